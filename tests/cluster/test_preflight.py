"""Differences that would silently train another model are found before the first step."""

import hashlib
import json

import hypothesis
import pytest
from absl import logging
from hypothesis import strategies as st

from tfdist_ext.cluster import ClusterSpecification, Task, check_records, describe_this_task
from tfdist_ext.errors import ConfigurationMismatchError

COMPARED = ["protocol_version", "world_size", "keras_version", "main_script_sha256", "seed", "keras_floatx"]


def records(num_tasks):
    return [
        {"task": f"worker:{rank}", "rank": rank, **{field: f"{field} value" for field in COMPARED}}
        for rank in range(num_tasks)
    ]


def describe(rank, **arguments):
    jobs = {"worker": ["a:1", "b:1"]}
    return describe_this_task(ClusterSpecification.from_jobs(jobs, task=Task("worker", rank)), **arguments)


def test_the_record_is_flat_json_with_the_facts(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(b"import this\n")
    record = describe(1, seed=7, main_script=str(script))
    assert json.loads(json.dumps(record)) == record
    assert record["task"] == "worker:1" and (record["rank"], record["world_size"]) == (1, 2)
    assert record["main_script_sha256"] == hashlib.sha256(b"import this\n").hexdigest()
    assert record["seed"] == 7
    assert {"tfdist_ext_version", "tensorflow_version", "keras_version", "python_version"} <= set(record)


def test_two_tasks_of_one_installation_agree():
    check_records([describe(0, seed=1), describe(1, seed=1)])


def test_a_missing_script_is_left_out(tmp_path):
    assert "main_script_sha256" not in describe(0, main_script=str(tmp_path / "none.py"))


def test_a_seed_on_one_task_only_is_a_difference():
    with pytest.raises(
        ConfigurationMismatchError, match="worker:0 and worker:1 differ in seed: None.*5.*set_rand"
    ):
        check_records([describe(0), describe(1, seed=5)])


@hypothesis.given(st.data())
def test_any_one_difference_is_named(data):
    num_tasks = data.draw(st.integers(2, 5))
    odd = data.draw(st.integers(1, num_tasks - 1))
    field = data.draw(st.sampled_from(COMPARED))
    changed = records(num_tasks)
    changed[odd][field] = "something else"
    with pytest.raises(ConfigurationMismatchError) as caught:
        check_records(changed)
    error = caught.value
    assert (error.field, error.tasks) == (field, ("worker:0", f"worker:{odd}"))
    assert error.values == (f"{field} value", "something else")
    for part in (field, "worker:0", f"worker:{odd}", "something else"):
        assert part in str(error)


@hypothesis.given(st.sets(st.sampled_from(COMPARED)), st.permutations(range(3)))
def test_all_differing_fields_are_listed_in_any_order_of_tasks(fields, order):
    changed = records(3)
    for field in fields:
        changed[2][field] = "something else"
    shuffled = [changed[rank] for rank in order]
    if not fields:
        check_records(shuffled)
        return
    with pytest.raises(ConfigurationMismatchError) as caught:
        check_records(shuffled)
    assert all(field in str(caught.value) for field in fields)


@hypothesis.given(st.sampled_from([field for field in COMPARED if field != "seed"]), st.integers(0, 2))
def test_a_fact_that_a_task_does_not_have_is_not_compared(field, absent):
    changed = records(3)
    del changed[absent][field]
    check_records(changed)


def test_warn_logs_every_difference(monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    changed = records(2)
    changed[1].update(seed=3, keras_version="0")
    check_records(changed, on_mismatch="warn")
    assert len(warnings) == 2
    assert "keras_version" in warnings[0] and "seed" in warnings[1]


@pytest.mark.parametrize("field", ["protocol_version", "world_size"])
def test_what_cannot_work_is_an_error_even_under_warn(field):
    changed = records(2)
    changed[1].update({field: 99, "seed": 3})
    with pytest.raises(ConfigurationMismatchError) as caught:
        check_records(changed, on_mismatch="warn")
    assert caught.value.field == field


def test_two_processes_of_one_task():
    twins = records(2)
    twins[1]["task"] = "worker:0"
    with pytest.raises(
        ConfigurationMismatchError, match="Two processes have the same task 'worker:0'.*index of"
    ):
        check_records(twins, on_mismatch="warn")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="on_mismatch"):
        check_records([], on_mismatch="ignore")
