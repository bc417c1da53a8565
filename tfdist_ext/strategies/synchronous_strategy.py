"""What do `run` and `reduce` of the two synchronous strategies do?"""

from __future__ import annotations

import contextlib
import datetime
import re
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tfdist_ext import compat, errors
from tfdist_ext.cluster import environment
from tfdist_ext.data import slot_values
from tfdist_ext.strategies import frame as frames

# TensorFlow names it in the errors of an input pipeline.
_INPUT_OPERATION = "IteratorGetNext"

_NODE = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_CAUSE = re.compile(r"^\w*(Error|Exception|Interrupt)\w*: ")


def _cause_in(message: str) -> str:
    """Returns the line of a TensorFlow message that says what went wrong."""
    lines = [_NODE.sub("", line).strip() for line in message.split("\n")]
    told = [line for line in lines if line and not line.startswith("Graph execution error")]
    return next((line for line in told if _CAUSE.match(line)), told[0] if told else "unknown")


# A type checker sees the mixin on top of what it is mixed into.
_Strategy: Any = tf.distribute.Strategy if TYPE_CHECKING else object


class SynchronousStrategy(_Strategy):
    """Mixin of the public strategies: `run`, `reduce` and failures."""

    def run(self, fn, args=(), kwargs=None, options=None):
        """Runs `fn` on each local replica; see `tf.distribute.Strategy.run`.

        A Keras loss that `fn` computes on a batch of this strategy is weighted by the replica's rows, and
        `optimizer.apply_gradients` applies the sum over all replicas once.

        Runs on: every worker.

        Args:
            fn: Function of one replica's values.
            args: Positional arguments; distributed values are replaced by the replica's own.
            kwargs: Keyword arguments, likewise.
            options: A `tf.distribute.RunOptions`; ignored, as in TensorFlow's mirrored strategies.

        Returns:
            The replicas' results, merged as `tf.distribute.Strategy.run` does.
        """
        self._check_batches(args, kwargs)
        self._warn_of_a_late_tf_config()
        with self.translating_failures():
            if hasattr(fn, "run_distributed"):
                with self.scope():
                    return fn.run_distributed(self, args)
            if self.num_replicas_in_sync == 1:
                return self._run_plain(fn, args, kwargs, options)
            if isinstance(fn, tf.types.experimental.PolymorphicFunction):
                return self._traced(fn)(*args, **(kwargs or {}))
            rows = slot_values.rows_of(args, kwargs)
            return self._run_plain(self._with_frame(fn, rows), args, kwargs, options)

    _made_without_tf_config: datetime.datetime | None = None

    def note_that_it_was_made_alone(self) -> None:
        """Remembers when this strategy was made, if TF_CONFIG was unset then."""
        if environment.tf_config() is None:
            self._made_without_tf_config = datetime.datetime.now()

    def _warn_of_a_late_tf_config(self) -> None:
        if self._made_without_tf_config is None or environment.tf_config() is None:
            return
        logging.warning(
            "TF_CONFIG is set now, at the first step at %s, but was unset when this %s was made at %s: it trains "
            "alone, and every task would train a model of its own. Set TF_CONFIG before the strategy is made.",
            f"{datetime.datetime.now():%H:%M:%S}", type(self).__name__, f"{self._made_without_tf_config:%H:%M:%S}",
        )  # fmt: skip
        self._made_without_tf_config = None

    def _check_batches(self, *structures) -> None:
        """Refuses values that were distributed over other replicas than this strategy's: some would be lost."""
        num_local = len(self.extended.worker_devices)
        for leaf in tf.nest.flatten(structures):
            if not isinstance(leaf, compat.PerReplica):
                continue
            slots = leaf.rows.shape[0] if isinstance(leaf, slot_values.PerSlot) else self.num_replicas_in_sync
            if len(leaf.values) != num_local or slots not in (None, self.num_replicas_in_sync):
                raise ValueError(
                    f"A value given to `strategy.run` is distributed over {slots} replicas ({len(leaf.values)} of this "
                    f"process), and the strategy has {self.num_replicas_in_sync} ({num_local} of this process). Use "
                    "the strategy that distributed the dataset."
                )

    def reduce(self, reduce_op, value, axis):
        """Reduces what the replicas returned; see `tf.distribute.Strategy.reduce`.

        Runs on: every worker.

        Args:
            reduce_op: A `tf.distribute.ReduceOp`, or its name.
            value: What `run` returned, in any structure. A number or a tensor is this worker's value.
            axis: Axis to reduce along as well, or None.

        Returns:
            Structure of tensors, the same on every worker.

        Raises:
            TypeError: A value is no number.
            ValueError: The sum of something that is no replica's value is asked for.
        """
        if axis is None and tf.nest.is_nested(value):
            return tf.nest.map_structure(lambda leaf: self.reduce(reduce_op, leaf, axis), value)
        self._check_to_reduce(reduce_op, value)
        return super().reduce(reduce_op, value, axis)

    def _check_to_reduce(self, reduce_op, value) -> None:
        if isinstance(value, compat.DistributedValues) or self.num_replicas_in_sync == 1:
            return
        several_workers = self.extended.num_workers > 1
        if value is None or isinstance(value, (str, bytes)) or (several_workers and isinstance(value, bool)):
            raise TypeError(
                f"`strategy.reduce` takes what `strategy.run` returned, and numbers; received {value!r}."
            )
        if not several_workers and str(reduce_op).upper().endswith("SUM"):
            raise ValueError(
                f"`strategy.reduce(SUM, ...)` adds up the values of replicas; received {value!r}, which no replica "
                "returned. Return it from the function that `strategy.run` runs."
            )

    def _run_plain(self, fn, args, kwargs, options):
        return super().run(fn, args=args, kwargs=kwargs, options=options)

    def _traced(self, function):
        """Returns a tf.function that runs the Python function of `function` on each replica, traced once."""
        # Kept by the function: the clone refers to it, so that a table of the strategy would hold both for ever.
        traced = vars(function).setdefault("_tfdist_ext_traced", weakref.WeakKeyDictionary())
        if self not in traced:

            def run_in_graph(*args, **kwargs):
                return self.run(function.python_function, args, kwargs)

            traced[self] = compat.clone_function(function, run_in_graph)
        return traced[self]

    def _with_frame(self, fn, rows):
        converted = compat.convert_user_function(fn)

        @tf.autograph.experimental.do_not_convert
        def run_on_replica(*args, **kwargs):
            with frames.entered(self.frame_of_this_replica(rows)):
                return converted(*args, **kwargs)

        return run_on_replica

    def frame_of_this_replica(self, rows, **fields) -> frames.Frame:
        """Returns the frame of the replica whose context is active.

        Args:
            rows: int64 tensor `[num_slots]`, rows of every sub-batch, or None.
            **fields: Further fields of the frame.
        """
        context = tf.distribute.get_replica_context()
        slot = self.extended.slot_of_local_replica(context._replica_id)
        frame = frames.Frame(self, slot, self.num_replicas_in_sync, **fields)
        if rows is not None:
            own, total = tf.cast(rows[slot], tf.float64), tf.cast(tf.reduce_sum(rows), tf.float64)
            frame.share = tf.math.divide_no_nan(own, total)
            frame.rows, frame.num_rows, frame.has_rows = rows, rows[slot], rows[slot] > 0
        return frame

    _noted_failure: errors.TfdistError | None = None

    @property
    def last_failure(self) -> errors.TfdistError | None:
        """The typed error behind the latest `tf.errors.UnknownError` of a tf.function, or None."""
        group = self.extended.process_group
        return self._noted_failure or (group.last_failure if group is not None else None)

    def note_failure(self, error: BaseException) -> None:
        """Keeps a typed error that is about to pass through a TensorFlow runtime, which forgets the type."""
        if isinstance(error, errors.TfdistError):
            self._noted_failure = error

    @contextlib.contextmanager
    def translating_failures(self):
        """Turns what TensorFlow makes of an exception in a host function back into that exception.

        An error of the user's own stays what it is, whatever went wrong before.
        """
        before = self._known_failures()
        try:
            yield
        except tf.errors.OpError as error:
            if isinstance(error, tf.errors.OutOfRangeError):
                raise
            for failure in self._known_failures():
                told = type(failure).__name__ in error.message and str(failure)[:200] in error.message
                if told or (isinstance(error, tf.errors.UnknownError) and failure not in before):
                    raise failure from error
            if _INPUT_OPERATION in error.message and self.extended.process_group is not None:
                self.extended.process_group.abandon_all("input/", _cause_in(error.message))
            raise

    def _known_failures(self) -> list[errors.TfdistError]:
        group = self.extended.process_group
        failures = [self._noted_failure, group.last_failure if group is not None else None]
        return [failure for failure in failures if failure is not None]
