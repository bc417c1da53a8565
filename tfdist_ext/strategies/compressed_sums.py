"""How are gradients summed when each worker sends only their largest entries?

The residuals, what a worker has not sent yet, are state of that worker alone: no two workers have the same, and
nobody averages them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist_ext.collectives import TopK, error_feedback, local
from tfdist_ext.collectives.compression import ring_bytes, top_k_bytes


class CompressedSums:
    """Sums of which some gradients travel compressed, and the residuals of this worker.

    Runs on: every worker.

    Args:
        compression: What is compressed, and how much.
        host: `HostCollectives` of the group.
        ring: `RingAllReduce` for all that travels whole.
        make_variable: Makes a `tf.Variable` of this worker from an initial value and a name, outside of any graph.
    """

    def __init__(
        self, compression: TopK, host, ring, make_variable: Callable[[np.ndarray, str], tf.Variable]
    ):
        self._compression = compression
        self._host = host
        self._ring = ring
        self._make_variable = make_variable
        # By name: whose residual it is (weak: a model may go), and the residual.
        self._residuals: dict[str, tuple[Any, tf.Variable]] = {}
        self._restored: dict[str, np.ndarray] = {}
        self._checked = False

    # --- state -------------------------------------------------------------------------------------------------
    @property
    def residuals(self) -> dict[str, tf.Variable]:
        """The residuals made so far, by the path of their variable."""
        living = {name: pair for name, pair in self._residuals.items() if pair[0]() is not None}
        return {name: residual for name, (_, residual) in living.items()}

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """Sets all residuals: to what is given, and to zero where nothing is given.

        Args:
            values: By the path of the variable. Kept for the residuals that are not made yet.

        Raises:
            ValueError: A value does not have the shape of its residual.
        """
        values = {name: np.array(value) for name, value in values.items()}
        made = self.residuals
        for name, residual in made.items():
            if name in values:
                _check_shape(name, values[name].shape, residual.shape)
        for name, residual in made.items():
            residual.assign(values.pop(name, np.zeros(residual.shape)).astype(residual.dtype.as_numpy_dtype))
        self._restored = values

    def _residual_of(self, variable, gradient) -> tf.Variable:
        """Returns the residual of a variable, made at the first trace that needs it."""
        for owner, residual in self._residuals.values():
            if owner() is variable:
                return residual
        # The model of the others is gone, and their names are free.
        self._residuals = {name: pair for name, pair in self._residuals.items() if pair[0]() is not None}
        path = name = getattr(variable, "path", None) or variable.name
        number = 0
        while name in self._residuals:
            number += 1
            name = f"{path}_{number}"
        value = self._restored.pop(name, None)
        if value is None:
            value = np.zeros(gradient.shape)
        _check_shape(name, value.shape, gradient.shape)
        residual = self._make_variable(value.astype(gradient.dtype.as_numpy_dtype), f"{name}/residual")
        self._residuals[name] = (weakref.ref(variable), residual)
        return residual

    # --- sums --------------------------------------------------------------------------------------------------
    def sum_step(self, per_replica, name: str, variables, loss_scale) -> list:
        """Sums what one step computed.

        Residuals change only if the summed gradients are finite, which all workers see alike: what loss scaling
        skips has not happened.

        Args:
            per_replica: For each value the list of the local replicas' tensors; gradients come first.
            name: Name for messages.
            variables: The variable of each gradient.
            loss_scale: By how much gradients are too large in this step, or None. Residuals are kept without it.

        Returns:
            The sums, each on the first replica's device.
        """
        chosen = [i for i in range(len(variables)) if self._compresses(per_replica[i])]
        rest = [i for i in range(len(per_replica)) if i not in chosen]
        results: list = [None] * len(per_replica)
        counts_step = bool(variables)
        if rest:
            sums = self._ring.sum_over_replicas([per_replica[i] for i in rest], name, counts_step)
            for i, value in zip(rest, sums, strict=True):
                results[i] = value
            counts_step = counts_step and all(isinstance(per_replica[i][0], tf.IndexedSlices) for i in rest)
        if not chosen:
            return results
        # One residual a worker, so its replicas add up before anything is chosen.
        gradients = [local.sum_replicas(per_replica[i]) for i in chosen]
        self._warn_if_it_does_not_pay(gradients)
        residuals = [self._residual_of(variables[i], g) for i, g in zip(chosen, gradients, strict=True)]
        totals, left = self._exchange(gradients, residuals, name, loss_scale, counts_step)
        for i, value in zip(chosen, totals, strict=True):
            results[i] = value
        happens = error_feedback.all_finite(results[: len(variables)])
        for residual, value in zip(residuals, left, strict=True):
            residual.assign(tf.where(happens, value, residual))
        return results

    def _compresses(self, values) -> bool:
        dense = not isinstance(values[0], tf.IndexedSlices)
        return dense and self._compression.compresses(values[0].dtype.name, values[0].shape.num_elements())

    def _exchange(self, gradients, residuals, name, loss_scale, counts_step):
        """Returns the sums of what all workers sent, and what this one has left."""
        sent, left, like = [], [], []
        for gradient, residual in zip(gradients, residuals, strict=True):
            scale = None if loss_scale is None else tf.cast(loss_scale, gradient.dtype)
            update = gradient + (residual if scale is None else residual * scale)
            num_sent = self._compression.num_sent(gradient.shape.num_elements())
            entries = error_feedback.largest(update, num_sent)
            unsent = error_feedback.without(update, entries)
            sent.append(entries)
            left.append(unsent if scale is None else unsent / scale)
            like.append((num_sent, gradient.dtype))
        message = error_feedback.pack(sent)
        # The length in the name: a worker that compresses otherwise is then named in an error.
        gathered = self._host.gather(message, f"{name}/top_k/{message.shape[0]}", counts_step)
        by_rank = [error_feedback.unpack(one, like) for one in gathered]
        totals = [
            error_feedback.total([parts[number] for parts in by_rank], gradient.shape)
            for number, gradient in enumerate(gradients)
        ]
        return totals, left

    def _warn_if_it_does_not_pay(self, gradients) -> None:
        if self._checked:
            return
        self._checked = True
        workers = self._host.num_workers
        sizes = [(g.shape.num_elements(), g.dtype.size) for g in gradients]
        compressed = sum(top_k_bytes(self._compression.num_sent(n), size, workers) for n, size in sizes)
        whole = sum(ring_bytes(n, size, workers) for n, size in sizes)
        if compressed >= whole:
            logging.warning(
                "Compression with fraction=%g does not pay with %d workers: a step receives %d bytes of compressed "
                "gradients, and would receive %d without. It pays for fractions below 1/%d.",
                self._compression.fraction, workers, compressed, whole, workers,
            )  # fmt: skip


def _check_shape(name, shape, expected) -> None:
    if tuple(shape) != tuple(expected):
        raise ValueError(
            f"The restored compression residual of `{name}` must have the shape {tuple(expected)} of its variable; "
            f"received {tuple(shape)}. Restore the residuals of this model, or none."
        )
