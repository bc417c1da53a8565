"""File systems that fail, crash, or lose power at a chosen call; and what is read afterwards."""

import os

from tfdist_ext.checkpoint.directory import CheckpointDirectory
from tfdist_ext.checkpoint.file_system import LocalFileSystem
from tfdist_ext.checkpoint.manifest import Manifest

CHANGES = ("make_folder", "write", "fsync_file", "fsync_folder", "replace", "remove", "remove_folder")


class Crash(BaseException):
    """The process is dead: no handler of ordinary errors may see it."""


class WatchedFileSystem(LocalFileSystem):
    """Calls `before(number, name, *arguments)` before each change."""

    def __init__(self, before=lambda number, name, *arguments: None):
        self.calls = []
        self._before = before

    def _change(self, name, *arguments):
        number = len(self.calls)
        self.calls.append((name, *arguments))
        self._before(number, name, *arguments)
        getattr(super(), name)(*arguments)


for _name in CHANGES:
    setattr(WatchedFileSystem, _name, lambda self, *arguments, _name=_name: self._change(_name, *arguments))


def crashing_at(crash_number):
    """A file system that dies before a call, and lets nothing happen afterwards. A write is torn in its middle."""

    def before(number, name, *arguments):
        if number == crash_number and name == "write":
            path, data = arguments
            LocalFileSystem().write(path, data[: len(data) // 2])
        if number >= crash_number:
            raise Crash

    return WatchedFileSystem(before)


def failing_at(failure_number, error_number):
    """A file system of which one call fails."""

    def before(number, name, *arguments):
        if number == failure_number:
            raise OSError(error_number, os.strerror(error_number), arguments[0])

    return WatchedFileSystem(before)


def save(directory, step, attempt="a", content=b"weights", created=100.0):
    """Saves two files."""
    with directory.begin(step, attempt) as draft:
        draft.write_bytes("state", content)
        draft.write_bytes("position.json", b"{}")
        files = tuple(draft.seal(["state", "position.json"]))
        return draft.commit(Manifest(step=step, attempt=attempt, files=files, created_unix_seconds=created))


def intact(path):
    """Reads a directory as a new process would: (step, content of `state`), the newest first; all must be whole."""
    directory = CheckpointDirectory(path)
    found = []
    for record in directory.newest_first():
        assert directory.check(record) is None, directory.check(record)
        with open(os.path.join(record.path, "state"), "rb") as file:
            found.append((record.step, file.read()))
    return found


# What is there before, what is done, and the states in which a crash may leave it, the first being that of before.
def first_save(directory):
    save(directory, 10, "a", b"ten")


def next_save(directory):
    save(directory, 20, "b", b"twenty")


def save_again(directory):
    # The clock of the new attempt is behind.
    save(directory, 10, "b", b"again", created=50.0)


def delete_oldest(directory):
    directory.delete(directory.records()[0])


def save_and_delete(directory):
    save(directory, 30, "c", b"thirty")
    delete_oldest(directory)


def sweep(directory):
    directory.sweep(older_than_seconds=-1.0)


def prepare_nothing(path):
    pass


def prepare_one(path):
    save(CheckpointDirectory(path), 10, "a", b"ten")


def prepare_two(path):
    prepare_one(path)
    save(CheckpointDirectory(path), 20, "b", b"twenty")


def prepare_leftovers(path):
    """Two of one step, as a crash before the deletion leaves them; a draft; and half a deletion."""
    save(CheckpointDirectory(path), 10, "b", b"again", created=200.0)
    name = "checkpoint-0000000010-b"
    os.rename(os.path.join(path, name), os.path.join(path, "aside"))
    save(CheckpointDirectory(path), 10, "a", b"ten")
    os.rename(os.path.join(path, "aside"), os.path.join(path, name))
    CheckpointDirectory(path).begin(30, "c").write_bytes("state", b"half")
    os.makedirs(os.path.join(path, ".deleted-0000000005-d", "temporary"))


TEN, AGAIN, TWENTY, THIRTY = (10, b"ten"), (10, b"again"), (20, b"twenty"), (30, b"thirty")
SCENARIOS = {
    "first_save": (prepare_nothing, first_save, [[], [TEN]]),
    "next_save": (prepare_one, next_save, [[TEN], [TWENTY, TEN]]),
    "save_again": (prepare_one, save_again, [[TEN], [AGAIN, TEN], [AGAIN]]),
    "delete_oldest": (prepare_two, delete_oldest, [[TWENTY, TEN], [TWENTY]]),
    "save_and_delete": (
        prepare_two,
        save_and_delete,
        [[TWENTY, TEN], [THIRTY, TWENTY, TEN], [THIRTY, TWENTY]],
    ),
    "sweep": (prepare_leftovers, sweep, [[AGAIN, TEN], [AGAIN]]),
}


def num_calls(name, path):
    """Counts the changes of a scenario, by doing it once in a folder of its own."""
    prepare, act, states = SCENARIOS[name]
    prepare(path)
    watched = WatchedFileSystem()
    act(CheckpointDirectory(path, file_system=watched))
    assert intact(path) == states[-1]
    return len(watched.calls)
