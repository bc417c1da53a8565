"""How does a set depend on the rows of the other sets of its round? It is computed in two halves.

In the first half a worker computes its batch and shows what a loss of the whole batch needs of it, on the first ps:
targets, predictions and weights, or denominators. When it is known which sets make the step, what they showed is put
together there. In the second half each worker computes its set again, on its own batch and what the others showed: it
is then one replica of a synchronous step. Where a step of the user's own has no parts that add up, the batches
themselves are shown, and the worker of the first set computes the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist_ext.strategies.parameter_server_variables import device_of_task
from tfdist_ext.training import losses
from tfdist_ext.training.batch_functions import Kind

_FIRST_PS = device_of_task(0)


class Showing:
    """What the first half knows of the other sets: nothing.

    Attributes:
        shown: Tensors whose first axis grows with the sets, in the order of the exchanges.
    """

    def __init__(self):
        self.shown: list[tf.Tensor] = []

    def place(self, frame, rows) -> None:
        """Makes a frame that of the only set of a step of several."""
        _place(frame, self, tf.reshape(tf.cast(rows, tf.int64), [1]), tf.zeros([], tf.int64))

    def rows_of_all(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns this set's own rows, and shows them."""
        self.shown.append(tf.stop_gradient(packed))
        return packed

    def total_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """Returns this set's own number, and shows it."""
        self.shown.append(tf.reshape(tf.stop_gradient(number), [1]))
        return number


class Shown:
    """What the second half knows of the other sets.

    Args:
        tensors: What all sets showed, in the order of the exchanges.
        rows: int64 `[sets of the step]`, the rows of each.
        slot: Scalar int64, which of them this one is.
    """

    def __init__(self, tensors: Sequence[tf.Tensor], rows: tf.Tensor, slot: tf.Tensor):
        self._rest = iter(tensors)
        self._rows, self._slot = rows, slot

    def place(self, frame, rows) -> None:
        """Makes a frame that of this set."""
        _place(frame, self, self._rows, self._slot)

    def rows_of_all(self, packed: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all sets."""
        return tf.ensure_shape(next(self._rest), [None, *packed.shape[1:]])

    def total_of_all(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the numbers of all sets."""
        return tf.reduce_sum(next(self._rest))


def _place(frame, told, rows: tf.Tensor, slot: tf.Tensor) -> None:
    """Makes a frame that of one replica of a step of several."""
    frame.round, frame.num_slots = told, frame.round_size
    frame.rows, frame.slot, frame.num_rows = rows, slot, rows[slot]
    total = tf.cast(tf.reduce_sum(rows), tf.float64)
    frame.share = tf.math.divide_no_nan(tf.cast(frame.num_rows, tf.float64), total)


def what_needs_others(frame, verdict) -> str | None:
    """Returns what makes the sets of a round depend on each other, as the beginning of a sentence, or None.

    Args:
        frame: Frame in which the step was traced.
        verdict: `step_trial.Verdict` on a step of the user's own, or None.
    """
    names = losses.that_need_other_sets(frame)
    if names is not None:
        return f"The losses {names} are"
    if verdict is None:
        return None
    kinds = set(verdict.applications)
    # What a step of the user's own shows of a sum that Keras computed is one number of several that are means.
    logs_sum = losses.are_all_sums(frame) and bool(frame.num_scalars or verdict.logs)
    return (
        "The losses of the `train_step` are" if Kind.NEITHER in kinds or len(kinds) > 1 or logs_sum else None
    )


def needs_whole_batch(verdict) -> bool:
    """Returns True where no parts of a step of the user's own add up."""
    return verdict is not None and Kind.NEITHER in verdict.applications


def dense_leaves(data) -> list[tf.Tensor]:
    """Returns the tensors of a batch whose rows can be shown.

    Raises:
        NotImplementedError: Some of them are ragged or sparse.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if not isinstance(leaf, tf.experimental.Optional)]
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        raise NotImplementedError(
            "A loss of the `train_step` is no mean and no sum over the rows of a batch, so that one worker computes "
            "the batches of a step of `Synchronous` together, and ragged or sparse ones cannot be put together. Use "
            "a policy that applies one batch at a time, as `BoundedStaleness`."
        )
    return leaves


def with_leaves(data, leaves):
    """Returns a batch with other tensors in the places of those that `dense_leaves` gives."""
    rest = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: leaf if isinstance(leaf, tf.experimental.Optional) else next(rest), data
    )


class Halves:
    """The traced functions of the two halves.

    Args:
        first: `(data, cached, draw, arguments) -> list of tensors to show`, traced on a worker.
        second: `(data, cached, draw, arguments, shown, slot) -> [counts, wires, kept]`.
        batch_spec: Structure of specs of one batch.
        other_specs: Specs of `cached`, `draw`, `arguments`.
        is_whole: True where the first set computes the whole step.
    """

    def __init__(self, first, second, batch_spec, other_specs, is_whole: bool):
        self._first, self._batch_spec, self._other_specs = first, batch_spec, other_specs
        self.is_whole = is_whole
        self._num_batch = len(tf.nest.flatten(batch_spec, expand_composites=True))
        self._joins: dict = {}
        self._from_iterator = self._from_batch = None
        self._shown_specs: list = []
        # The first half is traced now: what it shows decides what the second takes.
        _ = self.first_next
        self.second = tf.function(second, autograph=False).get_concrete_function(
            batch_spec, *other_specs, self._shown_specs, tf.TensorSpec([], tf.int64)
        )

    @property
    def first_next(self):
        """`(iterator, cached, draw, arguments) -> [rows, *batch, *shown]`, for the worker."""
        if self._from_iterator is None:

            def compute(iterator, *rest):
                return self._show(iterator.get_next(), *rest)

            self._from_iterator = self._traced(compute, tf.data.IteratorSpec(self._batch_spec))
        return self._from_iterator

    @property
    def first_batch(self):
        """The same for a batch that the chief sends."""
        if self._from_batch is None:
            self._from_batch = self._traced(self._show, self._batch_spec)
        return self._from_batch

    def _traced(self, compute, spec):
        return tf.function(compute, autograph=False).get_concrete_function(spec, *self._other_specs)

    def _show(self, data, cached, draw, arguments):
        rows, shown = self._first(data, cached, draw, arguments)
        counts = tf.reshape(tf.cast(rows, tf.int64), [1])
        with tf.device(_FIRST_PS):
            on_ps = [tf.identity(tensor) for tensor in (counts, *shown)]
        self._shown_specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in on_ps]
        # Shapes alone tell the chief how many rows there are.
        marker = tf.zeros([tf.cast(rows, tf.int32)], tf.bool)
        batch = [tf.identity(t) for t in tf.nest.flatten(data, expand_composites=True)]
        return [marker, *batch, *on_ps]

    def divide(self, outputs) -> tuple[int, list, list]:
        """Returns the rows, the batch and what was shown, of the outputs of the first half."""
        end = 1 + self._num_batch
        return outputs[0].shape[0], list(outputs[1:end]), list(outputs[end:])

    def batch_of(self, tensors):
        """Returns a batch in its structure."""
        return tf.nest.pack_sequence_as(self._batch_spec, tensors, expand_composites=True)

    def put_together(self, shown: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns what some sets showed as one, on the ps."""
        count = len(shown)
        if count not in self._joins:

            def join(parts):
                return [tf.concat(each, axis=0) for each in zip(*parts, strict=True)]

            with tf.device(_FIRST_PS):
                self._joins[count] = tf.function(join, autograph=False).get_concrete_function(
                    [self._shown_specs] * count
                )
        with tf.device(_FIRST_PS):
            return list(self._joins[count]([list(each) for each in shown]))
