"""How is a thing made for a program, and what does it take?"""

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.conformance.inputs import Input, normal


def call(layer, tensors):
    """Calls a layer on its only input, or on the list of them."""
    return layer(tensors[0] if len(tensors) == 1 else list(tensors))


@dataclasses.dataclass(frozen=True)
class Branch:
    """One layer in a model of many: own inputs, the layer, a Dense head, and a loss of its own.

    Attributes:
        make: Makes the layer; is given its name.
        inputs: What it takes.
        apply: How it is called.
        stem: Whether a Dense layer stands before it, so that gradients pass through it.
        adapt: Whether it is adapted to its rows before it is called.
        single: Whether it computes in single precision.
        is_saved_as_it_is: Whether a loaded model has the weights of the saved one; else their predictions are equal.
    """

    make: Callable[..., Any]
    inputs: tuple[Input, ...] = (normal(4),)
    apply: Callable[..., Any] = call
    stem: bool = True
    adapt: bool = False
    single: bool = False
    is_saved_as_it_is: bool = True


@dataclasses.dataclass(frozen=True)
class Output:
    """An output of a model, and what it is compared with."""

    activation: str
    target: Input
    shape: tuple[int, ...] = (2,)
    dtype: str = "float64"
