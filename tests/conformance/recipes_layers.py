"""Recipes for the layers that do not draw random numbers."""

import keras

from tests.conformance import own_layers
from tests.conformance.inputs import ids, normal, padded, positive, words
from tests.conformance.recipes import Branch, call

L = keras.layers
LINE, PLANE, SPACE = (normal(6, 3),), (normal(6, 6, 3),), (normal(4, 4, 4, 2),)
TWO = (normal(4), positive(4))
SEQUENCES = (normal(4, 3), normal(5, 3))
SINGLE = {"dtype": "float32"}


FEATURES = (normal(4),)


def of(layer, inputs=FEATURES, stem=True, adapt=False, apply=call, **arguments):
    """Returns the recipe of a class with these arguments."""
    single = arguments.get("dtype") == "float32"
    return Branch(lambda name: layer(**arguments, name=name), inputs, apply, stem, adapt, single)


def _pools():
    """The layers that exist for one, two and three dimensions."""
    made = {}
    for rank, inputs in ((1, LINE), (2, PLANE), (3, SPACE)):

        def add(name, inputs=inputs, rank=rank, ending="", **arguments):
            full_name = f"{name}{rank}D{ending}"
            made[full_name] = of(getattr(L, full_name), inputs, **arguments)

        # TensorFlow has no pooling of three dimensions in double precision on a CPU.
        pooled = SINGLE if rank == 3 else {}
        for kind in ("Average", "Max"):
            add(f"Adaptive{kind}Pooling", output_size=2, **pooled)
            add(f"{kind}Pooling", pool_size=2, **pooled)
            add(f"Global{kind}Pooling")
        add("Conv", filters=2, kernel_size=2)
        add("Conv", ending="Transpose", filters=2, kernel_size=2)
        add("Cropping", cropping=1)
        add("UpSampling", size=2)
        add("ZeroPadding", padding=1)
        add("ConvLSTM", inputs=(normal(2, *inputs[0].shape),), filters=2, kernel_size=2)
        if rank < 3:
            add("DepthwiseConv", kernel_size=2)
            add("SeparableConv", filters=2, kernel_size=2)
    return made


def _cell(cell):
    """Returns the recipe of a cell, which trains inside of an RNN."""
    return Branch(lambda name: L.RNN(cell(), name=name), LINE)


def _sequential(name):
    layers = [L.InputLayer((4,)), L.Dense(3, activation="tanh")]
    return keras.Sequential(layers, name=name)


def _attention(layer, tensors):
    query, value = tensors
    return layer(query, value)


def _masked(layer, tensors):
    return L.LSTM(2, name=f"{layer.name}__lstm")(layer(tensors[0]))


def _boxes(layer, tensors):
    pictures, boxes, labels = tensors
    found = layer({"images": pictures, "bounding_boxes": {"boxes": boxes, "labels": labels}})
    return found["bounding_boxes"]["boxes"]


def _reverse(layer, tensors):
    return layer(layer(tensors[0]), reverse=True)


MERGING = {
    name: of(getattr(L, name), TWO)
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
}

PLAIN = {
    **_pools(),
    **MERGING,
    "Activation": of(L.Activation, activation="tanh"),
    "ActivityRegularization": of(L.ActivityRegularization, l1=0.1, l2=0.1),
    "BatchNormalization": of(L.BatchNormalization),
    "Dense": of(L.Dense, units=3),
    "Dot": of(L.Dot, TWO, axes=1),
    "ELU": of(L.ELU),
    "EinsumDense": of(L.EinsumDense, LINE, equation="abc,cd->abd", output_shape=(6, 2)),
    "Embedding": of(L.Embedding, (ids(4),), input_dim=5, output_dim=3),
    "Flatten": of(L.Flatten, PLANE),
    "GroupNormalization": of(L.GroupNormalization, groups=2),
    "Identity": of(L.Identity),
    "InputLayer": Branch(_sequential),
    "Lambda": Branch(lambda name: L.Lambda(own_layers.squared, output_shape=(4,), name=name)),
    "Layer": of(own_layers.Scale),
    "LayerNormalization": of(L.LayerNormalization),
    "LeakyReLU": of(L.LeakyReLU),
    "PReLU": of(L.PReLU),
    "Permute": of(L.Permute, LINE, dims=(2, 1)),
    "RMSNormalization": of(L.RMSNormalization),
    "ReLU": of(L.ReLU),
    "RepeatVector": of(L.RepeatVector, n=2),
    "Rescaling": of(L.Rescaling, scale=0.5, offset=0.1),
    "Reshape": of(L.Reshape, target_shape=(2, 2)),
    "ReversibleEmbedding": of(L.ReversibleEmbedding, (ids(4),), apply=_reverse, input_dim=5, output_dim=3),
    "Softmax": of(L.Softmax),
    "UnitNormalization": of(L.UnitNormalization),
    "SpectralNormalization": Branch(lambda name: L.SpectralNormalization(L.Dense(3), name=name)),
    "Wrapper": Branch(lambda name: own_layers.Wrapped(L.Dense(3), name=name)),
    "TFSMLayer": Branch(own_layers.saved_model_layer),
}

SEQUENTIAL = {
    "AdditiveAttention": of(L.AdditiveAttention, SEQUENCES),
    "Attention": of(L.Attention, SEQUENCES, use_scale=True),
    "Bidirectional": Branch(lambda name: L.Bidirectional(L.LSTM(2), name=name), LINE),
    "GRU": of(L.GRU, LINE, units=2),
    "GRUCell": _cell(lambda: L.GRUCell(2)),
    "GroupQueryAttention": of(
        L.GroupQueryAttention,
        SEQUENCES,
        apply=_attention,
        head_dim=2,
        num_query_heads=2,
        num_key_value_heads=1,
    ),
    "LSTM": of(L.LSTM, LINE, units=2),
    "LSTMCell": _cell(lambda: L.LSTMCell(2)),
    "Masking": of(L.Masking, (padded(5, 3),), stem=False, apply=_masked),
    "MultiHeadAttention": of(L.MultiHeadAttention, SEQUENCES, apply=_attention, num_heads=2, key_dim=2),
    "RNN": _cell(lambda: own_layers.Cell(2)),
    "SimpleRNN": of(L.SimpleRNN, LINE, units=2),
    "SimpleRNNCell": _cell(lambda: L.SimpleRNNCell(2)),
    "StackedRNNCells": _cell(lambda: L.StackedRNNCells([L.GRUCell(2), L.LSTMCell(2)])),
    "TimeDistributed": Branch(lambda name: L.TimeDistributed(L.Dense(2), name=name), LINE),
}

PREPARING = {
    "CategoryEncoding": of(L.CategoryEncoding, (ids(3),), num_tokens=5),
    "Discretization": of(L.Discretization, stem=False, adapt=True, num_bins=3, output_mode="one_hot"),
    "HashedCrossing": of(L.HashedCrossing, (ids(1), ids(1, below=4)), num_bins=5, output_mode="one_hot"),
    "Hashing": of(L.Hashing, (words(2),), num_bins=5, output_mode="multi_hot"),
    "IntegerLookup": of(L.IntegerLookup, (ids(3),), adapt=True, output_mode="multi_hot"),
    "MaxNumBoundingBoxes": of(
        L.MaxNumBoundingBoxes,
        (positive(4, 4, 3), positive(3, 4), ids(3)),
        stem=False,
        apply=_boxes,
        max_number=2,
        bounding_box_format="xyxy",
    ),
    "MelSpectrogram": of(
        L.MelSpectrogram,
        (normal(64),),
        stem=False,
        fft_length=16,
        sequence_stride=8,
        num_mel_bins=4,
        **SINGLE,
    ),
    "Normalization": of(L.Normalization, stem=False, adapt=True),
    "STFTSpectrogram": of(L.STFTSpectrogram, (normal(32, 1),), stem=False, frame_length=8),
    "StringLookup": of(L.StringLookup, (words(2),), adapt=True, output_mode="multi_hot"),
    "TextVectorization": of(L.TextVectorization, (words(),), adapt=True, output_mode="count"),
}
