"""How are variables on parameter servers copied, written and read there, and not through this process?

A copy is one function call for each ps: it returns the values themselves, which TensorFlow copies when they are changed
while somebody holds them. A ps that sees the directory writes and reads its own part; for one that does not, the chief
does so, a bounded part at a time.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import compat
from tfdist_ext.checkpoint import shares

HERE = "/device:CPU:0"
# What passes through the chief is never more than this, or one tensor that is larger.
_AT_A_TIME_BYTES = 64 << 20
_CANNOT_SEE = (
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
)


def server_of(device: str | None) -> str | None:
    """Returns the device on which a ps reads and writes what is on `device`, None where that is no ps.

    Example:
        >>> server_of("/job:ps/replica:0/task:1/device:CPU:0")
        '/job:ps/replica:0/task:1/device:CPU:0'
        >>> server_of("/job:chief/replica:0/task:0/device:CPU:0") is None
        True
    """
    spec = tf.DeviceSpec.from_string(device or "")
    return f"/job:ps/replica:0/task:{spec.task or 0}{HERE}" if spec.job == "ps" else None


class ServerCopies:
    """Copies variables that are on parameter servers, with one call for each of these.

    Args:
        variables: `tf.Variable` by any key.

    Attributes:
        keys: The keys of those that are on a ps.
    """

    def __init__(self, variables: Mapping[Any, tf.Variable]):
        self._by_server: dict[str, dict[Any, tf.Variable]] = {}
        for key, variable in variables.items():
            server = server_of(variable.device)
            if server is not None:
                self._by_server.setdefault(server, {})[key] = variable
        self.keys = {key for some in self._by_server.values() for key in some}
        self._functions: dict[str, Any] = {}

    def copies(self) -> dict[Any, tf.Tensor]:
        """Returns the values of all of them, each still on its ps.

        Runs on: chief, while nothing is applied.
        """
        found: dict[Any, tf.Tensor] = {}
        for server, some in self._by_server.items():
            if server not in self._functions:
                self._functions[server] = _reader(server, list(some.values()))
            with tf.device(server):
                found.update(zip(some, self._functions[server](), strict=True))
        return found


def _reader(server: str, variables: Sequence[tf.Variable]):
    def read():
        with tf.device(server):
            return [tf.identity(variable.read_value_no_copy()) for variable in variables]

    with tf.device(server):
        return tf.function(read, autograph=False).get_concrete_function()


def write(prefix: str, entries: Sequence[Any]) -> list[str]:
    """Writes a bundle, and returns the names of its files.

    Runs on: any thread.

    Args:
        prefix: Where; the folder exists.
        entries: Have `key`, `slice_spec`, `tensor` and `num_bytes`.

    Raises:
        tf.errors.OpError: What the file system says, or a ps that is gone.
    """
    by_server: dict[str, list[Any]] = {}
    for entry in entries:
        by_server.setdefault(server_of(entry.tensor.device) or HERE, []).append(entry)
    own = by_server.pop(HERE, [])
    together = [
        (HERE, share) for share in shares.deal(own, lambda entry: entry.num_bytes, shares.num_threads())
    ]
    fetched: list[Any] = []
    for server, some in sorted(by_server.items()):
        if _writes_to(server, os.path.dirname(prefix)):
            together.append((server, some))
        else:
            fetched += some
    pieces = [*together, *((HERE, some) for some in _bounded(fetched))]
    pieces = [(device, some) for device, some in pieces if some]
    if len(pieces) == 1:
        _save(pieces[0][0], prefix, pieces[0][1])
        return _file_names(prefix, 1)
    parts = [f"{prefix}.part-{number}" for number in range(len(pieces))]
    saves = [
        functools.partial(_save, device, part, some)
        for part, (device, some) in zip(parts, pieces, strict=True)
    ]
    num_together = sum(bool(some) for _, some in together)
    with _AtTheSameTime(saves[:num_together]):
        for save in saves[num_together:]:
            save()
    with compat.own_executor(), tf.device(HERE):
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=prefix, delete_old_dirs=False
        )
    return _file_names(prefix, len(parts))


def _file_names(prefix: str, number: int) -> list[str]:
    name = os.path.basename(prefix)
    return [f"{name}.index", *(f"{name}.data-{index:05d}-of-{number:05d}" for index in range(number))]


def _save(device: str, prefix: str, entries: Sequence[Any]) -> None:
    with compat.own_executor(), tf.device(device):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[entry.key for entry in entries],
            shape_and_slices=[entry.slice_spec for entry in entries],
            tensors=[tf.identity(entry.tensor) for entry in entries],
        )


def _bounded(entries: Sequence[Any]) -> Iterator[list[Any]]:
    """Yields parts such that little passes through this process at a time."""
    part: list[Any] = []
    num_bytes = 0
    for entry in entries:
        if part and num_bytes + entry.num_bytes > _AT_A_TIME_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(entry)
        num_bytes += entry.num_bytes
    if part:
        yield part


def _writes_to(server: str, folder: str) -> bool:
    """Finds out whether a ps sees a folder of this process under the same name, and may write to it."""
    token = secrets.token_hex(8)
    question = os.path.join(folder, f".probe-{token}")
    answer = f"{question}-answer"
    try:
        with open(question, "x") as file:
            file.write(token)
        with compat.own_executor(), tf.device(server):
            # Seen first: writing would make a folder of that name on another machine.
            if tf.raw_ops.ReadFile(filename=question).numpy().decode() != token:
                return False
            tf.raw_ops.WriteFile(filename=answer, contents=token)
        with open(answer) as file:
            return file.read() == token
    except (*_CANNOT_SEE, FileNotFoundError):
        return False
    finally:
        for path in (question, answer):
            if os.path.exists(path):
                os.unlink(path)


class _AtTheSameTime:
    """Runs functions in threads while the block of a `with` runs; then waits, and raises the first error."""

    def __init__(self, functions: Sequence[Callable[[], None]]):
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(function,)) for function in functions]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, kind, error, trace) -> None:
        for thread in self._threads:
            thread.join()
        if kind is None and self._errors:
            raise self._errors[0]

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self._errors.append(error)


def read_into(prefix: str, targets: Sequence[tuple[str, str, tf.Variable]]) -> None:
    """Gives variables on parameter servers the values of a bundle; each shard of a table reads its own slice.

    Runs on: chief, while nothing is applied.

    Args:
        prefix: The bundle; a ps that does not see it gets the values from the chief.
        targets: Key in the file, slice specification ("" for a whole tensor) and variable.

    Raises:
        tf.errors.DataLossError: The file is damaged.
        tf.errors.NotFoundError: The file has no such tensor.
    """
    by_server: dict[str, list[tuple[str, str, tf.Variable]]] = {}
    for target in targets:
        by_server.setdefault(server_of(target[2].device) or HERE, []).append(target)
    for server, some in by_server.items():
        try:
            _read_on(server, prefix, some)
        except _CANNOT_SEE:
            _read_on(HERE, prefix, some)


def _read_on(device: str, prefix: str, targets: Sequence[tuple[str, str, tf.Variable]]) -> None:
    part: list[tuple[str, str, tf.Variable]] = []
    num_bytes = 0
    for target in targets:
        more = target[2].shape.num_elements() * target[2].dtype.size
        if part and num_bytes + more > _AT_A_TIME_BYTES:
            _read_part(device, prefix, part)
            part, num_bytes = [], 0
        part.append(target)
        num_bytes += more
    _read_part(device, prefix, part)


def _read_part(device: str, prefix: str, targets: Sequence[tuple[str, str, tf.Variable]]) -> None:
    with compat.own_executor():
        with tf.device(device):
            values = tf.raw_ops.RestoreV2(
                prefix=prefix,
                tensor_names=[key for key, _, _ in targets],
                shape_and_slices=[slice_spec for _, slice_spec, _ in targets],
                dtypes=[variable.dtype for _, _, variable in targets],
            )
        for (_, _, variable), value in zip(targets, values, strict=True):
            variable.assign(value)
