"""Every task is told goodbye in bounded time, and told whether the chief failed."""

import sys
import threading
import time

import pytest

from tfdist_ext.cluster import Task
from tfdist_ext.cluster.control import Goodbye
from tfdist_ext.cluster.goodbye import Farewell

WORKERS = {Task("worker", index): f"10.0.0.{index}:2222" for index in range(40)}


def test_all_tasks_are_told_where_they_are():
    told = []
    farewell = Farewell(
        lambda task, address, goodbye, deadline: told.append((task, address, goodbye)) or True
    )
    farewell.add(WORKERS)
    farewell.say(30)
    assert sorted(told, key=lambda word: word[0].index) == [
        (task, address, Goodbye()) for task, address in WORKERS.items()
    ]


def test_a_task_that_hangs_is_left_alone_and_named(capsys):
    hangs = threading.Event()

    def tell(task, address, goodbye, deadline):
        # The 40 tasks have 32 threads.
        return hangs.wait(60) if task.index == 7 else task.index != 9

    farewell = Farewell(tell)
    farewell.add(WORKERS)
    begin = time.monotonic()
    try:
        farewell.say(1.0)
    finally:
        hangs.set()
    assert 1.0 <= time.monotonic() - begin < 10
    assert "no goodbye reached worker:7, worker:9;" in capsys.readouterr().err


@pytest.mark.parametrize("at_a_prompt", [False, True])
def test_an_uncaught_exception_makes_it_a_failure_except_at_a_prompt(at_a_prompt, monkeypatch):
    if at_a_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    heard, shown = [], []
    farewell = Farewell(lambda task, address, goodbye, deadline: heard.append(goodbye) or True)
    farewell.add({Task("ps", 0): "10.0.0.1:2222"})
    error = ValueError("wrong")
    farewell.chained(lambda *values: shown.append(values))(ValueError, error, None)
    farewell.say(30)
    # The hook that was there before still shows it.
    assert shown == [(ValueError, error, None)]
    assert heard == [Goodbye() if at_a_prompt else Goodbye(failed=True, reason="ValueError: wrong")]


def test_a_forked_child_says_nothing(monkeypatch):
    told = []
    farewell = Farewell(lambda task, *values: told.append(task) or True)
    farewell.add(WORKERS)
    monkeypatch.setattr("os.getpid", lambda: -1)
    farewell.say(30)
    assert not told
