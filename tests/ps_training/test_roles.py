"""What the strategy is on an evaluator, and what it says of clusters that cannot work."""

import pytest

from tests.ps_training import role_programs


def test_m14_an_evaluator_runs_alone_on_one_device(worker_pool):
    """Two steps of w' = w - 1/4 * 2 w from 1, and the mean of w^2 after them."""
    (result,) = worker_pool.run(role_programs.evaluator_alone, num_workers=1, fresh=True)
    assert result == {"weight": 0.25, "loss": pytest.approx(0.0625)}


def test_p19_m8_clusters_without_ps_or_workers_and_absent_tasks_are_named(worker_pool):
    (result,) = worker_pool.run(role_programs.errors_of_clusters, num_workers=1, fresh=True)
    assert result["no ps"].startswith("ClusterSpecError") and "`ps`" in result["no ps"].replace("'", "`")
    assert result["no worker"].startswith("ClusterSpecError") and "worker" in result["no worker"]
    assert result["nobody there"].startswith("StartupTimeoutError")
    assert (
        "worker:0 at 127.0.0.1:2" in result["nobody there"]
        and "ps:0 at 127.0.0.1:3" in result["nobody there"]
    )
