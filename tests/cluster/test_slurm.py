"""What Slurm tells a task: the numbers of its manual, damaged ones in one sentence, and nothing built of them."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.cluster import from_slurm
from tfdist_ext.errors import ClusterSpecError


def environ(hosts, counts, rank=0, **others):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        **others,
    }


@pytest.mark.parametrize(
    ("hosts", "counts", "expected"),
    [
        # Slurm numbers tasks in the order of its list, not of the alphabet: n10 comes after n9.
        ("n[9-10]", "2,1", ["n9:8888", "n9:8889", "n10:8888"]),
        ("m5", "1", ["m5:8888"]),
        ("n[08-10,2],m", "1(x5)", ["n08:8888", "n09:8888", "n10:8888", "n2:8888", "m:8888"]),
        ("r[1-2]n[1-2]", "1(x4)", ["r1n1:8888", "r1n2:8888", "r2n1:8888", "r2n2:8888"]),
        ("a.b-c[1]", "1", ["a.b-c1:8888"]),
    ],
)
def test_h25_tasks_in_slurms_order(hosts, counts, expected):
    cluster = from_slurm(environ=environ(hosts, counts))
    assert [address for _, address in cluster.members] == expected


def test_h25_cyclic_tasks_go_round_the_hosts():
    cluster = from_slurm(environ=environ("n[1-2]", "2,1", 1, SLURM_DISTRIBUTION="cyclic"))
    assert [address for _, address in cluster.members] == ["n1:8888", "n2:8888", "n1:8889"]
    assert str(cluster.task) == "worker:1"


def test_h25_jobs_take_tasks_in_order():
    found = [
        str(from_slurm({"chief": 1, "worker": 2, "ps": 1}, environ=environ("n[1-4]", "1(x4)", rank)).task)
        for rank in range(4)
    ]
    assert found == ["chief:0", "worker:0", "worker:1", "ps:0"]


def test_h25_no_gpu_is_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")  # No nvidia-smi.
    assert from_slurm(environ=environ("n", "1")).world_size == 1


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (environ("n[1-2]", "1"), "names 2 hosts"),
        (environ("n", "1", rank=1), "this is task 1, and there are 1 tasks"),
        (environ("n", "1", rank="x"), "SLURM_PROCID is `x`"),
        (environ("n", "999999999"), "SLURM_STEP_TASKS_PER_NODE is `999999999`"),
        (environ("n", "1(x999999999)"), "100000 in all at most"),
        (environ("n", "0"), "SLURM_STEP_TASKS_PER_NODE is `0`"),
        (environ("n[1-999999999]", "1"), "SLURM_STEP_NODELIST is"),
        (environ("n[1-90000]m[1-90000]", "1"), "names 100001 hosts"),
        (environ("n[2-1]", "1"), "SLURM_STEP_NODELIST is"),
        (environ("n[1", "1"), "SLURM_STEP_NODELIST is"),
        (environ("n;rm", "1"), "SLURM_STEP_NODELIST is"),
        (environ("n", "1", SLURM_DISTRIBUTION="plane=2"), "--distribution=block or cyclic"),
        ({"SLURM_PROCID": "0"}, "SLURM_STEP_NODELIST is not set"),
        ({}, "SLURM_STEP_NODELIST is not set"),
    ],
)
def test_h25_a_damaged_environment_is_one_sentence_and_builds_nothing(variables, words):
    with pytest.raises(ClusterSpecError, match=re.escape(words)) as caught:
        from_slurm(environ=variables)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("jobs", "words"),
    [({"worker": 3}, "has 3 tasks"), ({"worker": 2, "ps": 0}, "has 2 tasks"), ({"wrker": 2}, "`wrker`")],
)
def test_h25_jobs_that_are_not_those_of_slurm(jobs, words):
    with pytest.raises(ClusterSpecError, match=re.escape(words)):
        from_slurm(jobs, environ=environ("n[1-2]", "1(x2)"))


def test_h25_a_port_for_each_task():
    with pytest.raises(ClusterSpecError, match="leaves no port"):
        from_slurm(first_port=65535, environ=environ("n", "2"))


@hypothesis.given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=8))
def test_h25_whatever_the_variables_say_there_is_a_cluster_or_a_sentence(hosts, counts, rank):
    try:
        cluster = from_slurm(environ=environ(hosts, counts, rank))
    except ClusterSpecError as error:
        assert "\n" not in str(error).replace(hosts, "").replace(counts, "").replace(rank, "")
    else:
        assert cluster.world_size >= 1


@hypothesis.given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.booleans(), st.data())
def test_h25_every_rank_finds_itself(counts, is_cyclic, data):
    total = sum(counts)
    rank = data.draw(st.integers(0, total - 1))
    hosts = f"n[1-{len(counts)}]"
    way = {"SLURM_DISTRIBUTION": "cyclic"} if is_cyclic else {}
    cluster = from_slurm(environ=environ(hosts, ",".join(map(str, counts)), rank, **way))
    addresses = [address for _, address in cluster.members]
    assert cluster.rank == rank and len(set(addresses)) == total
    per_host = [sum(a.startswith(f"n{h}:") for a in addresses) for h in range(1, len(counts) + 1)]
    assert per_host == counts
