"""Which random streams does this process have, and how are they put back where they were?

Streams that are variables (Keras' seed generators, `tf.random.Generator`) are saved with the variables. Here are those
of Python, of NumPy, and of TensorFlow's own seeds for operations without one.
"""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np

from tfdist_ext import compat

_operations_of_graph: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def state_of_process() -> dict[str, Any]:
    """Returns the state of the process' streams as plain data.

    Runs on: every task whose Python code draws numbers.
    """
    operations = compat.operation_seeds()
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "tensorflow_seed": compat.global_seed(),
        "tensorflow_operations": None if operations is None else operations.getstate(),
    }


def restore_process(state: dict[str, Any], steps_aside: int = 0) -> list[str]:
    """Puts the streams where `state_of_process` found them.

    Args:
        state: What it returned, here or on another worker.
        steps_aside: 0 for the worker that the state is of; another worker, which has none of its own, gets a stream
            of its own for each number.

    Returns:
        Sentences about what could not be restored.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if steps_aside:
        np.random.seed([*np.random.randint(2**31, size=4), steps_aside])
        random.seed(f"{random.random()}/{steps_aside}")
    operations, saved = compat.operation_seeds(), state["tensorflow_operations"]
    if operations is not None and saved is not None:
        operations.setstate(saved)
    if compat.global_seed() != state["tensorflow_seed"]:
        return [
            f"tf.random.set_seed was {state['tensorflow_seed']} when the checkpoint was saved and is "
            f"{compat.global_seed()} here; operations traced from now on draw other numbers"
        ]
    return []


def generators() -> dict[str, Any]:
    """Returns the process-wide generators that are variables, by name, of those in use."""
    found = {
        "tensorflow_global_generator": compat.global_generator(),
        "keras_global_seed_generator": getattr(compat.keras_global_seed_generator(), "state", None),
    }
    return {name: generator for name, generator in found.items() if generator is not None}


def stateful_operations(function) -> list[str]:
    """Returns the names of random operations of a traced tf.function that keep their state where nobody can read it."""
    names: set[str] = set()
    for graph in compat.concrete_graphs(function):
        # A traced graph stays as it is, and this is asked at every save.
        if graph not in _operations_of_graph:
            _operations_of_graph[graph] = compat.stateful_random_operations(graph)
        names |= set(_operations_of_graph[graph])
    return sorted(names)
