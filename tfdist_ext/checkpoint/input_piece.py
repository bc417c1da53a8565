"""Is the position of the input captured: will a new process find the same rows?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.checkpoint.input_position import REPLAY, InputPosition
from tfdist_ext.checkpoint.manifest import Piece
from tfdist_ext.checkpoint.pass_order import not_in_an_iterator

_HOW = {
    REPLAY: "replay: the passes that were opened and the batches that were read",
    "iterator": "the state of the tf.data iterator",
}


def input_piece(position: InputPosition | None) -> Piece:
    """Says whether the position is captured, and why not.

    Args:
        position: Of the dataset, or None where none was given.
    """
    if position is None:
        why: str | None = "no dataset was given; pass dataset= to TrainingState"
    else:
        why = _why_not(position) if isinstance(position.plain, tf.data.Dataset) else None
    if why is None and position is not None:
        return Piece(name="input", captured=True, reason=_HOW[position.how])
    return Piece(name="input", captured=False, reason=why or "")


def _why_not(position: InputPosition) -> str | None:
    unordered = compat.unordered_steps(position.plain)
    if unordered:
        return f"{unordered[0]} may give its elements in another order each time; set deterministic=True"
    if position.how == REPLAY:
        unseeded = compat.unseeded_steps(position.plain)
        return (
            f"{unseeded[0]} draws other numbers in every process; give it a seed, or call "
            "keras.utils.set_random_seed(...) before the dataset is made"
            if unseeded
            else None
        )
    why = not_in_an_iterator(position.plain)
    return (
        None
        if why is None
        else (
            f"{why}, and an iterator that is restored gives later passes another one; pass "
            f'input_position="{REPLAY}" to TrainingState, or reshuffle_each_iteration=False to the shuffle'
        )
    )
