"""How does TensorFlow Datasets serve the handwritten digits?

Importing this module registers `tfds.load("uci_digits")`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from tfdist_ext.data import digits

_CITATION = """\
@misc{alpaydin1998optical,
  author = {Alpaydin, E. and Kaynak, C.},
  title = {Optical Recognition of Handwritten Digits},
  year = {1998},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49},
}"""


class UciDigits(tfds.core.GeneratorBasedBuilder):
    """The 1,797 images of 8x8 pixels that come with tfdist_ext; splits `train` (1,437) and `test` (360).

    Args:
        data_dir: Where to prepare; by default a temporary folder of this user's, not the user's home.
        **arguments: As for every `tfds.core.DatasetBuilder`.

    References:
        Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository,
        1998, DOI 10.24432/C50P49, CC BY 4.0.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "The test half of the source, in two fixed splits."}
    # Nothing is downloaded. Without this line TensorFlow Datasets looks for a list of checksums beside this
    # file, with a package (importlib_resources) that it does not install.
    url_infos: dict[str, Any] = {}

    def __init__(self, *, data_dir: str | os.PathLike[str] | None = None, **arguments: Any):
        super().__init__(data_dir=digits.cache_directory() if data_dir is None else data_dir, **arguments)

    def download_and_prepare(self, **arguments: Any) -> None:
        """Prepares the files unless they are there; several processes may call it at the same time.

        Args:
            **arguments: As for every `tfds.core.DatasetBuilder`.
        """
        config = arguments.pop("download_config", None) or tfds.download.DownloadConfig()
        # By default TensorFlow Datasets first asks the network for prepared files.
        config = dataclasses.replace(config, try_download_gcs=False)
        with _one_at_a_time(self.data_path.parent):
            super().download_and_prepare(download_config=config, **arguments)
        if not self.info.splits:
            # Another process made the files after this builder had looked for them.
            self.info.read_from_directory(self.data_path)

    def _info(self) -> tfds.core.DatasetInfo:
        return _OfflineInfo(
            builder=self,
            disable_shuffling=True,  # Keep the order of the source.
            description="Handwritten digits of 8x8 pixels from 0 to 16 (CC BY 4.0), shipped with tfdist_ext.",
            homepage="https://doi.org/10.24432/C50P49",
            citation=_CITATION,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # There is nothing to download.
        return {split: self._generate_examples(split) for split in digits.NUM_IMAGES}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        images, labels = digits.read_digits()
        for row in digits.rows_of_split(labels, split):
            yield int(row), {"image": images[row], "label": int(labels[row])}


class _OfflineInfo(tfds.core.DatasetInfo):
    """Information that is not looked for on the network."""

    def initialize_from_bucket(self) -> None:
        """Does nothing; TensorFlow Datasets' own leaves an empty folder in /tmp each time."""


@contextlib.contextmanager
def _one_at_a_time(directory: Any) -> Iterator[None]:
    """Holds a lock that the kernel takes back if this process dies.

    TensorFlow Datasets writes elsewhere and renames at the end, so that readers never see half a data set;
    but of two writers the second one's rename fails.
    """
    if "://" in os.fspath(directory):
        yield  # An object store has no locks; there, prepare once before starting the workers.
        return
    local = pathlib.Path(directory)
    local.mkdir(parents=True, exist_ok=True)
    with (local / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
