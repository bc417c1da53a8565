"""What does a worker tell the others once an element of its input has failed? Nothing more."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tfdist_ext.data.exchanging_pipeline import ExchangingPipeline, endless


@pytest.mark.parametrize("fails_at", [0, 2])
def test_f21_after_a_failed_element_nothing_is_exchanged(fails_at):
    # TensorFlow's prefetch reads on behind a failure: without the guard it would exchange all of the later elements.
    exchanged = []

    def exchange_input(stream, record):
        exchanged.append(int(record[1]))
        return [record]

    def checked(row):
        ok = tf.debugging.assert_none_equal(row, tf.constant(fails_at, tf.int64), message="bad row")
        with tf.control_dependencies([ok]):
            return (tf.reshape(row, [1]),), tf.constant([1, 0], tf.int64)

    extended = SimpleNamespace(local_slots=(0,), num_workers=1, exchange_input=exchange_input)
    pipeline = ExchangingPipeline(endless(tf.data.Dataset.range(5).map(checked), extended), extended)
    iterator = iter(pipeline._dataset)
    for row in range(fails_at):
        assert next(iterator)[0][0].numpy().tolist() == [row]
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad row"):
        next(iterator)
    with pytest.raises(tf.errors.UnknownError, match="The input failed before"):
        next(iterator)
    assert exchanged == [1] * fails_at
