"""The residuals of one worker, in this process: the other worker is a message that the test writes."""

import gc

import numpy as np
import pytest
import tensorflow as tf

from tests.multi_worker.agreement import logged
from tfdist_ext.collectives import TopK, error_feedback
from tfdist_ext.collectives.cross_device import RingAllReduce
from tfdist_ext.strategies.compressed_sums import CompressedSums


class Host:
    """Two workers, of which the second sends `other`; by default zeros."""

    num_workers = 2

    def __init__(self):
        self.other = None
        self.names = []
        self.steps = 0

    def gather(self, message, name, counts_step):
        self.names.append(name)
        self.steps += counts_step
        return [message, self.other if self.other is not None else tf.zeros_like(message)]


class Named:
    """What is asked of a variable."""

    def __init__(self, path):
        self.path = path


@pytest.fixture
def host():
    return Host()


def sums_of(host, **options):
    compression = TopK(**{"fraction": 0.25, "min_elements": 4, **options})
    return CompressedSums(
        compression, host, RingAllReduce(None, num_local=1), lambda value, name: tf.Variable(value, name=name)
    )


def step(sums, variable, gradient, loss_scale=None):
    (total,) = sums.sum_step([[tf.constant(gradient, tf.float32)]], "gradients", [variable], loss_scale)
    return total.numpy().tolist()


def test_two_steps_by_hand(host):
    sums, kernel = sums_of(host), Named("dense/kernel")
    assert step(sums, kernel, [1, -4, 2, 3]) == [0, -4, 0, 0]
    assert sums.residuals["dense/kernel"].numpy().tolist() == [1, 0, 2, 3]
    # u = [2, 1, 4, 6]
    assert step(sums, kernel, [1, 1, 2, 3]) == [0, 0, 0, 6]
    assert sums.residuals["dense/kernel"].numpy().tolist() == [2, 1, 4, 0]
    # int32 words: one index and one value. Each call is a step of training.
    assert host.names == ["gradients/top_k/2"] * 2 and host.steps == 2


def test_what_the_other_worker_sent_is_added(host):
    sums, kernel = sums_of(host), Named("kernel")
    host.other = error_feedback.pack([error_feedback.Entries(tf.constant([1]), tf.constant([10.0]))])
    assert step(sums, kernel, [1, -4, 2, 3]) == [0, 6, 0, 0]
    assert sums.residuals["kernel"].numpy().tolist() == [1, 0, 2, 3]


def test_the_replicas_of_a_worker_share_a_residual(host):
    sums, kernel = sums_of(host), Named("kernel")
    replicas = [tf.constant([1.0, 0, 2, 3]), tf.constant([0.0, -4, 0, 2])]
    (total,) = sums.sum_step([replicas], "gradients", [kernel], None)
    assert total.numpy().tolist() == [0, 0, 0, 5]  # 3 + 2 is larger than 4.
    assert sums.residuals["kernel"].numpy().tolist() == [1, -4, 2, 0]


def test_residuals_are_kept_without_the_loss_scale(host):
    sums, kernel = sums_of(host), Named("kernel")
    # Gradients 8 times too large, then 2 times: the same as [1, -4, 2, 3] and [1, 1, 2, 3].
    assert step(sums, kernel, [8, -32, 16, 24], loss_scale=8.0) == [0, -32, 0, 0]
    assert sums.residuals["kernel"].numpy().tolist() == [1, 0, 2, 3]
    assert step(sums, kernel, [2, 2, 4, 6], loss_scale=tf.constant(2.0)) == [0, 0, 0, 12]
    assert sums.residuals["kernel"].numpy().tolist() == [2, 1, 4, 0]


def test_a_step_that_is_skipped_anywhere_changes_no_residual(host):
    sums, kernel = sums_of(host), Named("kernel")
    step(sums, kernel, [1, -4, 2, 3])
    # Our own overflow is what is sent; that of the other worker arrives in the sum.
    assert np.isnan(step(sums, kernel, [1, np.nan, 50, 60])[1])
    assert sums.residuals["kernel"].numpy().tolist() == [1, 0, 2, 3]
    host.other = error_feedback.pack([error_feedback.Entries(tf.constant([0]), tf.constant([np.inf]))])
    assert step(sums, kernel, [1, 2, 50, 60]) == [np.inf, 0, 0, 63]
    assert sums.residuals["kernel"].numpy().tolist() == [1, 0, 2, 3]
    # So does an infinity in a gradient that travels whole.
    host.other = None
    values = [[tf.constant([1.0, 2, 50, 60])], [tf.constant([np.inf])]]
    sums.sum_step(values, "gradients", [kernel, Named("bias")], None)
    assert sums.residuals["kernel"].numpy().tolist() == [1, 0, 2, 3]


def test_small_sparse_and_whole_numbers_travel_whole(host):
    sums = sums_of(host)
    rows = tf.IndexedSlices(tf.constant([[1.0] * 4, [2.0] * 4]), tf.constant([5, 5]), tf.constant([9, 4]))
    values = [rows, tf.constant([1.0, 2, 3]), tf.constant([1.0, 2, 3, 4]), tf.constant([7, 8, 9, 9, 9])]
    variables = [Named("table"), Named("bias"), Named("kernel")]
    table, bias, kernel, update = sums.sum_step([[value] for value in values], "gradients", variables, None)
    assert list(sums.residuals) == ["kernel"]
    assert (table.indices.numpy().tolist(), table.values.numpy().tolist()) == ([5], [[3.0] * 4])
    assert bias.numpy().tolist() == [1, 2, 3] and update.numpy().tolist() == [7, 8, 9, 9, 9]
    assert kernel.numpy().tolist() == [0, 0, 0, 4]
    # The step was counted with what travelled whole.
    assert host.steps == 0


def test_a_residual_belongs_to_a_variable_not_to_a_name(host):
    sums, one, other = sums_of(host), Named("kernel"), Named("kernel")
    step(sums, one, [1, 0, 0, 9])
    step(sums, other, [2, 0, 0, 9])
    assert {name: value.numpy()[0] for name, value in sums.residuals.items()} == {"kernel": 1, "kernel_1": 2}
    del one
    gc.collect()
    assert list(sums.residuals) == ["kernel_1"]
    step(sums, other, [3, 0, 0, 9])
    assert sums.residuals["kernel_1"].numpy()[0] == 5
    # A model that is built anew takes the place of the one that is gone, from zero.
    again = Named("kernel")
    step(sums, again, [7, 0, 0, 9])
    assert sums.residuals["kernel"].numpy().tolist() == [7, 0, 0, 0]


def test_restored_values_wait_for_their_variable(host):
    sums, kernel, bias = sums_of(host), Named("kernel"), Named("bias")
    step(sums, bias, [1, 2, 3, 4])
    sums.restore({"kernel": np.array([0, 0, 5, 0])})
    # What is not named becomes zero.
    assert sums.residuals["bias"].numpy().tolist() == [0, 0, 0, 0]
    assert step(sums, kernel, [1, 2, -1, 3]) == [0, 0, 4, 0]
    sums.restore({"kernel": np.array([9, 0, 0, 0])})
    assert sums.residuals["kernel"].numpy().tolist() == [9, 0, 0, 0]


def test_restored_values_must_have_the_shape_of_their_variable(host):
    sums, kernel = sums_of(host), Named("kernel")
    sums.restore({"kernel": np.zeros(5)})
    with pytest.raises(
        ValueError, match=r"`kernel` must have the shape \(4,\) of its variable; received \(5,\)"
    ):
        step(sums, kernel, [1, 2, 3, 4])
    step(sums, kernel, [1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"`kernel` must have the shape"):
        sums.restore({"kernel": np.zeros(5)})
    assert sums.residuals["kernel"].numpy().tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(("fraction", "warnings"), [(0.25, 0), (0.5, 1)])
def test_one_warning_where_compression_does_not_pay(host, fraction, warnings):
    # 2 workers: it pays below 1/2. One entry of 4 is 8 bytes against 2 * 4 * 4 / 2 = 16, two are 16.
    sums = sums_of(host, fraction=fraction)
    with logged() as lines:
        for _ in range(2):
            step(sums, Named("kernel"), [1, 2, 3, 4])
    told = [line for line in lines if "does not pay" in line]
    assert len(told) == warnings
    assert all("16 bytes" in line and "would receive 16 without" in line for line in told)
