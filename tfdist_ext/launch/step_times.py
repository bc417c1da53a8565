"""How long does a step of Keras `fit` take?"""

from __future__ import annotations

import time

import keras


class StepTimes(keras.callbacks.Callback):
    """Measures the time from the end of each step to the end of the next one in its epoch."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_epoch_begin(self, epoch, logs=None):
        """Starts anew: between epochs Keras does other things."""
        del epoch, logs
        self._last = None

    def on_train_batch_end(self, batch, logs=None):
        """Takes the time of one step."""
        del batch, logs
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now
