"""How does an optimizer update a variable that lies in shards, or only the rows of it that a step touched?

The optimizer's own `update_step` runs on plain tensors: the shard, or the touched rows of it, and the same part of
its slots. The results are written back where they came from. Nothing of the optimizer's arithmetic is repeated here.
"""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.strategies.parameter_server_variables import is_lazy
from tfdist_ext.training.pulled import is_sharded, shards_of

# Rows without a gradient stay as they are, so that touching the others alone is the same algorithm.
_EXACT_BY_ROWS = (keras.optimizers.SGD, keras.optimizers.Adagrad)
# They use norms or factors over the whole variable, which a shard does not see.
_NOT_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in ("Adafactor", "Lamb", "Muon")
    if hasattr(keras.optimizers, name)
)


def updates_rows_only(optimizer, variable) -> bool:
    """Returns True where a sparse gradient changes the touched rows alone."""
    if is_lazy(variable):
        return True
    plain = type(optimizer) in _EXACT_BY_ROWS and not getattr(optimizer, "momentum", 0)
    return plain


@contextlib.contextmanager
def updating_shards_and_rows(optimizer, gradients_of):
    """Lets `optimizer.apply` handle sharded variables and touched rows.

    Args:
        optimizer: Keras optimizer; of a `LossScaleOptimizer` the inner one.
        gradients_of: Function of a Keras variable and of the gradient that reached the update step; returns one
            gradient for each shard, with local rows.
    """
    original_update, original_decay = optimizer._backend_update_step, optimizer._apply_weight_decay

    def update(gradients, variables, learning_rate):
        usual = []
        for gradient, variable in zip(gradients, variables, strict=True):
            by_rows = isinstance(gradient, tf.IndexedSlices) and updates_rows_only(optimizer, variable)
            if is_sharded(variable) or by_rows:
                _check_elementwise(optimizer, variable)
                parts = gradients_of(variable, gradient)
                for index, (part, shard) in enumerate(zip(parts, shards_of(variable), strict=True)):
                    with tf.device(shard.device):
                        _update_part(optimizer, variable, index, part, learning_rate, by_rows)
            else:
                usual.append((gradient, variable))
        if usual:
            original_update([g for g, _ in usual], [v for _, v in usual], learning_rate)

    def decay(variables):
        original_decay([variable for variable in variables if not is_sharded(variable)])
        if optimizer.weight_decay is None:
            return
        for variable in variables:
            if is_sharded(variable) and optimizer._use_weight_decay(variable):
                for shard in shards_of(variable):
                    with tf.device(shard.device):
                        rate = tf.cast(optimizer.learning_rate, shard.dtype)
                        shard.assign_sub(shard * tf.cast(optimizer.weight_decay, shard.dtype) * rate)

    with replaced(optimizer, _backend_update_step=update, _apply_weight_decay=decay):
        yield


@contextlib.contextmanager
def replaced(owner, **methods):
    """Gives one object other methods for a while."""
    for name, method in methods.items():
        object.__setattr__(owner, name, method)
    try:
        yield
    finally:
        for name in methods:
            object.__delattr__(owner, name)


@contextlib.contextmanager
def scaled_learning_rate(optimizer, factor):
    """Multiplies the learning rate of one update by a scalar tensor; None leaves it alone."""
    if factor is None:
        yield
        return
    original = optimizer._get_current_learning_rate

    def scaled():
        rate = tf.convert_to_tensor(original())
        return rate * tf.cast(factor, rate.dtype)

    with replaced(optimizer, _get_current_learning_rate=scaled):
        yield


def check_can_shard(optimizer, variables) -> None:
    """Refuses settings of an optimizer that need a sharded variable in one piece.

    Raises:
        ValueError: Gradient accumulation.
    """
    sharded = [variable.path for variable in variables if is_sharded(variable)]
    if sharded and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"`gradient_accumulation_steps` cannot be combined with the sharded variable `{sharded[0]}`. Let "
            f"workers sum the "
            "gradients of several batches instead: ParameterServerStrategy(push_every_steps=...)."
        )


def _check_elementwise(optimizer, variable):
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ValueError(
            f"The optimizer `{type(optimizer).__name__}` computes with norms of whole variables, so it cannot update "
            f"`{variable.path}` in parts. Use another optimizer, or no variable_partitioner."
        )


class _PartScope(keras.StatelessScope):
    """Shows the optimizer one part of a variable and of its slots."""

    def __init__(self, read_part):
        super().__init__(initialize_variables=False)
        self._read_part = read_part
        self.parts: dict[int, tf.Tensor] = {}
        self.variables: dict[int, keras.Variable] = {}
        self.assigned: set[int] = set()

    def get_current_value(self, variable):
        key = id(variable)
        if key not in self.parts:
            self.parts[key] = self._read_part(variable)
            self.variables[key] = variable
        return self.parts[key]

    def change(self, variable, value):
        self.get_current_value(variable)
        self.parts[id(variable)] = tf.cast(value, self.parts[id(variable)].dtype)
        self.assigned.add(id(variable))


def _update_part(optimizer, variable, shard_index, gradient, learning_rate, by_rows):
    """Runs `update_step` on a shard or on some of its rows, and writes the outcome back."""
    shape = variable._value.shape

    def part_of(kept):
        """Returns the tf.Variable that holds this part of the variable or of a slot, and whether it has rows."""
        if kept._value.shape != shape:
            return kept._value, False  # A scalar such as a product of decay factors.
        shards = shards_of(kept)
        return shards[shard_index if len(shards) > 1 else 0], True

    rows = gradient.indices if by_rows else None

    def read(kept):
        part, has_rows = part_of(kept)
        return part.sparse_read(rows) if rows is not None and has_rows else part.read_value()

    if by_rows:
        dense = gradient.values
    elif isinstance(gradient, tf.IndexedSlices):
        dense = tf.convert_to_tensor(gradient)
    else:
        dense = gradient
    scope = _PartScope(read)
    with scope:
        _stand_in(optimizer, scope).update_step(dense, variable, learning_rate)
    for key in scope.assigned:
        part, has_rows = part_of(scope.variables[key])
        if rows is not None and has_rows:
            part.scatter_update(tf.IndexedSlices(scope.parts[key], rows))
        else:
            part.assign(scope.parts[key])


def _stand_in(optimizer, scope: _PartScope):
    """Returns an object with the optimizer's state and arithmetic that assigns to the scope."""

    class StandIn(type(optimizer)):  # type: ignore[misc]
        def assign(self, variable, value):
            scope.change(variable, value)

        def assign_add(self, variable, value):
            scope.change(variable, scope.get_current_value(variable) + tf.cast(value, variable.dtype))

        def assign_sub(self, variable, value):
            scope.change(variable, scope.get_current_value(variable) - tf.cast(value, variable.dtype))

        def _var_key(self, variable):
            return compat.optimizer_key(optimizer, variable)

    stand_in = object.__new__(StandIn)
    stand_in.__dict__.update(vars(optimizer))
    return stand_in
