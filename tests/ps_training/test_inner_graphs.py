"""Weights that are read inside loops, branches and functions of TensorFlow train as on one device."""

import pytest

from tests.ps_training import inner_graph_programs as programs
from tests.single_host.oracle import TOLERANCE


@pytest.mark.parametrize("group", ["named", "others"])
def test_f1_weights_read_in_inner_graphs_train_as_on_one_device(chief, group):
    """Sequential SGD on float64; the first weights of each kind must move on one device, and alike on workers."""
    result = chief(programs.against_one_device, group=group)
    for path, weight in result.items():
        assert weight["moved"] > 1e-4, path
        assert weight["difference"] < TOLERANCE, path


def test_f1_a_layer_that_is_a_function_is_traced_for_each_use(chief):
    assert max(chief(programs.traced_again)) < TOLERANCE


def test_f1_a_large_table_that_is_read_in_a_loop_trains(chief):
    result = chief(programs.table_in_a_loop)
    assert max(result.values()) < TOLERANCE


def test_f1_a_missing_gradient_is_keras_warning_and_a_lost_one_an_error(chief):
    result = chief(programs.missing_gradients)
    (warning,) = result["unused"]["warned"]
    assert "unused/bias" in warning and "matrix" not in warning
    assert result["unused"]["error"] == "" and result["unused"]["moved"]
    assert "`lost/matrix`" in result["lost"]["error"] and not result["lost"]["moved"]
    assert "`counting/count`" in result["counting"]["error"] and not result["counting"]["moved"]


def test_f1_replicas_warn_of_a_missing_gradient_once(worker_pool):
    (warned,) = worker_pool.run(programs.warnings_of_two_replicas, num_workers=1, devices=2)
    assert len(warned) == 1 and "unused/bias" in warned[0]


def test_f1_a_state_for_each_row_flows_in_order_or_is_refused_by_name(chief):
    result = chief(programs.states_of_rows)
    assert max(result["differences"]) < TOLERANCE
    for refused in ("synchronous", "evaluate", "predict"):
        assert "stateful" in result[refused] and "rnn_state" in result[refused], refused
