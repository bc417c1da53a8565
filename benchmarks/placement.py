"""How good are the planners, how long do they take, and does the prediction rank placements as a clock does?

python -m benchmarks.placement --json results.json

brute force     predicted seconds of each planner's placement over those of the best of all placements (the same list
                order), as a geometric mean over random graphs, where sending takes 0.3, 1 and 3 times computing
planning        seconds to plan graphs of 100, 1,000 and 5,000 operations
prediction      predicted and measured seconds of six placements of one model on two logical CPU devices, between which
                sending costs what it says it costs: a host function sleeps on every tensor that crosses
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.machine import write_results
from tfdist_ext.placement.machine import Device, Link, Machine
from tfdist_ext.placement.operations import Edge, Operation, OperationGraph
from tfdist_ext.placement.planners import plan_graph

METHODS = ("auto", "greedy", "heft", "m-etf", "m-sct")
COMMUNICATIONS = (0.3, 1.0, 3.0)
# Devices of the three stages of the model.
PLACEMENTS = ("000", "001", "111", "110", "011", "101")
_LINK = Link(latency_seconds=0.004, bytes_per_second=50e6)
_WIDTH = 512


def random_graph(seed: int, largest: int, communication: float) -> tuple[OperationGraph, Machine]:
    """Returns 4 to `largest` operations and 2 or 3 devices, some of half the speed.

    Args:
        seed: Of the drawing.
        largest: Most operations.
        communication: Mean time of sending over mean time of computing.
    """
    draw = random.Random(seed)
    number, num_devices = draw.randint(4, largest), draw.choice([2, 3])
    slowness = [1.0] + [draw.choice([1.0, 1.0, 2.0]) for _ in range(num_devices - 1)]
    sizes = [int(1000 * draw.uniform(0.2, 1.8) * 5.5 * communication) for _ in range(number)]
    operations = []
    for index in range(number):
        work = draw.uniform(1, 10)
        seconds = {f"d{device}": work * slow for device, slow in enumerate(slowness)}
        operations.append(Operation(name=f"o{index}", seconds=seconds, output_bytes=(sizes[index],)))
    edges = []
    for consumer in range(1, number):
        producers = [one for one in range(consumer) if draw.random() < 0.3] or [draw.randrange(consumer)]
        edges += [
            Edge(producer=f"o{one}", consumer=f"o{consumer}", num_bytes=sizes[one]) for one in producers
        ]
    devices = [Device(name=f"d{index}") for index in range(num_devices)]
    return OperationGraph(operations, edges), Machine(
        devices=devices, link=Link(latency_seconds=0.0, bytes_per_second=1000.0)
    )


def against_brute_force(communication: float, num_graphs: int, largest: int) -> dict:
    """Compares planners with the best placement of each graph."""
    ratios: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(num_graphs):
        graph, machine = random_graph(seed, largest, communication)
        best = plan_graph(graph, machine, "brute-force").predicted_seconds
        for method in METHODS:
            ratios[method].append(plan_graph(graph, machine, method).predicted_seconds / best)
    return {
        "case": "brute force",
        "sending_over_computing": communication,
        "num_graphs": num_graphs,
        "largest_graph": largest,
        "brute_force_ratio_geomean": {
            method: math.exp(statistics.fmean(map(math.log, values))) for method, values in ratios.items()
        },
        "brute_force_ratio_worst": {method: max(values) for method, values in ratios.items()},
    }


def planning_seconds(num_operations: int) -> dict:
    """Times the planners on a random graph; m-SCT solves a linear program and is left out of large ones."""
    draw = random.Random(num_operations)
    operations = [
        Operation(name=f"o{index}", kind="MatMul", flops=draw.uniform(1e6, 1e8), output_bytes=(10_000,))
        for index in range(num_operations)
    ]
    edges = [
        Edge(producer=f"o{producer}", consumer=f"o{consumer}", num_bytes=10_000)
        for consumer in range(1, num_operations)
        for producer in {draw.randrange(max(0, consumer - 50), consumer) for _ in range(2)}
    ]
    graph = OperationGraph(operations, edges)
    machine = Machine(devices=[Device(name=f"d{index}") for index in range(4)])
    seconds = {}
    for method in (
        "auto",
        "greedy",
        "heft",
        "m-etf",
        "min-cut",
        *(("m-sct",) if num_operations <= 1000 else ()),
    ):
        started = time.perf_counter()
        plan_graph(graph, machine, method)
        seconds[method] = time.perf_counter() - started
    return {"case": "planning", "num_operations": num_operations, "plan_seconds": seconds}


def predicted_and_measured(num_runs: int, width: int = _WIDTH) -> dict:
    """Predicts and times six placements of a model of three stages."""
    import tensorflow as tf

    from tfdist_ext.placement import explain

    x = tf.random.stateless_normal([width // 4, width], seed=[1, 2])
    devices = [
        Device(name=f"CPU:{index}", flops_per_second=_flops_per_second(tf, width, num_runs))
        for index in (0, 1)
    ]
    machine = Machine(devices=devices, link=_LINK)
    predicted, measured = {}, {}
    functions = {placement: model(tf, placement, width, inject=True) for placement in PLACEMENTS}
    for placement in PLACEMENTS:
        report = explain(model(tf, placement, width, inject=False), x, machine=machine)
        predicted[placement] = report.predicted_seconds
        functions[placement](x)
    times: dict[str, list[float]] = {placement: [] for placement in PLACEMENTS}
    for _, placement in itertools.product(range(num_runs), PLACEMENTS):
        started = time.perf_counter()
        functions[placement](x).numpy()
        times[placement].append(time.perf_counter() - started)
    measured = {placement: statistics.median(values) for placement, values in times.items()}
    return {
        "case": "prediction",
        "model": f"three stages, {width} wide",
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "rank_correlation": rank_correlation(list(predicted.values()), list(measured.values())),
        "relative_errors": {name: predicted[name] / measured[name] - 1 for name in PLACEMENTS},
    }


def model(tf, placement: str, width: int, *, inject: bool):
    """Returns a tf.function of the placement: three stages, one after the other, on the devices that its digits say.

    What flows into them differs in size: width / 4 rows, then as many as the width, then width / 8; the input is on
    device 0. The variables of a stage are on its device.

    Args:
        tf: TensorFlow.
        placement: Such as "011".
        width: Of all products.
        inject: Whether a tensor that crosses sleeps for what the link costs.
    """
    stages = [int(digit) for digit in placement]
    weights = []
    for device in stages:
        with tf.device(f"CPU:{device}"):
            weights.append(tf.Variable(tf.eye(width)))

    def send(tensor, source: int, destination: int):
        if not inject or source == destination:
            return tensor
        seconds = _LINK.seconds(tensor.shape.num_elements() * tensor.dtype.size)

        def wait(array):
            time.sleep(seconds)
            return array

        sent = tf.numpy_function(wait, [tensor], tensor.dtype)
        sent.set_shape(tensor.shape)
        return sent

    @tf.function
    def run(x):
        here, source = x, 0
        for stage in range(3):
            here = send(here, source, stages[stage])
            source = stages[stage]
            with tf.device(f"CPU:{source}"):
                weight = weights[stage].read_value()
                for _ in range(3):
                    here = tf.matmul(here, weight)
                if stage == 0:
                    here = tf.tile(here, [4, 1])
                elif stage == 1:
                    here = here[: width // 8]
                else:
                    here = tf.reduce_sum(here)
        return here

    return run


def _flops_per_second(tf, width: int, num_runs: int) -> float:
    """Times products on one thread of this machine."""
    x, weight = tf.ones([width, width]), tf.eye(width)

    @tf.function
    def product(x):
        for _ in range(4):
            x = tf.matmul(x, weight)
        return tf.reduce_sum(x)

    product(x)
    durations = []
    for _ in range(num_runs):
        started = time.perf_counter()
        product(x).numpy()
        durations.append(time.perf_counter() - started)
    return 4 * 2 * width**3 / statistics.median(durations)


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns Spearman's coefficient; equal values share their mean rank.

    Example:
        >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
        0.5
    """

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]

    a, b = ranks(one), ranks(other)
    mean = (len(a) - 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    spread = math.sqrt(sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b))
    return covariance / spread if spread else 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small numbers, for the tests")
    arguments = parser.parse_args(argv)
    num_graphs, largest, sizes, num_runs = (
        (6, 6, (50,), 3) if arguments.quick else (200, 10, (100, 1000, 5000), 21)
    )
    results = []
    for communication in COMMUNICATIONS:
        results.append(against_brute_force(communication, num_graphs, largest))
        _show(results[-1])
    for size in sizes:
        results.append(planning_seconds(size))
        _show(results[-1])
    _two_single_threaded_devices()
    results.append(predicted_and_measured(num_runs, width=64 if arguments.quick else _WIDTH))
    _show(results[-1])
    if arguments.json:
        write_results(arguments.json, results)
    return 0


def _two_single_threaded_devices() -> None:
    """Makes two logical devices whose products use one thread each, so that two run side by side on two cores."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def _show(result: dict) -> None:
    text = ", ".join(
        f"{name} {_rounded(value)}"
        for name, value in result.items()
        if name not in ("case", "relative_errors")
    )
    sys.stdout.write(f"{result['case']}: {text}\n")


def _rounded(value):
    if isinstance(value, dict):
        return " ".join(f"{name}={_rounded(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
