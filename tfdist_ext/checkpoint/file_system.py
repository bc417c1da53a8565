"""Which calls to the operating system make a checkpoint, and what do their errors mean?

Everything that changes a checkpoint directory goes through a `FileSystem`, so that a test can end the world at any
of its calls. Folders are local or mounted; their file system must rename atomically, as POSIX asks.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Protocol

from tfdist_ext.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)
# Some network file systems cannot do this to a folder; their renames are as durable as they get.
_CANNOT_FSYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP)


class FileSystem(Protocol):
    """What is done to files and folders; each method raises OSError as the system does."""

    def make_folder(self, path: str) -> None:
        """Makes a folder, unless it is there."""

    def write(self, path: str, data: bytes) -> None:
        """Writes a whole file, new or over an old one."""

    def read(self, path: str) -> bytes:
        """Reads a whole file."""

    def list_folder(self, path: str) -> list[str]:
        """Lists the names in a folder, in the order of the alphabet."""

    def fsync_file(self, path: str) -> None:
        """Returns when the content of a file would survive a power failure."""

    def fsync_folder(self, path: str) -> None:
        """Returns when the names in a folder would survive a power failure."""

    def replace(self, source: str, target: str) -> None:
        """Renames in one atomic act."""

    def remove(self, path: str) -> None:
        """Removes a file or a link."""

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder."""


class LocalFileSystem:
    """The file system of this machine."""

    def make_folder(self, path: str) -> None:
        """See `FileSystem`."""
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def write(self, path: str, data: bytes) -> None:
        """See `FileSystem`."""
        with open(path, "wb") as file:
            file.write(data)

    def read(self, path: str) -> bytes:
        """See `FileSystem`."""
        with open(path, "rb") as file:
            return file.read()

    def list_folder(self, path: str) -> list[str]:
        """See `FileSystem`."""
        return sorted(os.listdir(path))

    def fsync_file(self, path: str) -> None:
        """See `FileSystem`."""
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def fsync_folder(self, path: str) -> None:
        """See `FileSystem`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _CANNOT_FSYNC_FOLDERS:
                raise
        finally:
            os.close(descriptor)

    def replace(self, source: str, target: str) -> None:
        """See `FileSystem`."""
        os.replace(source, target)

    def remove(self, path: str) -> None:
        """See `FileSystem`."""
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        """See `FileSystem`."""
        os.rmdir(path)


def remove_tree(file_system: FileSystem, path: str) -> None:
    """Removes a folder with all that is in it; what another process removes meanwhile is gone too.

    Args:
        file_system: Where.
        path: A folder, a file, or a link, which is removed and not followed. It need not exist.
    """
    with contextlib.suppress(FileNotFoundError):
        if os.path.islink(path) or not os.path.isdir(path):
            file_system.remove(path)
            return
        for name in file_system.list_folder(path):
            remove_tree(file_system, os.path.join(path, name))
        file_system.remove_folder(path)


def make_folders(file_system: FileSystem, path: str) -> None:
    """Makes a folder and those it is in, so that they would survive a power failure.

    Args:
        file_system: Where.
        path: The folder, from the root.
    """
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        file_system.make_folder(folder)
        file_system.fsync_folder(os.path.dirname(folder))


def explain(error: OSError, path: str, needed_bytes: int | None = None) -> CheckpointError:
    """Says what an error of the operating system means for somebody who saves or deletes.

    Args:
        error: The error.
        path: The checkpoint directory.
        needed_bytes: What was being written.

    Returns:
        The error to raise, with the fix in it.

    Example:
        >>> str(explain(OSError(errno.EROFS, "Read-only file system"), "/data"))
        'Cannot write to /data: Read-only file system. Choose a directory that this user may write to, ...'
    """
    if error.errno in _FULL:
        needed = "more room" if needed_bytes is None else f"room for {needed_bytes:,} bytes more"
        text = (
            f"the disk is full; the checkpoint needs {needed}. Delete old checkpoints or other files there, keep fewer "
            "checkpoints, or choose another directory. The checkpoints that were there are intact."
        )
    elif error.errno in _REFUSED:
        text = f"{error.strerror}. Choose a directory that this user may write to, or mend its permissions."
    elif error.errno in _NO_FOLDER:
        text = f"{error.filename or path} is a file, not a directory. Choose another directory, or move the file away."
    elif error.errno == errno.ENOENT:
        text = (
            f"{error.filename or 'a file'} is gone. Another task gave this save up, or somebody deleted it; all tasks "
            "must see the same directory."
        )
    else:
        text = f"{error.strerror or error}. The checkpoints that were there are intact."
    return CheckpointError(f"Cannot write to {path}: {text}", path=path)
