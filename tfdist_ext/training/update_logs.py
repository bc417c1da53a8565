"""How do the counts of an update policy get into Keras' logs?"""

from __future__ import annotations

import keras


class UpdateLogs(keras.callbacks.Callback):
    """Adds to the logs of each epoch what the update policy did, so that History, CSVLogger and TensorBoard show it.

    Keys: `applied_sets`, `dropped_sets`, `lost_sets`, `dropped_rows`, `staleness_p50`, `staleness_p95`,
    `staleness_max` and `wait_seconds`: counts since the strategy began to train the model. Put it first in the list
    of callbacks.

    Example:
        >>> model.fit(dataset, callbacks=[UpdateLogs()])  # doctest: +SKIP
    """

    def on_epoch_end(self, epoch, logs=None):
        """See `keras.callbacks.Callback`."""
        total = getattr(self.model.distribute_strategy, "statistics", {}).get("total")
        if logs is None or total is None:
            return
        logs.update(
            applied_sets=total["applied"],
            dropped_sets=total["dropped"],
            lost_sets=total["lost"],
            dropped_rows=total["rows_dropped"],
            staleness_p50=total["age_p50"] or 0,
            staleness_p95=total["age_p95"] or 0,
            staleness_max=total["age_max"] or 0,
            wait_seconds=total["waited_seconds"],
        )
