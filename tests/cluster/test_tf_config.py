"""TF_CONFIG becomes a specification and back; every mistake is told with its fix."""

import json

import hypothesis
import pytest
from absl import logging
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterSpecification, Task, from_tf_config, tf_config, to_tf_config
from tfdist_ext.errors import ClusterSpecError

TWO_WORKERS = {"worker": ["h0:1", "h1:1"]}


def config(cluster=TWO_WORKERS, type_="worker", index=0, **more):
    return {"cluster": cluster, "task": {"type": type_, "index": index}, **more}


def error_of(content) -> str:
    with pytest.raises(ClusterSpecError) as caught:
        from_tf_config(content if isinstance(content, str) else json.dumps(content))
    return str(caught.value)


@st.composite
def specifications(draw):
    """Any valid cluster, with gaps in its indices or without, seen by any task that it allows."""
    port = iter(range(1, 100))
    members = [(Task("chief", 0), f"c:{next(port)}")] if draw(st.booleans()) else []
    for job in ("worker", "ps", "evaluator"):
        indices = draw(st.sets(st.integers(0, 12), max_size=4))
        members += [(Task(job, index), f"h{index}.example:{next(port)}") for index in sorted(indices)]
    tasks = [task for task, _ in members]
    if not any(task.type == "evaluator" for task in tasks):
        tasks.append(Task("evaluator", draw(st.integers(0, 3))))
    task = draw(st.sampled_from(tasks))
    text = st.text(max_size=5)
    return ClusterSpecification(
        members=tuple(members), task=task, environment=draw(text), rpc_layer=draw(text)
    )


@hypothesis.given(specifications())
def test_round_trip(cluster):
    assert from_tf_config(to_tf_config(cluster)) == cluster


@hypothesis.given(specifications())
def test_ranks_are_a_permutation(cluster):
    tasks = cluster.training_tasks
    assert len(set(tasks)) == cluster.world_size
    if cluster.task.type in ("chief", "worker"):
        assert tasks[cluster.rank] == cluster.task
        assert cluster.is_chief == (cluster.rank == 0)


@hypothesis.given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["worker", "h:1"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["cluster", "task", "worker", "type", "index", "0"]), inner, max_size=3
    ),
    max_leaves=12,
))  # fmt: skip
def test_whatever_the_json_nothing_but_our_error_is_raised(content):
    faults = tf_config.faults_in(json.dumps(content))
    try:
        from_tf_config(json.dumps(content))
    except ClusterSpecError as error:
        assert str(error) == faults[0]
    else:
        assert not faults


@pytest.mark.parametrize(
    "content", ["", "  ", "{}", '{"cluster": {}, "task": {}}', '{"environment": "cloud"}']
)
def test_no_cluster_and_no_task_is_a_job_of_one(content):
    assert from_tf_config(content).world_size == 1


def test_string_indices_are_accepted():
    assert from_tf_config(config(index="1")).task == Task("worker", 1)


def test_a_lonely_task_needs_no_index():
    cluster = from_tf_config({"cluster": {"chief": ["a:1"], **TWO_WORKERS}, "task": {"type": "chief"}})
    assert cluster.task == Task("chief", 0)
    assert "no index" in error_of({"cluster": TWO_WORKERS, "task": {"type": "worker"}})


def test_master_is_the_chief_with_one_notice(monkeypatch):
    notices = []
    monkeypatch.setattr(logging, "warning", lambda text, *_: notices.append(text))
    tf_config._notice_master.cache_clear()
    cluster = from_tf_config(config({"master": ["m:1"], **TWO_WORKERS}, "master"))
    assert (cluster.task, cluster.rank, cluster.world_size) == (Task("chief", 0), 0, 3)
    assert len(notices) == 1 and "`chief`" in notices[0]
    assert "both `master` and `chief`" in error_of(config({"master": ["m:1"], "chief": ["c:1"]}, "chief"))


def test_empty_jobs_do_not_count():
    assert list(from_tf_config(config({**TWO_WORKERS, "ps": [], "chief": []})).jobs) == ["worker"]


def test_M11_chief_in_a_cluster_of_workers():
    text = error_of(config(type_="chief"))
    assert "chief:0" in text and "worker (2 tasks: 0, 1)" in text
    assert '{"type": "worker", "index": 0}' in text and '"chief": ["host:port"]' in text


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("ps_hosts", "ps"), ("worker_hosts", "worker"), ("workers", "worker"), ("wroker", "worker"),
     ("Chief", "chief"), ("parameter_server", "ps"), ("evaluators", "evaluator")],
)  # fmt: skip
def test_M12_unknown_jobs_get_a_suggestion(key, suggestion):
    assert f"Did you mean '{suggestion}'?" in error_of(config({key: ["h:1"]}))


def test_M12_a_job_like_nothing_known_lists_the_jobs():
    assert "The jobs are chief, worker, ps, evaluator." in error_of(config({"banana": ["h:1"]}))


def test_not_json_shows_the_position():
    text = error_of('{"cluster": {"worker": ["a:1"]}, }')
    assert "line 1 column 34" in text and "An example:" in text
    assert "double quotes" in error_of("{'cluster': {}}")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ([1], ["must be a JSON object", "a list ([1])"]),
        (config(index=2), ["worker:2", "worker (2 tasks: 0, 1)", "Set the index"]),
        (config(index=-1), ["-1", "number from 0"]),
        (config(index="one"), ["'one'", "number from 0"]),
        (config(index=True), ["True", "number from 0"]),
        (config({}), ["its cluster is empty", "unset TF_CONFIG"]),
        (config({"worker": []}), ["its cluster is empty"]),
        (config(["h:1"]), ["must map job names to addresses"]),
        (config({"worker": "h:1"}), ['Write ["h:1"]']),
        (config({"worker": [2222]}), ["worker:0", "must be a text", "2222"]),
        (config({"worker": 3}), ["must be a list of addresses"]),
        (config({"worker": {"zero": "h:1"}}), ["'zero'", "number from 0"]),
        (config({"worker": {"0": "h:1", "00": "h:2"}}), ["one index twice"]),
        (config({"worker": ["h:1", "h:1"]}), ["worker:0 and worker:1", "same address"]),
        (config({"worker": ["localhost:1", "127.0.0.1:1"]}), ["same address"]),
        (config({"worker": ["h:1"], "ps": ["H:1"]}), ["worker:0 and ps:0", "same address"]),
        (config({"chief": ["a:1", "b:1"]}, "chief"), ["2 chiefs", "has one"]),
        (config({"chief": {"1": "a:1"}}, "chief", 1), ["index 1", "index 0"]),
        ({"cluster": TWO_WORKERS}, ["which task this process is", '"type": "worker"']),
        ({"cluster": TWO_WORKERS, "task": 5}, ["must be an object", "a number (5)"]),
        ({"cluster": TWO_WORKERS, "task": {"index": 0}}, ["without a type"]),
        ({"cluster": TWO_WORKERS, "task": {"type": 7, "index": 0}}, ["unknown job 7"]),
        ({"worker": ["h:1"], "task": {"type": "worker", "index": 0}}, ["'worker' outside \"cluster\""]),
        ({"clusters": TWO_WORKERS, "task": {"type": "worker", "index": 0}}, ["Did you mean 'cluster'?"]),
        (config(type_="ps"), ["ps:0", "only worker", '"ps": ["host:port"]']),
        (config(environment=3), ["environment", "must be a text"]),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_fix(content, parts):
    text = error_of(content)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("h", "no port. Write 'host:port', for instance 'h:2222'"),
        ("[::1]", "no port"),
        ("h:", "port ''"),
        ("h:http", "port 'http'"),
        ("h:0", "1 to 65535"),
        ("h:65536", "1 to 65535"),
        ("http://h:1", "Remove it: write 'h:1'"),
        ("grpc://h:1/", "Remove it: write 'h:1'"),
        ("h:1/path", "Write 'h:1'"),
        (" h:1", "Write 'h:1'"),
        ("", "is empty"),
        (":1", "no host"),
        ("::1:2222", "brackets"),
        ("[nope]:1", "no IPv6 address"),
        ("a b:1", "no host name"),
    ],
)
def test_addresses_that_nobody_can_connect_to(address, part):
    text = error_of(config({"worker": ["good:1", address]}))
    assert part in text and "worker:1" in text


@pytest.mark.parametrize(
    "address", ["10.0.0.1:2222", "[fe80::1]:80", "job-worker-0.svc.cluster.local:1", "a_b:9"]
)
def test_addresses_that_are_right(address):
    assert from_tf_config(config({"worker": [address]})).address == address
