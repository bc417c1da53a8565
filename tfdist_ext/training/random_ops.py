"""Which random ops of a model are outside our streams?

Keras seed generators are covered: each draw is a function of (seed, step, slot, call). Stateful `tf.random` ops
keep their state inside the runtime, where nobody can set or save it; they are reported.
"""

from __future__ import annotations

import tensorflow as tf
from absl import logging

from tfdist_ext import compat


def generators_of(model) -> list:
    """Returns the `tf.random.Generator`s that are attributes of the model or of its layers, each once."""
    found: dict[int, tf.random.Generator] = {}
    for layer in [model, *model._flatten_layers(include_self=False)]:
        for value in vars(layer).values():
            if isinstance(value, tf.random.Generator):
                found[id(value)] = value
    return list(found.values())


def report_stateful(graph, model_name: str) -> list[str]:
    """Warns, naming them, about random ops of a step that are not reproducible over replicas.

    Args:
        graph: Graph of the traced step.
        model_name: Name for the message.

    Returns:
        The names found.
    """
    names = compat.stateful_random_operations(graph)
    if names:
        logging.warning(
            "Model `%s` uses stateful tf.random ops (%s). Their streams are not covered: they differ from one run and "
            "one layout to another. Use keras.random with a keras.random.SeedGenerator, or tf.random.stateless_*.",
            model_name,
            ", ".join(names[:5]),
        )
    return names
