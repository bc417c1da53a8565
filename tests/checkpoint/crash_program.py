"""Run by a test: does one thing to a checkpoint directory and is killed, by SIGKILL, before a chosen call.

Usage: python -m tests.checkpoint.crash_program DIR SCENARIO NUMBER
"""

import os
import signal
import sys

from tests.checkpoint.disks import SCENARIOS, WatchedFileSystem
from tfdist_ext.checkpoint.directory import CheckpointDirectory


def main():
    path, scenario, kill_number = sys.argv[1], sys.argv[2], int(sys.argv[3])

    def before(number, name, *arguments):
        if number == kill_number:
            os.kill(os.getpid(), signal.SIGKILL)

    SCENARIOS[scenario][1](CheckpointDirectory(path, file_system=WatchedFileSystem(before)))


if __name__ == "__main__":
    main()
