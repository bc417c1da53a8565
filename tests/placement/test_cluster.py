"""What is asked of parameter servers happens there; and what needs no TensorFlow does not load it."""

import json
import os
import subprocess
import sys

import pytest

FIRST = "/job:ps/replica:0/task:0/device:CPU:0"
SECOND = "/job:ps/replica:0/task:1/device:CPU:0"


def run(*arguments):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=180, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def results():
    return json.loads(run("-m", "tests.placement.cluster_program"))


def test_the_strategy_splits_by_fair_shares(results):
    assert results["shards"] == [FIRST, SECOND]
    # Halves of the table, 800 bytes each, and the small one on the first of two equals.
    assert results["small"] == FIRST and results["totals"] == [800 + 64, 800]


def test_variables_and_operations_are_on_the_server_that_was_named(results):
    assert results["remote"] == SECOND
    assert {results["assigned"][name] for name in ("Gather", "mul", "mul/y")} == {SECOND}
    assert results["assigned"]["Sum"] == "CPU:0"
    # 2 numbers of rows, int32, go there, and 2 rows of 4 float32 come back, not the table.
    assert results["crossing"] == {"ids": ["CPU:0", SECOND, 8], "mul": [SECOND, "CPU:0", 32]}


def test_plans_know_servers(results):
    assert results["planned"] == SECOND
    assert results["sums"] == [16.0, 16.0]


def test_a_server_that_is_not_there(results):
    assert results["missing"].startswith(
        f"There is no device '/job:ps/task:7'; there are CPU:0, {FIRST}, {SECOND}, "
    )


def test_planning_a_graph_does_not_load_tensorflow():
    pure = (
        "import sys; from tfdist_ext.placement import Device, Machine, Operation, OperationGraph, plan_graph, Plan; "
        "plan = plan_graph(OperationGraph([Operation(name='a')], []), Machine(devices=[Device(name='CPU:0')])); "
        "print(plan.devices['a'], 'tensorflow' in sys.modules)"
    )
    assert run("-c", pure) == "CPU:0 False"
