"""How long does an all-reduce take between processes of this machine?

python -m benchmarks.collectives --json results.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time

import numpy as np

from tfdist_ext.collectives import ProcessGroup

_MEBIBYTE = 1 << 20


def free_addresses(count: int) -> list[str]:
    """Returns loopback addresses whose ports were free a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


def time_all_reduce(addresses, rank, sizes_bytes, repetitions, options, results) -> None:
    """Runs as one worker; rank 0 puts (bytes, seconds of every repetition) into `results`."""
    names = [f"worker:{index}" for index in range(len(addresses))]
    group = ProcessGroup.connect(addresses, rank, task_names=names, **options)
    for num_bytes in sizes_bytes:
        buffer = np.ones(num_bytes // 4, np.float32)
        seconds = []
        for repetition in range(repetitions + 3):
            buffer[:] = 1.0
            group.barrier("begin")
            begin = time.perf_counter()
            group.submit_all_reduce(buffer, name="values").result()
            if repetition >= 3:  # The first ones pay for page faults and TCP's slow start.
                seconds.append(time.perf_counter() - begin)
            if buffer.size and buffer[-1] != len(addresses):
                raise AssertionError(f"The sum is {buffer[-1]} in place of {len(addresses)}.")
        if rank == 0:
            results.put((num_bytes, seconds))
    group.close()


def measure(num_workers: int, sizes_bytes: list[int], repetitions: int, options: dict) -> list[dict]:
    """Returns one result a size, from `num_workers` processes."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    addresses = free_addresses(num_workers)
    processes = [
        context.Process(
            target=time_all_reduce, args=(addresses, rank, sizes_bytes, repetitions, options, results)
        )
        for rank in range(num_workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"Workers ended with {[process.exitcode for process in processes]}.")
    rows = []
    for _ in sizes_bytes:
        num_bytes, seconds = results.get()
        rows.append(
            {
                "megabytes": num_bytes / _MEBIBYTE,
                "workers": num_workers,
                "seconds": statistics.median(seconds),
                "fastest_seconds": min(seconds),
                "repetitions": len(seconds),
                "dtype": "float32",
                **options,
            }
        )
    return rows


def main() -> None:
    """Measures, shows a table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="File to write the results to.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[64 / _MEBIBYTE, 0.5, 8, 64])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--ring_chunk_bytes", type=int)
    parser.add_argument("--direct_threshold_bytes", type=int)
    arguments = parser.parse_args()
    options = {
        name: getattr(arguments, name)
        for name in ("ring_chunk_bytes", "direct_threshold_bytes")
        if getattr(arguments, name) is not None
    }
    sizes_bytes = [round(megabytes * _MEBIBYTE) // 4 * 4 for megabytes in arguments.megabytes]
    results = []
    for num_workers in arguments.workers:
        results += measure(num_workers, sizes_bytes, arguments.repetitions, options)
    for row in results:
        print(
            f"{row['workers']} workers  {row['megabytes']:12.6f} MiB  {1000 * row['seconds']:9.3f} ms  "
            f"(fastest {1000 * row['fastest_seconds']:.3f})"
        )
    if arguments.json:
        machine = {"system": platform.platform(), "cores": os.cpu_count(), "numpy": np.__version__}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=2)


if __name__ == "__main__":
    main()
