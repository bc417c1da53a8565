"""How does what was restored outlive the callbacks' `on_train_begin` and `on_epoch_begin`?

In a `fit` that goes on they have had their effect before the checkpoint was saved, and run again: they scale the rate a
second time, draw numbers, set counts back. What they change is put back in memory, once all of them have run.
"""

from __future__ import annotations

from typing import Any

from tfdist_ext.checkpoint import plain_data, random_streams


class HeldState:
    """Variables, random streams and objects of a training state, as they are now.

    Runs on: every worker.

    Args:
        state: `TrainingState`.
    """

    def __init__(self, state):
        self._state = state
        self._variables = state.variables()
        self._snapshot = self._variables.snapshot()
        self._random = random_streams.state_of_process()
        self._objects = plain_data.dumps(state.objects_state())

    def put_back(self) -> None:
        """Gives all of it the values that it had."""
        self._variables.put_back(self._snapshot)
        random_streams.restore_process(self._random)
        objects: dict[str, Any] = plain_data.loads(self._objects)
        self._state.load_objects_state(objects)
