"""Run by a test: saves a step, one that does not fit on the disk, and one after making room.

Usage: python -m tests.checkpoint.full_disk_program DIR [mount]
"""

import errno
import os
import subprocess
import sys

import tensorflow as tf

from tests.checkpoint.disks import WatchedFileSystem
from tfdist_ext import errors
from tfdist_ext.checkpoint import LatestN, TrainingCheckpointManager, TrainingState
from tfdist_ext.checkpoint.directory import CheckpointDirectory

NUM_ELEMENTS = 50_000  # 200 kB.


def main():
    path, mounts = sys.argv[1], sys.argv[2:] == ["mount"]
    os.mkdir(path)
    if mounts:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    weights = tf.Variable(tf.zeros([NUM_ELEMENTS]))
    state = TrainingState(weights=weights, allow_missing=["input"])
    checkpoints = TrainingCheckpointManager(state, path, keep=LatestN(9), stop_on_sigterm=False)
    full = [False]

    def before(number, name, *arguments):
        if full[0] and name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not mounts:
        checkpoints.directory = CheckpointDirectory(path, file_system=WatchedFileSystem(before))
    for step in (1, 2, 3):
        weights.assign(tf.fill([NUM_ELEMENTS], float(step)))
        fill(os.path.join(path, "filler"), mounts and step == 2)
        full[0] = step == 2
        try:
            checkpoints.save(step, wait=True)
        except errors.CheckpointError as error:
            print("a tmpfs of 1 MB" if mounts else "an injected error")
            print(str(error).replace("\n", " "))
    weights.assign(tf.zeros([NUM_ELEMENTS]))
    restored = checkpoints.restore_or_initialize()
    right = bool((weights.numpy() == 3).all())
    print(f"saved {checkpoints.steps()}, restored {restored.step}, values right {right}")


def fill(filler, is_full):
    """Leaves 100 kB of room, or all of it."""
    if os.path.exists(filler):
        os.unlink(filler)
    if is_full:
        room = os.statvfs(os.path.dirname(filler))
        with open(filler, "wb") as file:
            file.write(bytes(room.f_bavail * room.f_frsize - 100_000))


if __name__ == "__main__":
    main()
