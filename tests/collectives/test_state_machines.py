"""The state machines alone: any order of delivery that links can produce, no sockets, no threads."""

import collections
import functools
import warnings

import hypothesis
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from tfdist_ext.collectives.direct import DirectAllReduce
from tfdist_ext.collectives.exchange import AllGather, Barrier, Broadcast
from tfdist_ext.collectives.message import Message
from tfdist_ext.collectives.ring import RingAllReduce
from tfdist_ext.transport import ProtocolViolation


def run(machines, choose):
    """Delivers messages one by one, `choose(n)` picking among n busy links, and among n messages of a link.

    Large and small messages of a link may travel on two sockets, so that they overtake each other.
    """
    links = collections.defaultdict(collections.deque)

    def post(source, messages):
        for message in messages:
            data = (
                message.payload if isinstance(message.payload, memoryview) else message.payload.view(np.uint8)
            )
            links[source, message.peer].append(message._replace(peer=source, payload=memoryview(bytes(data))))

    for rank, machine in enumerate(machines):
        post(rank, machine.start())
    while busy := sorted(link for link, queue in links.items() if queue):
        source, target = busy[choose(len(busy))]
        queue = links[source, target]
        index = choose(len(queue))
        message = queue[index]
        del queue[index]
        post(target, machines[target].receive(message))
    assert all(machine.done and not machine.missing for machine in machines)


@st.composite
def integer_rows(draw):
    size = draw(st.integers(1, 6))
    length = draw(st.integers(0, 40))
    values = st.integers(-8, 8)
    return [draw(st.lists(values, min_size=length, max_size=length)) for _ in range(size)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@hypothesis.given(rows=integer_rows(), chunk_bytes=st.integers(1, 64), data=st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_all_reduce_of_small_integers_is_exact(dtype, rows, chunk_bytes, data):
    # Sums of at most 6 integers of magnitude 8 are exact in every one of the dtypes.
    expected = np.sum(np.array(rows, np.int64).reshape(len(rows), -1), axis=0)
    size = len(rows)
    makers = [lambda rank, buffer: DirectAllReduce(rank, size, buffer)]
    if size > 1 and rows[0]:
        makers.append(lambda rank, buffer: RingAllReduce(rank, size, buffer, chunk_bytes=chunk_bytes))
    for make in makers:
        machines = [make(rank, np.array(row).astype(np.dtype(dtype))) for rank, row in enumerate(rows)]
        run(machines, lambda n: data.draw(st.integers(0, n - 1)))
        for machine in machines:
            np.testing.assert_array_equal(machine.result().astype(np.int64), expected)


@hypothesis.given(
    size=st.integers(2, 6),
    length=st.integers(1, 50),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    reduction=st.sampled_from(["sum", "mean"]),
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_all_ranks_hold_the_same_bits_whatever_the_order_of_delivery(
    size, length, seed, data, dtype, reduction
):
    inputs = np.random.default_rng(seed).normal(size=(size, length)).astype(np.dtype(dtype))
    results = []
    for make in (
        lambda rank, buffer: DirectAllReduce(rank, size, buffer, reduction=reduction),
        lambda rank, buffer: RingAllReduce(rank, size, buffer, reduction=reduction, chunk_bytes=16),
    ):
        first = [make(rank, inputs[rank].copy()) for rank in range(size)]
        run(first, lambda n: 0)
        second = [make(rank, inputs[rank].copy()) for rank in range(size)]
        run(second, lambda n: data.draw(st.integers(0, n - 1)))
        bits = {machine.result().tobytes() for machine in first + second}
        assert len(bits) == 1
        results.append(first[0].result())
    # Each of size - 1 additions (and the division) errs by half a unit in the last place of a partial sum,
    # none of which exceeds the sum of magnitudes; half-precision values are rounded once more at the end.
    exact = inputs.astype(np.float64).sum(axis=0)
    magnitude = np.abs(inputs.astype(np.float64)).sum(axis=0)
    if reduction == "mean":
        exact, magnitude = exact / size, magnitude / size
    epsilon = float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    for result in results:
        assert np.all(np.abs(result.astype(np.float64) - exact) <= size * epsilon * magnitude)


def test_direct_sum_adds_in_rank_order():
    # (1e8 + 1) + -1e8 is 0 in float32, where 1e8 + 1 == 1e8; any order that cancels first gives 1.
    machines = [
        DirectAllReduce(rank, 3, np.array([value], np.float32)) for rank, value in enumerate([1e8, 1, -1e8])
    ]
    run(machines, lambda n: n - 1)
    assert [machine.result()[0] for machine in machines] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("make", [DirectAllReduce, lambda *a: RingAllReduce(*a, chunk_bytes=2)])
def test_half_precision_is_rounded_once(make):
    # float16 has 11 significant bits: 2048 + 1 == 2048. Adding 1 three times to 2048 in float16 gives 2048;
    # the exact sum 2051 lies halfway between 2050 and 2052 and rounds to the even 2052.
    machines = [make(rank, 4, np.full(4, value, np.float16)) for rank, value in enumerate([2048, 1, 1, 1])]
    run(machines, lambda n: 0)
    for machine in machines:
        np.testing.assert_array_equal(machine.result(), np.full(4, 2052, np.float16))


def test_int32_wraps_around():
    machines = [RingAllReduce(rank, 2, np.full(3, 2**31 - 1, np.int32)) for rank in range(2)]
    run(machines, lambda n: 0)
    assert machines[0].result().tolist() == [-2, -2, -2]


@hypothesis.given(
    num_rows=st.lists(st.integers(0, 4), min_size=1, max_size=6), columns=st.integers(0, 3), data=st.data()
)
@hypothesis.settings(deadline=None, max_examples=60)
def test_all_gather_keeps_unequal_first_dimensions(num_rows, columns, data):
    arrays = [np.full((rows, columns), rank, np.float64) for rank, rows in enumerate(num_rows)]
    machines = [AllGather(rank, len(arrays), array) for rank, array in enumerate(arrays)]
    run(machines, lambda n: data.draw(st.integers(0, n - 1)))
    for machine in machines:
        for result, array in zip(machine.result(), arrays, strict=True):
            np.testing.assert_array_equal(result, array)


@hypothesis.given(size=st.integers(1, 6), data=st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_broadcast_and_barrier(size, data):
    root = data.draw(st.integers(0, size - 1))
    machines = [Broadcast(rank, size, np.array([[rank, 7]]), root=root) for rank in range(size)]
    run(machines, lambda n: data.draw(st.integers(0, n - 1)))
    assert [machine.result().tolist() for machine in machines] == [[[root, 7]]] * size
    run([Barrier(rank, size) for rank in range(size)], lambda n: data.draw(st.integers(0, n - 1)))


@pytest.mark.parametrize(
    "message",
    [
        Message(2, np.zeros(4, np.uint8)),  # not the previous rank
        Message(0, np.zeros(3, np.uint8)),  # too short
        Message(0, np.zeros(4, np.uint8), hop=9),
        Message(0, np.zeros(4, np.uint8), piece=1),
    ],
)
def test_ring_refuses_messages_out_of_place(message):
    machine = RingAllReduce(1, 3, np.zeros(3, np.float32))
    machine.start()
    with pytest.raises(ProtocolViolation):
        machine.receive(message)


def test_ring_refuses_a_message_that_comes_twice():
    machine = RingAllReduce(1, 3, np.zeros(3, np.float32))
    machine.receive(Message(0, np.zeros(4, np.uint8)))
    with pytest.raises(ProtocolViolation, match="twice"):
        machine.receive(Message(0, np.zeros(4, np.uint8)))


@pytest.mark.parametrize("kind", [DirectAllReduce, RingAllReduce])
def test_volume(kind):
    """Each rank of a ring sends 2 (n - 1) / n of the buffer, in a direct exchange n - 1 times the buffer."""
    size, buffer = 4, np.zeros(100, np.float32)
    machines = [kind(rank, size, buffer.copy()) for rank in range(size)]
    sent = [0] * size
    queue = collections.deque((rank, message) for rank in range(size) for message in machines[rank].start())
    while queue:
        rank, message = queue.popleft()
        data = memoryview(message.payload).cast("B")
        sent[rank] += data.nbytes
        received = message._replace(peer=rank, payload=memoryview(bytes(data)))
        queue.extend((message.peer, reply) for reply in machines[message.peer].receive(received))
    assert sent == ([600] * size if kind is RingAllReduce else [1200] * size)


@pytest.mark.parametrize("length", [4, 4096])
def test_infinities_are_summed_without_a_warning(length):
    # Loss scaling makes them on purpose, and decides by itself: inf - inf is NaN.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (DirectAllReduce, functools.partial(RingAllReduce, chunk_bytes=1024)):
            values = [np.full(length, np.inf, "float32"), np.full(length, -np.inf, "float32")]
            machines = [make(rank, 2, value) for rank, value in enumerate(values)]
            run(machines, lambda n: 0)
            assert all(np.isnan(machine.result()).all() for machine in machines)
