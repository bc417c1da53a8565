"""Events reach whoever listens, and no listener can hurt the emitter."""

import threading

from absl import logging

from tfdist_ext import events


def test_events_reach_every_listener_until_it_leaves():
    seen = []

    def first(name, fields):
        seen.append(("first", name, fields["step"]))

    def second(name, fields):
        seen.append(("second", name, fields["step"]))

    events.subscribe(first)
    events.subscribe(first)  # Twice is once.
    events.subscribe(second)
    try:
        events.emit("step_applied", step=1)
        events.unsubscribe(first)
        events.emit("step_applied", step=2)
    finally:
        events.unsubscribe(first)
        events.unsubscribe(second)
    events.emit("step_applied", step=3)
    assert seen == [
        ("first", "step_applied", 1),
        ("second", "step_applied", 1),
        ("second", "step_applied", 2),
    ]


def test_a_listener_that_fails_is_logged_and_the_others_are_called(monkeypatch):
    logged, seen = [], []
    monkeypatch.setattr(logging, "exception", lambda text, *values: logged.append(text % values))

    def fails(name, fields):
        raise RuntimeError("a bug of the listener")

    def works(name, fields):
        seen.append(name)

    events.subscribe(fails)
    events.subscribe(works)
    try:
        events.emit("peer_lost", name="a field may be called name")
    finally:
        events.unsubscribe(fails)
        events.unsubscribe(works)
    assert seen == ["peer_lost"] and len(logged) == 1 and "peer_lost" in logged[0]


def test_listeners_may_come_and_go_while_others_emit():
    counts = [0] * 4

    def work(number):
        def listen(name, fields):
            if fields["number"] == number:
                counts[number] += 1

        for _ in range(200):
            events.subscribe(listen)
            events.emit("tick", number=number)
            events.unsubscribe(listen)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [200] * 4
