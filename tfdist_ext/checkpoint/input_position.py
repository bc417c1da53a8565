"""Which row comes next, and how does a new process get there?

Two ways. *Replay*: the order of a pass over the data is the same each time it is opened, so the number of the pass and
the batches read from it say it all; the new process opens as many passes and reads over those batches. *Iterator*: the
state of the `tf.data` iterator itself is saved, buffers and all, where the pipeline can be saved.

Keras' `fit` tells the position through `EpochReading`, a custom loop by iterating over `TrainingState.dataset`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import tensorflow as tf
from absl import logging

from tfdist_ext import compat, errors
from tfdist_ext.checkpoint.pass_order import Skipping, skipping

REPLAY, ITERATOR = "replay", "iterator"


class InputPosition:
    """Where reading stands in one dataset.

    Args:
        dataset: `tf.data.Dataset`, or a distributed dataset of a strategy.
        how: "replay" or "iterator".

    Attributes:
        dataset: The dataset for the user's loop or for `fit`; iterating over it counts.
        how: "replay" or "iterator".
        num_opened: Iterators opened so far.
        num_batches: Batches taken from the last of them.
        observers: Functions that get each batch that a custom loop takes.
        reading: Set while a `fit` with our callback runs.
    """

    def __init__(self, dataset, how: str = REPLAY):
        if how not in (REPLAY, ITERATOR):
            raise ValueError(
                f'Argument `input_position` must be "{REPLAY}" or "{ITERATOR}"; received {how!r}.'
            )
        if not isinstance(dataset, (tf.data.Dataset, tf.distribute.DistributedDataset)):
            raise TypeError(
                "Argument `dataset` must be a tf.data.Dataset or a distributed dataset; received "
                f"{type(dataset).__name__}. Try tf.data.Dataset.from_tensor_slices(...).batch(...)."
            )
        self.plain = dataset
        self.dataset = _counting(dataset, self)
        self.how = how
        self.num_opened = 0
        self.num_batches = 0
        self.observers: list[Any] = []
        self.reading: Any = None
        self._iterator: Any = None
        self._resume: tuple[dict[str, Any], bool, Any] | None = None
        self._at_opening: dict[str, Any] = {}
        # Of each pass that was opened: batches that were asked for, the end of the data counted as one.
        self._asked: list[int] = []
        self._variables = _captured_variables(dataset)

    # --- what is saved ---------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Returns the position as plain data."""
        leases = getattr(self._iterator, "leases_state", None)
        return {
            "how": self.how,
            "num_opened": self.num_opened,
            "num_batches": self.num_batches,
            "asked": list(self._asked),
            "leases": None if leases is None else leases(),
            "variables_at_opening": self._at_opening,
            "variables": self._values(),
        }

    def iterator_to_save(self):
        """Returns the iterator whose state is to be saved, or None under replay.

        Raises:
            ValueError: The iterator has no state that can be saved.
        """
        if self.how == REPLAY or self._iterator is None:
            return None
        if not isinstance(self._iterator, compat.Trackable):
            raise ValueError(
                f"The iterator is a {type(self._iterator).__name__}, whose state cannot be saved. Pass "
                f'input_position="{REPLAY}".'
            )
        return self._iterator

    def load(self, state: dict[str, Any], *, within: bool, restore_iterator=None) -> None:
        """Goes to a position when the next iterator is opened.

        Args:
            state: What `state` returned.
            within: True to go on within the pass that was being read; False to begin the one after it.
            restore_iterator: Gives an iterator the state that was saved with `state`, under "iterator".
        """
        self._resume = state, within, restore_iterator

    @property
    def is_to_resume_within(self) -> bool:
        """True until a position within a pass that was loaded has been reached."""
        return self._resume is not None and self._resume[1]

    # --- reading ---------------------------------------------------------------------------------------------------
    def open(self, dataset=None):
        """Opens a pass and counts it; `dataset` is what Keras made of ours."""
        dataset = self.plain if dataset is None else dataset
        if self._resume is not None:
            state, within, restore_iterator = self._resume
            self._resume = None
            # The state of an iterator at its end says nothing of the next pass: that one is found by replay.
            ended = within and state["how"] == ITERATOR and self._is_whole(state["num_batches"])
            self._skip_passes(dataset, state, state["num_opened"] - (within and not ended))
            self._assign(state["variables"])
            if ended:
                self._at_opening, self.num_batches = state["variables_at_opening"], state["num_batches"]
                return iter(())
            if within:
                return self._open_within(dataset, state, restore_iterator)
        self._at_opening = self._values()
        self.num_opened += 1
        self._asked.append(0)
        self.num_batches = 0
        self._iterator = iter(dataset)
        return self._iterator

    def _skip_passes(self, dataset, state: dict[str, Any], until: int) -> None:
        """Opens passes that were read before, and reads of them what the order of later ones depends on."""
        how, step = skipping(self.plain)
        asked = state.get("asked") or []
        if how == Skipping.READ and self.num_opened < until:
            logging.warning(
                "Reading over the %d passes before: the order of the next one depends on how far they were read (%s).",
                until - self.num_opened,
                step,
            )
        while self.num_opened < until:
            # A dataset that reshuffles draws the order of a pass when it is opened.
            iterator = iter(dataset)
            number = asked[self.num_opened] if self.num_opened < len(asked) else 0
            wanted = {Skipping.OPENED: 0, Skipping.BEGUN: min(1, number), Skipping.READ: number}[how]
            if hasattr(iterator, "leases_state"):
                wanted = 0  # Workers of parameter servers open each pass anew, by its number.
            for _ in itertools.islice(iterator, wanted):
                pass
            self._asked.append(number)
            self.num_opened += 1

    def _is_whole(self, num_batches: int) -> bool:
        """Whether so many batches are a whole pass: the state of an iterator at its end says nothing of the next."""
        return isinstance(self.plain, tf.data.Dataset) and int(self.plain.cardinality()) == num_batches

    def take(self, num_batches: int = 1) -> None:
        """Counts batches that a loop takes."""
        self.num_batches += num_batches
        if self._asked:  # None is open where `fit` was given other data.
            self._asked[-1] += num_batches

    def note_end(self) -> None:
        """Notes that a loop has asked for one batch more than there were."""
        if self._asked:
            self._asked[-1] += 1

    def observed(self, iterator, num_batches: int):
        """Tells the observers of the next batches; returns what yields them. Workers' batches never come here."""
        if not self.observers or hasattr(iterator, "leases"):
            return iterator
        batches = list(itertools.islice(iterator, num_batches))
        for batch in batches:
            for observer in self.observers:
                observer(batch)
        return iter(batches) if batches else iterator

    def count_opening(self) -> None:
        """Counts an iterator that somebody else opened on the dataset."""
        self.num_opened += 1
        self._asked.append(0)

    def _open_within(self, dataset, state: dict[str, Any], restore_iterator):
        """Opens the pass that was being read, where it was."""
        saved_iterator = state["how"] == ITERATOR and restore_iterator is not None
        if not saved_iterator:
            self._assign(state["variables_at_opening"])
        self._at_opening = state["variables_at_opening"]
        self.num_opened, self.num_batches = state["num_opened"], state["num_batches"]
        self._asked.append(self.num_batches)
        self._iterator = iterator = iter(dataset)
        leases = state["leases"]
        if hasattr(iterator, "go_to"):
            if leases is None:
                iterator.go_to_batch(self.num_batches)
            else:
                iterator.go_to(leases)
        elif saved_iterator:
            restore_iterator(iterator)
        else:
            if leases is not None:
                self.num_batches = _num_read_in_order(leases)
            for _ in range(self.num_batches):
                next(iterator)
        return iterator

    def _values(self) -> dict[str, Any]:
        return {name: variable.numpy() for name, variable in self._variables.items()}

    def _assign(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name in self._variables:
                self._variables[name].assign(value)


def _num_read_in_order(leases: dict[str, Any]) -> int:
    """Returns how many batches workers of parameter servers have used, if these are the first ones."""
    shards = leases["shards"]
    number = sum(shard["position"] for shard in shards)
    expected = [len(range(shard, number, len(shards))) for shard in range(len(shards))]
    if leases["pending"] or [shard["position"] for shard in shards] != expected:
        raise errors.CheckpointMismatchError(
            "The checkpoint was saved within an epoch by workers that read at different speeds, and the strategy of "
            "this program reads one batch after the other. Resume under parameter servers, or from the end of an epoch."
        )
    return number


class CountingIterator:
    """What a custom loop gets for `iter(state.dataset)`."""

    def __init__(self, position: InputPosition):
        self._position = position
        self._iterator = position.open()

    def __iter__(self):
        return self

    def __next__(self):
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._position.note_end()
            raise
        self._position.take()
        for observer in self._position.observers:
            observer(batch)
        return batch


def _counting(dataset, position: InputPosition):
    """Returns a shallow copy of a dataset on which `iter` counts."""
    kind: Any = type(dataset)
    counted = copy.copy(dataset)
    counted.__class__ = _counting_kind(kind)
    counted.tfdist_position = position
    return counted


@functools.cache
def _counting_kind(kind: Any) -> type:
    def iterate(self):
        return CountingIterator(self.tfdist_position)

    return type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})


def _captured_variables(dataset) -> dict[str, tf.Variable]:
    """Returns the variables that functions of a dataset use, such as the state of a random generator."""
    if not isinstance(dataset, tf.data.Dataset):
        return {}
    found: dict[int, tf.Variable] = {}
    for node in compat.dataset_nodes(dataset):
        for function in compat.dataset_functions(node):
            for variable in function.graph.variables:
                found[id(variable)] = variable
    return {f"{number}": variable for number, variable in zip(itertools.count(), found.values())}
