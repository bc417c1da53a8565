"""What if every worker saves to the same path? One valid file is left, and nobody waits for anybody.

Keras writes the file in place: two workers that write at the same time would leave a mixture. Here each writes
beside the target and moves the whole file into place, which is atomic; all hold the same values.
"""

from __future__ import annotations

import os
import pathlib
import uuid

_FILE_SUFFIXES = (".keras", ".h5", ".hdf5")


def atomically(original, strategy_of):
    """Returns a `save` that writes files of multi-worker models by a move.

    Args:
        original: The unbound `keras.Model.save` or `save_weights`.
        strategy_of: Function of a model that returns its strategy or None.

    Returns:
        A function with the same signature.
    """

    def save(self, filepath, *args, **kwargs):
        strategy = strategy_of(self)
        is_file = isinstance(filepath, (str, os.PathLike)) and str(filepath).endswith(_FILE_SUFFIXES)
        if strategy is None or strategy.extended.num_workers == 1 or not is_file:
            return original(self, filepath, *args, **kwargs)
        target = pathlib.Path(filepath)
        if not kwargs.get("overwrite", True) and target.exists():
            return original(self, filepath, *args, **kwargs)
        # The suffix stays at the end: Keras chooses the format by it.
        name = f".{target.stem}.{strategy.extended.worker_index}-{uuid.uuid4().hex[:8]}{_suffix_of(target)}"
        temporary = target.with_name(name)
        try:
            original(self, str(temporary), *args, **kwargs)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
        return None

    return save


def _suffix_of(target: pathlib.Path) -> str:
    # Weights must end in `.weights.h5`, which is two suffixes.
    return ".weights.h5" if target.name.endswith(".weights.h5") else target.suffix
