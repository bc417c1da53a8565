"""Which layers keep a state that has a row for each row of a batch?"""

from __future__ import annotations


def check(model, strategy) -> None:
    """Refuses layers whose state belongs to the rows of a batch, where replicas share the rows.

    Args:
        model: Keras model.
        strategy: The strategy; with one replica everything is allowed.

    Raises:
        NotImplementedError: A layer is stateful; names it.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False) is True:
            raise NotImplementedError(
                f"Layer `{layer.name}` is stateful: it keeps a state for each row of the batch, and the "
                f"{strategy.num_replicas_in_sync} replicas have different rows. Use `stateful=False`, or pass "
                "the state as an input and an output of the model."
            )
