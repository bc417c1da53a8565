"""A flipped byte or a missing file of a TensorFlow bundle is found, and the tensor is named."""

import pytest
import tensorflow as tf

from tfdist_ext.checkpoint.bundle import verify_bundle
from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.manifest import Manifest

KERNEL = tf.reshape(tf.range(600.0), [20, 30])
BIAS = tf.constant([1 / 3, -1 / 7])


@pytest.fixture
def prefix(tmp_path):
    """Two float tensors and a text, as `tf.train.Checkpoint` writes them."""
    checkpoint = tf.train.Checkpoint(
        kernel=tf.Variable(KERNEL), bias=tf.Variable(BIAS), vocabulary=tf.Variable(["one", "two"])
    )
    return checkpoint.write(str(tmp_path / "state"))


def data_file(prefix):
    return f"{prefix}.data-00000-of-00001"


def flip(path, position):
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_an_intact_bundle_has_no_problem(prefix):
    assert verify_bundle(prefix) is None


@pytest.mark.parametrize("tensor", ["kernel", "bias"])
def test_a_flipped_byte_names_its_tensor(prefix, tensor):
    content = open(data_file(prefix), "rb").read()
    value = {"kernel": KERNEL, "bias": BIAS}[tensor].numpy().tobytes()
    assert content.count(value) == 1
    flip(data_file(prefix), content.index(value) + len(value) // 2)
    problem = verify_bundle(prefix)
    assert problem.startswith(f"Tensor {tensor}/.ATTRIBUTES/VARIABLE_VALUE of state is damaged: ")
    assert "\n" not in problem


def test_every_byte_of_the_data_is_covered(prefix):
    """No byte may change a value unnoticed; this bundle is small enough to try them all."""
    content = open(data_file(prefix), "rb").read()
    for position in range(0, len(content), 11):
        flip(data_file(prefix), position)
        assert verify_bundle(prefix) is not None, position
        flip(data_file(prefix), position)
    assert verify_bundle(prefix) is None


def test_a_torn_data_file_is_found(prefix):
    with open(data_file(prefix), "r+b") as file:
        file.truncate(100)
    assert "of state is damaged" in verify_bundle(prefix)


@pytest.mark.parametrize("damage", ["missing", "torn", "empty"])
def test_a_damaged_index_is_found(prefix, damage):
    path = tf.io.gfile.glob(f"{prefix}.index")[0]
    if damage == "missing":
        tf.io.gfile.remove(path)
    else:
        with open(path, "r+b") as file:
            file.truncate(0 if damage == "empty" else 60)
    assert verify_bundle(prefix).startswith("The index of state cannot be read: ")


def test_a_missing_data_file_is_found(prefix):
    tf.io.gfile.remove(data_file(prefix))
    assert verify_bundle(prefix) is not None


def test_a_flipped_byte_in_a_committed_checkpoint_is_found_by_a_deep_check(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    with directory.begin(1, "a") as draft:
        tf.train.Checkpoint(kernel=tf.Variable(KERNEL)).write(draft.path("state"))
        files = draft.seal(["state.index", "state.data-00000-of-00001"])
        record = draft.commit(Manifest(step=1, attempt="a", files=tuple(files)))
    assert directory.check(record, deep=True) is None
    flip(f"{record.path}/state.data-00000-of-00001", 1000)
    # Sizes say nothing of it; the checksum of the tensor does.
    assert directory.check(record) is None
    assert directory.check(record, deep=True).startswith(
        "Tensor kernel/.ATTRIBUTES/VARIABLE_VALUE of state is damaged"
    )
    flip(f"{record.path}/state.data-00000-of-00001", 1000)
    flip(f"{record.path}/state.index", 20)
    assert directory.check(record).startswith("state.index is damaged")
