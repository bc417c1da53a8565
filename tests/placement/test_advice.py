"""Each suggestion has the gain that is worked out by hand."""

import pytest

from tfdist_ext.placement import Device, Edge, Link, Machine, Operation, OperationGraph
from tfdist_ext.placement.advice import suggestions
from tfdist_ext.placement.schedule import simulate
from tfdist_ext.placement.trace import Traced

# A byte takes a second to cross.
MACHINE = Machine(
    devices=[Device(name="d0"), Device(name="d1")], link=Link(latency_seconds=0.0, bytes_per_second=1.0)
)


def op(name, seconds, num_bytes=0, **more):
    times = {"d0": seconds, "d1": seconds}
    return Operation(name=name, kind=more.pop("kind", "Op"), seconds=times, output_bytes=(num_bytes,), **more)


def advice(operations, edges, placement, densified=()):
    graph = OperationGraph(operations, edges)
    traced = Traced(graph, {}, (), (), densified, {})
    return {
        one.text: one.gain_seconds
        for one in suggestions(traced, placement, MACHINE, simulate(graph, placement, MACHINE))
    }


def test_move_the_operation_to_its_data_or_the_data_to_it():
    operations = [op("a", 1.0, 10), op("b", 1.0, 2), op("c", 1.0)]
    edges = [Edge(producer="a", consumer="b", num_bytes=10), Edge(producer="b", consumer="c", num_bytes=2)]
    found = advice(operations, edges, {"a": "d0", "b": "d1", "c": "d0"})
    # 1 + 10 + 1 + 2 + 1 seconds; with b on d0 only 3, with a on d1 or c on d1 the other crossing stays.
    assert found == {
        "move b from d1 to d0, where its data are": 12.0,
        "move a from d0 to d1, where its data are": 10.0,
        "move c from d0 to d1, where its data are": 2.0,
    }


def test_what_is_pinned_is_not_moved_nor_a_move_made_that_does_not_fit():
    operations = [
        op("a", 1.0, 10, pinned="d0"),
        op("b", 1.0, group="table"),
        op("table", 0.0, pinned="d1", group="table"),
    ]
    edges = [Edge(producer="a", consumer="b", num_bytes=10)]
    assert advice(operations, edges, {"a": "d0", "b": "d1", "table": "d1"}) == {}


def test_send_half_the_bytes():
    operations = [op("a", 1.0, 8, pinned="d0"), op("b", 1.0, pinned="d1")]
    edges = [Edge(producer="a", consumer="b", num_bytes=8, dtype="float32")]
    placement = {"a": "d0", "b": "d1"}
    assert advice(operations, edges, placement) == {"send a:0 to d1 as bfloat16": 4.0}
    whole = [Edge(producer="a", consumer="b", num_bytes=8, dtype="int64")]
    assert advice(operations, whole, placement) == {}


def test_make_first_what_has_to_cross():
    operations = [op("long", 3.0, pinned="d1"), op("b", 1.0, 1, pinned="d1"), op("c", 1.0, pinned="d0")]
    edges = [Edge(producer="b", consumer="c", num_bytes=1)]
    found = advice(operations, edges, {"long": "d1", "b": "d1", "c": "d0"})
    # In list order d1 runs the long one first: 3 + 1, 1 to cross, 1. With b first: it is over at 1, c from 2 to 3,
    # while d1 runs the long one until 4.
    assert found == {"make b first on d1: sending it to d0 then overlaps with the rest": pytest.approx(2.0)}


def test_keep_the_gradient_of_a_gather_sparse():
    operations = [
        op("rows", 1.0, 4, pinned="d0"), op("dense", 1.0, 100, pinned="d0", kind="UnsortedSegmentSum"),
        op("update", 1.0, pinned="d1"),
    ]  # fmt: skip
    edges = [
        Edge(producer="rows", consumer="dense", num_bytes=4),
        Edge(producer="dense", consumer="update", num_bytes=100),
    ]
    found = advice(operations, edges, {"rows": "d0", "dense": "d0", "update": "d1"}, densified=("dense",))
    # 4 bytes cross in place of 100.
    assert found == {
        "keep the gradient at dense sparse (IndexedSlices): 4 bytes in place of the whole table": pytest.approx(
            96.0
        )
    }
