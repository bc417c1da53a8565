"""What is the full state of a training job, and is all of it captured?

`tf.train.Checkpoint(model=model)` leaves out metrics, the states of Keras' seed generators, and everything that is not
a variable. `TrainingState` finds the rest, and says what it could not capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_ext import compat, errors
from tfdist_ext.checkpoint import object_graph, participants, plain_data, random_streams
from tfdist_ext.checkpoint.callback_states import Baselines, CallbackStates
from tfdist_ext.checkpoint.input_piece import input_piece
from tfdist_ext.checkpoint.input_position import REPLAY, InputPosition
from tfdist_ext.checkpoint.manifest import Piece
from tfdist_ext.checkpoint.tensors import VariableList


class TrainingState:
    """Everything that has to be restored for training to go on as if it had never stopped.

    Runs on: every worker (the chief alone under parameter servers), after the model was made.

    Args:
        model: Keras model; its optimizer, metrics, seed generators and layers' variables are found. None for a loop
            without one.
        dataset: What training reads: a `tf.data.Dataset` or a distributed dataset. Use `state.dataset` in its place.
        input_position: How the next row is found again: "replay" (the order of the data is the same each time, and the
            batches that were read are read over) or "iterator" (the state of the `tf.data` iterator with its buffers
            is saved, where the pipeline can be).
        optimizer: Optimizer of a loop without `model.compile`.
        strategy: The strategy; default: the model's, else the one in scope.
        allow_missing: Names or patterns (`"callbacks/*"`) of pieces that need not be captured, and of variables that
            need not be in the checkpoint or in the program.
        **objects: More state by name: trackable objects (variables, modules, `tf.random.Generator`), Keras metrics and
            what else has `variables`, or objects with `state_dict()` and `load_state_dict(state)` of plain data and
            arrays, which each worker saves for itself.

    Attributes:
        dataset: Iterate over it in a custom loop, or pass it to `fit`; the first pass after a restore begins with the
            next unread batch.
        step: Updates applied.
        epoch: Epoch that is open; in a custom loop, yours to set.
        batch: Steps of it that were done.
        fit: Number of the `fit` that runs, from 1; 0 in a custom loop.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> state = TrainingState(model)
        >>> [piece.name for piece in state.pieces() if not piece.captured]
        ['input']
    """

    def __init__(
        self,
        model: keras.Model | None = None,
        dataset=None,
        *,
        input_position: str = REPLAY,
        optimizer=None,
        strategy: tf.distribute.Strategy | None = None,
        allow_missing: Sequence[str] = (),
        **objects: Any,
    ):
        self.model = model
        self.optimizer = optimizer
        self.strategy = (
            strategy or getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
        )
        self.allow_missing = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
        self.position = None if dataset is None else InputPosition(dataset, input_position)
        self.dataset = None if self.position is None else self.position.dataset
        self.step = self.epoch = self.batch = self.fit = 0
        self.callbacks: CallbackStates | None = None
        self.callback_baselines: Baselines = {}
        self._trackables: dict[str, Any] = {}
        self._variable_owners: dict[str, Any] = {}
        self._stateful: dict[str, Any] = {}
        for name, value in objects.items():
            self._add(name, value)
        self._variables: VariableList | None = None
        self._found: tuple = ()

    def _add(self, name: str, value: Any) -> None:
        if name in ("model", "optimizer", "metrics", "more", "random"):
            raise ValueError(
                f"Argument `{name}` is taken: the state has something of that name. Try another one."
            )
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._stateful[name] = value
        elif isinstance(value, compat.Trackable):
            self._trackables[name] = value
        elif _owns_variables(value):
            # Keras metrics are not trackable.
            self._variable_owners[name] = value
        else:
            raise TypeError(
                f"Argument `{name}` must be a trackable object (tf.Variable, tf.Module, Keras layer, "
                "tf.random.Generator), a Keras metric, or have `state_dict` and `load_state_dict`; received "
                f"{type(value).__name__}."
            )

    @property
    def participants(self) -> participants.Participants:
        """Who saves together."""
        return participants.of_strategy(self.strategy)

    # --- variables -------------------------------------------------------------------------------------------------
    def variables(self) -> VariableList:
        """Returns the list of all variables there are now.

        Raises:
            ValueError: The model or an optimizer is not built yet.
        """
        self.build()
        found = tuple(map(id, self._keras_variables() + list(random_streams.generators().values())))
        if self._variables is None or not self._variables.is_lasting or found != self._found:
            self._variables, self._found = self._listed(), found
        return self._variables

    def build(self) -> None:
        """Makes variables that do not exist yet, such as those of metrics, from the types of the dataset's batches.

        Raises:
            ValueError: The model is not built, and nothing says on what it will be called.
        """
        if self.model is not None and not compat.is_built(self.model):
            self._build_model(self.model)
        for optimizer in self._optimizers():
            if not optimizer.built:
                with self.strategy.scope():
                    optimizer.build(self._trained_variables())

    def _build_model(self, model) -> None:
        dataset = None if self.position is None else self.position.plain
        specs = getattr(dataset, "batch_spec", None) or getattr(dataset, "element_spec", None)
        try:
            with self.strategy.scope():
                compat.build_from_batch(model, keras.tree.map_structure(_symbol, specs))
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            # A model that a custom loop calls, or one whose train_step knows its parts, needs no more than these.
            if not all(layer.built for layer in [model, *model.layers]):
                raise ValueError(
                    f"Model `{model.name}` is not built, so that it has no variables to save or restore. Build it "
                    "(`model.build(input_shape)`), or pass `dataset=` so that it can be built from its batches."
                ) from error

    def _trained_variables(self) -> list:
        if self.model is not None:
            return self.model.trainable_variables
        found = [
            variable
            for trackable in self._trackables.values()
            for variable in getattr(trackable, "trainable_variables", [])
        ]
        if not found:
            raise ValueError(
                "The optimizer is not built, and the state has no model whose variables it could be built for. Call "
                "`optimizer.build(variables)` first."
            )
        return found

    def _optimizers(self) -> list:
        compiled = getattr(self.model, "optimizer", None)
        given = [compiled, self.optimizer, *self._trackables.values()]
        return [one for one in given if isinstance(one, keras.optimizers.Optimizer)]

    def _keras_variables(self) -> list:
        found = []
        if self.model is not None:
            found += [*self.model.variables, *self.model.metrics_variables]
        for optimizer in self._optimizers():
            found += optimizer.variables
        for owner in self._variable_owners.values():
            found += owner.variables
        return list({id(variable): variable for variable in found}.values())

    def _listed(self) -> VariableList:
        children: dict[str, Any] = dict(self._trackables)
        children |= {name: list(owner.variables) for name, owner in self._variable_owners.items()}
        if self.model is not None:
            children["model"] = self.model
            children["metrics"] = list(self.model.metrics_variables)
        if self.optimizer is not None:
            children["optimizer"] = self.optimizer
        generators = random_streams.generators()
        if generators:
            children["random"] = generators
        listed = VariableList(tf.train.Checkpoint(**children))
        more = [variable for variable in self._keras_variables() if id(variable) not in listed.ids]
        return VariableList(tf.train.Checkpoint(**children, more=more)) if more else listed

    # --- Python state ----------------------------------------------------------------------------------------------
    def python_state(self) -> dict[str, Any]:
        """Returns what this worker has besides variables, as plain data."""
        books = getattr(self.strategy, "training_books", None)
        return {
            "step": self.step,
            "epoch": self.epoch,
            "batch": self._batch_now(),
            "within": self._is_within(),
            "fit": self.fit,
            "batches_of_pass": self._batches_of_pass(),
            "stopped": bool(getattr(self.model, "stop_training", False)),
            "input": None if self.position is None else self.position.state(),
            "random": random_streams.state_of_process(),
            "callbacks": None if self.callbacks is None else self.callbacks.state(),
            "objects": self.objects_state(),
            "books": None if books is None else books.state_dict(),
        }

    def objects_state(self) -> dict[str, Any]:
        """Returns the state of the objects that have a `state_dict`, by name."""
        return {name: value.state_dict() for name, value in self._stateful.items()}

    def load_objects_state(self, state: dict[str, Any]) -> None:
        """Takes over what `objects_state` returned."""
        for name in set(state) & set(self._stateful):
            self._stateful[name].load_state_dict(state[name])

    def _batch_now(self) -> int:
        if self.position is None or self.position.reading is not None:
            return self.batch
        return self.position.num_batches

    def _batches_of_pass(self) -> int | None:
        reading = None if self.position is None else self.position.reading
        return None if reading is None else reading.counted_batches

    def _is_within(self) -> bool:
        """Whether training goes on within the pass that is being read, rather than with the next one."""
        if self.position is None or self.position.num_opened == 0:
            return False
        reading = self.position.reading
        return reading is None or self.batch > 0 or reading.continues

    def load_python_state(self, state: dict[str, Any], steps_aside: int = 0) -> list[str]:
        """Takes over what `python_state` returned, but for input and callbacks, whose time comes later.

        Args:
            state: Of this worker, or of the chief where this worker has none.
            steps_aside: 0 for this worker's own.

        Returns:
            Sentences about what could not be restored.
        """
        self.step, self.epoch, self.batch = state["step"], state["epoch"], state["batch"]
        notes = random_streams.restore_process(state["random"], steps_aside)
        for name in sorted(set(state["objects"]) ^ set(self._stateful)):
            side = "the checkpoint" if name in state["objects"] else "the program"
            if not object_graph.matches(name, self.allow_missing):
                raise errors.CheckpointMismatchError(
                    f"Object `{name}` is only in {side}. Pass the same objects to TrainingState as when it was saved, "
                    f"or allow_missing=[{name!r}]."
                )
            notes.append(f"object `{name}` is only in {side}")
        self.load_objects_state(state["objects"])
        books = getattr(self.strategy, "training_books", None)
        if books is not None and state["books"] is not None:
            books.load_state_dict(state["books"])
        return notes

    # --- completeness ------------------------------------------------------------------------------------------------
    def pieces(self) -> list[Piece]:
        """Says of every piece of state whether it is captured, and why not; see `require_complete`."""
        variables = self.variables()
        pieces = [
            Piece(name="variables", captured=True, reason=f"{len(variables.ids)} variables"),
            Piece(name="random/python", captured=True, reason="random.getstate()"),
            Piece(name="random/numpy", captured=True, reason="numpy.random.get_state()"),
        ]
        pieces += [
            Piece(name=name, captured=True, reason="its variables")
            for name in sorted([*self._trackables, *self._variable_owners])
        ]
        pieces += self._objects_pieces()
        pieces.append(input_piece(self.position))
        operations = random_streams.stateful_operations(getattr(self.model, "train_function", None))
        pieces += [
            Piece(
                name=f"random/operations/{name}",
                captured=False,
                reason="a tf.random operation keeps its state inside the runtime; use keras.random with a "
                "keras.random.SeedGenerator, tf.random.Generator or tf.random.stateless_*",
            )
            for name in operations
        ]
        if self.callbacks is not None:
            pieces += self.callbacks.pieces()
        if getattr(getattr(self.strategy, "delay_compensation", None), "adaptive", False):
            pieces.append(
                Piece(
                    name="delay_compensation",
                    captured=False,
                    reason="the moving means of DelayCompensation(adaptive=True) are not saved, and would begin anew",
                )
            )
        return pieces

    def require_complete(self) -> list[Piece]:
        """Returns `pieces()` if all are captured or allowed not to be.

        Raises:
            CheckpointIncompleteError: A piece is not; the message has all of them.
        """
        pieces = self.pieces()
        missing = [
            piece
            for piece in pieces
            if not piece.captured and not object_graph.matches(piece.name, self.allow_missing)
        ]
        if missing:
            lines = "\n  ".join(f"{piece.name}: {piece.reason}" for piece in missing)
            names = ", ".join(repr(piece.name) for piece in missing)
            raise errors.CheckpointIncompleteError(
                f"A checkpoint of this training would not be complete, and resuming from it not exact:\n  {lines}\n"
                f"Mend it, or pass allow_missing=[{names}] to TrainingState to go on without."
            )
        return pieces

    def _objects_pieces(self) -> list[Piece]:
        """Says of the objects with a `state_dict` whether it can be written as it is now."""
        pieces = []
        for name in sorted(self._stateful):
            try:
                plain_data.dumps(self._stateful[name].state_dict(), name)
                pieces.append(Piece(name=name, captured=True, reason="its state_dict()"))
            except TypeError as error:
                pieces.append(Piece(name=name, captured=False, reason=f"in its state_dict(), {error}"))
        return pieces


def _owns_variables(value: Any) -> bool:
    variables = getattr(value, "variables", None)
    return isinstance(variables, list | tuple) and all(
        isinstance(variable, keras.Variable | tf.Variable) for variable in variables
    )


def _symbol(spec):
    return keras.KerasTensor(spec.shape, spec.dtype.name) if isinstance(spec, tf.TensorSpec) else spec
