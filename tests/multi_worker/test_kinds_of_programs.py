"""Losses, states, optimizers and collectives of a user's own, on several workers: is the run the one device's?"""

import keras
import numpy as np
import pytest

from tests.multi_worker.agreement import assert_identical, make_strategy
from tests.single_host import oracle
from tests.single_host import programs_of_a_kind as programs


def regression():
    return oracle.batched(oracle.regression_data(rows=13), 4)


def fractions():
    return oracle.batched((*programs.fractions(), np.linspace(0.1, 2.0, 13)), 4)


PROGRAMS = {
    "f19 Dice": (lambda: programs.compiled(keras.losses.Dice()), fractions),
    "f19 in-batch negatives": (lambda: programs.compiled(programs.in_batch_negatives), fractions),
    "f19 rows' losses by hand": (
        lambda: programs.by_hand(programs.STEP_LOSSES["rows' losses over the batch size"], counts=True),
        regression,
    ),
    "f19 ratio of sums by hand": (
        lambda: programs.by_hand(programs.STEP_LOSSES["ratio of sums"]),
        regression,
    ),
    "f10 one loss, two optimizers": (lambda: programs.two_optimizers("one loss for both"), regression),
    "f10 MultiOptimizer": (
        lambda: programs.with_optimizer(programs.OWN_OPTIMIZERS["own apply in a MultiOptimizer"]),
        regression,
    ),
    "f11 all_gather": (
        lambda: programs.with_collective(programs.COLLECTIVES["all_gather of negatives"]),
        regression,
    ),
    "f11 all_reduce": (
        lambda: programs.with_collective(programs.COLLECTIVES["all_reduce of a mean"]),
        regression,
    ),
}


def run_all(distributed):
    keras.config.set_floatx("float64")
    strategy = make_strategy(distributed)
    runs = {}
    for name, (make, data) in PROGRAMS.items():
        runs[name] = oracle.train(strategy, make, data)
        del runs[name]["model"]
    return runs


@pytest.fixture(scope="module")
def one_device(worker_pool):
    return worker_pool.run(run_all, num_workers=1, distributed=False)[0]


@pytest.mark.parametrize(("num_workers", "devices"), [(2, 2)])
def test_f9_f10_f11_f19_programs_equal_one_device(worker_pool, one_device, num_workers, devices):
    # The last batch has one row. The step that counts keeps rows, steps, totals and averages beside its weights.
    results = worker_pool.run(run_all, num_workers=num_workers, devices=devices, distributed=True)
    assert_identical(results)
    for name, expected in one_device.items():
        oracle.assert_same_run(results[0][name], expected)
