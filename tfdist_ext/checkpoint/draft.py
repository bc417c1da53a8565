"""How is a checkpoint written, so that a crash at any moment leaves either none of it or all?"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from absl import logging

from tfdist_ext.checkpoint.file_system import FileSystem, explain, remove_tree
from tfdist_ext.checkpoint.layout import COMMITTED, DRAFT, delete_folder, folder_name, read_record
from tfdist_ext.checkpoint.manifest import (
    CRC32C_PER_TENSOR,
    FILE_NAME,
    CheckpointRecord,
    FileRecord,
    Manifest,
)
from tfdist_ext.errors import CheckpointError

BUNDLE_DATA = re.compile(r"(.+)\.data-\d{5}-of-\d{5}")


class Draft:
    """A checkpoint that is being written. `CheckpointDirectory.begin` makes one.

    Several tasks may write different files of the same draft; each seals its own and tells the chief what it sealed,
    and the chief alone commits. Leaving a `with` block by an exception abandons the draft.

    Args:
        file_system: Where.
        directory: The checkpoint directory.
        step: Of the checkpoint.
        attempt: Of the save.

    Attributes:
        step: Of the checkpoint.
        attempt: Of the save.
        folder: Where the files go until the commit.
    """

    def __init__(self, file_system: FileSystem, directory: str, step: int, attempt: str):
        self.step = step
        self.attempt = attempt
        self.folder = os.path.join(directory, folder_name(DRAFT, step, attempt))
        self._directory = directory
        self._file_system = file_system

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.abandon()

    def path(self, name: str) -> str:
        """Names a file for somebody else to write, for instance a prefix for TensorFlow.

        Args:
            name: A plain file name.

        Returns:
            The path.
        """
        return os.path.join(self.folder, name)

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a file.

        Args:
            name: A plain file name.
            data: Its content.

        Raises:
            CheckpointError: If it cannot be written. The draft is gone then.
        """
        with self.explained(len(data)):
            self._file_system.write(self.path(name), data)

    def seal(self, names: Iterable[str]) -> list[FileRecord]:
        """Makes files durable and records what they are. They must not be written to any more.

        Args:
            names: Of files that this task wrote.

        Returns:
            What the manifest says of them, in the same order.

        Raises:
            CheckpointError: If a file is missing or cannot be made durable. The draft is gone then.
        """
        names = list(names)
        with self.explained():
            for name in names:
                self._file_system.fsync_file(self.path(name))
            self._file_system.fsync_folder(self.folder)
            return [_record(self.path(name), name) for name in names]

    def commit(self, manifest: Manifest) -> CheckpointRecord:
        """Makes the checkpoint exist, then deletes others of the same step.

        Runs on: chief

        Args:
            manifest: Of this step and attempt, with the files of all tasks.

        Returns:
            The record. Its manifest has a later date than all others in the directory, whatever the clock says.

        Raises:
            ValueError: If the manifest is of another step or attempt.
            CheckpointError: If a file is missing, or the disk is full or not writable. The draft is gone then.
        """
        if (manifest.step, manifest.attempt) != (self.step, self.attempt):
            raise ValueError(
                f"Argument `manifest` must be of step {self.step} and attempt {self.attempt!r}; received step "
                f"{manifest.step} and {manifest.attempt!r}. Try `step=draft.step, attempt=draft.attempt`."
            )
        target = os.path.join(self._directory, folder_name(COMMITTED, self.step, self.attempt))
        with self.explained():
            others = self._others()
            manifest = _dated_after(manifest, others)
            self._require_files(manifest.files)
            # This order is the protocol. The files of all tasks are durable since they were sealed; now the manifest,
            # then its name. Only then the folder gets the name by which readers know it, in one atomic act: the commit.
            self._file_system.write(self.path(FILE_NAME), manifest.to_json().encode())
            self._file_system.fsync_file(self.path(FILE_NAME))
            self._file_system.fsync_folder(self.folder)
            self._file_system.replace(self.folder, target)
            self._file_system.fsync_folder(self._directory)
        # Only now that the new one is durable.
        for record in others:
            if record.step == self.step:
                self._delete(record)
        return CheckpointRecord(step=self.step, path=target, attempt=self.attempt, manifest=manifest)

    @contextlib.contextmanager
    def explained(self, needed_bytes: int | None = None) -> Iterator[None]:
        """Says of errors of the system within a `with` block what they mean, and abandons the draft.

        Args:
            needed_bytes: What is being written; None for the size of what is there by then.

        Raises:
            CheckpointError: In place of OSError.
        """
        try:
            yield
        except OSError as error:
            if needed_bytes is None:
                needed_bytes = _size(self.folder)
            self.abandon()
            raise explain(error, self._directory, needed_bytes) from error

    def abandon(self) -> None:
        """Removes the draft. Does nothing after the commit, or when it is gone."""
        try:
            remove_tree(self._file_system, self.folder)
        except OSError as error:
            logging.warning("%s could not be removed: %s. It is never read; delete it.", self.folder, error)

    def _others(self) -> list[CheckpointRecord]:
        names = self._file_system.list_folder(self._directory)
        records = [read_record(self._file_system, self._directory, name) for name in names]
        return [record for record in records if record is not None and record.manifest is not None]

    def _require_files(self, files: Sequence[FileRecord]) -> None:
        """A task that wrote to a disk of its own, in the belief that all share it, is found here."""
        for file in files:
            path = self.path(file.name)
            num_bytes = os.path.getsize(path) if os.path.exists(path) else None
            if num_bytes != file.num_bytes:
                self.abandon()
                found = "is missing" if num_bytes is None else f"has {num_bytes:,} bytes"
                raise CheckpointError(
                    f"Cannot commit step {self.step} to {self._directory}: {file.name}, written with "
                    f"{file.num_bytes:,} bytes, {found}. All tasks must write to one directory that they share.",
                    path=path,
                )

    def _delete(self, record: CheckpointRecord) -> None:
        try:
            delete_folder(self._file_system, self._directory, os.path.basename(record.path))
        except OSError as error:
            # The newer one is committed; this one is only in the way, and a sweep will find it.
            logging.warning("%s was replaced but could not be deleted: %s", record.path, error)


def _record(path: str, name: str) -> FileRecord:
    if BUNDLE_DATA.fullmatch(name):
        return FileRecord(name=name, num_bytes=os.path.getsize(path), checksum=CRC32C_PER_TENSOR)
    return FileRecord(name=name, num_bytes=os.path.getsize(path), checksum=checksum_of_file(path))


def checksum_of_file(path: str) -> str:
    """Computes the checksum of a file, a part at a time.

    Args:
        path: The file.

    Returns:
        `"sha256:<hex>"`.
    """
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _dated_after(manifest: Manifest, others: Sequence[CheckpointRecord]) -> Manifest:
    """Clocks may go back; the date of what is committed later must not."""
    dates = [record.manifest.created_unix_seconds + 1e-3 for record in others if record.manifest is not None]
    return dataclasses.replace(manifest, created_unix_seconds=max([manifest.created_unix_seconds, *dates]))


def _size(folder: str) -> int | None:
    try:
        return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))
    except OSError:
        return None
