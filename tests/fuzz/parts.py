"""Of what is a program made? Pieces of source, simplest first: a shrunk program has the first ones."""

DENSE = 'x = keras.layers.Dense(3, activation="tanh")(x)'

# From [rows, columns] to [rows, columns].
LAYERS = {
    "dense": DENSE,
    "relu": 'x = keras.layers.Dense(3, activation="relu")(x)',
    "regularized": 'x = keras.layers.Dense(3, kernel_regularizer="l2", bias_regularizer="l1")(x)',
    "activity regularizer": 'x = keras.layers.Dense(3, activation="tanh", activity_regularizer="l2")(x)',
    "constrained": "x = keras.layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.5))(x)",
    "frozen": "x = keras.layers.Dense(3, trainable=False)(x)",
    "layer norm": "x = keras.layers.LayerNormalization()(x)",
    "group norm": "x = keras.layers.GroupNormalization(1)(x)",
    "prelu": "x = keras.layers.PReLU()(x)",
    "fixed normalization": "x = keras.layers.Normalization(mean=0.1, variance=2.0)(x)",
    "conv": "x = keras.layers.Flatten()(keras.layers.Conv1D(2, 2)(keras.layers.RepeatVector(3)(x)))",
    "lstm": "x = keras.layers.LSTM(2)(keras.layers.RepeatVector(3)(x))",
    "gru": "x = keras.layers.GRU(2)(keras.layers.RepeatVector(3)(x))",
    "bidirectional": "x = keras.layers.Bidirectional(keras.layers.SimpleRNN(2))(keras.layers.RepeatVector(2)(x))",
    "masked": (
        "x = keras.layers.LSTM(2)(keras.layers.Masking(0.0)(\n"
        "        keras.layers.Reshape((-1, 1))(keras.layers.ReLU()(x))))"
    ),
    "attention": (
        "s = keras.layers.RepeatVector(3)(x)\n"
        "    x = keras.layers.Flatten()(keras.layers.MultiHeadAttention(1, 2)(s, s))"
    ),
    "shared": (
        'shared = keras.layers.Dense(3, activation="tanh")\n'
        '    x = shared(shared(keras.layers.Dense(3, activation="tanh")(x)))'
    ),
    "nested": 'x = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(2)])(x)',
    "lora": "x = keras.layers.Dense(3, lora_rank=1)(x)",
    "mean loss": "x = MeanLoss()(x)",
    "sum loss": "x = SumLoss()(x)",
    "counting": "x = Counting()(x)",
    "moving mean": "x = MovingMean()(x)",
    "loop": "x = Loop()(x)",
    "gradient of one's own": "x = keras.layers.Lambda(doubled_gradient)(x)",
    "spectral norm": "x = keras.layers.SpectralNormalization(keras.layers.Dense(3))(x)",
    "batch norm": "x = keras.layers.BatchNormalization()(x)",
    "dropout": "x = keras.layers.Dropout(0.4, seed=3)(x)",
    "noise": "x = keras.layers.GaussianNoise(0.3, seed=3)(x)",
}

VALUE_LOSSES = (
    '"mse"',
    'keras.losses.MeanSquaredError(reduction="sum")',
    'keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")',
    '"mae"',
    '"huber"',
    '"log_cosh"',
    '"binary_crossentropy"',
    'keras.losses.BinaryCrossentropy(label_smoothing=0.1, reduction="sum")',
    '"kl_divergence"',
    '"poisson"',
    '"cosine_similarity"',
    '"mean_absolute_percentage_error"',
    '"mean_squared_logarithmic_error"',
    '"binary_focal_crossentropy"',
    "keras.losses.Dice()",
    'keras.losses.Tversky(reduction="sum")',
    "root_of_mean",
    "sum_over_four",
    "in_batch_negatives",
    "mean_of_columns",
    "RatioOfSums()",
)
LABEL_LOSSES = (
    '"sparse_categorical_crossentropy"',
    'keras.losses.SparseCategoricalCrossentropy(reduction="sum")',
    "keras.losses.SparseCategoricalCrossentropy(ignore_class=0)",
    'keras.losses.SparseCategoricalCrossentropy(ignore_class=0, reduction="mean_with_sample_weight")',
)
ONE_HOT_LOSSES = (
    '"categorical_crossentropy"',
    "keras.losses.CategoricalCrossentropy(label_smoothing=0.1)",
    '"categorical_focal_crossentropy"',
    '"categorical_hinge"',
    "keras.losses.Dice()",
)
LOSSES = {"values": VALUE_LOSSES, "labels": LABEL_LOSSES, "one-hot": ONE_HOT_LOSSES}
HEADS = {"values": (2, "sigmoid"), "labels": (3, "softmax"), "one-hot": (3, "softmax")}

METRICS = {
    "values": (
        '"mae"',
        "keras.metrics.RootMeanSquaredError()",
        "keras.metrics.CosineSimilarity()",
        "keras.metrics.R2Score()",
        "largest_error",
        "root_of_mean",
        "keras.metrics.BinaryAccuracy()",
    ),
    "labels": (
        '"accuracy"',
        "keras.metrics.SparseTopKCategoricalAccuracy(2)",
        "keras.metrics.SparseCategoricalCrossentropy()",
    ),
    "one-hot": (
        '"accuracy"',
        "keras.metrics.AUC(num_thresholds=20)",
        "keras.metrics.Precision()",
        'keras.metrics.F1Score(average="macro")',
        "keras.metrics.CategoricalCrossentropy()",
        "keras.metrics.OneHotMeanIoU(3)",
    ),
}

OPTIMIZERS = {
    "SGD": ("momentum=0.9", "nesterov=True"),
    "Adam": ("amsgrad=True",),
    "RMSprop": ("momentum=0.5", "centered=True"),
    "Adagrad": (),
    "Adadelta": (),
    "Adamax": (),
    "Nadam": (),
    "AdamW": (),
    "Ftrl": ("l1_regularization_strength=0.01", "l2_shrinkage_regularization_strength=0.01"),
    "Lion": (),
    "Adafactor": (),
    "Lamb": (),
    "Muon": (),
}
OPTIONS = (
    "clipnorm=0.1",
    "clipvalue=0.02",
    "global_clipnorm=0.1",
    "weight_decay=0.01",
    "use_ema=True",
    "ema_overwrite_frequency=2",
    "gradient_accumulation_steps=2",
    "gradient_accumulation_steps=3",
    "loss_scale_factor=8.0",
)
RATES = (
    "0.1",
    "keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)",
    "keras.optimizers.schedules.CosineDecay(0.0, 4, warmup_target=0.1, warmup_steps=2)",
)

CALLBACKS = {
    "early stopping": 'keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.05)',
    "best weights": (
        'keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.05, restore_best_weights=True)'
    ),
    "schedule": "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "plateau": 'keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05)',
    "evaluates": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: evaluated.append(\n"
        "            model.evaluate(**evaluation_arrays, batch_size=batch_size, verbose=0, return_dict=True)))"
    ),
    "predicts": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: predicted.append(\n"
        "            model.predict(evaluation_arrays['x'], batch_size=batch_size, verbose=0)))"
    ),
    "evaluates in mid-epoch": (
        "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: evaluated.append(\n"
        "            model.evaluate(**evaluation_arrays, batch_size=batch_size, verbose=0, return_dict=True)))"
    ),
    "saves weights": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.save_weights(\n"
        '            os.path.join(folder, f"{epoch}.weights.h5")))'
    ),
    "sets weights": (
        "keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.set_weights(\n"
        "            [0.5 * weight for weight in model.get_weights()]))"
    ),
    "batch logs": (
        "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))"
    ),
    "stops in mid-epoch": (
        "keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: setattr(\n"
        '            model, "stop_training", batch >= 1))'
    ),
    "swaps averages": "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "backup": "keras.callbacks.BackupAndRestore(folder)",
}
SEE_BATCHES = ("evaluates in mid-epoch", "batch logs", "stops in mid-epoch")

# The first line of a `train_step` or `compute_loss` of one's own; see `script`.
STEPS = (
    "",
    "compute_loss",
    "mean by hand",
    "sum over four by hand",
    "ratio by hand",
    "Keras loss by hand",
    "gradient penalty",
    "own compute_loss",
    "clipped by hand",
)
