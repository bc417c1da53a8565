"""How does a model predict on the rows of all replicas?"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.data import batches
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import building, computed, step_batches
from tfdist_ext.training.recorder import Recorder, RecordingScope


class PredictStep:
    """`model.predict_step` under a synchronous strategy; rows come back in the order of the input.

    What layers assign is committed once, as in training: a seed generator moves on.

    Args:
        model: Keras model.
    """

    def __init__(self, model):
        self.model = model

    def __call__(self, data):
        """Predicts on one replica alone."""
        return self.python_step(data)

    def python_step(self, data):
        """The model's own `predict_step`."""
        return self.model.predict_step(data)

    def run_distributed(self, strategy, args):
        """Returns the outputs of the global batch, on every worker."""
        (data,) = args
        extended = strategy.extended
        if strategy.num_replicas_in_sync == 1:
            return extended.call_for_each_replica(self.python_step, args=(data,))
        data, rows, may_be_empty = step_batches.as_slots(strategy, data)
        building.build_layers(self.model, strategy, tf.nest.map_structure(step_batches.spec_of_rows, data))
        structures: dict = {}
        plans: dict = {}
        per_replica = extended.call_for_each_replica(
            lambda batch: self._predict_on_replica(strategy, batch, rows, may_be_empty, structures, plans),
            args=(data,),
        )
        num_local = len(extended.worker_devices)
        flat = [[value] if num_local == 1 else list(value.values) for value in per_replica]
        num_outputs = len(tf.nest.flatten(structures[0]))
        gathered = extended.gather_slots(flat[:num_outputs])
        if plans:
            _commit(extended, plans[0], flat[num_outputs:])
        return tf.nest.pack_sequence_as(structures[0], gathered)

    def _predict_on_replica(self, strategy, data, rows, may_be_empty, structures, plans):
        local = tf.distribute.get_replica_context()._replica_id
        frame = strategy.frame_of_this_replica(rows)
        is_first = step_batches.is_first_with_rows(rows, frame.slot)
        specs: list = []

        def run(batch):
            recorder = Recorder(None, in_place=False)
            scope = RecordingScope(recorder, ())
            with frames.entered(frame), scope:
                outputs = self.python_step(batch)
            structures[local] = outputs
            flat = [
                leaf if isinstance(leaf, tf.RaggedTensor) else tf.convert_to_tensor(leaf)
                for leaf in tf.nest.flatten(outputs)
            ]
            specs[:] = [tf.type_spec_from_value(tensor) for tensor in flat]
            updates = []
            if scope.assigned:
                updates, plans[local] = computed.pack(
                    frame, is_first, recorder, scope, None, tf.zeros([], tf.int64)
                )
            return [*flat, *updates]

        if not may_be_empty:
            frame.has_rows = None
            return step_batches.listed(run(data))
        if tf.executing_eagerly():
            tensors = run(step_batches.rows_or_zeros(frame.has_rows, data))
            count = rows[frame.slot]
            return [tensor[:count] for tensor in tensors[: len(specs)]] + tensors[len(specs) :]
        has_rows, frame.has_rows = frame.has_rows, None

        def empty():
            updates = computed.zeros_of(plans[local]) if local in plans else []
            return [batches.empty_batch(spec) for spec in specs] + updates

        return step_batches.listed(
            tf.cond(has_rows, step_batches.in_this_name_scope(lambda: run(data)), empty)
        )


def _commit(extended, plan, per_replica) -> None:
    summed = extended.sum_step(per_replica, "prediction")

    def update(local):
        values = [value[local] for value in summed]
        for variable, value in computed.new_values(plan, values[: len(plan.updates)], values[-1][0]):
            variable.assign(value)

    extended.update_each_local_replica(update)
