"""How do many small tensors travel as few large ones?

A message between two tasks costs the same whether it carries 40 bytes or 40 kB, and so does every tensor that the
chief has to keep track of. Tensors that go to, or come from, one task are joined end to end, whatever their dtypes:
each is looked at as elements of the shortest one. Large ones and those whose shape is only known at run time go by
themselves, because joining copies them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

_PACK_BELOW_BYTES = 512 << 10


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors that travel as one.

    Attributes:
        device: The parameter server at one end.
        carrier: Dtype of what travels.
        members: Their positions in the list that is packed.
        joined: False for a tensor that goes by itself, in its own shape.
    """

    device: str
    carrier: tf.DType
    members: tuple[int, ...]
    joined: bool


class Packing:
    """Packs and unpacks lists of tensors of known types.

    Args:
        specs: `tf.TensorSpec` of each tensor.
        devices: Device of each tensor's parameter server.
        wire_dtypes: For each tensor the dtype in which it travels, or None for its own. A cast to a shorter one rounds.
        below_bytes: Smaller tensors are joined.

    Example:
        >>> packing = Packing([tf.TensorSpec([2]), tf.TensorSpec([], tf.int64)], ["/job:ps/task:0"] * 2)
        >>> (wire,) = packing.pack([tf.constant([1.0, 2.0]), tf.constant(3, tf.int64)])
        >>> tuple(wire.shape)
        (4,)
        >>> [tensor.numpy().tolist() for tensor in packing.unpack([wire])]
        [[1.0, 2.0], 3]
    """

    def __init__(
        self,
        specs: Sequence[tf.TensorSpec],
        devices: Sequence[str],
        wire_dtypes: Sequence[tf.DType | None] | None = None,
        below_bytes: int = _PACK_BELOW_BYTES,
    ):
        self.specs = list(specs)
        wanted = [None] * len(self.specs) if wire_dtypes is None else wire_dtypes
        self._wire = [_on_the_wire(spec.dtype, wire) for spec, wire in zip(self.specs, wanted, strict=True)]
        joined: dict[str, list[int]] = {}
        alone: list[Group] = []
        for position, (spec, device) in enumerate(zip(specs, devices, strict=True)):
            small = (
                spec.shape.is_fully_defined() and spec.shape.num_elements() * spec.dtype.size < below_bytes
            )
            if small and spec.dtype != tf.string:
                joined.setdefault(device, []).append(position)
            else:
                alone.append(Group(device, self._wire[position], (position,), joined=False))
        self.groups = [
            Group(
                device,
                min((self._wire[m] for m in members), key=lambda d: d.size),
                tuple(members),
                joined=True,
            )
            for device, members in joined.items()
        ] + alone

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors whose size is known, as they travel."""
        return sum(
            spec.shape.num_elements() * wire.size
            for spec, wire in zip(self.specs, self._wire, strict=True)
            if spec.shape.is_fully_defined()
        )

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns one tensor for each group."""
        return [self.pack_group(group, tensors) for group in self.groups]

    def pack_group(
        self, group: Group, tensors: Sequence[tf.Tensor], tail: Sequence[tf.Tensor] = ()
    ) -> tf.Tensor:
        """Returns the members of one group, out of all tensors, as one tensor.

        Args:
            group: A group of this packing.
            tensors: All tensors.
            tail: Vectors of the group's carrier that are appended, for instance to say a number by a length.
        """
        wires = [_cast(tensors[position], self._wire[position]) for position in group.members]
        if not group.joined:
            return wires[0]
        flat = [_seen_as(wire, group.carrier) for wire in wires] + list(tail)
        return flat[0] if len(flat) == 1 else tf.concat(flat, axis=0)

    def unpack(self, wires: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors, in the order in which they were given."""
        tensors: list = [None] * len(self.specs)
        for group, wire in zip(self.groups, wires, strict=True):
            for position, part in zip(group.members, self.unpack_group(group, wire), strict=True):
                tensors[position] = part
        return tensors

    def length(self, group: Group) -> int:
        """Returns the number of carrier elements of a joined group, without a tail."""
        return sum(self._lengths(group))

    def unpack_group(self, group: Group, wire: tf.Tensor) -> list[tf.Tensor]:
        """Returns the members of one group; a tail is left out."""
        if not group.joined:
            position = group.members[0]
            return [_cast(wire, self.specs[position].dtype)]
        lengths = self._lengths(group)
        has_tail = wire.shape[0] != sum(lengths)
        parts = tf.split(wire, [*lengths, -1] if has_tail else lengths)
        members = []
        for position, part in zip(group.members, parts, strict=False):
            spec = self.specs[position]
            members.append(_cast(_seen_again(part, self._wire[position], spec.shape), spec.dtype))
        return members

    def _lengths(self, group: Group) -> list[int]:
        return [
            self.specs[m].shape.num_elements() * (self._wire[m].size // group.carrier.size)
            for m in group.members
        ]


def _on_the_wire(dtype: tf.DType, wire: tf.DType | None) -> tf.DType:
    if dtype == tf.bool:
        return tf.int32
    shorter = wire is not None and dtype.is_floating and dtype.size > wire.size
    return wire if shorter else dtype


def _seen_as(tensor: tf.Tensor, carrier: tf.DType) -> tf.Tensor:
    """Returns the memory of a tensor as a vector of another dtype, of the same size or shorter."""
    flat = tf.reshape(tensor, [-1])
    return flat if flat.dtype == carrier else tf.reshape(tf.bitcast(flat, carrier), [-1])


def _seen_again(part: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape) -> tf.Tensor:
    if part.dtype != dtype:
        ratio = dtype.size // part.dtype.size
        part = tf.bitcast(part if ratio == 1 else tf.reshape(part, [-1, ratio]), dtype)
    return tf.reshape(part, shape)


def _cast(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tensor if tensor.dtype == dtype else tf.cast(tensor, dtype)
