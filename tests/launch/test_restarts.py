"""When a whole group is started again, and what is told; without processes, time being an argument."""

import datetime

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist_ext.launch.restarts import FailedAttempt, GroupRestarts, RestartRules

NOON = datetime.datetime(2026, 1, 2, 12, 0, 0)


def failed(code=1, *, seconds=60.0, name="worker:0"):
    return FailedAttempt(name=name, code=code, failed_at=NOON, seconds=seconds)


def run_attempts(rules, failures, *, interrupted=False):
    """Plays attempts until the job ends; returns the decisions and the waits."""
    restarts, delays = GroupRestarts(rules), []
    for failure in failures:
        assert restarts.begin() == len(delays)
        delay = restarts.attempt_failed(failure, interrupted=interrupted)
        if delay is None:
            break
        delays.append(delay)
    return restarts, delays


def test_the_wait_doubles_up_to_a_minute():
    rules = RestartRules(max_restarts=9, backoff_seconds=1)
    assert [rules.delay_seconds(restart) for restart in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert rules.delay_seconds(10_000) == 60
    # A wait that is longer from the start was asked for, and stays.
    assert RestartRules(backoff_seconds=300).delay_seconds(5) == 300
    assert RestartRules(backoff_seconds=0).delay_seconds(5) == 0


def test_the_budget_counts_in_total():
    restarts, delays = run_attempts(RestartRules(max_restarts=2), [failed()] * 5)
    assert delays == [1, 2]
    assert len(restarts.history) == 3


def test_without_max_restarts_nothing_is_started_again_and_nothing_is_told():
    restarts, delays = run_attempts(RestartRules(), [failed()])
    assert delays == [] and restarts.report("failed") == []


@pytest.mark.parametrize("code", [2, 126, 127])
def test_a_command_that_is_wrong_is_not_started_again(code):
    restarts, delays = run_attempts(RestartRules(max_restarts=3), [failed(code)])
    assert delays == []
    assert restarts.report("failed")[0] == (
        f"failed after 0 restarts; exit code {code} says that the command itself is wrong, so it was not started "
        "again:"
    )


@pytest.mark.parametrize("code", [1, 3, 81, 143, -9, -15])
def test_every_other_failure_starts_the_group_again(code):
    _, delays = run_attempts(RestartRules(max_restarts=1), [failed(code)])
    assert delays == [1]


def test_a_job_that_was_asked_to_stop_is_not_started_again():
    restarts, delays = run_attempts(RestartRules(max_restarts=3), [failed(143)], interrupted=True)
    assert delays == []
    assert "a signal asked the job to stop" in restarts.report("failed")[0]


def test_the_history_has_a_line_an_attempt():
    failures = [failed(-9, name="worker:1", seconds=12.34), failed(143, seconds=7)]
    restarts, _ = run_attempts(RestartRules(max_restarts=5), failures)
    restarts.begin()
    assert restarts.report("finished") == [
        "finished after 2 restarts:",
        "  attempt 1 failed at 2026-01-02 12:00:00, 12.3 s after its start: worker:1 was ended by SIGKILL",
        "  attempt 2 failed at 2026-01-02 12:00:00, 7.0 s after its start: worker:0 ended with exit code 143 "
        "(preempted)",
    ]


def test_a_wait_that_was_interrupted_is_no_restart():
    restarts, _ = run_attempts(RestartRules(max_restarts=5), [failed(), failed()])
    assert restarts.report("stopped by SIGTERM")[0] == "stopped by SIGTERM after 1 restart:"


def test_the_announcement():
    restarts, (delay,) = run_attempts(RestartRules(max_restarts=3, backoff_seconds=0.5), [failed()])
    assert restarts.announcement(delay) == "starting all tasks again in 0.5 s (restart 1 of 3)"


@pytest.mark.parametrize(
    ("max_restarts", "seconds", "num_quick"),
    [
        (3, [1, 1, 1, 1], 4),
        (3, [90, 1, 1, 1], 3),
        (3, [1, 1, 90, 1], None),
        (3, [1, 1, 1, 90], None),
        (1, [1, 1], 2),
        (1, [90, 1], None),
        (2, [90, 5, 5], 2),
    ],
)
def test_a_crash_loop_is_named_when_as_many_attempts_as_allowed_restarts_failed_at_once(
    max_restarts, seconds, num_quick
):
    failures = [failed(seconds=attempt) for attempt in seconds]
    restarts, _ = run_attempts(RestartRules(max_restarts=max_restarts), failures)
    heading = restarts.report("failed")[0]
    if num_quick is None:
        assert "crash loop" not in heading
    else:
        assert f"crash loop: the last {num_quick} attempts each failed within 5 s of their start" in heading


@pytest.mark.parametrize(
    "arguments", [{"max_restarts": -1}, {"backoff_seconds": -1}, {"backoff_seconds": float("nan")}]
)
def test_rules_are_validated(arguments):
    with pytest.raises(ValueError, match="must not be negative"):
        RestartRules(**arguments)


@hypothesis.given(
    st.integers(0, 5),
    st.floats(0, 100),
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 127, 143, -9]), st.floats(0, 100)), min_size=1, max_size=9),
)
def test_any_history_is_bounded_and_told_in_full(max_restarts, backoff_seconds, endings):
    failures = [failed(code, seconds=seconds) for code, seconds in endings]
    rules = RestartRules(max_restarts=max_restarts, backoff_seconds=backoff_seconds)
    restarts, delays = run_attempts(rules, failures)
    assert len(delays) <= max_restarts
    assert delays == sorted(delays) and all(0 <= delay <= max(60, backoff_seconds) for delay in delays)
    # Only the last attempt may have said that the command is wrong.
    assert all(failure.code not in (2, 127) for failure in restarts.history[:-1])
    lines = restarts.report("failed")
    assert len(lines) == (1 + len(restarts.history) if max_restarts else 0)
