"""What remains when a ps or the chief dies in the middle of `fit`?"""

import time

from tests.parameter_server.cluster import Cluster
from tfdist_ext.cluster import ServingExit


def test_p13_a_killed_ps_is_one_typed_error_and_a_killed_chief_ends_the_others():
    # TF#7767. Both clusters are started at once; the second one is looked at when the first one is done.
    with (
        Cluster(num_workers=1, num_ps=2, spare=False) as loses_ps,
        Cluster(num_workers=1, spare=False) as dies,
    ):
        dies.begin("train_for_ever")
        dies.wait_for("in mid-epoch")
        dies.kill_chief()
        gone = time.monotonic()
        fact = loses_ps.run("train_and_lose_a_ps", index=1)
        address = loses_ps.jobs["ps"][1]
        assert (fact["type"], fact["task"]) == ("ParameterServerLostError", "ps:1")
        assert fact["text"].startswith(f"ps:1 at {address} died, and the variables on it are lost.")
        assert fact["seconds"] < 15 and 5 <= fact["step"] <= 8
        assert fact["evaluate"] == ["ParameterServerLostError", "ps:1"]
        assert loses_ps.finish() == 0
        assert (loses_ps.exit_code("worker", 0), loses_ps.exit_code("ps", 0)) == (0, 0)
        assert dies.exit_code("worker", 0) == dies.exit_code("ps", 0) == ServingExit.CHIEF_LOST == 82
        # 20 s without a chief, and the time between two probes.
        assert time.monotonic() - gone < 30


def test_a_stopped_ps_is_given_up_after_a_while_and_the_chief_ends():
    with Cluster(num_workers=1, num_ps=2, spare=False) as cluster:
        fact = cluster.run("train_and_stop_a_ps", index=1, patience_seconds=6.0)
        address = cluster.jobs["ps"][1]
        assert cluster.wait_for("ps:1 at").endswith("training waits 6 s for it.")
        assert (fact["type"], fact["task"]) == ("ParameterServerLostError", "ps:1")
        assert fact["text"].startswith(f"ps:1 at {address} has not answered for ")
        # The watch looks every 2 s, and may have looked 2 s before; then 5 s for an error on its way.
        assert 6 - 2 - 1 < fact["seconds"] < 6 + 2 + 1 + 5
        assert fact["evaluate"] == ["ParameterServerLostError", "ps:1"]
        # A goodbye may take 5 s; the rest is the usual end of a process.
        assert cluster.finish(15) == 0
        assert (cluster.exit_code("worker", 0), cluster.exit_code("ps", 0)) == (0, 0)
