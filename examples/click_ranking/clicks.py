"""Whom do which items please? Click logs drawn from a model that is known, so that the best log-loss is known too.

Row `i` of a seed is always the same row: its user, its item and whether it was a click are hashes of `(seed, i)`. Any
worker can therefore draw any batch, in any order, and a run that goes on after a crash finds the same rows.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from examples.click_ranking import quality

# The rows that test the model are drawn far behind those that train it.
_FIRST_TEST_ROW = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clicks:
    """Synthetic impressions: a user saw an item, and clicked or not.

    User `u` and item `v` are drawn from Zipf's law, `P(u) ~ (u + 1) ** -zipf_exponent`. A click is drawn with the
    chance `sigmoid(bias + a_u + b_v + <p_u, q_v>)`, where biases and tastes are normal.

    Attributes:
        num_users: Vocabulary of users.
        num_items: Vocabulary of items.
        zipf_exponent: 0 draws all ids alike; the larger, the more rows go to few ids.
        num_tastes: Length of the vectors `p_u` and `q_v`.
        bias_scale: Standard deviation of `a_u` and of `b_v`.
        taste_scale: Standard deviation of `<p_u, q_v>`.
        bias: The logit of an average user and item.
        seed: Everything is drawn from it.
    """

    num_users: int = 50_000
    num_items: int = 10_000
    zipf_exponent: float = 1.3
    num_tastes: int = 2
    bias_scale: float = 1.0
    taste_scale: float = 1.0
    bias: float = -0.5
    seed: int = 1

    def train(self, num_rows: int, batch_size: int) -> tf.data.Dataset:
        """Returns the batches `({"user", "item"}, clicked)` of the rows from 0 on; the last one may be smaller."""
        return self._batches(0, num_rows, batch_size)

    def test(self, num_rows: int, batch_size: int) -> tf.data.Dataset:
        """Returns batches of rows that `train` never returns."""
        return self._batches(_FIRST_TEST_ROW, num_rows, batch_size)

    def best_log_loss(self, num_rows: int) -> float:
        """Returns the log-loss that a perfect model would expect on so many test rows: the entropy of their clicks."""
        features, _ = next(iter(self.test(num_rows, num_rows)))
        return quality.entropy(self.chance(**features))

    def _batches(self, first: int, num_rows: int, batch_size: int) -> tf.data.Dataset:
        rows = tf.data.Dataset.range(first, first + num_rows).batch(batch_size)
        return rows.map(self._impressions)

    def _impressions(self, row):
        uniform = self._uniform(row, "row", 3)
        user, item = self._zipf(uniform[:, 0], self.num_users), self._zipf(uniform[:, 1], self.num_items)
        clicked = uniform[:, 2] < self.chance(user, item)
        return {"user": user, "item": item}, tf.cast(clicked, tf.float32)[:, None]

    def chance(self, user, item):
        """Returns the probability of a click, in float64: what a perfect model would predict.

        Args:
            user: int64 ids, `[rows]`.
            item: int64 ids, `[rows]`.
        """
        # The first column is the bias of the id, the others are its taste.
        of_user = tf.math.ndtri(self._uniform(user, "user", 1 + self.num_tastes))
        of_item = tf.math.ndtri(self._uniform(item, "item", 1 + self.num_tastes))
        biases = self.bias_scale * (of_user[:, 0] + of_item[:, 0])
        tastes = tf.reduce_sum(of_user[:, 1:] * of_item[:, 1:], axis=1)
        return tf.sigmoid(self.bias + biases + self.taste_scale / self.num_tastes**0.5 * tastes)

    def _zipf(self, uniform, vocabulary: int):
        weights = np.arange(1, vocabulary + 1, dtype=np.float64) ** -self.zipf_exponent
        up_to = np.cumsum(weights) / weights.sum()
        return tf.minimum(tf.searchsorted(up_to, uniform, side="right", out_type=tf.int64), vocabulary - 1)

    def _uniform(self, numbers, purpose: str, num_columns: int):
        """Hashes numbers to `[rows, num_columns]` in (0, 1), float64, with SplitMix64.

        References:
            G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
        """
        keys = np.random.SeedSequence([self.seed, *purpose.encode()]).generate_state(num_columns, np.uint64)
        bits = tf.cast(numbers, tf.uint64)[:, None] * tf.constant(0x9E3779B97F4A7C15, tf.uint64) + keys
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            shifted = tf.bitwise.right_shift(bits, tf.constant(shift, tf.uint64))
            bits = tf.bitwise.bitwise_xor(bits, shifted) * tf.constant(factor, tf.uint64)
        # The upper 52 bits and a half: neither 0 nor 1 comes out.
        top = tf.bitwise.right_shift(bits, tf.constant(12, tf.uint64))
        return (tf.cast(top, tf.float64) + 0.5) * 2.0**-52
