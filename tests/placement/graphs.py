"""Graphs to plan: some by hand, and random ones."""

import random

from tfdist_ext.placement.machine import Device, Link, Machine
from tfdist_ext.placement.operations import Edge, Operation, OperationGraph


def machine(num_devices=2, latency=0.0, bandwidth=1.0, memory=None, speeds=None):
    """Returns devices d0, d1, ... on which what `fixed` says is what an operation takes."""
    memory = memory or {}
    devices = [
        Device(name=f"d{index}", **({"memory_bytes": memory[f"d{index}"]} if f"d{index}" in memory else {}))
        for index in range(num_devices)
    ]
    del speeds
    return Machine(devices=devices, link=Link(latency_seconds=latency, bytes_per_second=bandwidth))


def fixed(name, *seconds, **fields):
    """Returns an operation that takes so long on d0, d1, ...; the last number counts for all that follow."""
    padded = [*seconds, *[seconds[-1]] * (8 - len(seconds))]
    return Operation(name=name, seconds={f"d{index}": value for index, value in enumerate(padded)}, **fields)


def edge(producer, consumer, num_bytes=0, output=0, **fields):
    """Returns an edge."""
    return Edge(producer=producer, consumer=consumer, num_bytes=num_bytes, output=output, **fields)


def diamond(num_bytes=1):
    """Returns a -> b, c -> d, in which b and c take 4 s and the others 1 s."""
    operations = [
        fixed("a", 1.0, output_bytes=(num_bytes,)), fixed("b", 4.0, output_bytes=(num_bytes,)),
        fixed("c", 4.0, output_bytes=(num_bytes,)), fixed("d", 1.0),
    ]  # fmt: skip
    pairs = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")]
    return OperationGraph(operations, [edge(x, y, num_bytes) for x, y in pairs])


def random_graph(seed, largest=10, communication=1.0, num_devices=None):
    """Returns a graph of 4 to `largest` operations and a machine of 2 or 3 devices, some of half the speed.

    Args:
        seed: Of the drawing.
        largest: Most operations.
        communication: Mean time of sending a tensor over mean time of computing one.
        num_devices: Instead of drawing it.
    """
    draw = random.Random(seed)
    number = draw.randint(4, largest)
    devices = num_devices or draw.choice([2, 3])
    slowness = [1.0] + [draw.choice([1.0, 1.0, 2.0]) for _ in range(devices - 1)]
    sizes = [int(1000 * draw.uniform(0.2, 1.8) * 5.5 * communication) for _ in range(number)]
    operations = [
        fixed(f"o{index}", *(work * slow for slow in slowness), output_bytes=(sizes[index],))
        for index, work in enumerate(draw.uniform(1, 10) for _ in range(number))
    ]
    edges = []
    for consumer in range(1, number):
        producers = [index for index in range(consumer) if draw.random() < 0.3] or [draw.randrange(consumer)]
        edges += [edge(f"o{producer}", f"o{consumer}", sizes[producer]) for producer in producers]
    return OperationGraph(operations, edges), machine(devices, bandwidth=1000.0)
