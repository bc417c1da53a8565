"""A TPU that is missing or does not fit is explained; full-state checkpoints work under TensorFlow's TPUStrategy."""

import socket

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.strategies import tpu_stand_in
from tfdist_ext.checkpoint import EverySteps, TrainingCheckpointManager, TrainingState
from tfdist_ext.strategies import tpu_connection

VERSIONS = {"tensorflow": "2.21.0", "tensorflow-tpu": None}


def make_dataset():
    # 48 rows in 6 batches; two rows for each of four replicas.
    rows = np.random.RandomState(5).rand(48, 3).astype("float32")
    return tf.data.Dataset.from_tensor_slices((rows, rows.sum(axis=1, keepdims=True))).batch(
        8, drop_remainder=True
    )


def make_model(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=3),
                keras.layers.Dense(1),
            ]
        )
        # Keras compiles for XLA where it can; on logical CPU devices it cannot.
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], jit_compile=False)
    return model


class Crash(keras.callbacks.Callback):
    """Stops a `fit` the hard way after a number of batches."""

    def __init__(self, after):
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt


def train(strategy, directory, crash_after=None):
    keras.utils.set_random_seed(7)
    model = make_model(strategy)
    state = TrainingState(model, make_dataset(), strategy=strategy)
    checkpoints = TrainingCheckpointManager(state, directory, save=EverySteps(4))
    callbacks = [checkpoints.keras_callback()]
    if crash_after is None:
        model.fit(state.dataset, epochs=3, callbacks=callbacks, shuffle=False, verbose=0)
    else:
        with pytest.raises(KeyboardInterrupt):
            model.fit(
                state.dataset,
                epochs=3,
                callbacks=[*callbacks, Crash(crash_after)],
                shuffle=False,
                verbose=0,
            )
        checkpoints.wait()
    return model


def values_of(model):
    found = [*model.variables, *model.optimizer.variables]
    return {variable.path: keras.ops.convert_to_numpy(variable) for variable in found}


def assert_same_bits(model, other):
    ours, theirs = values_of(model), values_of(other)
    assert len(ours) > 10
    for (path, value), expected in zip(ours.items(), theirs.values(), strict=True):
        np.testing.assert_array_equal(value, expected, err_msg=path)


def test_fit_that_crashed_on_a_tpu_goes_on_bit_for_bit(monkeypatch, tmp_path):
    strategy = tpu_stand_in.make_strategy(monkeypatch)
    assert isinstance(strategy, tf.distribute.TPUStrategy) and strategy.num_replicas_in_sync == 4
    expected = train(strategy, tmp_path / "whole")
    # The tenth batch is in the middle of the second epoch; the last checkpoint is of step 8.
    train(strategy, tmp_path / "crashed", crash_after=10)
    resumed = train(strategy, tmp_path / "crashed")
    assert int(keras.ops.convert_to_numpy(resumed.optimizer.iterations)) == 18
    assert_same_bits(resumed, expected)
    for variable in resumed.trainable_variables:
        copies = [copy.numpy() for copy in variable.value.values]
        assert len(copies) == 4 and all((copy == copies[0]).all() for copy in copies)


@pytest.mark.parametrize("other", ["one_device", "mirrored"])
def test_the_state_of_a_tpu_is_restored_elsewhere(monkeypatch, tmp_path, other):
    trained = train(tpu_stand_in.make_strategy(monkeypatch), tmp_path)
    elsewhere = (
        tf.distribute.get_strategy()
        if other == "one_device"
        else tfdist_ext.MirroredStrategy(["CPU:0", "CPU:1"])
    )
    model = make_model(elsewhere)
    state = TrainingState(model, make_dataset(), strategy=elsewhere)
    TrainingCheckpointManager(state, tmp_path).restore_or_initialize()
    # Saved at the end of `fit` too: three epochs of six.
    assert state.step == 18
    assert_same_bits(model, trained)


def test_the_state_of_one_device_is_restored_on_a_tpu(monkeypatch, tmp_path):
    trained = train(tf.distribute.get_strategy(), tmp_path)
    strategy = tpu_stand_in.make_strategy(monkeypatch)
    model = make_model(strategy)
    state = TrainingState(model, make_dataset(), strategy=strategy)
    TrainingCheckpointManager(state, tmp_path).restore_or_initialize()
    assert_same_bits(model, trained)
    model.fit(make_dataset(), epochs=1, shuffle=False, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 24


def test_an_environment_with_a_tpu_gets_its_strategy(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "stand-in")
    started = []
    connect = tpu_connection.connect
    monkeypatch.setattr(
        tpu_connection,
        "connect",
        lambda name: connect(name, make_resolver=tpu_stand_in.Resolver, initialize=started.append),
    )
    made = []
    monkeypatch.setattr(
        tf.distribute, "TPUStrategy", lambda resolver: made.append(resolver) or "the TPU's strategy"
    )
    assert tfdist_ext.strategy_from_environment() == "the TPU's strategy"
    assert made == started and isinstance(made[0], tpu_stand_in.Resolver)


def test_this_build_of_tensorflow_has_no_tpu_and_says_what_to_install():
    # The real call, on a machine without a TPU and a TensorFlow without its kernels.
    has_kernels = tpu_connection.installed_versions()["tensorflow-tpu"] is not None
    expected = "There is no TPU behind 'local'" if has_kernels else "has no kernels for TPUs"
    with pytest.raises(tfdist_ext.TPUUnavailableError, match=expected) as caught:
        tfdist_ext.strategy_from_environment(tpu="local")
    assert caught.value.tpu == "local"
    assert has_kernels or f"pip install tensorflow-tpu=={tf.__version__} " in str(caught.value)


def test_an_address_where_nothing_listens_is_named_with_the_wait():
    with socket.socket() as bound:  # Bound and not listening: connections are refused.
        bound.bind(("127.0.0.1", 0))
        free_port = bound.getsockname()[1]
        with pytest.raises(
            tfdist_ext.TPUUnavailableError, match=f"127.0.0.1:{free_port} does not answer within"
        ):
            tfdist_ext.strategy_from_environment(tpu=f"grpc://127.0.0.1:{free_port}")


@pytest.mark.parametrize(
    ("failure", "versions", "expected"),
    [
        ("ValueError: Please provide a TPU Name to connect to.", VERSIONS, "Runtime > Change runtime type > TPU"),
        (
            "NotFoundError: '__inference__tpu_init_fn_4' is neither a type of a primitive operation nor a name",
            VERSIONS,
            "runs another version of TensorFlow than this process (2.21.0)",
        ),
        (
            "NotFoundError: anything",
            {"tensorflow": "2.21.0", "tensorflow-tpu": "2.19.1"},
            "Keep the TPU build alone: `pip uninstall -y tensorflow tensorflow-tpu`",
        ),
        (
            "NotFoundError: TPUs not found in the cluster. Failed in initialization: No matching devices",
            {"tensorflow": None, "tensorflow-tpu": "2.20.0"},
            "There is no TPU behind 'mine'",
        ),
        ("URLError: <urlopen error [Errno -2] Name or service not known>", VERSIONS, "cannot be looked up from here"),
        ("RuntimeError: TPU is on fire\nand more", VERSIONS, "(RuntimeError: TPU is on fire). Check"),
    ],
)  # fmt: skip
def test_what_tensorflow_says_becomes_a_cause_and_a_fix(failure, versions, expected):
    sentence = tpu_connection.explain("mine", failure, versions)
    assert expected in sentence and "\n" not in sentence
