"""How does a program run, on one device and distributed, and when do the two agree?"""

from __future__ import annotations

import dataclasses
import functools
import gc
import linecache
import traceback

import numpy as np

from tests.fuzz import known, script
from tests.single_host.oracle import TOLERANCE
from tfdist_ext.testing import WorkerPool

# Where a difference is this many times what a change of the input by one rounding makes, it is no rounding.
_ROUNDINGS = 1000.0
# Relative change of the input: 4 units in the last place.
_NOISE = 2.0**-50
# What a forgotten weight changes is above this; a difference below may be rounding that the program magnifies.
_CLEAR = 1e-6
# A hang is a finding; slowness on a machine that others use is none.
_JOB_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a program.

    Attributes:
        kind: "equal", "refused" (in documented words), "impossible" (one device fails as well), "lenient" (one
            device alone fails), "rounding", or a finding: "different", "error", "lost".
        text: What differs, or the error.
    """

    kind: str
    text: str = ""

    @property
    def is_finding(self):
        return self.kind in ("different", "error", "lost")


class Runner:
    """Runs programs in processes that it starts when they are first needed.

    Args:
        fault: Planted in the distributed run: 0.01 moves each weight by that; for tests of the fuzzer itself.
    """

    def __init__(self, fault=0.0):
        self._pools, self._fault = {}, fault

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        for pool in self._pools.values():
            pool.close()

    def verdict(self, program):
        """Returns what came of a program."""
        try:
            result = self._run(program)
        except Exception as error:
            return Verdict("lost", f"{type(error).__name__}: {error}"[-3000:])
        return judge(program, result)

    def _run(self, program):
        workers, devices = {"mirrored": (1, 3), "workers": (2, 1), "servers": (1, 1)}[program.strategy]
        # A process can be the chief of clusters of one shape only.
        pool = self._pools.setdefault((program.strategy, program.servers), WorkerPool())
        results = pool.run(
            run_both,
            num_workers=workers,
            devices=devices,
            timeout_seconds=_JOB_SECONDS,
            source=script.functions_of(program),
            layout=[program.strategy, program.replicas, program.servers, program.policy],
            batch_size=program.batch_size,
            step_rows=program.batch_size * program.batches_in_a_step,
            fault=self._fault,
        )
        return results[0]


def run_both(source, layout, batch_size, step_rows, fault):
    """Runs a program distributed and on one device; runs in a process of the pool."""
    _hide_imports_from_the_collector()
    run = _defined(source)["run"]
    distributed = _attempt(run, lambda: _strategy(*layout), batch_size, batch_size)
    alone = _attempt(run, lambda: None, batch_size, step_rows)
    for weight in distributed.get("weights", []):
        weight += fault
    result = {"distributed": distributed, "alone": alone}
    if 0.0 < _difference_of(distributed, alone)[0] < _CLEAR:
        result["moved"] = _attempt(run, lambda: None, batch_size, step_rows, noise=_NOISE)
    return result


@functools.cache
def _hide_imports_from_the_collector():
    """`clear_session` collects: half a second each time over what was imported."""
    gc.collect()
    gc.freeze()


def _defined(source):
    import contextlib
    import os
    import tempfile

    import keras
    import tensorflow as tf

    import tfdist_ext

    names = dict(contextlib=contextlib, os=os, tempfile=tempfile, keras=keras, np=np, tf=tf)
    names |= {"tfdist_ext": tfdist_ext, "__name__": "program"}
    # Autograph and inspect read the source of what they trace.
    file_name = f"<program {hash(source)}>"
    linecache.cache[file_name] = (len(source), None, source.splitlines(True), file_name)
    exec(compile(source, file_name, "exec"), names)
    return names


def _strategy(kind, replicas, servers, policy):
    import tfdist_ext

    if kind == "mirrored":
        return tfdist_ext.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    if kind == "workers":
        return tfdist_ext.MultiWorkerMirroredStrategy()
    name, _, argument = policy.rstrip(")").partition("(")
    made = getattr(tfdist_ext, name)(*([int(argument)] if argument else []))
    cluster = tfdist_ext.cluster.in_process(num_workers=replicas, num_ps=servers)
    return tfdist_ext.ParameterServerStrategy(cluster, update_policy=made)


def _attempt(run, make_strategy, *arguments, **options):
    try:
        return _plain(run(make_strategy(), *arguments, **options))
    except Exception as error:
        name = type(error).__name__
        return {"error": f"{name}: {error}"[:2000], "where": traceback.format_exc()[-3000:]}


def _plain(value):
    """Makes of the result what can cross to another process."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return np.array(value, dtype="float64")


def _leaves(value, path=""):
    if isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], f"{path}/{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}/{index}")
    else:
        yield path, np.asarray(value)


def _difference_of(one, other):
    """Returns the largest difference, relative where values are above 1, and where it is."""
    if "error" in one or "error" in other:
        return 0.0, ""
    first, second = dict(_leaves(one)), dict(_leaves(other))
    if first.keys() != second.keys():
        return float("inf"), f"there is {sorted(first.keys() ^ second.keys())[:4]} in one run only"
    largest, place = 0.0, ""
    for path, value in first.items():
        expected = second[path]
        if value.shape != expected.shape:
            return float("inf"), f"{path} has shape {value.shape}, not {expected.shape}"
        alike = (value == expected) | (np.isnan(value) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            apart = np.abs(value - expected) / np.maximum(1.0, np.abs(expected))
        apart = np.where(alike, 0.0, np.where(np.isfinite(apart), apart, np.inf))
        if apart.max(initial=0.0) > largest:
            largest = float(apart.max())
            place = f"{path}: {value.ravel()[:6].tolist()}, not {expected.ravel()[:6].tolist()}, off by {largest:.3g}"
    return largest, place


def judge(program, result):
    """Returns the verdict on what both runs gave."""
    distributed, alone = result["distributed"], result["alone"]
    error, other = distributed.get("error"), alone.get("error")
    if error and known.refusal(program, error):
        return Verdict("refused", error)
    if other:
        return Verdict("impossible", other) if error else Verdict("lenient", other)
    if error:
        return Verdict("error", error + "\n" + distributed["where"])
    difference, place = _difference_of(distributed, alone)
    if difference <= TOLERANCE:
        return Verdict("equal")
    moved = _difference_of(result["moved"], alone)[0] if "moved" in result else 0.0
    if difference <= _ROUNDINGS * moved:
        return Verdict("rounding", place)
    return Verdict("different", place)
