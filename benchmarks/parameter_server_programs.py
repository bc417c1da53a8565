"""What every task of the cluster of `benchmarks.parameter_server` runs: the chief measures, the others serve.

    tfdist-ext run --chief --workers 2 --ps 1 -- python -m benchmarks.parameter_server_programs --results results.jsonl

Each result is one line of JSON, written as soon as it is known.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator

import numpy as np

import tfdist_ext
from benchmarks.parameter_server_contestants import Fit, OurLoop, StockLoop, medians, race
from benchmarks.parameter_server_delays import measure_delays
from benchmarks.parameter_server_models import (
    BATCH_SIZE,
    DENSE_MODELS,
    EMBEDDING_WIDTH,
    IDS_PER_BATCH,
    NUM_ID_BATCHES,
    QUICK,
    Size,
    dense_model,
    draw_ids,
    endless,
    megabytes_of,
    table_model,
)

CASES = ("dense", "sparse", "delays")
STOCK_SPARSE_STEPS = 3


# --- (a) and (b): the engine's own cost ---------------------------------------------------------------------------
def measure_dense(size: Size) -> Iterator[dict]:
    """Yields the loop's and `fit`'s result for each model."""
    strategy = tfdist_ext.ParameterServerStrategy(update_policy=tfdist_ext.Asynchronous())
    generator = np.random.default_rng(1)
    for name in size.dense_models:
        num_inputs, widths = DENSE_MODELS[name]
        x = generator.normal(size=(BATCH_SIZE, num_inputs)).astype(np.float32)
        y = generator.normal(size=(BATCH_SIZE, widths[-1])).astype(np.float32)
        make_model = functools.partial(dense_model, num_inputs, widths)
        make_data = endless(x[None], y[None])
        contestants = {
            "loop": OurLoop(strategy, make_model, make_data()),
            "stock": StockLoop(strategy, make_model, make_data),
            "fit": Fit(strategy, make_model, make_data()),
        }
        rates = race(
            contestants,
            num_rounds=size.num_rounds,
            turn_seconds=size.turn_seconds,
            warm_up_steps=size.warm_up_steps,
        )
        yield from dense_results(name, rates)


def dense_results(name: str, rates: dict[str, list[float]]) -> list[dict]:
    """Makes two results of the rates of "loop", "stock" and "fit"."""
    median = medians(rates)
    num_inputs, widths = DENSE_MODELS[name]
    common = {
        "stock_updates_per_second": median["stock"],
        "model_megabytes": megabytes_of(num_inputs, widths),
        "num_variables": 2 * len(widths),
        "batch_size": BATCH_SIZE,
    }
    loop = {
        "case": f"async {name}",
        "updates_per_second": median["loop"],
        **common,
        "ratio_to_stock": median["loop"] / median["stock"],
        "updates_per_second_by_round": rates["loop"],
        "stock_updates_per_second_by_round": rates["stock"],
    }
    fit = {
        "case": f"fit {name}",
        "updates_per_second": median["fit"],
        **common,
        "ratio_to_stock": median["fit"] / median["stock"],
        "ratio_to_custom_loop": median["fit"] / median["loop"],
        "updates_per_second_by_round": rates["fit"],
    }
    return [loop, fit]


# --- (c): bytes and time follow the rows touched, not the table ---------------------------------------------------
def measure_sparse(size: Size) -> Iterator[dict]:
    """Yields a result for the small table, and one for the large table with its ratio to the small one."""
    strategy = tfdist_ext.ParameterServerStrategy(update_policy=tfdist_ext.Asynchronous())
    labels = np.random.default_rng(3).normal(size=(NUM_ID_BATCHES, IDS_PER_BATCH, 1)).astype(np.float32)
    loops, stock_loops, unique_rows = {}, {}, {}
    for num_rows in size.table_rows:
        ids = draw_ids(num_rows, size.table_rows[0])
        unique_rows[num_rows] = float(np.mean([len(np.unique(batch)) for batch in ids]))
        make_model = functools.partial(table_model, num_rows)
        make_data = endless(ids[..., None], labels)
        loops[num_rows] = OurLoop(strategy, make_model, make_data())
        stock_loops[num_rows] = StockLoop(strategy, make_model, make_data)
    rates = race(
        loops, num_rounds=size.num_rounds, turn_seconds=size.turn_seconds, warm_up_steps=size.warm_up_steps
    )
    # A race of its own, few steps a turn: this loop moves the whole table in every step.
    stock_rates = race(
        stock_loops, num_rounds=size.num_rounds, turn_seconds=0.0, warm_up_steps=STOCK_SPARSE_STEPS
    )
    small = medians(rates)[size.table_rows[0]]
    for num_rows, loop in loops.items():
        loop.run(size.warm_up_steps)
        # Of this model's training since it began; no set was dropped.
        total = strategy.statistics["total"]
        bytes_per_step = (total["bytes_pulled"] + total["bytes_pushed"]) / total["applied"]
        yield sparse_result(
            num_rows,
            medians(rates)[num_rows],
            medians(stock_rates)[num_rows],
            small,
            unique_rows[num_rows],
            bytes_per_step,
        ) | {"updates_per_second_by_round": rates[num_rows]}


def sparse_result(
    num_rows: int,
    rate: float,
    stock_rate: float,
    small_rate: float,
    unique_rows: float,
    bytes_per_step: float,
) -> dict:
    """Makes a result, beside the bytes of the rows touched: each once to the worker, its gradient once back."""
    touched = 2 * unique_rows * EMBEDDING_WIDTH * 4
    return {
        "case": f"sparse {num_rows} x {EMBEDDING_WIDTH}",
        "updates_per_second": rate,
        "stock_updates_per_second": stock_rate,
        "ratio_to_stock": rate / stock_rate,
        "ratio_to_small_table": rate / small_rate,
        "ids_per_batch": IDS_PER_BATCH,
        "unique_rows_per_batch": unique_rows,
        "bytes_per_step": bytes_per_step,
        "bytes_of_touched_rows": touched,
        "ratio_to_touched_rows": bytes_per_step / touched,
        "table_bytes": num_rows * EMBEDDING_WIDTH * 4,
    }


def main() -> None:
    """Serves, or measures and writes one line a result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    # Makes this task serve if it is a worker or a ps.
    strategy = tfdist_ext.ParameterServerStrategy()
    measures = {"dense": measure_dense, "sparse": measure_sparse, "delays": measure_delays}
    for case in arguments.cases:
        started = time.monotonic()
        for result in measures[case](QUICK if arguments.quick else Size()):
            result = {
                "case": result.pop("case"),
                "workers": strategy.num_workers,
                "ps": strategy.num_ps,
            } | result
            result["load_average"] = os.getloadavg()[0]
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        sys.stderr.write(f"{case}: {time.monotonic() - started:.0f} s\n")


if __name__ == "__main__":
    main()
