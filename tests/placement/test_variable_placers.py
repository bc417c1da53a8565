"""Variables are split and dealt by bytes or by traffic; slots stay with their variable."""

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist_ext.placement import FairSharePartitioner, PlacementTable, placement_table, variable_traffic


def test_only_what_weighs_more_than_a_share_is_split():
    # 4 tasks share 4000 bytes: 1000 each.
    partitioner = FairSharePartitioner(4000, 4)
    assert partitioner(shape=tf.TensorShape([250]), dtype=tf.float32) == [1]
    assert partitioner(shape=tf.TensorShape([251]), dtype=tf.float32) == [2]
    # 2200 bytes are 2.2 shares; with a slack of 2 they are 1.1.
    assert partitioner(tf.TensorShape([55, 10]), tf.float32) == [3, 1]
    assert FairSharePartitioner(4000, 4, slack=2.0)(tf.TensorShape([55, 10]), tf.float32) == [2, 1]
    # Never more than tasks, nor than rows.
    assert partitioner(tf.TensorShape([10_000]), tf.float32) == [4]
    assert partitioner(tf.TensorShape([2, 10_000]), tf.float32) == [2, 1]
    assert partitioner(tf.TensorShape([2, 10_000]), tf.float32, axis=1) == [1, 4]
    assert partitioner(tf.TensorShape([]), tf.float32) == []


def test_by_traffic_a_table_weighs_the_rows_of_a_step():
    rows = FairSharePartitioner(1000, 2, weight=lambda shape, dtype: 32 * shape[1] * dtype.size)
    # 32 rows of 2 float32 are 256 bytes a step of 500.
    assert rows(tf.TensorShape([1_000_000, 2]), tf.float32) == [1, 1]
    assert rows(tf.TensorShape([1_000_000, 8]), tf.float32) == [2, 1]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.integers(1, 5))
def test_after_splitting_largest_first_is_close_to_balance(rows, num_tasks):
    partitioner = FairSharePartitioner(sum(rows) * 4, num_tasks)
    sizes = {}
    for number, size in enumerate(rows):
        (shards,) = partitioner(tf.TensorShape([size]), tf.float32)
        sizes |= {f"{number}/{i}": size // shards + (i < size % shards) for i in range(shards)}
    totals = PlacementTable.largest_first(sizes, num_tasks).totals
    # No shard is above a share, rounded up to a row; the last one dealt to the fullest found it at the mean at most.
    assert max(totals) <= sum(rows) / num_tasks + -(-sum(rows) // num_tasks) + 1


def test_tensorflow_takes_it_as_a_variable_partitioner():
    assert isinstance(FairSharePartitioner(100, 2), tf.distribute.experimental.partitioners.Partitioner)
    for wrong in ({"total_weight": 0}, {"num_tasks": 0}, {"slack": -1.0}):
        with pytest.raises(ValueError, match="must be positive; received"):
            FairSharePartitioner(**{"total_weight": 1, "num_tasks": 1, **wrong})


def training_step():
    """A table of 100 x 4 and a kernel of 4 x 2, float32, with Adam."""
    table = tf.Variable(tf.zeros([100, 4]), name="table")
    kernel = tf.Variable(tf.zeros([4, 2]), name="kernel")
    optimizer = keras.optimizers.Adam()
    optimizer.build([table, kernel])

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.matmul(tf.gather(table, ids), kernel))
        gradient, dense = tape.gradient(loss, [table, kernel])
        table.scatter_sub(gradient)
        kernel.assign_sub(dense)
        return loss, [slot.value.read_value() for slot in optimizer.variables]

    return step


def test_traffic_counts_each_tensor_once():
    traffic = variable_traffic(training_step(), [tf.constant([5, 7, 9])])
    # The table: 3 numbers of rows (12) and 3 rows of 4 (48) for the gather; the same numbers, reshaped (12), and the
    # gradient's rows (48) for the update.
    assert traffic["table"] == 12 + 48 + 12 + 48
    # The kernel, 32 bytes, is read once for both products; its gradient is as large.
    assert traffic["kernel"] == 32 + 32


def test_slots_lie_beside_their_variable():
    table = placement_table(training_step(), [tf.constant([5, 7, 9])], num_tasks=2)
    rows = {row.variable: row for row in table.rows}
    assert (rows["table"].num_bytes, rows["table"].slot_bytes) == (1600, 3200)
    assert (rows["kernel"].num_bytes, rows["kernel"].slot_bytes) == (32, 64)
    assert rows["table"].task != rows["kernel"].task
    assert sum(table.totals) == 4800 + 96 + 8 + 4  # And the step, int64, and the learning rate.


def test_by_traffic_the_small_but_busy_may_lie_apart():
    sizes = {"cold": 1000, "cool": 900, "hot": 10, "warm": 10}
    by_bytes = PlacementTable.largest_first(sizes, 2)
    by_traffic = PlacementTable.largest_first(sizes, 2, weight={"hot": 50, "warm": 40, "cold": 1})
    assert {row.variable: row.task for row in by_bytes.rows} == {"cold": 0, "cool": 1, "hot": 1, "warm": 1}
    assert {row.variable: row.task for row in by_traffic.rows} == {"hot": 0, "warm": 1, "cold": 1, "cool": 1}
    # The table still counts bytes: 10 against 1910, a mean of 960.
    assert by_traffic.imbalance == pytest.approx(1910 / 960)
