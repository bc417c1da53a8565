"""The handwritten digits: facts of the source, the fixed splits, and many processes that prepare at once."""

import gzip
import hashlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tfdist_ext.data import digits

ROOT = pathlib.Path(__file__).parents[2]
# The source's own description counts these images of each digit in the test half (optdigits.names).
IMAGES_OF_EACH_DIGIT = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
# The first line of the source: a zero.
FIRST_IMAGE = """
     0  0  5 13  9  1  0  0
     0  0 13 15 10 15  5  0
     0  3 15  2  0 11  8  0
     0  4 12  0  0  8  8  0
     0  5  8  0  0  9  8  0
     0  4 11  0  1 12  7  0
     0  2 14  5 10 12  0  0
     0  0  6 13 10  0  0  0
"""


@pytest.fixture(scope="module")
def source():
    return digits.read_digits()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def test_the_file_is_the_source_unchanged():
    text = gzip.decompress((ROOT / "tfdist_ext/data/digits.csv.gz").read_bytes())
    found = hashlib.sha256(text).hexdigest()
    assert found == "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    notice = (ROOT / "tfdist_ext/data/digits.txt").read_text()
    assert found in notice and "CC BY 4.0" in notice and "10.24432/C50P49" in notice


def test_counts_range_and_first_image(source):
    images, labels = source
    assert images.shape == (1797, 8, 8, 1) and images.dtype == np.uint8
    assert images.min() == 0 and images.max() == 16
    assert np.bincount(labels).tolist() == IMAGES_OF_EACH_DIGIT
    assert images[0, ..., 0].tolist() == [
        [int(pixel) for pixel in line.split()] for line in FIRST_IMAGE.split("\n") if line.strip()
    ]
    # The people wrote the digits in turn.
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_splits_are_fixed_disjoint_complete_and_balanced(source):
    _, labels = source
    train, test = (digits.rows_of_split(labels, split) for split in ("train", "test"))
    assert len(train) == 1437 and len(test) == 360
    assert sorted([*train, *test]) == list(range(1797))
    # A fifth of each digit: of 178 zeros 35.6, so 35 or 36.
    for count, expected in zip(np.bincount(labels[test]), IMAGES_OF_EACH_DIGIT, strict=True):
        assert count in (expected // 5, expected // 5 + 1)
    # By hand: images 0, 10, 20, 30, 36, 48, ... are the zeros, and every fifth of them is test.
    zeros = np.flatnonzero(labels == 0)
    assert test[labels[test] == 0].tolist() == zeros[::5].tolist()


def test_tensorflow_datasets_serves_the_same_rows(source, data_dir):
    import tensorflow_datasets as tfds

    from tfdist_ext.data import uci_digits

    images, labels = source
    for split in ("train", "test"):
        dataset, info = tfds.load("uci_digits", split=split, data_dir=data_dir, with_info=True)
        rows = list(tfds.as_numpy(dataset))
        expected = digits.rows_of_split(labels, split)
        assert info.splits[split].num_examples == len(rows) == len(expected)
        assert np.array_equal(np.stack([row["image"] for row in rows]), images[expected])
        assert [row["label"] for row in rows] == labels[expected].tolist()
    assert issubclass(uci_digits.UciDigits, tfds.core.GeneratorBasedBuilder)


def test_load_digits_scales_batches_and_shuffles(source, data_dir):
    images, labels = source
    rows = digits.rows_of_split(labels, "test")
    batches = list(digits.load_digits("test", 100, data_dir=data_dir).as_numpy_iterator())
    assert [len(label) for _, label in batches] == [100, 100, 100, 60]
    # A division by 16 is exact.
    assert np.array_equal(np.concatenate([image for image, _ in batches]) * 16, images[rows])
    assert batches[0][0].dtype == np.float32 and batches[0][1].dtype == np.int64
    shuffled = digits.load_digits("test", shuffle_seed=1, data_dir=data_dir)
    first, second = ([int(label) for _, label in shuffled.as_numpy_iterator()] for _ in range(2))
    assert first != second and sorted(first) == sorted(second) == sorted(labels[rows])
    again = digits.load_digits("test", shuffle_seed=1, data_dir=data_dir)
    assert [int(label) for _, label in again.as_numpy_iterator()] == first


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="'train' or 'test'; received 'validation'"):
        digits.load_digits("validation")


def test_several_processes_prepare_at_once_and_leave_the_home_alone(tmp_path, monkeypatch):
    for name in ("home", "temporary"):
        (tmp_path / name).mkdir()
    # Keras, and Matplotlib where it is there, write settings of their own into the home unless told of another place.
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    program = (
        "from tfdist_ext.data.digits import load_digits\n"
        "print(sum(int(label) for _, label in load_digits('test').as_numpy_iterator()))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    images, labels = digits.read_digits()
    expected = int(labels[digits.rows_of_split(labels, "test")].sum())
    assert [int(output.splitlines()[-1]) for output, _ in outputs] == [expected] * 4
    assert list((tmp_path / "home").iterdir()) == []
    (prepared,) = (tmp_path / "temporary").glob("tfdist_ext-*")
    # One data set, and nothing half-made beside it.
    assert sorted(path.name for path in (prepared / "uci_digits").iterdir()) == [".lock", "1.0.0"]


def test_a_folder_that_somebody_else_could_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(digits.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = digits.cache_directory()
    assert directory == digits.cache_directory() and directory.parent == tmp_path
    directory.chmod(0o777)
    with pytest.raises(PermissionError, match="pass `data_dir`"):
        digits.cache_directory()
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="pass `data_dir`"):
        digits.cache_directory()


def test_reading_the_digits_imports_neither_tensorflow_nor_tensorflow_datasets():
    program = (
        "import sys\nfrom tfdist_ext.data import digits\n"
        "print(sorted({'tensorflow', 'tensorflow_datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
