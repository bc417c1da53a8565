"""Every kind of input reaches the workers, each row once; what cannot work is refused with one sentence."""

import numpy as np

from tests.ps_training import input_programs


def test_p1_every_kind_of_input_applies_every_row_once(chief):
    """12 rows in 6 batches; the last weight that moves is that of the row itself."""
    result = chief(input_programs.kinds_of_input)
    on_batches = result.pop("batches")
    for kind, (counts, iterations) in result.items():
        assert counts == [1.0] * 12, kind
        assert iterations == 6, kind
    # train_on_batch adds 1 to four weights; outputs are then 2, and the loss is minus their sum.
    assert on_batches["moved"] == [1.0] * 4 + [0.0] * 8
    assert on_batches["outputs"] == [2.0] * 4
    assert on_batches["loss"] == -8.0


def test_shuffled_rows_come_in_the_order_of_one_device_in_every_epoch(chief):
    """Each pass reshuffles; w after each step tells the order of the rows exactly."""
    result = chief(input_programs.order_of_shuffled_rows)
    assert result["distributed"] == result["alone"]
    assert len(result["distributed"]) == 21
    first, second = np.diff(result["distributed"][:7]), np.diff(result["distributed"][7:14])
    assert not np.allclose(first, second)


def test_predictions_keep_their_order_and_evaluation_counts_each_row_once(chief):
    result = chief(input_programs.results_in_order)
    assert result["rows"] == 23
    assert result["difference"] < 1e-14
    assert abs(result["loss"] - result["expected"]) < 1e-14


def test_a_train_step_with_two_optimizers(chief):
    """Three steps of w' = w - rate * w from 1: (1/2)^3 and (3/4)^3."""
    result = chief(input_programs.two_optimizers)
    assert result["good"]["weights"] == [0.125, 0.421875]
    assert result["good"]["logs"] == {"first": 0.5 * 0.25**2, "second": 0.5 * 0.5625**2}
    assert "twice" in result["twice"] and "push_every_steps" not in result["twice"]
    assert "after applying gradients" in result["reads"]
    assert result["after"] == result["good"]


def test_what_cannot_work_is_refused_in_words(chief):
    result = chief(input_programs.refusals)
    expected = {
        "foreign optimizer": "outside the scope",
        "eager": "run_eagerly",
        "accumulating": "push_every_steps",
        "policy": "update_policy",
        "too few": "wait, shrink, fail",
        "cached rounds": "BoundedStaleness",
        "wire": "bfloat16",
        "timeout": "worker_timeout_seconds",
        "another cluster": "one cluster",
        "stale rounds": "num_backup_workers",
    }
    assert result.keys() == expected.keys()
    for name, words in expected.items():
        assert words in result[name], (name, result[name])


def test_d7_the_report_says_on_which_task_the_input_runs(chief):
    result = chief(input_programs.input_report)
    assert "InterleaveDataset" in result["interleave"] and "ShardDataset" in result["interleave"]
    assert "shard 0 of 2: on worker:0" in result["interleave"] and "worker:1" in result["interleave"]
    assert "RepeatDataset" in result["repeat"] and "on worker:1" in result["repeat"]
    assert result["cardinality"] == -1  # tf.data's word for a dataset without end.
    assert (
        result["python"].startswith("All operations run on chief:0") and "Python function" in result["python"]
    )


def test_h7_the_chief_keeps_a_bounded_number_of_batches(chief):
    """Two workers may be 4 batches apart, which are 2 * (4 + 1) of the data, and each has one more on its way."""
    result = chief(input_programs.kept_by_the_chief)
    for policy, (most, rows, applied, _) in result.items():
        assert most <= 2 * (4 + 1) + 2, (policy, result)
        assert rows == applied == 160, policy
    assert result["bounded 1, drop"][3] > 0 and result["one backup"][3] > 0


def test_h28_models_that_were_never_called_or_have_nothing_to_train_do_as_on_one_device(chief):
    result = chief(input_programs.as_on_one_device)
    assert result.keys() == input_programs.AS_ONE_DEVICE.keys()
    for name, (distributed, alone) in result.items():
        assert distributed == alone, name
        assert not isinstance(alone, str), name
