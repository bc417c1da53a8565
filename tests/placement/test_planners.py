"""Planners against every placement there is, and what each must respect."""

import itertools
import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.placement.graphs import diamond, edge, fixed, machine, random_graph
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.planners import METHODS, plan_graph
from tfdist_ext.placement.planners.min_cut import place as min_cut
from tfdist_ext.placement.plans import InfeasiblePlacementError, Plan
from tfdist_ext.placement.schedule import simulate, transfers

LIST_PLANNERS = ["greedy", "heft", "m-etf", "m-sct"]
# `python -m benchmarks.placement` does the same with 200 graphs of up to 10 operations.
NUM_GRAPHS = 50


def ratios_to_the_best(communication, methods, num_graphs=NUM_GRAPHS):
    """Returns predicted seconds over those of the best placement, by method, of many small graphs."""
    ratios = {method: [] for method in methods}
    for seed in range(num_graphs):
        graph, devices = random_graph(seed, largest=8, communication=communication)
        best = plan_graph(graph, devices, "brute-force").predicted_seconds
        for method in methods:
            ratios[method].append(plan_graph(graph, devices, method).predicted_seconds / best)
    return ratios


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.mark.parametrize("communication, bound", [(0.3, 1.05), (1.0, 1.05), (3.0, 1.10)])
def test_against_every_placement(communication, bound, capsys):
    ratios = ratios_to_the_best(communication, ["auto", *LIST_PLANNERS])
    with capsys.disabled():
        for method, values in ratios.items():
            mean, worst = geometric_mean(values), max(values)
            print(f"\n  sending / computing {communication}: {method} {mean:.4f}, worst {worst:.2f}", end="")
    assert min(min(values) for values in ratios.values()) >= 1 - 1e-12
    assert geometric_mean(ratios.pop("auto")) <= bound
    for values in ratios.values():
        assert geometric_mean(values) <= 1.15


@pytest.mark.parametrize("method", [method for method in METHODS if method != "min-cut"])
def test_one_device_where_that_is_best(method):
    # A chain has nothing to run side by side: 3 s on the fast device; d1 takes twice as long.
    chain = OperationGraph(
        [fixed(name, 1.0, 2.0, output_bytes=(5,)) for name in "abc"], [edge("a", "b", 5), edge("b", "c", 5)]
    )
    plan = plan_graph(chain, machine(2), method)
    assert plan.predicted_seconds == 3 and set(plan.devices.values()) == {"d0"} and plan.cut_bytes == 0


@pytest.mark.parametrize("method", ["greedy", "heft", "m-etf", "m-sct", "auto", "brute-force"])
def test_two_devices_where_that_is_best(method):
    # a: 0-1, b: 1-5 on its device; c elsewhere from 1.1 to 5.1, when b's output is there too: d: 5.1-6.1.
    graph = diamond(1)
    plan = plan_graph(graph, machine(2, bandwidth=10.0), method)
    assert plan.predicted_seconds == pytest.approx(6.1, rel=1e-12)
    assert plan.devices["b"] != plan.devices["c"]


@st.composite
def graphs_with_rules(draw):
    """A random graph of which some operations share a group or are pinned."""
    graph, devices = random_graph(draw(st.integers(0, 10**6)), largest=9)
    names = [device.name for device in devices.devices]
    operations, pins = [], {}
    for operation in graph.operations.values():
        group = draw(st.sampled_from(["", "", "", "g", "h"]))
        key = group or operation.name
        if key not in pins:
            pins[key] = draw(st.sampled_from([None, None, None, *names]))
        fields = {"output_bytes": operation.output_bytes, "group": group, "pinned": pins[key]}
        operations.append(fixed(operation.name, *operation.seconds.values(), **fields))
    return OperationGraph(operations, graph.edges), devices


@settings(max_examples=120, deadline=None)
@given(graphs_with_rules(), st.sampled_from([method for method in METHODS if method != "brute-force"]))
def test_groups_and_pins_are_respected_and_plans_are_deterministic(made, method):
    graph, devices = made
    plan = plan_graph(graph, devices, method)
    assert list(plan.devices) == list(graph.operations)
    for members in graph.groups.values():
        assert len({plan.devices[name] for name in members}) == 1
    for name, operation in graph.operations.items():
        assert operation.pinned in (None, plan.devices[name])
    assert plan == plan_graph(graph, devices, method)
    schedule = simulate(graph, plan.devices, devices)
    assert plan.predicted_seconds == schedule.seconds and plan.peak_bytes == schedule.peak_bytes
    assert plan.cut_bytes == sum(one.num_bytes for one in transfers(graph, plan.devices))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("method", METHODS)
def test_memory_forces_a_split(method):
    # Two variables of 80 bytes and devices of 100: one each, whatever that costs.
    graph = OperationGraph(
        [
            fixed("v", 0.0, resident_bytes=80, group="v"), fixed("a", 1.0, group="v", output_bytes=(4,)),
            fixed("w", 0.0, resident_bytes=80, group="w"), fixed("b", 1.0, group="w"),
        ],
        [edge("v", "a"), edge("w", "b"), edge("a", "b", 4)],
    )  # fmt: skip
    plan = plan_graph(graph, machine(2, memory={"d0": 100, "d1": 100}), method)
    assert plan.devices["v"] != plan.devices["w"]
    assert plan.peak_bytes == {plan.devices["v"]: 84, plan.devices["w"]: 84}


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_fit_names_the_device_and_what_is_missing(method):
    graph = OperationGraph([fixed("table", 0.0, resident_bytes=1000), fixed("a", 1.0)], [edge("table", "a")])
    with pytest.raises(InfeasiblePlacementError) as caught:
        plan_graph(graph, machine(2, memory={"d0": 300, "d1": 700}), method)
    if method != "min-cut":
        assert (caught.value.device, caught.value.missing_bytes) == ("d1", 300)
        assert "d1" in str(caught.value) and "300 bytes" in str(caught.value)


def cut_of(graph, placement):
    return sum(one.num_bytes for one in transfers(graph, placement))


def test_min_cut_against_the_smallest_cut_of_the_same_balance():
    found, smallest = 0, 0
    for seed in range(60):
        graph, devices = random_graph(seed, largest=9, num_devices=2)
        work = {name: operation.seconds["d0"] for name, operation in graph.operations.items()}
        limit = max(1.25 * sum(work.values()) / 2, sum(work.values()) / 2 + max(work.values()))
        cuts = []
        for choice in itertools.product(["d0", "d1"], repeat=len(graph)):
            placement = dict(zip(graph.operations, choice, strict=True))
            loads = [sum(work[name] for name in work if placement[name] == device) for device in ("d0", "d1")]
            if max(loads) <= limit:
                cuts.append(cut_of(graph, placement))
        smallest += min(cuts)
        found += cut_of(graph, min_cut(graph, devices))
    print(f"min-cut cuts {found / smallest:.3f} times the bytes of the smallest cuts of the same balance")
    assert smallest <= found <= 1.15 * smallest


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"pip install 'tfdist_ext\[placement\]'"):
        plan_graph(diamond(), machine(2), "m-sct")


def test_an_unknown_method():
    with pytest.raises(ValueError, match="must be one of auto, greedy, .*; received 'best'"):
        plan_graph(diamond(), machine(2), "best")


def test_plans_are_data():
    one = plan_graph(diamond(), machine(2, bandwidth=10.0), "greedy")
    other = Plan(
        devices={**one.devices, "a": "elsewhere"}, method="by hand", predicted_seconds=1.0, cut_bytes=0
    )
    assert one.differences(other) == {"a": (one.devices["a"], "elsewhere")}
    assert "greedy: 6100.000 ms predicted" in str(one)
    with pytest.raises(ValueError, match="must be a plan with the fields"):
        Plan.from_json("{}")
