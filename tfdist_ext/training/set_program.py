"""What runs on a worker to make a set, and on the ps to apply the sets of a step?

Each is one traced function. `compute` runs wholly on a worker and reads variables from the ps; `deliver` brings a
set to the ps; `commit` runs on the ps alone, where everything it needs has arrived, so that a worker's death cannot
leave it half done.
"""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.data import batches
from tfdist_ext.ps import BoundedStaleness
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import losses, own_apply, row_update, set_logs, set_scaling, set_sums
from tfdist_ext.training.gradient_set import FIRST_PS, SetLayout
from tfdist_ext.training.lost_gradients import check_none_lost
from tfdist_ext.training.pulled import Pulled, PulledScope, PullPlan, is_sharded
from tfdist_ext.training.recorder import watching_results
from tfdist_ext.training.set_recorder import SetRecorder


class SetProgram:
    """The traced functions of one step, for training or for evaluation.

    Args:
        strategy: `ParameterServerStrategy`.
        step: Function of a batch that returns logs: `model.train_step`, `model.test_step` or a user's own.
        batch_spec: Structure of specs of one batch.
        variables: Keras variables that `step` may read; small ones are pulled packed.
        metrics: Keras metrics whose results may be among the logs.
        trains: Whether `step` applies gradients.
        pushes: True when compute itself brings the set to the ps, because it will be admitted in any case.
        caches: True when workers compute on variables that they fetched before.
        compensation: `DelayCompensation`, or None.
        round_size: Sets of a step.
        sums: True where the losses of the step are sums over rows that no Keras loss computes.
        argument_specs: Specs of what `step` takes besides the batch.
    """

    def __init__(
        self, strategy, step, batch_spec, variables, metrics=(), *, trains, pushes=False, caches=False,
        compensation=None, round_size=1, sums=False, argument_specs=(),
    ):  # fmt: skip
        self._strategy, self._step, self._metrics = strategy, step, list(metrics)
        self._spec = batch_spec
        self._trains = trains
        self.pushes, self._caches = pushes, caches
        self._compensation = compensation
        self._round_size, self._sums = round_size, sums
        self._fixed_share: float | None = None
        self.layout: Any = None  # `SetLayout`, once traced.
        self.pulled: Any = None  # `Pulled`, once traced.
        self.logs: Any = None  # `LogReading`, once `commit` is traced.
        self.uses_draw = False
        self._applications: list = []
        self._commits: dict = {}
        self._means: dict = {}
        self._deliver = self._join = None
        self.plan = PullPlan(variables, strategy.wire_dtype)
        self.fetch: Any = None
        if caches:
            self.fetch = tf.function(self._fetch, autograph=False).get_concrete_function()
        copies = self.fetch.outputs[: len(self.plan.packing.groups)] if caches else []
        self._cached_specs = [tf.TensorSpec(copy.shape, copy.dtype) for copy in copies]
        self._draw_spec = tf.TensorSpec([], tf.int64)
        self._argument_specs = list(argument_specs)
        self._from_iterator: Any = None
        self._from_batch: Any = None

    @classmethod
    def of_function(cls, strategy, step, batch_spec, **options) -> SetProgram:
        """Returns the program of a custom loop's step, whose variables are found by tracing it once."""
        scout = cls(
            strategy, step, batch_spec, (), trains=True, argument_specs=options.get("argument_specs", ())
        )
        scout.trace(fed_by_chief=False)
        found = [*scout.pulled.large_read, *(rows.variable for rows in scout.pulled.touched)]
        return cls(strategy, step, batch_spec, found, trains=True, **options)

    def _fetch(self):
        """Returns copies of the variables on the worker, and where delays are compensated those that stay on the ps."""
        on_ps = self.plan.read_on_ps()
        return [tf.identity(wire) for wire in on_ps] + (on_ps if self._compensation is not None else [])

    # --- compute: on a worker ------------------------------------------------------------------------------------
    @property
    def compute_next(self):
        """`(iterator, cached, draw, arguments) -> [rows, *wires]`, traced at first use, for the worker."""
        if self._from_iterator is None:
            spec = tf.data.IteratorSpec(self._spec)

            def compute(iterator, cached, draw, arguments):
                return self._compute(iterator.get_next(), cached, draw, arguments)

            self._from_iterator = self._traced(compute, spec)
        return self._from_iterator

    @property
    def compute_batch(self):
        """`(batch, cached, draw, arguments) -> [rows, *wires]` for a batch that the chief sends; traced then."""
        if self._from_batch is None:
            self._from_batch = self._traced(self._compute, self._spec)
        return self._from_batch

    def _traced(self, compute, spec):
        concrete = tf.function(compute, autograph=False).get_concrete_function(
            spec, self._cached_specs, self._draw_spec, self._argument_specs
        )
        applications, self._applications = self._applications, []
        check_none_lost(applications, self._step_on, self._spec, self._argument_specs)
        return concrete

    def trace(self, fed_by_chief: bool) -> None:
        """Traces compute on this thread, before workers' threads call it: Keras traces on one thread only."""
        _ = self.compute_batch if fed_by_chief else self.compute_next

    def _compute(self, data, cached, draw, arguments):
        wires = cached if self._caches else self.plan.read_on_ps()
        backups = list(wires)
        pulled = Pulled(self.plan, wires, tf.compat.v1.get_default_graph())
        recorder = SetRecorder(self._trains and _is_sequential(self._strategy.update_policy))
        frame = frames.Frame(
            None, 0, 1, recorder=recorder, draw=draw, pulled=pulled, round_size=self._round_size
        )
        scope = PulledScope(pulled, recorder.check_access)
        rows = batches.num_rows([leaf for leaf in keras.tree.flatten(data) if not _is_optional(leaf)])
        with (
            watching_results(self._metrics),
            frames.entered(frame),
            scope,
            compat.tracing_inner_functions_anew(),
        ):
            logs = self._step_on(data, arguments)
        self._applications = recorder.applications
        if self._trains and not recorder.applications:
            logging.warning(
                "The training step applies no gradients: steps are counted, and nothing is trained."
            )
        weight = losses.weight_of_set(frame, rows)
        if self._round_size > 1 and losses.are_all_sums(frame):
            self._fixed_share = 1 / self._round_size
        elif self._sums:
            self._fixed_share = 1.0
        layout = SetLayout(recorder, scope, pulled, logs, weight, self._strategy.wire_dtype)
        self.uses_draw = self.uses_draw or frame.drew
        if self.layout is None:
            self.layout, self.pulled = layout, pulled
        outputs = layout.pack(rows)
        if self.pushes:
            outputs = _on_their_ps(layout.packing.groups, outputs)
        # Shapes alone tell the chief how many rows of a table were pulled. Where they are those whose gradients are
        # pushed, nothing more need be returned.
        trained = {id(variable) for variable, _, _ in layout.row_widths}
        twice = len({id(t.variable) for t in pulled.touched}) < len(pulled.touched)
        self._counted = [t for t in pulled.touched if twice or id(t.variable) not in trained]
        counts = [t.count for t in self._counted]
        self.num_counts = len(counts)
        self.num_wires = len(outputs)
        kept = []
        if self._compensation is not None:
            kept = [] if self._caches else _on_their_ps(self.plan.packing.groups, backups)
        return [*counts, *outputs, *kept]

    def _step_on(self, data, arguments):
        return self._step(keras.tree.map_structure(none_for_optional, data), *arguments)

    def divide(self, outputs):
        """Returns what compute gave: the tensors whose shapes are counts, the wires, and what the ps keep."""
        wires = self.num_counts + self.num_wires
        return outputs[: self.num_counts], list(outputs[self.num_counts : wires]), list(outputs[wires:])

    @property
    def join(self):
        """`(*wires, *wires) -> wires`: one set out of two of one worker and one base version, gradients summed."""
        if self._join is None:
            specs = self._wire_specs()

            def join(*wires):
                first, second = (
                    self.layout.unpack_here(w) for w in (wires[: len(specs)], wires[len(specs) :])
                )
                return self.layout.packing.pack(set_sums.joined(first, second))

            self._join = tf.function(join, autograph=False).get_concrete_function(*specs, *specs)
        return self._join

    def bytes_pulled(self, counts, wires) -> int:
        """Returns the bytes of the variables that one compute pulled, row numbers included."""
        dense = 0 if self._caches else self.plan.packing.num_bytes
        dense += sum(v.shape.num_elements() * v._value.dtype.size for v in self.pulled.large_read)
        counted = sum(
            count.shape[0] * (t.row_bytes + t.id_bytes)
            for count, t in zip(counts, self._counted, strict=True)
        )
        seen = {id(t.variable) for t in self._counted}
        tables = {id(t.variable) for t in self.pulled.touched} - seen
        pushed = sum(
            wires[position].shape[0] * width
            for variable, position, width in self.layout.row_widths
            if id(variable) in tables
        )
        return dense + counted + pushed

    def bytes_pushed(self, wires) -> int:
        """Returns the bytes of a set on its way to the ps, row numbers included."""
        rows = sum(wires[position].shape[0] * width for _, position, width in self.layout.row_widths)
        return self.layout.num_bytes + rows

    # --- deliver: from a worker to the ps --------------------------------------------------------------------------
    @property
    def deliver(self):
        """`(*wires) -> wires`, the same tensors on their ps."""
        if self._deliver is None:
            groups = self.layout.packing.groups

            def deliver(*wires):
                return _on_their_ps(groups, wires)

            self._deliver = tf.function(deliver, autograph=False).get_concrete_function(*self._wire_specs())
        return self._deliver

    def _wire_specs(self):
        concrete = self._from_iterator or self._from_batch
        start = self.num_counts
        outputs = concrete.outputs[start : start + self.num_wires]
        return [tf.TensorSpec(output.shape, output.dtype) for output in outputs]

    def _kept_specs(self):
        concrete = self._from_iterator or self._from_batch
        outputs = concrete.outputs[self.num_counts + self.num_wires :]
        if self._caches:
            outputs = self.fetch.outputs[len(self.plan.packing.groups) :]
        return [tf.TensorSpec(output.shape, output.dtype) for output in outputs]

    # --- commit: on the ps -------------------------------------------------------------------------------------------
    def commit(self, num_sets: int, is_fresh: bool, is_damped: bool):
        """Returns `(factor, sets) -> [numbers, *other logs]`, traced at first use.

        Args:
            num_sets: How many sets make the step.
            is_fresh: Whether all of them were computed on the present version.
            is_damped: Whether the learning rate is multiplied by `factor`.
        """
        key = (num_sets, is_fresh, is_damped)
        if key not in self._commits:
            self._version = self._strategy.version_variable()
            specs = [[*self._wire_specs(), *self._kept_specs()] for _ in range(num_sets)]
            factor = tf.TensorSpec([], tf.float32)

            def commit(factor, sets):
                return self._commit(factor if is_damped else None, sets, is_fresh)

            with tf.device(FIRST_PS):
                self._commits[key] = tf.function(commit, autograph=False).get_concrete_function(factor, specs)
        return self._commits[key]

    def note_commit(self) -> None:
        """Counts a commit that has succeeded."""
        self._strategy.num_steps_applied += 1

    def was_committed(self) -> bool:
        """Returns True where a call of `commit` did its work though it raised, or was interrupted."""
        return bool(self._commits) and int(self._version.read_value()) > self._strategy.num_steps_applied

    def _commit(self, factor, sets, is_fresh):
        # All of it is on the ps already: what was admitted was delivered before, so that no worker takes part here.
        with tf.device(FIRST_PS):
            wires = [self._pinned(tensors) for tensors in sets]
            received = [self.layout.unpack(tensors[: self.num_wires]) for tensors in wires]
            kept = [tensors[self.num_wires :] for tensors in wires]
            by_weight = set_sums.shares_of(received)
            shares = set_sums.shares_of(received, self._fixed_share) if self._fixed_share else by_weight
            updated = set_sums.new_values(self.layout, received, by_weight, is_fresh)
            logs = set_sums.draw_logs(self.layout, received, shares, updated)
            self.logs = set_logs.LogReading(logs)
            outputs, self.logs.outputs = self.logs.outputs, []
            for application in range(len(self.layout.applications)):
                self._apply(application, received, shares, factor, kept, is_fresh)
            for variable, value in updated:
                variable.assign(value)
            if self._trains:
                self._version.assign_add(1)
            return outputs

    def _pinned(self, tensors):
        groups = self.layout.packing.groups
        wires = _on_their_ps(groups, tensors[: self.num_wires])
        kept = tensors[self.num_wires :]
        return wires + (_on_their_ps(self.plan.packing.groups, kept) if kept else [])

    def _apply(self, application, received, shares, factor, kept, is_fresh):
        _, variables = self.layout.applications[application]
        parts, whole = {}, []
        for index in range(len(variables)):
            per_shard = set_sums.sum_gradients(received, shares, application, index)
            gradient = set_sums.sharded_whole(per_shard)
            parts[id(gradient)] = per_shard
            whole.append(gradient)
        if self._compensation is not None and not is_fresh:
            whole = self._compensation.compensate(whole, variables, self.plan, kept, self._means)

        def gradients_of(variable, gradient):
            known = parts.get(id(gradient))
            return known if known is not None else set_sums.split_whole(variable, gradient)

        by_parts = any(
            is_sharded(v) or isinstance(g, tf.IndexedSlices) for g, v in zip(whole, variables, strict=True)
        )
        call = self.layout.calls[application]
        scales = [one.scale(application) for one in received]
        with contextlib.ExitStack() as stack:
            for part in own_apply.parts_of(call.optimizer):
                row_update.check_can_shard(part, variables)
                if by_parts:
                    stack.enter_context(row_update.updating_shards_and_rows(part, gradients_of))
                stack.enter_context(row_update.scaled_learning_rate(part, factor))
            stack.enter_context(self._strategy.extended.applying())
            scale = None if scales[0] is None else tf.reduce_max(tf.stack(scales))
            set_scaling.apply_unscaled(call, whole, variables, scale)


def _on_their_ps(groups, wires) -> list:
    placed = []
    for group, wire in zip(groups, wires, strict=True):
        with tf.device(group.device):
            placed.append(tf.identity(wire))
    return placed


def _is_sequential(policy) -> bool:
    return isinstance(policy, BoundedStaleness) and policy.clock == "version" and policy.max_staleness == 0


def none_for_optional(leaf):
    """Returns None for an empty optional, Keras' way to put None into a dataset, and other leaves as they are."""
    return None if _is_optional(leaf) else leaf


def _is_optional(leaf) -> bool:
    return isinstance(leaf, tf.experimental.Optional)
