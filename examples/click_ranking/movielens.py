"""Who liked which film? MovieLens 100K as click logs: a click is a rating of 4 or 5.

References:
    F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
"""

import dataclasses
import urllib.request

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

_NAME = "movielens/100k-ratings"
_SOURCE = "https://files.grouplens.org/datasets/movielens/"
_COLUMNS = ("user_id", "movie_id", "user_rating")
_LIKED = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratings:
    """All ratings, in the order of the source, which is shuffled. Every fifth row is held out.

    Attributes:
        user: Number of the user, int64 `[rows]`, from 0.
        item: Number of the film, int64 `[rows]`, from 0.
        clicked: 1.0 for a rating of 4 or 5, else 0.0; float32 `[rows, 1]`.
    """

    user: np.ndarray
    item: np.ndarray
    clicked: np.ndarray

    @property
    def num_users(self) -> int:
        """Vocabulary of users."""
        return int(self.user.max()) + 1

    @property
    def num_items(self) -> int:
        """Vocabulary of films."""
        return int(self.item.max()) + 1

    def train(self, num_rows: int, batch_size: int) -> tf.data.Dataset:
        """Returns batches `({"user", "item"}, clicked)` of the first rows that are not held out; fewer if there are."""
        return self._batches(np.arange(len(self.user)) % 5 != 0, num_rows, batch_size)

    def test(self, num_rows: int, batch_size: int) -> tf.data.Dataset:
        """Returns batches of the first held-out rows; fewer if there are."""
        return self._batches(np.arange(len(self.user)) % 5 == 0, num_rows, batch_size)

    def best_log_loss(self, num_rows: int) -> None:
        """None: nobody knows what people might have liked."""

    def _batches(self, chosen, num_rows: int, batch_size: int) -> tf.data.Dataset:
        rows = np.flatnonzero(chosen)[:num_rows]
        features = {"user": self.user[rows], "item": self.item[rows]}
        return tf.data.Dataset.from_tensor_slices((features, self.clicked[rows])).batch(batch_size)


def load_ratings() -> Ratings:
    """Reads MovieLens 100K, which TensorFlow Datasets fetches the first time (5 MB).

    Raises:
        RuntimeError: It is not there and cannot be fetched.
    """
    try:
        builder = tfds.builder(_NAME)
        if not builder.is_prepared():
            # Says at once that there is no network; TensorFlow Datasets tries for minutes.
            urllib.request.urlopen(_SOURCE, timeout=30).close()
            builder.download_and_prepare()
        batches = list(builder.as_dataset(split="train").batch(10_000).as_numpy_iterator())
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"TensorFlow Datasets needs a module that is missing: {error.name}. Run `pip install {error.name}`."
        ) from error
    except (
        Exception
    ) as error:  # TensorFlow Datasets, the network and the file system have errors of their own.
        raise RuntimeError(
            f"MovieLens is not here and could not be fetched ({type(error).__name__}: {error}). Run "
            f"`python -c \"import tensorflow_datasets as tfds; tfds.load('{_NAME}')\"` on a machine with a network, "
            "copy its ~/tensorflow_datasets here or name the copy in TFDS_DATA_DIR; or use --dataset synthetic."
        ) from error
    column = {name: np.concatenate([batch[name] for batch in batches]) for name in _COLUMNS}
    return Ratings(
        # Ids are texts there; numbers from 0 here.
        user=np.unique(column["user_id"], return_inverse=True)[1],
        item=np.unique(column["movie_id"], return_inverse=True)[1],
        clicked=(column["user_rating"] >= _LIKED).astype(np.float32)[:, None],
    )
