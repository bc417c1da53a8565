"""What is a program, and of what parts is it made?

Most fields are pieces of Python, so that the script that is printed is the program that ran.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole training program; each default is the simplest choice.

    Attributes:
        strategy: "mirrored", "workers" (MultiWorkerMirroredStrategy) or "servers" (ParameterServerStrategy).
        replicas: Devices of a mirrored strategy; workers otherwise.
        servers: Parameter servers.
        policy: Source of the update policy.
        inputs: "array", "tuple", "dict" or "ids".
        layers: Names of `parts.LAYERS`.
        outputs: "one", "list" or "dict".
        target: "values", "labels" or "one-hot".
        loss: Source of the loss.
        second_loss: Source of the loss of the second output.
        loss_weights: Weights of the two losses; empty for none.
        step: Name of `parts.STEPS`.
        sample_weight: "", "positive" or "zeros".
        class_weight: Whether classes are weighted.
        optimizer: Name of the optimizer.
        rate: Source of the learning rate.
        options: Sources of further arguments of the optimizer.
        loss_scale: Whether a `LossScaleOptimizer` wraps it.
        metrics: Sources of metrics.
        weighted_metrics: Sources of weighted metrics.
        steps_per_execution: As in `compile`.
        input: "arrays", "dataset", "generator", "python generator" or "sequence".
        rows: Rows of the training data.
        batch_size: Rows of a batch; on parameter servers, of one worker's.
        epochs: Number of epochs.
        steps_per_epoch: As in `fit`, on repeated data; 0 for none.
        validation: "", "arrays", "dataset" or "split".
        callbacks: Names of `parts.CALLBACKS`.
        shuffle: Whether arrays are shuffled.
        before: "", or what comes before `fit`: "train_on_batch", "evaluate", "predict".
        end: "", "evaluate" or "predict", at the end.
        after: "", or what comes between `fit` and a second one: "fit", "compile".
    """

    strategy: str = "mirrored"
    replicas: int = 2
    servers: int = 1
    policy: str = "BoundedStaleness(0)"
    inputs: str = "array"
    layers: tuple[str, ...] = ()
    outputs: str = "one"
    target: str = "values"
    loss: str = '"mse"'
    second_loss: str = '"mse"'
    loss_weights: tuple[float, ...] = ()
    step: str = ""
    sample_weight: str = ""
    class_weight: bool = False
    optimizer: str = "SGD"
    rate: str = "0.1"
    options: tuple[str, ...] = ()
    loss_scale: bool = False
    metrics: tuple[str, ...] = ()
    weighted_metrics: tuple[str, ...] = ()
    steps_per_execution: int = 1
    input: str = "dataset"
    rows: int = 4
    batch_size: int = 4
    epochs: int = 1
    steps_per_epoch: int = 0
    validation: str = ""
    callbacks: tuple[str, ...] = ()
    shuffle: bool = False
    before: str = ""
    after: str = ""
    end: str = ""

    @property
    def batches_in_a_step(self):
        """How many batches one step of one device stands for."""
        return self.replicas if self.strategy == "servers" and self.policy.startswith("Synchronous") else 1


_COUNTS = ("replicas", "servers", "rows", "batch_size", "epochs", "steps_per_execution", "steps_per_epoch")


def parts_of(program):
    """Returns what distinguishes a program from the simplest one, counts aside."""
    parts = {("strategy", program.strategy, program.batches_in_a_step > 1)}
    for field in dataclasses.fields(program):
        value = getattr(program, field.name)
        if field.name in ("strategy", "policy") or value == field.default:
            continue
        if field.name in _COUNTS:
            if field.name.startswith("steps"):
                parts.add((field.name,))
        elif isinstance(value, tuple):
            parts.update((field.name, part) for part in value)
        else:
            parts.add((field.name, value))
    return parts


def contains(program, smaller):
    """Returns True where a program has every part of a smaller one: a fault of that shows in it too."""
    return parts_of(smaller) <= parts_of(program)


def simpler(program):
    """Yields programs that have one field at its default, or one part of a field less."""
    for field in dataclasses.fields(program):
        value = getattr(program, field.name)
        if value != field.default:
            yield dataclasses.replace(program, **{field.name: field.default})
        if isinstance(value, tuple) and len(value) > 1 and field.name != "loss_weights":
            for index in range(len(value)):
                yield dataclasses.replace(program, **{field.name: value[:index] + value[index + 1 :]})
