"""Which checkpoints does a directory hold, and are they whole?

`layout.py` says what the names mean, `draft.py` in which order a checkpoint is written. A reader, such as an
evaluator on another machine, needs no lock: a checkpoint appears and vanishes by one atomic rename, and is never
changed in between.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from absl import logging

from tfdist_ext.checkpoint.draft import BUNDLE_DATA, Draft, checksum_of_file
from tfdist_ext.checkpoint.file_system import FileSystem, LocalFileSystem, explain, make_folders, remove_tree
from tfdist_ext.checkpoint.layout import (
    COMMITTED,
    DELETED,
    DRAFT,
    delete_folder,
    new_attempt,
    parse_name,
    read_record,
    set_folder_aside,
)
from tfdist_ext.checkpoint.manifest import CRC32C_PER_TENSOR, CheckpointRecord, FileRecord, newest_first
from tfdist_ext.errors import CheckpointError

_MOST_LOOKS = 10


class CheckpointDirectory:
    """A directory of checkpoints; many tasks may have one open on the same path.

    Args:
        path: The directory, local or mounted. It need not exist; the first save makes it.
        file_system: What carries out the changes.
        verify_bundle: Reads all tensors of a TensorFlow bundle, given its prefix, and returns the problem as one
            sentence, or None. By default `bundle.verify_bundle`, and TensorFlow is imported when it is first needed.
        clock: Returns the time in Unix seconds.

    Raises:
        ValueError: If the path is a URL.

    Attributes:
        path: The directory, from the root.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        file_system: FileSystem | None = None,
        verify_bundle: Callable[[str], str | None] | None = None,
        clock: Callable[[], float] = time.time,
    ):
        if "://" in os.fspath(path):
            raise ValueError(
                "Argument `path` must be a local or mounted directory, whose renames are atomic; received "
                f'{os.fspath(path)!r}. Try a mounted disk, and copy from there: "/mnt/checkpoints".'
            )
        self.path = os.path.abspath(path)
        self._file_system = LocalFileSystem() if file_system is None else file_system
        self._verify_bundle = verify_bundle
        self._clock = clock

    def begin(self, step: int, attempt: str | None = None) -> Draft:
        """Begins a checkpoint, or joins the task that did.

        Args:
            step: Updates applied.
            attempt: The token of the save, which all its writers share; None makes a new one.

        Returns:
            The draft to write to.

        Raises:
            CheckpointError: If the directory cannot be made or written.
        """
        draft = Draft(self._file_system, self.path, step, new_attempt() if attempt is None else attempt)
        try:
            make_folders(self._file_system, self.path)
            self._file_system.make_folder(draft.folder)
        except OSError as error:
            raise explain(error, self.path) from error
        return draft

    def records(self) -> list[CheckpointRecord]:
        """Lists the committed checkpoints.

        Returns:
            One record each, by step, and by date where one step was saved twice. What has no readable manifest is
            listed with its problem. What vanishes while this looks is left out.

        Raises:
            CheckpointError: If the path is no directory, or may not be read. A missing one holds no checkpoints.
        """
        for _ in range(_MOST_LOOKS):
            names = [name for name in self._names() if (parse_name(name) or ("",))[0] == COMMITTED]
            read = [read_record(self._file_system, self.path, name) for name in names]
            found = [record for record in read if record is not None]
            # What was deleted after the names were listed was replaced by something that is not among them.
            if len(found) == len(names):
                break
        return sorted(found, key=_age_order)

    def newest_first(self) -> list[CheckpointRecord]:
        """Lists the committed checkpoints in the order in which to try to restore them.

        Returns:
            `records()`, the one that was committed last first, whatever its step: training may have gone back to an
            older one. What has no readable date may be the newest; it comes before all, so that somebody hears of it.
        """
        records = self.records()
        unreadable = [record for record in records if record.manifest is None]
        return [*unreadable[::-1], *newest_first(records)]

    def check(self, record: CheckpointRecord, *, deep: bool = False) -> str | None:
        """Compares the files of a checkpoint with its manifest.

        Args:
            record: A checkpoint.
            deep: Whether to read the data files of TensorFlow too; their sizes are compared anyway.

        Returns:
            The first problem as one sentence, or None if there is none.
        """
        if record.manifest is None:
            return record.problem
        for file in record.manifest.files:
            problem = _problem_of_file(os.path.join(record.path, file.name), file)
            if problem is not None:
                return problem
        matches = [BUNDLE_DATA.fullmatch(file.name) for file in record.manifest.files] if deep else []
        for prefix in sorted({match[1] for match in matches if match}):
            problem = self._problem_of_bundle(os.path.join(record.path, prefix))
            if problem is not None:
                return problem
        return None

    def delete(self, record: CheckpointRecord) -> None:
        """Deletes a checkpoint; nobody sees half of it meanwhile.

        Args:
            record: The checkpoint; it may be gone already.

        Raises:
            CheckpointError: If it cannot be deleted.
        """
        try:
            delete_folder(self._file_system, self.path, os.path.basename(record.path))
        except OSError as error:
            raise explain(error, self.path) from error

    def set_aside(self, record: CheckpointRecord) -> None:
        """Gives a checkpoint a name that no reader takes for one.

        Args:
            record: The checkpoint.

        Raises:
            CheckpointError: If it cannot be renamed.
        """
        try:
            set_folder_aside(self._file_system, self.path, os.path.basename(record.path))
        except OSError as error:
            raise explain(error, self.path) from error

    def sweep(self, *, older_than_seconds: float = 3600.0, keep_attempts: Collection[str] = ()) -> list[str]:
        """Removes what dead attempts left: drafts, half-done deletions, and what a newer save of its step replaced.

        Only what bears our names is touched, and no link. A deletion goes whatever its age.

        Runs on: chief

        Args:
            older_than_seconds: A draft in which something was written since then may be another task's, and stays.
            keep_attempts: Attempts that are known to be alive.

        Returns:
            The names that were removed.
        """
        removed = [
            name for name in self._names() if self._is_leftover(name, older_than_seconds, keep_attempts)
        ]
        replaced = {os.path.basename(record.path) for record in self._replaced()}
        for name in [*removed, *sorted(replaced)]:
            try:
                if name in replaced:
                    delete_folder(self._file_system, self.path, name)
                else:
                    remove_tree(self._file_system, os.path.join(self.path, name))
            except OSError as error:
                logging.warning("%s is a leftover in %s but could not be removed: %s", name, self.path, error)
        return [*removed, *sorted(replaced)]

    def _names(self) -> list[str]:
        try:
            return self._file_system.list_folder(self.path)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise CheckpointError(
                f"{self.path} is a file, not a directory. Try the directory it is in.", path=self.path
            ) from error
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.", path=self.path) from error

    def _problem_of_bundle(self, prefix: str) -> str | None:
        if self._verify_bundle is None:
            from tfdist_ext.checkpoint.bundle import verify_bundle

            self._verify_bundle = verify_bundle
        return self._verify_bundle(prefix)

    def _is_leftover(self, name: str, older_than_seconds: float, keep_attempts: Collection[str]) -> bool:
        kind, _, attempt = parse_name(name) or ("", 0, "")
        path = os.path.join(self.path, name)
        if kind not in (DRAFT, DELETED) or os.path.islink(path):
            return False
        if kind == DELETED:
            return True
        return attempt not in keep_attempts and self._clock() - _last_change(path) > older_than_seconds

    def _replaced(self) -> list[CheckpointRecord]:
        """A crash between a commit and the deletion of what it replaced leaves both."""
        readable = [record for record in self.records() if record.manifest is not None]
        newest = {record.step: record for record in readable}
        sound = {step for step, record in newest.items() if self.check(record) is None}
        return [record for record in readable if record.step in sound and record is not newest[record.step]]


def _age_order(record: CheckpointRecord) -> tuple[int, float, str]:
    created = -1.0 if record.manifest is None else record.manifest.created_unix_seconds
    return record.step, created, record.attempt


def _problem_of_file(path: str, file: FileRecord) -> str | None:
    try:
        num_bytes = os.path.getsize(path)
        if num_bytes != file.num_bytes:
            return f"{file.name} has {num_bytes:,} bytes instead of {file.num_bytes:,}."
        if file.checksum != CRC32C_PER_TENSOR and checksum_of_file(path) != file.checksum:
            return f"{file.name} is damaged: its checksum is not the one that was written."
    except FileNotFoundError:
        return f"{file.name} is missing."
    except OSError as error:
        return f"{file.name} cannot be read: {error.strerror}."
    return None


def _last_change(path: str) -> float:
    """When something was last written in a draft. One that vanishes while this looks was just changed."""
    try:
        times = [os.lstat(path).st_mtime]
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
    except FileNotFoundError:
        return float("inf")
    return max(times)
