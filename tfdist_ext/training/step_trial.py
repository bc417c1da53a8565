"""Do the parts of a step that a user wrote add up over replicas as it is assumed?

What Keras itself computes is known. A `train_step`, a `compute_loss`, a layer or a metric of a user's own is tried
before it is traced: on two small random batches as two replicas would see them, and on both together as one device.
Gradients, assigned variables and numbers fed to means are compared, and each is from then on combined in the way that
gives the value of the whole. Nothing is applied or assigned; dropout is off and noise is the same for all rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import batch_functions
from tfdist_ext.training.batch_functions import Kind
from tfdist_ext.training.recorder import ResultNotes, watching_results
from tfdist_ext.training.step_verdict import ROWS, CannotTry, Verdict, compare, same, tolerance_of
from tfdist_ext.training.without_chance import trying


class CallsCollectives(CannotTry):
    """It gathers rows or sums over replicas by itself: it knows what it does."""


@dataclasses.dataclass
class Trial:
    """What one run of a trial sees of the other's rows, and what it leaves behind.

    Attributes:
        others: What the other part exchanged in an earlier run, in order; None in the first.
    """

    others: list | None = None
    is_first_part: bool = True
    exchanged: list = dataclasses.field(default_factory=list)
    applications: list = dataclasses.field(default_factory=list)
    scalars: list = dataclasses.field(default_factory=list)
    updates: dict = dataclasses.field(default_factory=dict)
    logs: list = dataclasses.field(default_factory=list)

    def exchange(self, value):
        """Returns the values of both parts in their order; in the first run this part's own alone."""
        index = len(self.exchanged)
        self.exchanged.append(tf.stop_gradient(value))
        if self.others is None:
            return [value]
        other = self.others[index]
        return [value, other] if self.is_first_part else [other, value]

    def rows_of_all(self, packed):
        """Returns the rows of both parts."""
        return tf.concat(self.exchange(packed), axis=0)

    def total_of_all(self, number):
        """Returns the sum of the numbers of both parts."""
        return tf.add_n(self.exchange(number))

    def refuse(self, what: str):
        """Ends the trial, because of a collective."""
        raise CallsCollectives(what)


class _TrialRecorder(ResultNotes):
    in_place = False

    def __init__(self, trial: Trial):
        super().__init__()
        self._trial = trial

    def record_apply(self, frame, optimizer, gradients, variables, method="apply"):
        variables = list(optimizer._trainable_variables if variables is None else variables)
        own: dict = {}
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                own.update(_parts(id(variable), frames.weighted_by_share(frame, gradient)))
        self._trial.applications.append(own)


def _parts(key: int, gradient) -> dict:
    """Returns a gradient as arrays; of a table only the rows that were touched."""
    if not isinstance(gradient, tf.IndexedSlices):
        return {key: tf.convert_to_tensor(gradient).numpy()}
    rows, positions = np.unique(gradient.indices.numpy(), return_inverse=True)
    values = gradient.values.numpy()
    sums = np.zeros((len(rows), *values.shape[1:]), values.dtype)
    np.add.at(sums, positions, values)
    return {(key, int(row)): value for row, value in zip(rows, sums, strict=True)}


class _Dropped(keras.StatelessScope):
    """Keeps what the step assigns, and what it assigned it to; some variables have other values before."""

    def __init__(self, old_values: dict[int, tf.Tensor]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, Any] = {}
        self._old_values = old_values

    def add_update(self, update):
        variable, value = update
        self.assigned[id(variable)] = variable
        super().add_update((variable, tf.stop_gradient(value)))

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return self.old_value(variable) if value is None else value

    def old_value(self, variable):
        """Returns the value of a variable before the step."""
        return self._old_values.get(id(variable), variable._value)


def is_users_own(model, python_step_name: str) -> bool:
    """Returns True where a step of a model may do something to rows that Keras and this package do not know.

    A layer of the user's own does where it keeps a state or adds a loss; what else it computes is for Keras to sum up.
    """
    for name in (python_step_name, "compute_loss", "compute_metrics"):
        function = getattr(type(model), name, None)
        if function is not None and not _is_known(function.__module__):
            return True
    # Those given to `compile` are inside of one metric.
    metrics = [part for metric in model.metrics for part in (metric, *getattr(metric, "metrics", ()))]
    if any(not _is_known(type(metric).__module__) for metric in metrics):
        return True
    layers = [layer for layer in model._flatten_layers() if not _is_known(type(layer).__module__)]
    return any(_keeps_state(layer) or _mentions(type(layer), "add_loss") for layer in layers)


def _is_known(module: str) -> bool:
    return module.split(".")[0] in ("keras", "tfdist_ext")


def _keeps_state(layer) -> bool:
    return bool(layer._non_trainable_variables) or any(
        isinstance(value, tf.Variable) for value in vars(layer).values()
    )


def _mentions(kind: type, name: str) -> bool:
    """Returns True where a method of a class of the user's own uses an attribute of this name."""
    pending = [
        method.__code__
        for owner in kind.__mro__
        if not _is_known(owner.__module__)
        for method in vars(owner).values()
        if isinstance(method, types.FunctionType)
    ]
    while pending:
        code = pending.pop()
        if name in code.co_names:
            return True
        pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return False


def verdict_of(strategy, model, step, specs) -> Verdict:
    """Tries a step of a model on random rows.

    Runs on: every worker, before the step is traced; nothing is communicated.

    Args:
        strategy: The strategy.
        model: Built Keras model.
        step: Function of a batch.
        specs: Structure of the specs of a batch.

    Returns:
        The verdict; an empty one, with a warning, where the step cannot be tried.
    """
    try:
        return frames.outside_of_everything(lambda: _try(strategy, model, step, specs))
    except Exception as error:  # Whatever a user's step does with rows that make no sense to it.
        tell = logging.info if isinstance(error, CallsCollectives) else logging.warning
        tell(
            "The steps of model `%s` could not be tried on random rows (%s: %s). Its own losses are taken for means "
            "over the rows of a batch, and what its layers assign for the same on all rows.",
            model.name,
            type(error).__name__,
            str(error).split("\n")[0][:200],
        )
        return Verdict()


def _try(strategy, model, step, specs) -> Verdict:
    with strategy.scope(), compat.keeping_values(model), tf.summary.record_if(False):
        with _on_one_replica(strategy):
            num_metrics = len(model.metrics)
            verdict, together = _judged(strategy, model, step, specs)
            if len(model.metrics) != num_metrics:  # Made on the way, so that their results were not watched.
                verdict, together = _judged(strategy, model, step, specs)
    _tell(model, verdict, together)
    return verdict


@contextlib.contextmanager
def _on_one_replica(strategy):
    if strategy.num_replicas_in_sync == 1:  # Parameter servers: variables are read as they are.
        yield
        return
    context = compat.ReplicaContext(strategy, replica_id_in_sync_group=0)
    with context, tf.device(strategy.extended.worker_devices[0]):
        yield


def _judged(strategy, model, step, specs) -> tuple[Verdict, Trial]:
    generator = np.random.default_rng(11)
    parts = [_random_batch(generator, specs, rows) for rows in ROWS]
    whole = keras.tree.map_structure(_both, *parts)
    tolerance = tolerance_of({layer.compute_dtype for layer in model._flatten_layers()} - {None})

    old_values: dict[int, tf.Tensor] = {}

    def run(verdict=None) -> list[Trial]:
        def on(part, others):
            return _run(strategy, model, step, parts[part], part, others, verdict, old_values)

        runs = [on(part, None) for part in (0, 1)]
        return [on(part, runs[1 - part].exchanged) for part in (0, 1)] if runs[0].exchanged else runs

    together = _run(strategy, model, step, whole, None, None, None, old_values)
    old_values.update(_other_than_zero(together))
    if old_values:
        together = _run(strategy, model, step, whole, None, None, None, old_values)
    runs = run()
    verdict = compare(runs[0], runs[1], together, tolerance)
    if verdict.needs_whole_batch and not same(run()[0], runs[0]):
        raise CannotTry("it draws random numbers that no `keras.random.SeedGenerator` seeds")
    if Kind.SUM in verdict.scalars:
        # Metrics that are fed a sum are right once it is known to be one.
        one, other = run(verdict)
        verdict.updates = compare(one, other, together, tolerance).updates
    return verdict, together


def _other_than_zero(trial: Trial) -> dict[int, tf.Tensor]:
    """Returns other values for what is assigned and is zero: a sum of changes and one of values look alike there."""
    return {
        key: tf.fill(old.shape, tf.constant(3, old.dtype))
        for key, (variable, old, _) in trial.updates.items()
        if old.dtype.kind in "fiu" and not old.any() and variable.aggregation != "sum"
    }


def _random_batch(generator, specs, rows: int):
    def draw(spec):
        if not spec.shape.rank:
            raise CannotTry("a part of its batch has no rows")
        shape = tuple(spec.shape)
        if spec.dtype == tf.string:
            array = np.full([rows, *(length or 1 for length in shape[1:])], b"0")
        else:
            array = batch_functions.draw(generator, "fractions", shape, spec.dtype.as_numpy_dtype, rows)
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.sparse.from_dense(array)
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_tensor(array, ragged_rank=spec.ragged_rank).with_row_splits_dtype(
                spec.row_splits_dtype
            )
        return tf.constant(array)

    return keras.tree.map_structure(lambda spec: None if spec is None else draw(spec), specs)


def _both(one, other):
    if isinstance(one, tf.SparseTensor):
        return tf.sparse.concat(0, [one, other])
    return None if one is None else tf.concat([one, other], axis=0)


def _run(strategy, model, step, batch, part, others, verdict, old_values) -> Trial:
    trial = Trial(others, is_first_part=part == 0)
    total = sum(ROWS)
    rows = total if part is None else ROWS[part]
    num_slots = max(2, strategy.num_replicas_in_sync)
    frame = frames.Frame(
        strategy, part or 0, num_slots,
        share=tf.constant(rows / total, tf.float64), num_rows=tf.constant(rows, tf.int64),
        rows=tf.constant([*ROWS, *[0] * (num_slots - 2)], tf.int64),
        is_whole=part is None, recorder=_TrialRecorder(trial), trial=trial, verdict=verdict,
    )  # fmt: skip
    scope = _Dropped(old_values)
    with watching_results(model.metrics), frames.entered(frame), scope, trying():
        logs = step(batch)
    for key, variable in scope.assigned.items():
        old, new = scope.old_value(variable), scope.state_mapping[key]
        trial.updates[key] = (variable, np.asarray(old), np.asarray(new))
    known = frame.recorder.results
    trial.logs = [
        np.asarray(leaf) for leaf in tf.nest.flatten(logs) if tf.is_tensor(leaf) and id(leaf) not in known
    ]
    return trial


def _tell(model, verdict: Verdict, together: Trial) -> None:
    if verdict.needs_whole_batch:
        logging.warning(
            "A loss or a result of model `%s` is no mean and no sum over the rows of a batch, and no Keras loss: one "
            "replica computes the whole batch while the others wait. Results are those of one device. A loss given to "
            "`compile` is distributed whatever it is.",
            model.name,
        )
        return
    strange = [v.path for key, (v, *_) in together.updates.items() if verdict.updates.get(key) == "neither"]
    if strange:
        logging.warning(
            "What model `%s` assigns to %s is no mean, no sum and not the same on all rows: it is combined as if it "
            "were the first of these.",
            model.name,
            ", ".join(f"`{path}`" for path in strange),
        )
    numbers = sum(kind is Kind.NEITHER for kind in [*verdict.scalars, *verdict.logs])
    if numbers:
        logging.warning(
            "%d number(s) that steps of model `%s` log are no mean and no sum over rows: they are averaged by rows.",
            numbers,
            model.name,
        )
