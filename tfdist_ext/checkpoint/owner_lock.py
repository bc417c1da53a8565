"""Who may write to a checkpoint directory?

    DIR/.owner    made by the job that writes; says who it is, and is touched every few seconds while it lives

Two jobs on one directory would sweep and delete each other's work. Readers need no lock. An owner on this machine that
is dead is known to be at once, by its process id and the time at which it started; of one on another machine the
touches are waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from absl import logging

from tfdist_ext.checkpoint.file_system import explain
from tfdist_ext.errors import CheckpointError

FILE_NAME = ".owner"
# What file systems without hard links say.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
BEAT_SECONDS = 5.0
# Four touches of an owner on another machine; or for one on this machine to end that is about to.
PATIENCE_SECONDS = 20.0
PATIENCE_HERE_SECONDS = 5.0
# A claim to a dead owner's lock is a matter of microseconds.
_CLAIM_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, such that another one can find out whether it lives.

    Attributes:
        token: Of the lock.
        host: Name of its machine.
        machine: Boot of the machine, and name space of its process ids; "" where that is not known.
        pid: Process id.
        started: When it started, in the kernel's ticks; "" where that is not known.
        task: Its name in the job.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: str
    task: str

    def __str__(self) -> str:
        return f"{self.task}, process {self.pid} on {self.host}"


def this_process(task: str) -> Owner:
    """Returns this process as an owner with a new token."""
    boot = _read("/proc/sys/kernel/random/boot_id")
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return Owner(
        token=secrets.token_hex(8), host=socket.gethostname(), machine=f"{boot} {space}" if boot else "",
        pid=os.getpid(), started=_started(os.getpid()), task=task,
    )  # fmt: skip


def is_dead(owner: Owner, me: Owner) -> bool | None:
    """Whether an owner is gone; None where that cannot be seen from here."""
    if owner.machine != me.machine:
        # The same machine after another boot; else it is another one, or another container.
        rebooted = owner.machine.split(" ")[0] != me.machine.split(" ")[0] and owner.host == me.host
        return True if rebooted and owner.machine and me.machine else None
    if owner.host != me.host and not me.machine:
        return None
    if me.started:
        return _started(owner.pid) != owner.started
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class OwnerLock:
    """The right of one process to write to a directory.

    Args:
        directory: The checkpoint directory.
        task: Name of this task in its job.
        beat_seconds: How often it is touched.
    """

    def __init__(self, directory: str, task: str, beat_seconds: float = BEAT_SECONDS):
        self._directory = directory
        self._path = os.path.join(directory, FILE_NAME)
        self._me = this_process(task)
        self._beat_seconds = beat_seconds
        self._released = threading.Event()
        self._taken_by: str | None = None

    def acquire(
        self, *, patience_seconds: float = PATIENCE_SECONDS, here_seconds: float = PATIENCE_HERE_SECONDS,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Any] = time.sleep,
    ) -> None:  # fmt: skip
        """Takes the lock, also from an owner that is dead.

        Args:
            patience_seconds: How long an owner on another machine is watched.
            here_seconds: How long one on this machine is given to end.
            clock: Returns seconds.
            sleep: Waits.

        Raises:
            CheckpointError: Somebody else has it, who is named; or the directory cannot be written.
        """
        started, seen = clock(), None
        while not self._created():
            owner, touched = self._read()
            if owner is None:
                continue
            if seen is None or seen[0] != owner.token:
                seen, started = (owner.token, touched), clock()
            dead, waited = is_dead(owner, self._me), clock() - started
            patience = here_seconds if dead is False else patience_seconds
            if dead or (dead is None and touched == seen[1] and waited >= patience):
                logging.warning("%s was left by %s, which is gone.", self._path, owner)
                if not self._remove(owner.token):
                    sleep(min(0.05, self._beat_seconds / 4))
            elif waited >= patience or (dead is None and touched != seen[1]):
                raise CheckpointError(
                    f"{self._directory} is being written by another job: {owner}. Wait for its end, or choose another "
                    f"directory. If you know that it is gone, remove {self._path}.",
                    path=self._directory,
                )
            else:
                sleep(min(0.2, self._beat_seconds / 4))
        threading.Thread(target=self._beat, name=f"owner of {self._directory}", daemon=True).start()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child of the process that took it."""
        return os.getpid() == self._me.pid

    def require(self) -> None:
        """Raises where somebody else has taken the lock meanwhile: this process stood still for too long."""
        if self._taken_by is not None:
            raise CheckpointError(
                f"{self._directory} was taken over by another job: {self._taken_by}. This one had not been heard of "
                "for too long, and saves nothing more.",
                path=self._directory,
            )

    def release(self) -> None:
        """Gives the lock back; does nothing in a forked child, or when it was taken."""
        if not self._released.is_set() and self.is_of_this_process:
            self._released.set()
            self._remove(self._me.token)

    def _created(self) -> bool:
        # Whole from the start: written under another name, and linked, which fails where the name is taken.
        draft = f"{self._path}-{self._me.token}"
        try:
            os.makedirs(self._directory, exist_ok=True)
            with open(draft, "w") as file:
                json.dump(dataclasses.asdict(self._me), file)
            try:
                _put_in_place(draft, self._path)
            finally:
                os.unlink(draft)
        except FileExistsError as error:
            if not os.path.isdir(self._directory):
                raise explain(error, self._directory) from error
            return False
        except OSError as error:
            raise explain(error, self._directory) from error
        return True

    def _read(self) -> tuple[Owner | None, int]:
        """Returns the owner and when it last touched the lock; None if it is gone."""
        try:
            touched = os.stat(self._path).st_mtime_ns
            with open(self._path) as file:
                return Owner(**json.load(file)), touched
        except FileNotFoundError:
            return None, 0
        except (OSError, ValueError, TypeError):
            unknown = Owner(token="?", host="?", machine="?", pid=0, started="", task="somebody unknown")
            return unknown, touched

    def _remove(self, token: str) -> bool:
        """Removes the lock if it is still of that token; returns False where another is about to.

        Only who has made the claim to a token may remove its lock: of many that found the same dead owner one does, and
        none removes the lock of a successor.
        """
        claim = f"{self._path}-claim-{token}"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - os.stat(claim).st_mtime > _CLAIM_SECONDS:
                    os.unlink(claim)  # Left by one that died in between.
            return False
        except OSError:
            return True
        with contextlib.suppress(OSError):
            if _token_of(self._path) == token:
                os.unlink(self._path)
        with contextlib.suppress(OSError):
            os.unlink(claim)
        return True

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            owner, _ = self._read()
            if owner is not None and owner.token not in (self._me.token, "?"):
                self._taken_by = str(owner)
                return
            with contextlib.suppress(OSError):
                os.utime(self._path)


# The lock of each directory that this process has, and for whom.
_held: dict[str, tuple[OwnerLock, set[int]]] = {}


def hold(directory: str, task: str, holder: object) -> None:
    """Takes the lock of a directory for this process, unless it has it already.

    Args:
        directory: The checkpoint directory.
        task: Name of this task in its job.
        holder: The lock is given back with the last object for which it is held.

    Raises:
        CheckpointError: Another job has it, or has taken it.
    """
    lock, holders = _held.get(directory, (None, set()))
    if lock is None or not lock.is_of_this_process:
        lock, holders = OwnerLock(directory, task), set()
        lock.acquire()
        _held[directory] = lock, holders
    lock.require()
    if id(holder) not in holders:
        holders.add(id(holder))
        weakref.finalize(holder, give_back, directory, id(holder))


def give_back(directory: str, holder_id: int) -> None:
    """Gives the lock of a directory back, unless this process has it for somebody else too."""
    lock, holders = _held.get(directory, (None, set()))
    holders.discard(holder_id)
    if lock is not None and not holders:
        del _held[directory]
        lock.release()


@atexit.register
def _give_all_back() -> None:
    for lock, _ in _held.values():
        lock.release()


def _put_in_place(draft: str, path: str) -> None:
    """Makes a file exist under a name; raises FileExistsError where the name is taken."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(path, "x") as file:
            file.write(_read(draft))


def _token_of(path: str) -> str | None:
    try:
        return json.loads(_read(path))["token"]
    except (ValueError, KeyError, TypeError):
        return None


def _started(pid: int) -> str:
    """Returns when a process started; "" if there is none, or it has ended and nobody has looked."""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if not after_name or after_name[0] in "ZX" else after_name[19]


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
