"""How does Keras' `fit` read a dataset whose position is known, from the middle of an epoch where that is needed?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist_ext.checkpoint.executions import Executions
from tfdist_ext.checkpoint.input_position import InputPosition


class EpochReading:
    """How one `fit` reads the dataset of a position; told by Keras' iterator over epochs.

    Args:
        position: The position.
        applied: Returns the updates that were applied so far, or None where nobody counts them.

    Attributes:
        position: The position.
        step: Steps of the open epoch that were taken.
        first_step: Where the next epoch begins: not at 0 only right after a restore.
        on_begin: Called when the first step is about to be read, after all `on_epoch_begin`; or None.
        on_step_end: Called with a number of steps when they are done and all callbacks have been told; or None.
    """

    def __init__(self, position: InputPosition, applied: Callable[[], int | None] = lambda: None):
        self.position = position
        self.step = 0
        self.first_step = 0
        self.on_begin: Any = None
        self.on_step_end: Any = None
        self._untold_steps = 0
        self._executions = Executions(applied)
        # Batches of a pass as Keras has counted them; it opens another iterator at the end of a pass once it knows.
        self.batches_of_pass: int | None = None
        self._epochs: Any = None
        self._prepared: Any = None

    @property
    def has_begun(self) -> bool:
        """True once a `fit` reads the dataset."""
        return self._epochs is not None

    @property
    def continues(self) -> bool:
        """True where the next epoch goes on with the iterator of this one."""
        epochs = self._epochs
        return bool(epochs is not None and epochs.steps_per_epoch and epochs._current_iterator is not None)

    @property
    def counted_batches(self) -> int | None:
        """Batches of a pass, once Keras has counted them."""
        return self.batches_of_pass if self._epochs is None else self._epochs._num_batches

    def open(self, epochs):
        """Returns an iterator for Keras."""
        if epochs is not self._epochs:
            self.position.count_opening()
            return iter(epochs._distributed_dataset)
        prepared, self._prepared = self._prepared, None
        return self.position.open(epochs._distributed_dataset) if prepared is None else prepared

    def enumerate(self, epochs, original):
        """Wraps Keras' generator of the steps of an epoch."""
        if self._epochs not in (None, epochs):
            yield from original(epochs)
            return
        if self.on_begin is not None:
            self.on_begin()
        self._epochs = epochs
        epochs._num_batches = epochs._num_batches or self.batches_of_pass
        self.step, self.first_step = self.first_step, 0
        epochs.first_step = first = self.step
        if self.position.is_to_resume_within:
            self._resume_within(epochs, first)
        try:
            yield from self._steps(epochs, first, original)
        finally:
            if self._executions.is_open:
                self.position.note_end()

    def _steps(self, epochs, first: int, original):
        for begin, end, iterator in original(epochs):
            if end < first:
                continue
            epochs.first_step = 0
            num_steps = end + 1 - begin
            self._executions.begin(num_steps, self._left(epochs, iterator))
            yield begin, end, self.position.observed(iterator, num_steps)
            # Keras asks for the next step once all callbacks have heard of the one before.
            steps = self.take_untold_steps()
            if steps and self.on_step_end is not None:
                self.on_step_end(steps)

    def step_ends(self) -> None:
        """Notes that what was offered was trained on: at the end of the data it is not. Twice does no harm."""
        num_steps = self._executions.end()
        self.position.take(num_steps)
        self.step += num_steps
        self._untold_steps += num_steps

    def _left(self, epochs, iterator) -> int | None:
        """Returns the batches that the pass has left, or None where nobody knows."""
        length = None if hasattr(iterator, "leases") else epochs.data_adapter.num_batches
        return None if length is None else length - self.position.num_batches

    def take_untold_steps(self) -> int:
        """Returns the steps since `on_step_end`; an epoch that is stopped early asks for no next step."""
        steps, self._untold_steps = self._untold_steps, 0
        return steps

    def _resume_within(self, epochs, first: int) -> None:
        """Has Keras go on with an iterator that stands where it stood."""
        iterator = self.position.open(epochs._distributed_dataset)
        if epochs.steps_per_epoch:
            epochs._current_iterator = iterator
            epochs._steps_seen = self.position.num_batches - first
        else:
            self._prepared = iterator


class _Opener:
    """Stands for a dataset: `iter` opens a pass and counts it."""

    def __init__(self, open_pass):
        self._open_pass = open_pass

    def __iter__(self):
        return self._open_pass()


def opener(epochs, position: InputPosition) -> _Opener:
    """Returns what Keras' iterator over epochs may call `iter` on."""
    if position.reading is not None:
        return _Opener(lambda: position.reading.open(epochs))

    def open_pass():
        position.count_opening()
        return iter(epochs._distributed_dataset)

    return _Opener(open_pass)
