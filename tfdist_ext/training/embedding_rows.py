"""How does `keras.layers.Embedding` look up rows of a table that lies on parameter servers?"""

from __future__ import annotations

import keras

from tfdist_ext.strategies import frame as frames
from tfdist_ext.training.pulled import is_large


def look_up(original):
    """Returns the `call` that embedding layers get: on a worker only the touched rows of a large table travel.

    Args:
        original: The unbound method it replaces.

    Returns:
        A function with the same signature.
    """

    def call(self, inputs):
        frame = frames.current_frame()
        table = getattr(self, "_embeddings", None)
        plain = (
            table is not None and not self.lora_enabled and getattr(self, "quantization_mode", None) is None
        )
        if frame is None or frame.pulled is None or not plain or not is_large(table):
            return original(self, inputs)
        if not frame.pulled.reads_here:
            return original(
                self, inputs
            )  # In a loop or a branch: only a whole table has a gradient outside of it.
        if keras.backend.standardize_dtype(inputs.dtype) not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        rows = frame.pulled.rows(table, keras.ops.convert_to_tensor(inputs))
        return keras.ops.cast(rows, dtype=self.compute_dtype)

    return call
