"""Schedules worked out by hand, and what holds for every one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.placement.graphs import diamond, edge, fixed, machine, random_graph
from tfdist_ext.placement.machine import Device, Link, Machine
from tfdist_ext.placement.operations import Operation, OperationGraph
from tfdist_ext.placement.schedule import list_order, simulate, transfers, upward_ranks


def test_a_diamond_on_two_devices():
    # a: 0-1 on d0. b: 1-5 on d0. a's 2 bytes reach d1 at 3: c: 3-7. c's come back at 9: d: 9-10.
    graph, placement = diamond(2), {"a": "d0", "b": "d0", "c": "d1", "d": "d0"}
    schedule = simulate(graph, placement, machine(2))
    assert schedule.start == {"a": 0, "b": 1, "c": 3, "d": 9}
    assert schedule.finish == {"a": 1, "b": 5, "c": 7, "d": 10}
    assert schedule.seconds == 10
    assert schedule.critical_path == ("a", "c", "d")
    # On one device: 1 + 4 + 4 + 1, and the path goes through whatever ran last before.
    alone = simulate(graph, dict.fromkeys(placement, "d1"), machine(2))
    assert alone.seconds == 10 and alone.critical_path == ("a", "b", "c", "d")


def test_bytes_that_live_at_once():
    # d0 holds a and b, then, a being dead once c has run, b and the copy of c. d1 holds the copy of a, and c.
    graph = diamond(2)
    schedule = simulate(graph, {"a": "d0", "b": "d0", "c": "d1", "d": "d0"}, machine(2))
    assert schedule.peak_bytes == {"d0": 4, "d1": 4}
    # On one device, in the order a, b, c, d: a, then b beside a, then c beside both; a is dead when d comes.
    alone = simulate(graph, dict.fromkeys("abcd", "d0"), machine(2))
    assert alone.peak_bytes == {"d0": 6, "d1": 0}


def test_variables_stay():
    graph = OperationGraph(
        [fixed("v", 0.0, resident_bytes=100), fixed("a", 1.0, output_bytes=(10,)), fixed("b", 1.0)],
        [edge("v", "a"), edge("a", "b", 10)],
    )
    schedule = simulate(graph, {"v": "d0", "a": "d0", "b": "d1"}, machine(2))
    assert schedule.peak_bytes == {"d0": 110, "d1": 10}


def test_a_tensor_is_sent_once_to_each_device():
    graph = OperationGraph(
        [fixed("a", 1.0, output_bytes=(8, 4)), fixed("b", 1.0), fixed("c", 1.0), fixed("d", 1.0), fixed("e", 1.0)],
        [
            edge("a", "b", 8), edge("a", "c", 8), edge("a", "d", 8), edge("a", "e", 4, output=1),
            edge("b", "c", output=-1),
        ],
    )  # fmt: skip
    placement = {"a": "d0", "b": "d1", "c": "d1", "d": "d2", "e": "d0"}
    found = [
        (one.producer, one.output, one.destination, one.num_bytes, one.consumers)
        for one in transfers(graph, placement)
    ]
    assert found == [("a", 0, "d1", 8, ("b", "c")), ("a", 0, "d2", 8, ("d",))]


def test_a_loop_counts_its_turns():
    graph = OperationGraph(
        [
            Operation(name="a", kind="MatMul", flops=1e6, output_bytes=(1000,), times=3),
            Operation(name="b", kind="Add", flops=1e3),
        ],
        [edge("a", "b", 1000)],
    )
    device = {"flops_per_second": 1e9, "bytes_per_second": 1e9, "overhead_seconds": 0.0}
    rooflines = Machine(
        devices=[Device(name="d0", **device), Device(name="d1", **device)],
        link=Link(latency_seconds=0.0, bytes_per_second=1e6),
    )
    schedule = simulate(graph, {"a": "d0", "b": "d1"}, rooflines)
    # 3 x 1e6 / 1e9 s, 3000 bytes at 1e6 a second; b is bound by its 1000 bytes as by its 1000 FLOPs.
    assert schedule.seconds == pytest.approx(3e-3 + 3e-3 + 1e-6, rel=1e-12)
    assert transfers(graph, {"a": "d0", "b": "d1"})[0].num_bytes == 3000


def test_ranks_and_the_order():
    # d: 1. b, c: 4 + 2 x 1/2 (two of four pairs of devices are distinct) + 1 = 6. a: 1 + 1 + 6 = 8.
    assert upward_ranks(diamond(2), machine(2)) == {"d": 1, "c": 6, "b": 6, "a": 8}
    assert list_order(diamond(2), machine(2)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "operations, edges, message",
    [
        ([fixed("a", 1.0), fixed("a", 1.0)], [], "distinct names"),
        ([fixed("a", 1.0)], [edge("a", "b")], "'b' is none"),
        (
            [fixed("a", 1.0), fixed("b", 1.0)],
            [edge("a", "b"), edge("b", "a")],
            r"cycle; .* through \['a', 'b'\]",
        ),
    ],
)
def test_graphs_that_are_none(operations, edges, message):
    with pytest.raises(ValueError, match=message):
        OperationGraph(operations, edges)


def test_machines_that_are_none():
    with pytest.raises(ValueError, match="`memory_bytes` must be positive; received 0"):
        Device(name="d0", memory_bytes=0)
    with pytest.raises(ValueError, match="distinct, and at least one"):
        Machine(devices=[])
    with pytest.raises(ValueError, match="known devices"):
        Machine(devices=[Device(name="d0")], links={("d0", "d9"): Link()})
    with pytest.raises(ValueError, match="There is no device 'd9'; there are"):
        Machine(devices=[Device(name="d0")]).device("d9")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_what_holds_for_every_schedule(seed, draw):
    graph, devices = random_graph(seed)
    names = [device.name for device in devices.devices]
    placement = {name: draw.choice(names) for name in graph.operations}
    schedule = simulate(graph, placement, devices)
    for one in graph.edges:
        sent = devices.transfer_seconds(placement[one.producer], placement[one.consumer], one.num_bytes)
        assert schedule.start[one.consumer] >= schedule.finish[one.producer] + sent
    for device in names:
        runs = sorted((schedule.start[n], schedule.finish[n]) for n in placement if placement[n] == device)
        assert all(before[1] <= after[0] for before, after in zip(runs, runs[1:], strict=False))
    assert schedule.seconds == max(schedule.finish.values())
    # The path is unbroken: each begins when what it waits for, or its device, lets it.
    assert schedule.start[schedule.critical_path[0]] == 0
    assert schedule.finish[schedule.critical_path[-1]] == schedule.seconds
    expected = {
        (one.producer, one.output, placement[one.consumer]): one.num_bytes
        for one in graph.edges
        if placement[one.producer] != placement[one.consumer]
    }
    assert sum(one.num_bytes for one in transfers(graph, placement)) == sum(expected.values())
