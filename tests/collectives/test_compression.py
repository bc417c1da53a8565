"""Top-k with error feedback: what is sent, what stays, and that the two are all there was."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist_ext.collectives import TopK, error_feedback
from tfdist_ext.collectives.compression import ring_bytes, top_k_bytes


@pytest.mark.parametrize(
    ("fraction", "num_elements", "num_sent"),
    [(0.01, 1000, 10), (0.01, 20, 1), (0.5, 5, 2), (1.0, 7, 7), (0.1, 1_000_000, 100_000), (1e-9, 5000, 1)],
)
def test_how_many_are_sent(fraction, num_elements, num_sent):
    assert TopK(fraction=fraction).num_sent(num_elements) == num_sent


@pytest.mark.parametrize("arguments", [{"fraction": 0}, {"fraction": 1.5}, {"min_elements": 0}])
def test_options_are_validated(arguments):
    with pytest.raises(ValueError, match=f"Argument `{next(iter(arguments))}` must be"):
        TopK(**arguments)


def test_what_is_compressed():
    top_k = TopK(min_elements=100)
    assert top_k.compresses("float32", 100) and top_k.compresses("float64", 10_000)
    assert not top_k.compresses("float32", 99)
    assert not top_k.compresses("float16", 10_000) and not top_k.compresses("int32", 10_000)
    assert not top_k.compresses("float32", None)
    # An int32 index reaches no further.
    assert not top_k.compresses("float32", 2**31)


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_float32_pays_below_one_over_the_number_of_workers(num_workers):
    # 8 k (P - 1) against 8 n (P - 1) / P.
    n = 1000 * num_workers
    assert top_k_bytes(999, 4, num_workers) < ring_bytes(n, 4, num_workers)
    assert top_k_bytes(1000, 4, num_workers) == ring_bytes(n, 4, num_workers) == 8000 * (num_workers - 1)


def test_the_largest_in_magnitude_are_sent_and_of_equal_ones_the_first():
    update = tf.constant([[1.0, -3.0, 2.0], [3.0, -2.0, 0.0]])
    entries = error_feedback.largest(update, 3)
    sent = dict(zip(entries.indices.numpy().tolist(), entries.values.numpy().tolist(), strict=True))
    # 3 twice; of the two of magnitude 2 the one with the lower index.
    assert sent == {1: -3.0, 3: 3.0, 2: 2.0}
    left = error_feedback.without(update, entries)
    np.testing.assert_array_equal(left, [[1, 0, 0], [0, -2, 0]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_sent_first(bad):
    entries = error_feedback.largest(tf.constant([5.0, 4.0, bad, 3.0]), 1)
    np.testing.assert_array_equal(entries.values, [bad])
    assert not error_feedback.all_finite([entries.values])


def test_entries_of_all_workers_add_up():
    parts = [
        error_feedback.Entries(tf.constant([0, 3]), tf.constant([1.0, 2.0])),
        error_feedback.Entries(tf.constant([3, 1]), tf.constant([10.0, 20.0])),
    ]
    np.testing.assert_array_equal(error_feedback.total(parts, [2, 2]), [[1, 20], [0, 12]])


def test_all_finite_looks_at_floats_and_at_rows():
    rows = tf.IndexedSlices(tf.constant([[np.inf]]), tf.constant([0]))
    assert error_feedback.all_finite([tf.constant([1.0]), tf.constant([1], tf.int64)])
    assert not error_feedback.all_finite([tf.constant([1.0]), rows])
    assert error_feedback.all_finite([])


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["float32", "float64"])), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_a_message_keeps_every_bit(like, random):
    parts = []
    for num_sent, dtype in like:
        indices = tf.constant([random.randrange(2**31) for _ in range(num_sent)])
        # Any bits: also those of NaN.
        bits = np.array([random.randrange(256) for _ in range(num_sent * np.dtype(dtype).itemsize)], np.uint8)
        parts.append(error_feedback.Entries(indices, tf.constant(bits.view(dtype))))
    like = [(num_sent, tf.as_dtype(dtype)) for num_sent, dtype in like]
    unpacked = error_feedback.unpack(error_feedback.pack(parts), like)
    for one, other in zip(parts, unpacked, strict=True):
        np.testing.assert_array_equal(one.indices, other.indices)
        assert one.values.numpy().tobytes() == other.values.numpy().tobytes()


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(
    st.integers(1, 12),
    st.floats(0.01, 1.0),
    st.lists(st.lists(st.integers(-1000, 1000), min_size=12, max_size=12), min_size=1, max_size=6),
)
def test_what_was_sent_and_what_is_left_are_all_there_was(num_elements, fraction, steps):
    # Small whole numbers add without rounding, so the equality is exact.
    num_sent = TopK(fraction=fraction).num_sent(num_elements)
    gradients = [np.array(step[:num_elements], "float32") for step in steps]
    residual, sent = tf.zeros(num_elements), np.zeros(num_elements)
    for gradient in gradients:
        update = gradient + residual
        entries = error_feedback.largest(update, num_sent)
        residual = error_feedback.without(update, entries)
        assert entries.indices.shape == (num_sent,)
        # Nothing that stays is larger than what went.
        assert np.max(np.abs(residual)) <= np.min(np.abs(entries.values))
        sent += error_feedback.total([entries], [num_elements])
    np.testing.assert_array_equal(sent + residual, np.sum(gradients, axis=0))
