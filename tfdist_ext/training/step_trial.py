"""Do the parts of a step that a user wrote add up over replicas as it is assumed?

What Keras itself computes is known. A `train_step`, a `compute_loss`, a layer or a metric of a user's own is tried
before it is traced: on two small random batches as two replicas would see them, and on both together as one device.
Gradients, assigned variables and numbers fed to means are compared, and each is from then on combined in the way that
gives the value of the whole. Nothing is applied or assigned; dropout is off and noise is the same for all rows.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist_ext import compat
from tfdist_ext.strategies import frame as frames
from tfdist_ext.training import batch_functions
from tfdist_ext.training.batch_functions import Kind
from tfdist_ext.training.recorder import ResultNotes

_ROWS = (3, 2)
# A gradient that is all rounding is compared with the others of its step.
_SMALL = 1e-3


@dataclasses.dataclass
class Verdict:
    """How the parts of a step combine; what is not named combines as Keras' own.

    Attributes:
        applications: For each application of gradients the kind of its loss.
        scalars: For each number that is fed to a mean or a sum, in order.
        updates: For each assigned variable, by id: "sum" of the changes, "add" up the new values, "first", "mean".
        logs: For each number among the logs, in order.
    """

    applications: list[Kind] = dataclasses.field(default_factory=list)
    scalars: list[Kind] = dataclasses.field(default_factory=list)
    updates: dict[int, str] = dataclasses.field(default_factory=dict)
    logs: list[Kind] = dataclasses.field(default_factory=list)

    @property
    def needs_whole_batch(self) -> bool:
        """True where no way of adding up gives the gradients of the whole batch."""
        return Kind.NEITHER in self.applications

    def is_sum(self, application: int) -> bool:
        """Returns True where the loss of an application of gradients is a sum over rows."""
        return application < len(self.applications) and self.applications[application] is Kind.SUM

    def is_sum_in_metric(self, scalar: int) -> bool:
        """Returns True where a number that is fed to a mean or a sum is a sum over rows."""
        return scalar < len(self.scalars) and self.scalars[scalar] is Kind.SUM

    def kind_of_log(self, index: int) -> Kind | None:
        """Returns the kind of a logged number, or None where it is not known."""
        return self.logs[index] if index < len(self.logs) else None


class CannotTry(Exception):  # noqa: N818 - a signal, not an error
    """The step does something that a trial on one device cannot stand in for."""


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
        own = {
            id(v): tf.convert_to_tensor(frames.weighted_by_share(frame, g)).numpy()
            for g, v in zip(gradients, variables, strict=True)
            if g is not None
        }
        self._trial.applications.append(own)


class _Dropped(keras.StatelessScope):
    """Keeps what the step assigns, and what it assigned it to."""

    def __init__(self):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, Any] = {}

    def add_update(self, update):
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return variable._value if value is None else value


def is_users_own(model, python_step_name: str) -> bool:
    """Returns True where a step of a model runs code that is not Keras' or this package's."""
    for name in (python_step_name, "compute_loss", "compute_metrics"):
        function = getattr(type(model), name, None)
        if function is not None and not _is_known(function.__module__):
            return True
    parts = [*model._flatten_layers(), *model.metrics]
    return any(not _is_known(type(part).__module__) for part in parts)


def _is_known(module: str) -> bool:
    return module.split(".")[0] in ("keras", "tfdist_ext")


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
    # A thread of its own: no graph, no replica and no Keras scope is in force there.
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="tfdist_ext-trial") as executor:
        try:
            return executor.submit(_try, strategy, model, step, specs).result()
        except Exception as error:  # Whatever a user's step does with rows that make no sense to it.
            tell = logging.info if isinstance(error, CallsCollectives) else logging.warning
            tell(
                "The steps of model `%s` could not be tried on random rows (%s: %s). Its own losses are taken for "
                "means over the rows of a batch, and what its layers assign for the same on all rows.",
                model.name,
                type(error).__name__,
                str(error).split("\n")[0][:200],
            )
            return Verdict()


def _try(strategy, model, step, specs) -> Verdict:
    with strategy.scope(), compat.keeping_values(model), tf.summary.record_if(False):
        context = compat.ReplicaContext(strategy, replica_id_in_sync_group=0)
        with context, tf.device(strategy.extended.worker_devices[0]):
            generator = np.random.default_rng(11)
            parts = [_random_batch(generator, specs, rows) for rows in _ROWS]
            whole = keras.tree.map_structure(lambda *pair: tf.concat(pair, axis=0), *parts)
            run = lambda part, others=None: _run(strategy, step, parts[part], part, others)  # noqa: E731
            runs = [run(0), run(1)]
            if runs[0].exchanged:
                runs = [run(0, runs[1].exchanged), run(1, runs[0].exchanged)]
            together = _run(strategy, step, whole, None, None)
            verdict = _compare(*runs, together, _tolerance(model))
            if verdict.needs_whole_batch and not _same(run(0, runs[1].exchanged or None), runs[0]):
                raise CannotTry("it draws random numbers that no `keras.random.SeedGenerator` seeds")
    _tell(model, verdict, together)
    return verdict


def _random_batch(generator, specs, rows: int):
    def draw(spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            raise CannotTry(f"a part of its batch is a {type(spec).__name__}")
        if spec.dtype == tf.string:
            return tf.fill([rows, *(length or 1 for length in spec.shape[1:])], "0")
        array = batch_functions.draw(
            generator, "fractions", tuple(spec.shape), spec.dtype.as_numpy_dtype, rows
        )
        return tf.constant(array)

    return keras.tree.map_structure(lambda spec: None if spec is None else draw(spec), specs)


def _run(strategy, step, batch, part, others) -> Trial:
    trial = Trial(others, is_first_part=part == 0)
    total = sum(_ROWS)
    rows = total if part is None else _ROWS[part]
    frame = frames.Frame(
        strategy, part or 0, strategy.num_replicas_in_sync,
        share=tf.constant(rows / total, tf.float64), num_rows=tf.constant(rows, tf.int64),
        rows=tf.constant([*_ROWS, *[0] * (strategy.num_replicas_in_sync - 2)], tf.int64),
        is_whole=part is None, recorder=_TrialRecorder(trial), trial=trial,
    )  # fmt: skip
    scope = _Dropped()
    with frames.entered(frame), scope, trying():
        logs = step(batch)
    for key, variable in scope.assigned.items():
        old, new = variable._value, scope.state_mapping[key]
        trial.updates[key] = (variable, np.asarray(old), np.asarray(new))
    known = frame.recorder.results
    trial.logs = [
        np.asarray(leaf) for leaf in tf.nest.flatten(logs) if tf.is_tensor(leaf) and id(leaf) not in known
    ]
    return trial


# --- comparing ------------------------------------------------------------------------------------------------------
def _tolerance(model) -> float:
    """Returns the relative rounding that the gradients of a model may show."""
    dtypes = {layer.compute_dtype for layer in model._flatten_layers()} - {None}
    narrow = any("16" in dtype for dtype in dtypes)
    if narrow:
        return 0.05
    double = dtypes == {"float64"}
    return batch_functions.ROUNDINGS * float(np.finfo("float64" if double else "float32").eps)


def _compare(one: Trial, other: Trial, whole: Trial, tolerance: float) -> Verdict:
    verdict = Verdict()
    for gradients in zip(one.applications, other.applications, whole.applications, strict=True):
        verdict.applications.append(_kind_of_gradients(*gradients, tolerance))
    for values in zip(one.scalars, other.scalars, whole.scalars, strict=False):
        verdict.scalars.append(_kind_of_number(*values, tolerance))
    for values in zip(one.logs, other.logs, whole.logs, strict=False):
        verdict.logs.append(_kind_of_number(*values, tolerance))
    for key in one.updates.keys() & other.updates.keys() & whole.updates.keys():
        kind = _kind_of_update(one.updates[key], other.updates[key], whole.updates[key], tolerance)
        if kind is not None:
            verdict.updates[key] = kind
    return verdict


def _kind_of_gradients(one: dict, other: dict, whole: dict, tolerance: float) -> Kind:
    """Returns the kind of a loss by its gradients, which are weighted by the shares of the rows."""
    largest = max((float(np.max(np.abs(g), initial=0.0)) for g in whole.values()), default=0.0)
    shares = [rows / sum(_ROWS) for rows in _ROWS]
    errors = {Kind.MEAN: 0.0, Kind.SUM: 0.0}
    for key in one.keys() | other.keys() | whole.keys():
        a, b, together = (values.get(key, 0.0) for values in (one, other, whole))
        scale = max(float(np.max(np.abs(together), initial=0.0)), _SMALL * largest)
        if not np.all(np.isfinite(together)):
            raise CannotTry("its gradients on random rows are not finite")
        if scale == 0.0:
            continue
        for kind, total in ((Kind.MEAN, a + b), (Kind.SUM, a / shares[0] + b / shares[1])):
            errors[kind] = max(errors[kind], float(np.max(np.abs(total - together))) / scale)
    return _best(errors, tolerance)


def _kind_of_number(one, other, whole, tolerance: float) -> Kind:
    scale = float(np.max(np.abs(whole), initial=0.0)) or 1.0
    mean = (_ROWS[0] * one + _ROWS[1] * other) / sum(_ROWS)
    errors = {
        Kind.MEAN: float(np.max(np.abs(mean - whole), initial=0.0)) / scale,
        Kind.SUM: float(np.max(np.abs(one + other - whole), initial=0.0)) / scale,
    }
    return _best(errors, tolerance)


def _best(errors: dict, tolerance: float) -> Kind:
    kind = min(errors, key=lambda kind: (errors[kind], kind is not Kind.MEAN))
    if errors[Kind.MEAN] <= min(tolerance, 2 * errors[kind]):
        return Kind.MEAN
    return kind if errors[kind] <= tolerance else Kind.NEITHER


def _kind_of_update(one, other, whole, tolerance: float) -> str | None:
    """Returns how the values that replicas assign to a variable make that of one device; None where none does."""
    _, old, new = whole
    if old.dtype.kind not in "fiub" or old.shape != new.shape:
        return None
    old, new, a, b = (np.asarray(value, "float64") for value in (old, new, one[2], other[2]))
    change = max(
        float(np.max(np.abs(new - old), initial=0.0)), float(np.max(np.abs(new), initial=0.0)) * 1e-12
    )
    if change == 0.0 or not np.all(np.isfinite(new)):
        return None
    ways = {
        "same": a + (b - a) / 2 if np.array_equal(a, b) else None,
        "mean": (_ROWS[0] * a + _ROWS[1] * b) / sum(_ROWS),
        "sum": a + b - old,
        "add": a + b,
    }
    for way, value in ways.items():
        if value is not None and float(np.max(np.abs(value - new), initial=0.0)) <= tolerance * change:
            return way
    return "neither"


def _same(one: Trial, other: Trial) -> bool:
    return all(
        all(np.allclose(a[key], b[key], rtol=1e-5, atol=1e-12) for key in a)
        for a, b in zip(one.applications, other.applications, strict=True)
    )


def _tell(model, verdict: Verdict, together: Trial) -> None:
    if verdict.needs_whole_batch:
        logging.warning(
            "A loss of model `%s` is no mean and no sum over the rows of a batch, and no Keras loss: one replica "
            "computes the whole batch while the others wait. Results are those of one device. A loss given to "
            "`compile` is distributed whatever it is.",
            model.name,
        )
    strange = [v.path for key, (v, *_) in together.updates.items() if verdict.updates.get(key) == "neither"]
    if strange:
        logging.warning(
            "What model `%s` assigns to %s is no mean, no sum and not the same on all rows: it is combined as if it "
            "were the first of these.",
            model.name,
            ", ".join(f"`{path}`" for path in strange),
        )
    numbers = sum(kind is Kind.NEITHER for kind in [*verdict.scalars, *verdict.logs])
    if numbers and not verdict.needs_whole_batch:
        logging.warning(
            "%d number(s) that steps of model `%s` log are no mean and no sum over rows: they are averaged by rows.",
            numbers,
            model.name,
        )


# --- while a step is tried -----------------------------------------------------------------------------------------
class _Trying(threading.local):
    active = False


_trying = _Trying()


class trying:  # noqa: N801 - reads as a statement
    """Switches off, in this thread, what makes rows depend on others or on chance."""

    def __enter__(self):
        _trying.active = True

    def __exit__(self, *_):
        _trying.active = False


def install() -> None:
    """Replaces the random functions and BatchNormalization's `call`, which elsewhere do what they did."""
    for name in ("normal", "uniform", "truncated_normal", "randint"):
        _replace(compat.KerasRandom, name, _one_row)
    for name in ("categorical", "gamma", "binomial", "beta", "shuffle"):
        _replace(compat.KerasRandom, name, _refused)
    _replace(compat.KerasRandom, "dropout", _no_dropout)
    _replace(keras.layers.BatchNormalization, "call", _not_training)


def _replace(owner, name: str, make) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args, **kwargs):
        return (replaced if _trying.active else original)(*args, **kwargs)

    replaced = make(original)
    setattr(owner, name, replacement)


def _one_row(original):
    def draw(shape, *args, **kwargs):
        shape = tf.convert_to_tensor(shape)
        if not shape.shape[0]:
            return original([], *args, **kwargs)
        row = original([1, *shape[1:].numpy().tolist()], *args, **kwargs)
        return tf.broadcast_to(row, shape)

    return draw


def _no_dropout(original):
    del original
    return lambda inputs, *args, **kwargs: inputs


def _refused(original):
    def refuse(*args, **kwargs):
        raise CannotTry(f"it draws from `keras.random.{original.__name__}`")

    return refuse


def _not_training(original):
    def call(self, inputs, training=None, mask=None):
        return original(self, inputs, training=False, mask=mask)

    return call
