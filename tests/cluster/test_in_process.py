"""A cluster inside one process: started once, found again, and it trains."""

import re

import pytest

from tests.cluster import programs
from tfdist_ext.cluster import in_process


@pytest.mark.parametrize("name", ["num_workers", "num_ps"])
def test_a_cluster_needs_workers_and_ps(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a number from 1; received 0"):
        in_process(**{name: 0})


@pytest.mark.parametrize("name", ["worker_threads", "ps_threads"])
def test_there_is_a_thread_for_each_server(name):
    with pytest.raises(ValueError, match=f"`{name}` must be a number from 3; received 2"):
        in_process(2, 1, **{name: 2})


def test_it_trains_is_found_again_and_refuses_another_shape(worker_pool):
    (seen,) = worker_pool.run(programs.train_in_process, num_workers=1, fresh=True)
    refusal = seen.pop("refusal")
    assert seen == {
        "same": True,
        "here": True,
        "task": "chief:0",
        "jobs": {"chief": 1, "worker": 2, "ps": 1},
        "loopback": True,
        "device": "/job:ps/replica:0/task:0/device:CPU:0",
        "total": 190.0,  # 0 + 1 + ... + 19
    }
    assert re.search("already has a cluster of 2 workers and 1 ps .*cannot have one of 3 workers", refusal)
    assert "restart the process" in refusal
