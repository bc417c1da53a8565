"""What brings sets to the ps, and applies those of a step there?

Each is one traced function. `compute` runs wholly on a worker and reads variables from the ps; `deliver` brings a
set to the ps; `commit` runs on the ps alone, where everything it needs has arrived, so that a worker's death cannot
leave it half done.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from tfdist_ext.training import own_apply, row_update, set_logs, set_scaling, set_sums
from tfdist_ext.training.gradient_set import FIRST_PS
from tfdist_ext.training.pulled import is_sharded
from tfdist_ext.training.set_computation import SetComputation, on_their_ps


class SetProgram(SetComputation):
    """The traced functions of one step, for training or for evaluation; see `SetComputation`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logs: Any = None  # `LogReading`, once `commit` is traced.
        self._commits: dict = {}
        self._means: dict = {}
        self._deliver = self._join = None

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

    @property
    def bytes_pulled_for_first_half(self) -> int:
        """Returns the bytes of the variables that a first half pulls, without the rows of tables."""
        return 0 if self._caches else self.plan.packing.num_bytes

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
                return on_their_ps(groups, wires)

            self._deliver = tf.function(deliver, autograph=False).get_concrete_function(*self._wire_specs())
        return self._deliver

    def _wire_specs(self):
        start = self.num_counts
        outputs = self._producer.outputs[start : start + self.num_wires]
        return [tf.TensorSpec(output.shape, output.dtype) for output in outputs]

    def _kept_specs(self):
        outputs = self._producer.outputs[self.num_counts + self.num_wires :]
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
            updated = set_sums.new_values(self.layout, received, by_weight, shares, is_fresh)
            halved = self.halves is not None
            logs = set_sums.draw_logs(self.layout, received, by_weight if halved else shares, updated)
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
        wires = on_their_ps(groups, tensors[: self.num_wires])
        kept = tensors[self.num_wires :]
        return wires + (on_their_ps(self.plan.packing.groups, kept) if kept else [])

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
