"""What must be read of a pass that is skipped, so that the next one has the order that it would have had?

A step that reshuffles draws a new order each time it is opened. Most steps open what they read from when they are
opened themselves: then opening the pass is enough. A shuffle opens it when its first element is asked for; a repetition
or a concatenation in the middle of the pass; and a cache keeps the order of the pass that filled it.
"""

from __future__ import annotations

import enum
from typing import Any

import tensorflow as tf

from tfdist_ext import compat

# Seen for each: what they read from is opened with them.
_OPEN_AT_ONCE = frozenset(
    f"_{name}Dataset"
    for name in (
        "Batch", "ParallelBatch", "PaddedBatch", "DenseToRagged", "Map", "ParallelMap", "Prefetch", "Take", "Skip",
        "Filter", "Shard", "Zip", "Options", "Unbatch", "DirectedInterleave", "Scan", "TakeWhile", "Interleave",
        "ParallelInterleave", "FlatMap", "Window", "GroupByWindow", "GroupByReducer", "Unique", "Rebatch",
        "LegacyRebatch", "IgnoreErrors", "Assert", "MaxIntraOpParallelism", "PrivateThreadPool",
    )
)  # fmt: skip
_OPEN_AT_THE_FIRST_ELEMENT = frozenset({"_ShuffleDataset"})


class Skipping(enum.IntEnum):
    """What is done with a pass that is skipped."""

    OPENED = 0
    BEGUN = 1
    READ = 2


def skipping(dataset: Any) -> tuple[Skipping, str]:
    """Returns what must be done with a skipped pass, and the step because of which.

    Args:
        dataset: The dataset of the passes.
    """
    found = Skipping.OPENED, ""
    if not isinstance(dataset, tf.data.Dataset):
        return found
    for node, readers in compat.steps_with_readers(dataset):
        name = compat.dataset_type_name(node).removeprefix("_")
        if compat.captures_datasets(node):
            found = max(found, (Skipping.READ, name))
        varies = compat.differs_by_pass(node)
        # Variables are given their values again; what a cache has kept of them is not.
        fills_cache = "CacheDataset" in readers and any(
            function.graph.variables for function in compat.dataset_functions(node)
        )
        if not varies and not fills_cache:
            continue
        late = [reader for reader in readers if reader not in _OPEN_AT_ONCE]
        if any(reader not in _OPEN_AT_THE_FIRST_ELEMENT for reader in late):
            found = max(found, (Skipping.READ, name))
        elif late:
            found = max(found, (Skipping.BEGUN, name))
    return found


def not_in_an_iterator(dataset: Any) -> str | None:
    """Returns why the saved state of an iterator would not be enough for what comes after; None if it is.

    An iterator reads ahead, how far nobody knows: to the end of its pass, perhaps. TensorFlow then restores a step that
    reshuffles such that its next pass has another order. A pass without an end has no next one.

    Args:
        dataset: What the iterator reads.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return None
    steps = {id(node): node for node, _ in compat.steps_with_readers(dataset)}.values()
    captured = [node for node in steps if compat.captures_datasets(node)]
    if captured:
        return f"{compat.dataset_type_name(captured[0]).removeprefix('_')} refers to whole datasets"
    varying = [
        compat.dataset_type_name(node).removeprefix("_") for node in steps if compat.differs_by_pass(node)
    ]
    if len(varying) == 1 and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return None
    return f"{varying[0]} draws a new order for each pass" if varying else None
