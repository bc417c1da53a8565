"""How do tensors get out of variables, onto disk, and back?

The files are TensorFlow's own: `tf.train.Checkpoint(model=model).restore(prefix)` reads them without this package.
A snapshot copies nothing that is on a CPU: TensorFlow copies a variable's value when it is changed while somebody
holds it, so that the steps after a snapshot pay for what they overwrite, and nobody waits for the disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import compat, errors
from tfdist_ext.checkpoint import object_graph, server_tensors, shares
from tfdist_ext.checkpoint.early_flush import EarlyFlush


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor, or one slice of one, of a snapshot.

    Attributes:
        key: Name in the file.
        slice_spec: Where it lies in the whole, in TensorFlow's notation; "" for a whole tensor.
        tensor: The value, on the task that owns it.
    """

    key: str
    slice_spec: str
    tensor: tf.Tensor

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this is, or is a slice of."""
        if not self.slice_spec:
            return tuple(self.tensor.shape.as_list())
        return tuple(int(size) for size in self.slice_spec.split()[:-1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the value; strings count as nothing."""
        return self.tensor.shape.num_elements() * self.tensor.dtype.size


class Snapshot:
    """The values of all variables below an object, as they are now.

    Attributes:
        entries: `Entry` of each value.
        graph: `TrackableObjectGraph`: which object has which.
    """

    def __init__(self, entries: Sequence[Entry], graph):
        self.entries = list(entries)
        self.graph = graph

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray | tf.Tensor]) -> Snapshot:
        """Makes a snapshot of named values that belong to no object."""
        return cls([Entry(key, "", tf.convert_to_tensor(value)) for key, value in arrays.items()], None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all values; strings count as nothing."""
        return sum(entry.num_bytes for entry in self.entries)

    def as_plain(self) -> dict[str, np.ndarray | bytes]:
        """Returns the values by key, scalar strings as bytes, such that `of_arrays` makes a snapshot of them."""
        plain = {entry.key: entry.tensor.numpy() for entry in self.entries}
        if self.graph is not None:
            plain[compat.OBJECT_GRAPH_KEY] = self.graph.SerializeToString()
        return plain

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns dtype and whole shape by key."""
        return {entry.key: (entry.tensor.dtype.name, entry.whole_shape) for entry in self.entries}

    def write(self, prefix: str) -> list[str]:
        """Writes a bundle, and returns the names of its files; the caller makes them durable.

        Runs on: any thread.

        Raises:
            tf.errors.OpError: What the file system says.
            OSError: The same, to the thread that brings the file to the disk meanwhile.
        """
        entries = list(self.entries)
        if self.graph is not None:
            entries.append(
                Entry(compat.OBJECT_GRAPH_KEY, "", tf.constant(self.graph.SerializeToString(), tf.string))
            )
        with EarlyFlush(prefix):
            return server_tensors.write(prefix, entries)


class VariableList:
    """The variables below an object, found once and read at each save.

    Args:
        root: `tf.train.Checkpoint`.

    Attributes:
        root: The same.
        graph: `TrackableObjectGraph`.
        is_lasting: False where values were read when the list was made: make a new one for each save.
    """

    def __init__(self, root):
        self.root = root
        self._values, self.graph = compat.object_graph(root)
        self.is_lasting = not any(isinstance(value, tf.Tensor) for _, value in self._values.values())
        self._on_servers = server_tensors.ServerCopies(
            {
                (key, slice_spec): variable
                for key, (trackable, _) in self._values.items()
                for slice_spec, variable in compat.stored_variables(trackable).items()
            }
        )

    def __contains__(self, variable) -> bool:
        return any(trackable is variable for trackable, _ in self._values.values())

    @property
    def ids(self) -> set[int]:
        """`id` of each object that has values."""
        return {id(trackable) for trackable, _ in self._values.values()}

    def keys_of(self, variables: Sequence[Any]) -> list[str]:
        """Returns the keys of some of the variables."""
        wanted = {
            id(one) for variable in variables for one in (variable, getattr(variable, "_value", variable))
        }
        return [key for key, (trackable, _) in self._values.items() if id(trackable) in wanted]

    def paths(self) -> dict[str, str]:
        """Returns the paths of Keras variables by key."""
        found = {key: getattr(trackable, "path", None) for key, (trackable, _) in self._values.items()}
        return {key: path for key, path in found.items() if isinstance(path, str)}

    def specs(self) -> dict[str, tuple[str, tuple[int, ...]] | None]:
        """Returns dtype and shape by key, None where nobody knows before reading."""
        return {key: _spec_of(trackable, value) for key, (trackable, value) in self._values.items()}

    def take_part_in_snapshot(self) -> None:
        """Does another worker's part of the chief's `snapshot`: what holds parts is summed over all workers."""
        for trackable, value in self._values.values():
            if compat.holds_parts(trackable):
                compat.read_for_saving(trackable, value)

    def snapshot(self) -> Snapshot:
        """Reads all values.

        Runs on: whoever writes these variables, between two steps.
        """
        copies = self._on_servers.copies().items()
        entries = [Entry(key, slice_spec, tensor) for (key, slice_spec), tensor in copies]
        copied = {entry.key for entry in entries}
        for key, (trackable, value) in self._values.items():
            if key in copied:
                continue
            for slice_spec, tensor in compat.read_for_saving(trackable, value).items():
                entries.append(Entry(key, slice_spec, tensor))
        return Snapshot(entries, self.graph)

    def put_back(self, snapshot: Snapshot) -> None:
        """Gives all variables the values of a snapshot that this made.

        Runs on: every task that holds the variables, between two steps.
        """
        others: dict[int, tuple[Any, dict[str, tf.Tensor]]] = {}
        for entry in snapshot.entries:
            trackable, _ = self._values[entry.key]
            stored = compat.stored_variables(trackable)
            if entry.slice_spec or (entry.key, entry.slice_spec) in self._on_servers.keys:
                stored[entry.slice_spec].assign(entry.tensor)
            else:
                others.setdefault(id(trackable), (trackable, {}))[1][entry.key] = entry.tensor
        for trackable, values in others.values():
            compat.restore_from_values(trackable, values)

    def read(self, prefix: str) -> None:
        """Gives all variables that a file has their values; see `restore`."""
        targets: list[tuple[str, str, tf.Variable]] = []
        others: dict[int, tuple[Any, dict[str, str]]] = {}
        matched = object_graph.matched(saved_graph(prefix), self.graph)
        for key, saved_key in object_graph.with_parts(matched, self._values).items():
            trackable, _ = self._values[key]
            stored = compat.stored_variables(trackable)
            if any((key, slice_spec) in self._on_servers.keys for slice_spec in stored):
                targets += [(saved_key, slice_spec, variable) for slice_spec, variable in stored.items()]
            else:
                others.setdefault(id(trackable), (trackable, {}))[1][key] = saved_key
        specs = saved_specs(prefix)
        # All are read before the first is assigned: a file that turns out to be damaged changes none.
        read = shares.read_all(
            prefix, {key: specs[key] for _, saved_keys in others.values() for key in saved_keys.values()}
        )
        server_tensors.read_into(prefix, targets)
        for trackable, saved_keys in others.values():
            compat.restore_from_values(trackable, {key: read[saved] for key, saved in saved_keys.items()})


def read_arrays(prefix: str) -> dict[str, np.ndarray]:
    """Returns everything in a file that `of_arrays` was written to.

    Raises:
        tf.errors.DataLossError: The file is damaged.
    """
    reader = tf.train.load_checkpoint(prefix)
    return {key: reader.get_tensor(key) for key in reader.get_variable_to_shape_map()}


def saved_graph(prefix: str):
    """Returns the `TrackableObjectGraph` of a file."""
    text = tf.train.load_checkpoint(prefix).get_tensor(compat.OBJECT_GRAPH_KEY)
    return compat.TrackableObjectGraph.FromString(text)


def saved_specs(prefix: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape by key."""
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    return {
        key: (dtypes[key].name, tuple(shape))
        for key, shape in reader.get_variable_to_shape_map().items()
        if key != compat.OBJECT_GRAPH_KEY
    }


def restore(
    variables: VariableList, prefix: str, *, path_of: Mapping[str, str], allow_missing: Sequence[str] = ()
) -> list[str]:
    """Gives variables the values of a file, or changes nothing.

    Runs on: every task that holds the variables.

    Args:
        variables: All of them exist.
        prefix: The file.
        path_of: Readable names of keys of the file, for messages.
        allow_missing: Patterns of names that may be in the file or in the program alone.

    Returns:
        Sentences about names that were allowed to be missing.

    Raises:
        CheckpointMismatchError: Names, shapes or dtypes differ; the message has all of them.
        tf.errors.DataLossError: The file is damaged.
    """
    difference = object_graph.compare(
        saved_graph(prefix), saved_specs(prefix), variables.graph, variables.specs(), path_of
    )
    notes, problems = difference.sorted_out(allow_missing)
    if problems:
        raise errors.CheckpointMismatchError(
            f"The checkpoint {prefix} does not fit the program:\n  " + "\n  ".join(problems) + "\n"
            "Build the model and the optimizer as they were when it was saved, or pass `allow_missing=[...]` with "
            "patterns of the names to go on without."
        )
    variables.read(prefix)
    return notes


def _spec_of(trackable, value) -> tuple[str, tuple[int, ...]] | None:
    variable = getattr(trackable, "_value", trackable)
    shape, dtype = getattr(variable, "shape", None), getattr(variable, "dtype", None)
    has_parts = isinstance(value, dict) and not isinstance(variable, compat.ShardedVariable)
    if shape is None or not isinstance(dtype, tf.DType) or has_parts:
        return None
    return dtype.name, tuple(shape)
