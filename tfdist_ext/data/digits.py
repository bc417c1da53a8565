"""Which real data needs no network? 1,797 handwritten digits that come with the package.

Alpaydin, E. and Kaynak, C. (1998), "Optical Recognition of Handwritten Digits", UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, licensed CC BY 4.0; `digits.txt` beside the file says more.
"""

from __future__ import annotations

import gzip
import importlib.resources
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

MAX_PIXEL = 16
NUM_IMAGES = {"train": 1_437, "test": 360}
_TEST_EVERY = 5


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Reads the file that is shipped with the package.

    Returns:
        Images, uint8 `[1797, 8, 8, 1]` from 0 to 16, and labels, int64 `[1797]`, in the order of the source.
    """
    compressed = importlib.resources.files("tfdist_ext.data").joinpath("digits.csv.gz").read_bytes()
    lines = gzip.decompress(compressed).decode("ascii").splitlines()
    table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    return table[:, :64].reshape(-1, 8, 8, 1), table[:, 64].astype(np.int64)


def rows_of_split(labels: np.ndarray, split: str) -> np.ndarray:
    """Says which rows of the source a split has; pure.

    With the rows sorted by digit (each digit's in the order of the source), every fifth goes to `test`. So
    each digit is in both splits in the same proportion. The source does not say who wrote an image: the same
    13 people are in both splits.

    Args:
        labels: All labels, in the order of the source.
        split: `"train"` or `"test"`.

    Returns:
        Row numbers in ascending order.

    Raises:
        ValueError: There is no such split.

    Example:
        >>> rows_of_split(np.array([1, 0, 0, 1, 0, 1]), "test")
        array([1, 5])
    """
    if split not in NUM_IMAGES:
        raise ValueError(f"Argument `split` must be 'train' or 'test'; received {split!r}.")
    by_digit = np.argsort(labels, kind="stable")
    test = np.sort(by_digit[::_TEST_EVERY])
    return test if split == "test" else np.setdiff1d(by_digit, test)


def load_digits(
    split: str = "train",
    batch_size: int | None = None,
    *,
    shuffle_seed: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
) -> tf.data.Dataset:
    """Opens the handwritten digits through TensorFlow Datasets; needs no network.

    Runs on: every worker. All workers get the same rows in the same order, and divide each batch by rows.

    Args:
        split: `"train"` (1,437 images) or `"test"` (360 images); the splits are fixed.
        batch_size: Rows of a (global) batch; None leaves single images. The last batch may be smaller.
        shuffle_seed: Shuffles all rows, in another order each epoch; None keeps the order of the source.
        data_dir: Where TensorFlow Datasets prepares its files; by default a folder of this user's under the
            system's directory for temporary files.

    Returns:
        Dataset of `(image, label)`: float32 `[8, 8, 1]` from 0 to 1 in steps of 1/16 (exact in float32), and
        a scalar int64 label, both with a batch dimension in front if `batch_size` is given.

    Raises:
        ValueError: There is no such split.
    """
    if split not in NUM_IMAGES:
        raise ValueError(f"Argument `split` must be 'train' or 'test'; received {split!r}.")
    import tensorflow as tf

    from tfdist_ext.data.uci_digits import UciDigits

    builder = UciDigits(data_dir=data_dir)
    builder.download_and_prepare()
    dataset = builder.as_dataset(split=split, as_supervised=True, shuffle_files=False)
    if shuffle_seed is not None:
        dataset = dataset.shuffle(NUM_IMAGES[split], seed=shuffle_seed)
    if batch_size is not None:
        dataset = dataset.batch(batch_size)
    dataset = dataset.map(lambda image, label: (tf.cast(image, tf.float32) / MAX_PIXEL, label))
    options = tf.data.Options()
    # One small file cannot be divided by files; by rows, the order is one device's.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return dataset.with_options(options)


def cache_directory() -> pathlib.Path:
    """Makes the folder in which data sets are prepared when the user names none.

    It is no folder under the user's home, which on a cluster may be small, slow or read-only, and it holds
    nothing that could not be made again in a second.

    Returns:
        A folder that only this user can write.

    Raises:
        PermissionError: Somebody else owns the folder of that name.
    """
    directory = pathlib.Path(tempfile.gettempdir(), f"tfdist_ext-{os.getuid()}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.lstat()
    # Anybody can make a folder, or a link, of this name in /tmp before us.
    if directory.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{directory} is not a folder of this user's alone. Remove it, or pass `data_dir`."
        )
    return directory
