"""What runs on a worker to make a set?

One traced function, which reads variables from the ps; where sets of a round depend on each other, two of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.data import batches
from tfdist_ext.ps import BoundedStaleness
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import losses, round_exchange
from tfdist_ext.training.gradient_set import SetLayout
from tfdist_ext.training.lost_gradients import check_none_lost
from tfdist_ext.training.pulled import Pulled, PulledScope, PullPlan
from tfdist_ext.training.recorder import watching_results
from tfdist_ext.training.set_recorder import SetRecorder


@dataclasses.dataclass
class _Run:
    """What one run of the step left behind, while it is traced."""

    frame: Any
    recorder: SetRecorder
    scope: PulledScope
    pulled: Pulled
    logs: Any
    rows: Any
    backups: list


class SetComputation:
    """The functions of one step that run on workers, for training or for evaluation.

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
        verdict: `step_trial.Verdict` on a step of the user's own whose batches make a round, or None.
        argument_specs: Specs of what `step` takes besides the batch.
    """

    def __init__(
        self, strategy, step, batch_spec, variables, metrics=(), *, trains, pushes=False, caches=False,
        compensation=None, round_size=1, verdict=None, argument_specs=(),
    ):  # fmt: skip
        self._strategy, self._step, self._metrics = strategy, step, list(metrics)
        self._spec = batch_spec
        self._trains = trains
        self.pushes, self._caches = pushes, caches
        self._compensation = compensation
        self._round_size, self._verdict = round_size, verdict
        # Once traced, where sets of a round depend on each other.
        self.halves: Any = None  # `round_exchange.Halves`.
        self._needs: str | None = None
        self._other_metrics: list[str] = []
        self._producer: Any = None  # What the wires are outputs of.
        self._fixed_share: float | None = None
        self.layout: Any = None  # `SetLayout`, once traced.
        self.pulled: Any = None  # `Pulled`, once traced.
        self.uses_draw = False
        self._applications: list = []
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
    def of_function(cls, strategy, step, batch_spec, **options) -> Any:
        """Returns what runs a custom loop's step, whose variables are found by tracing it once."""
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
        if self.halves is not None:
            return self.halves.first_next
        if self._from_iterator is None:
            spec = tf.data.IteratorSpec(self._spec)

            def compute(iterator, cached, draw, arguments):
                return self._compute(iterator.get_next(), cached, draw, arguments)

            self._from_iterator = self._traced(compute, spec)
        return self._from_iterator

    @property
    def compute_batch(self):
        """`(batch, cached, draw, arguments) -> [rows, *wires]` for a batch that the chief sends; traced then."""
        if self.halves is not None:
            return self.halves.first_batch
        if self._from_batch is None:
            self._from_batch = self._traced(self._compute, self._spec)
        return self._from_batch

    def _traced(self, compute, spec):
        others = self._cached_specs, self._draw_spec, self._argument_specs
        concrete = tf.function(compute, autograph=False).get_concrete_function(spec, *others)
        applications, self._applications = self._applications, []
        check_none_lost(applications, self._step_on, self._spec, self._argument_specs)
        self._producer = concrete
        if not self._is_halved():
            return concrete
        self.layout, self.pushes = None, True
        is_whole = round_exchange.needs_whole_batch(self._verdict)
        self.halves = round_exchange.Halves(
            self._show_batch if is_whole else self._show,
            self._compute_whole if is_whole else self._compute_again,
            self._spec, others, is_whole,
        )  # fmt: skip
        self._producer = self.halves.second
        return self.halves.first_next if isinstance(spec, tf.data.IteratorSpec) else self.halves.first_batch

    def _is_halved(self) -> bool:
        needs = self._needs is not None
        if self._round_size == 1 or self._strategy.update_policy.max_staleness == 0:
            return needs or bool(self._other_metrics)
        if needs:
            raise NotImplementedError(
                f"{self._needs} no mean and no sum over the rows of a batch (or a mixture of them), so that each set "
                "of a step of `Synchronous` depends on the rows of the others. That needs sets of the present version: "
                "use `max_staleness=0`, or a policy that applies one batch at a time, as `BoundedStaleness`."
            )
        if self._other_metrics:
            logging.warning(
                "The metrics %s are no mean and no sum over the rows of a batch: with `max_staleness` the mean over "
                "the batches of a step is shown.",
                self._other_metrics,
            )
        return False

    def trace(self, fed_by_chief: bool) -> None:
        """Traces compute on this thread, before workers' threads call it: Keras traces on one thread only."""
        _ = self.compute_batch if fed_by_chief else self.compute_next

    def _compute(self, data, cached, draw, arguments):
        run = self._run(data, cached, draw, arguments)
        if self._round_size > 1:
            self._needs = round_exchange.what_needs_others(run.frame, self._verdict)
            self._other_metrics = run.frame.other_metrics
            self._fixed_share = 1 / self._round_size if losses.are_all_sums(run.frame) else None
            if self._fixed_share is None and self._verdict is not None and self._verdict.is_all_sums:
                self._fixed_share = 1.0
        return self._packed(run)

    def _show(self, data, cached, draw, arguments):
        told = round_exchange.Showing()
        return self._run(data, cached, draw, arguments, told).rows, told.shown

    def _show_batch(self, data, cached, draw, arguments):
        leaves = round_exchange.dense_leaves(data)
        return batches.num_rows(leaves), leaves

    def _compute_again(self, data, cached, draw, arguments, shown, slot):
        rows_of_sets, *shown = shown
        told = round_exchange.Shown(shown, rows_of_sets, slot)
        self._fixed_share = 1.0
        return self._packed(self._run(data, cached, draw, arguments, told))

    def _compute_whole(self, data, cached, draw, arguments, shown, slot):
        self._fixed_share = None
        whole = round_exchange.with_leaves(data, shown[1:])
        return self._packed(self._run(whole, cached, draw, arguments))

    def _run(self, data, cached, draw, arguments, told=None) -> _Run:
        wires = cached if self._caches else self.plan.read_on_ps()
        backups = list(wires)
        pulled = Pulled(self.plan, wires, tf.compat.v1.get_default_graph())
        recorder = SetRecorder(self._trains and _is_sequential(self._strategy.update_policy))
        frame = frames.Frame(
            None, 0, 1, recorder=recorder, draw=draw, pulled=pulled, round_size=self._round_size
        )
        rows = batches.num_rows([leaf for leaf in keras.tree.flatten(data) if not _is_optional(leaf)])
        frame.verdict = self._verdict
        if told is not None:
            told.place(frame, rows)
        scope = PulledScope(pulled, recorder.check_access)
        with (
            watching_results(self._metrics),
            frames.entered(frame),
            scope,
            compat.tracing_inner_functions_anew(),
        ):
            logs = self._step_on(data, arguments)
        self._applications = recorder.applications
        return _Run(frame, recorder, scope, pulled, logs, rows, backups)

    def _packed(self, run: _Run):
        recorder, pulled = run.recorder, run.pulled
        if self._trains and not recorder.applications:
            logging.warning(
                "The training step applies no gradients: steps are counted, and nothing is trained."
            )
        weight = losses.weight_of_set(run.frame, run.rows)
        ways = {} if self._verdict is None else dict(self._verdict.updates)
        ways.update(run.frame.ways)
        by_rows = losses.has_own_weight(run.frame) and "of rows" in ways.values()
        rows = tf.cast(run.rows, tf.float64) if by_rows else None
        layout = SetLayout(
            recorder, run.scope, pulled, run.logs, weight, self._strategy.wire_dtype, ways, rows
        )
        self.uses_draw = self.uses_draw or run.frame.drew
        if self.layout is None:
            self.layout, self.pulled = layout, pulled
        outputs = layout.pack(run.rows)
        if self.pushes:
            outputs = on_their_ps(layout.packing.groups, outputs)
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
            kept = [] if self._caches else on_their_ps(self.plan.packing.groups, run.backups)
        return [*counts, *outputs, *kept]

    def _step_on(self, data, arguments):
        return self._step(keras.tree.map_structure(none_for_optional, data), *arguments)

    def divide(self, outputs):
        """Returns what compute gave: the tensors whose shapes are counts, the wires, and what the ps keep."""
        wires = self.num_counts + self.num_wires
        return outputs[: self.num_counts], list(outputs[self.num_counts : wires]), list(outputs[wires:])


def on_their_ps(groups, wires) -> list:
    """Returns packed tensors, each on the ps of its group."""
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
