"""What is one step? Compute on each replica, aggregate, apply once.

`TrainStep` and `TestStep` are the functions that Keras hands to `strategy.run`; the strategy sees their
`run_distributed` and leaves the step to them.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfdist_ext.data import slot_values
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import computed, optimizers, random_ops, step_batches, step_trial, step_verdict
from tfdist_ext.training.recorder import NeedsInPlace, Recorder, RecordingScope, watching_results


class MetricsWereMade(Exception):  # noqa: N818 - a signal between two traces, not an error
    """Metrics of the model got their variables on the way: their results were not watched."""


class _Step:
    """One step of a Keras model under a synchronous strategy.

    Modes, tried in this order, the choice kept for later traces:
        guarded   a replica without rows skips the model (a branch of the graph)
        masked    every replica runs the model, an empty one on a row of zeros whose results are masked;
                  for models that communicate in their forward pass
        in place  masked, and gradients are summed and applied inside the step
    """

    def __init__(self, model):
        self.model = model
        self._masked = False
        self._in_place = False
        self._reported = False
        self._verdict: Any = None

    def __call__(self, data):
        return self.python_step(data)

    _name = "step"
    _method = ""

    def python_step(self, data):
        """The model's own step."""
        raise NotImplementedError

    @property
    def _optimizer(self):
        return None

    def run_distributed(self, strategy, args):
        """Runs the step on every local replica and returns the logs of the global batch.

        Args:
            strategy: The strategy.
            args: Tuple of the batch.

        Returns:
            Structure of tensors, the same on every worker.
        """
        (data,) = args
        if strategy.num_replicas_in_sync == 1:
            return strategy.extended.call_for_each_replica(self._run_alone, args=(strategy, data))
        data, rows, may_be_empty = step_batches.as_slots(strategy, data)
        if self._verdict is None:
            self._verdict = self._tried(strategy, data)
        if self._verdict.needs_whole_batch:
            data, rows, may_be_empty = step_batches.all_on_the_first(strategy, data, rows)
        per_replica, plan = self._compute(strategy, data, rows, may_be_empty)
        self._report_uncovered_randomness()
        loss_scale = functools.partial(optimizers.loss_scale_of, self._optimizer)
        summed = strategy.extended.sum_step(per_replica, self._name, plan.gradient_variables, loss_scale)
        checks = []
        if strategy.extended.num_workers > 1:
            checks = computed.check_rows(summed[-1][0], tf.reduce_sum(rows), slot_values.digest_of(data))
        with tf.control_dependencies(checks):
            return self._apply(strategy, plan, summed)

    def _run_alone(self, strategy, data):
        with frames.entered(strategy.frame_of_this_replica(None)):
            return self.python_step(data)

    def _tried(self, strategy, data):
        if not step_trial.is_users_own(self.model, self._method):
            return step_verdict.Verdict()
        specs = tf.nest.map_structure(step_batches.spec_of_rows, data)
        return step_trial.verdict_of(strategy, self.model, self.python_step, specs)

    # --- compute ------------------------------------------------------------------------------------------------
    def _compute(self, strategy, data, rows, may_be_empty):
        while True:
            try:
                return self._compute_once(strategy, data, rows, may_be_empty)
            except frames.ForwardCollective:
                self._masked = True
            except MetricsWereMade:
                continue
            except NeedsInPlace as reason:
                self._masked = self._in_place = True
                logging.info(
                    "`%s` of model `%s` is applied in place because %s. Results are the same; nothing overlaps.",
                    "train_step",
                    self.model.name,
                    reason,
                )

    def _compute_once(self, strategy, data, rows, may_be_empty):
        plans: dict = {}
        metrics = self.model.metrics
        digest = slot_values.digest_of(data)
        with watching_results(metrics):
            per_replica = strategy.extended.call_for_each_replica(
                lambda batch: self._compute_on_replica(strategy, batch, rows, digest, may_be_empty, plans),
                args=(data,),
            )
        if len(self.model.metrics) != len(metrics):
            raise MetricsWereMade()
        num_local = len(strategy.extended.worker_devices)
        values = [
            [tensor] if num_local == 1 else list(tensor.values)
            for tensor in (per_replica if isinstance(per_replica, (list, tuple)) else [per_replica])
        ]
        return values, plans[0]

    def _compute_on_replica(self, strategy, data, rows, digest, may_be_empty, plans):
        local = tf.distribute.get_replica_context()._replica_id
        frame = strategy.frame_of_this_replica(rows)
        is_first = step_batches.is_first_with_rows(rows, frame.slot)
        if not may_be_empty:
            frame.has_rows = None

        def run(batch, guarded):
            frame.guarded = guarded
            frame.recorder, frame.weights = Recorder(self._optimizer, self._in_place), []
            frame.verdict, frame.num_applications, frame.num_scalars = self._verdict, 0, 0
            scope = RecordingScope(frame.recorder, self._deferred_variables())
            with frames.entered(frame), scope:
                logs = self.python_step(batch)
            generators = random_ops.generators_of(self.model)
            tensors, plans[local] = computed.pack(
                frame, is_first, frame.recorder, scope, logs, digest, generators
            )
            return tensors

        if not may_be_empty:
            return step_batches.listed(run(data, guarded=False))
        if self._masked or tf.executing_eagerly():
            batch = step_batches.rows_or_zeros(frame.has_rows, data)
            return step_batches.listed(_mask_sparse(frame, run(batch, guarded=False)))
        has_rows, frame.has_rows = frame.has_rows, None
        try:
            with_rows = step_batches.in_this_name_scope(lambda: run(data, guarded=True))
            return step_batches.listed(tf.cond(has_rows, with_rows, lambda: computed.zeros_of(plans[local])))
        except ValueError as error:
            if "is not known before the step runs" not in str(error):
                raise
            raise frames.ForwardCollective() from None

    def _deferred_variables(self):
        optimizer = self._optimizer
        if optimizer is None:
            return ()
        return (*self.model.trainable_variables, *optimizer.variables)

    def _report_uncovered_randomness(self):
        if self._reported or tf.executing_eagerly():
            return
        self._reported = True
        random_ops.report_stateful(tf.compat.v1.get_default_graph(), self.model.name)

    # --- apply --------------------------------------------------------------------------------------------------
    def _apply(self, strategy, plan, summed):
        gradients = summed[: plan.num_gradients]
        updates = summed[plan.num_gradients : plan.num_gradients + len(plan.updates)]
        logs = summed[plan.num_gradients + len(plan.updates) : -1]

        def update(local):
            assignments = computed.new_values(
                plan, [values[local] for values in updates], summed[-1][local][0]
            )
            if gradients:
                optimizers.apply(
                    self._optimizer, [g[local] for g in gradients], plan.gradient_variables, plan.method
                )
            drawn = None
            if local == 0:
                updated = [pair for pair in assignments if isinstance(pair[0], keras.Variable)]
                with keras.StatelessScope(state_mapping=updated, initialize_variables=False):
                    drawn = computed.draw_logs(
                        plan, [values[0] for values in logs], lambda metric: metric.result()
                    )
            for variable, value in assignments:
                variable.assign(value)
            return drawn

        return strategy.extended.update_each_local_replica(update)[0]


class TrainStep(_Step):
    """`model.train_step` under a synchronous strategy."""

    _name = "gradients"
    _method = "train_step"

    def python_step(self, data):
        """The model's own `train_step`."""
        return self.model.train_step(data)

    @property
    def _optimizer(self):
        return self.model.optimizer


class TestStep(_Step):
    """`model.test_step` under a synchronous strategy."""

    __test__ = False  # Not a test class, whatever pytest thinks of its name.
    _name = "evaluation"
    _method = "test_step"

    def python_step(self, data):
        """The model's own `test_step`."""
        return self.model.test_step(data)


def _mask_sparse(frame, tensors):
    return [frame.mask(t) if isinstance(t, tf.IndexedSlices) else t for t in tensors]
