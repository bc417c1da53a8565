"""How do many small tensors travel as few large ones?

A message between two tasks costs the same whether it carries 40 bytes or 40 kB, and a model has many small variables.
Tensors that go to, or come from, one task and have one dtype are joined end to end; large ones and those whose shape is
only known at run time go by themselves, because joining copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

_PACK_BELOW_BYTES = 256 << 10


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors that travel as one.

    Attributes:
        device: The parameter server at one end.
        dtype: Their dtype.
        members: Their positions in the list that is packed.
        joined: False for a tensor that goes by itself, in its own shape.
    """

    device: str
    dtype: tf.DType
    members: tuple[int, ...]
    joined: bool


class Packing:
    """Packs and unpacks lists of tensors of known types.

    Args:
        specs: `tf.TensorSpec` of each tensor.
        devices: Device of each tensor's parameter server.
        wire_dtype: Dtype in which floats travel, or None for their own. A cast to a shorter one rounds.
        below_bytes: Smaller tensors are joined.

    Example:
        >>> packing = Packing([tf.TensorSpec([2]), tf.TensorSpec([])], ["/job:ps/task:0"] * 2)
        >>> (wire,) = packing.pack([tf.constant([1.0, 2.0]), tf.constant(3.0)])
        >>> wire.numpy().tolist()
        [1.0, 2.0, 3.0]
        >>> [tensor.numpy().tolist() for tensor in packing.unpack([wire])]
        [[1.0, 2.0], 3.0]
    """

    def __init__(
        self,
        specs: Sequence[tf.TensorSpec],
        devices: Sequence[str],
        wire_dtype: tf.DType | None = None,
        below_bytes: int = _PACK_BELOW_BYTES,
    ):
        self.specs = list(specs)
        self._wire_dtype = wire_dtype
        joined: dict[tuple[str, tf.DType], list[int]] = {}
        alone: list[Group] = []
        for position, (spec, device) in enumerate(zip(specs, devices, strict=True)):
            if spec.shape.is_fully_defined() and _num_bytes(spec) < below_bytes and spec.dtype != tf.string:
                joined.setdefault((device, spec.dtype), []).append(position)
            else:
                alone.append(Group(device, spec.dtype, (position,), joined=False))
        self.groups = [Group(*key, tuple(members), joined=True) for key, members in joined.items()] + alone

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors whose size is known, as they travel."""
        return sum(
            spec.shape.num_elements() * self._on_the_wire(spec.dtype).size
            for spec in self.specs
            if spec.shape.is_fully_defined()
        )

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one tensor for each group."""
        return [self.pack_group(group, tensors) for group in self.groups]

    def pack_group(self, group: Group, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the members of one group, out of all tensors, as one tensor."""
        wire = tensors[group.members[0]]
        if group.joined:
            flat = [tf.reshape(tensors[position], [-1]) for position in group.members]
            wire = flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)
        return self._cast(wire, self._on_the_wire(group.dtype))

    def unpack(self, wires: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, in the order in which they were given."""
        tensors: list = [None] * len(self.specs)
        for group, wire in zip(self.groups, wires, strict=True):
            for position, part in zip(group.members, self.unpack_group(group, wire), strict=True):
                tensors[position] = part
        return tensors

    def unpack_group(self, group: Group, wire: tf.Tensor) -> list[tf.Tensor]:
        """Returns the members of one group."""
        wire = self._cast(wire, group.dtype)
        if not group.joined:
            return [wire]
        shapes = [self.specs[position].shape for position in group.members]
        parts = tf.split(wire, [shape.num_elements() for shape in shapes]) if len(shapes) > 1 else [wire]
        return [tf.reshape(part, shape) for shape, part in zip(shapes, parts, strict=True)]

    def _on_the_wire(self, dtype: tf.DType) -> tf.DType:
        shorter = self._wire_dtype is not None and dtype.is_floating and dtype.size > self._wire_dtype.size
        return self._wire_dtype if shorter else dtype

    @staticmethod
    def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)


def _num_bytes(spec: tf.TensorSpec) -> int:
    return spec.shape.num_elements() * spec.dtype.size
