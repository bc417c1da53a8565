"""Tensors are dealt evenly to threads, which write and read one bundle, the same that TensorFlow reads."""

import os

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist_ext.checkpoint import shares
from tfdist_ext.checkpoint.bundle import verify_bundle
from tfdist_ext.checkpoint.early_flush import EarlyFlush
from tfdist_ext.checkpoint.tensors import Snapshot, VariableList, restore

MEGABYTE = 1 << 20


@hypothesis.given(st.lists(st.integers(0, 100 * MEGABYTE), max_size=30), st.integers(1, 5))
def test_everything_is_dealt_once_and_no_share_is_larger_than_it_must_be(sizes, num_shares):
    items = list(enumerate(sizes))
    dealt = shares.deal(items, lambda item: item[1], num_shares)
    assert sorted(item for share in dealt for item in share) == items
    assert 1 <= len(dealt) <= num_shares and (all(dealt) or dealt == [[]])
    shares_wanted = max(1, min(num_shares, sum(sizes) // (16 * MEGABYTE)))
    largest = max(sum(size for _, size in share) for share in dealt)
    lower_bound = max([sum(sizes) / shares_wanted, *sizes])
    # Giving each item to the smallest share is within 2 of that (Graham 1966).
    assert largest <= 2 * lower_bound


@pytest.fixture
def several_threads(monkeypatch):
    """As on a machine with three cores, and as if a few bytes were worth a thread."""
    monkeypatch.setattr(shares, "_LEAST_BYTES", 8)
    monkeypatch.setattr(shares, "num_threads", lambda: 3)


def variables():
    return {
        f"v{number}": tf.Variable(np.arange(100 * number, 100 * number + size, dtype=np.float32))
        for number, size in enumerate((5, 1, 40, 7, 0, 30))
    }


def test_several_parts_are_one_bundle_that_tensorflow_reads_too(tmp_path, several_threads):
    saved = variables()
    prefix = str(tmp_path / "state")
    names = VariableList(tf.train.Checkpoint(**saved)).snapshot().write(prefix)
    assert names == ["state.index", *(f"state.data-{number:05d}-of-00003" for number in range(3))]
    assert sorted(os.listdir(tmp_path)) == sorted(names) and verify_bundle(prefix) is None
    for read in (lambda here: tf.train.Checkpoint(**here).read(prefix).assert_consumed(), _restore(prefix)):
        here = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in saved.items()}
        read(here)
        for name, variable in saved.items():
            assert variable.numpy().tobytes() == here[name].numpy().tobytes()


def _restore(prefix):
    return lambda here: restore(VariableList(tf.train.Checkpoint(**here)), prefix, path_of={})


def test_damage_in_one_tensor_changes_no_variable(tmp_path, several_threads):
    prefix = str(tmp_path / "state")
    VariableList(tf.train.Checkpoint(**variables())).snapshot().write(prefix)
    with open(f"{prefix}.data-00000-of-00003", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    here = {name: tf.Variable(tf.zeros_like(variable)) for name, variable in variables().items()}
    with pytest.raises(tf.errors.DataLossError):
        _restore(prefix)(here)
    assert not any(variable.numpy().any() for variable in here.values())


def test_state_of_python_objects_is_restored_too(tmp_path):
    class Text(tf.train.experimental.PythonState):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def serialize(self):
            return self.value

        def deserialize(self, value):
            self.value = value.decode()

    prefix = str(tmp_path / "state")
    VariableList(tf.train.Checkpoint(text=Text("three"), v=tf.Variable(3.0))).snapshot().write(prefix)
    text, v = Text("zero"), tf.Variable(0.0)
    _restore(prefix)({"text": text, "v": v})
    assert text.value == "three" and v.numpy() == 3


def test_an_error_of_the_disk_that_only_the_early_flush_hears_of_is_raised(tmp_path, monkeypatch):
    """The system tells an error of writing back to one caller of fsync, which must not keep it to itself."""
    from tfdist_ext.checkpoint import early_flush

    def fail(path):
        failed.append(path)
        raise OSError(5, "Input/output error")

    failed = []
    monkeypatch.setattr(early_flush, "_flush", fail)
    monkeypatch.setattr(early_flush, "_INTERVAL_SECONDS", 0.0)
    path = tmp_path / "state.part-0.data-00000-of-00001.tempstate123"
    path.write_bytes(b"x")
    with pytest.raises(OSError, match="Input/output error"):
        with EarlyFlush(str(tmp_path / "state")) as flush:
            flush._thread.join()  # It ends at the first error.
    assert failed == [str(path)]


def test_arrays_without_an_object_are_written_too(tmp_path, several_threads):
    arrays = {"a": np.arange(20.0), "b": np.arange(30.0)}
    Snapshot.of_arrays(arrays).write(str(tmp_path / "arrays"))
    reader = tf.train.load_checkpoint(str(tmp_path / "arrays"))
    assert all((reader.get_tensor(name) == array).all() for name, array in arrays.items())
