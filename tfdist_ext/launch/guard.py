"""What stops the tasks when the launcher itself is killed?

This file runs as a small process of its own, in its own session. The launcher holds the other end of its
standard input and writes `+PID` for each task it starts and `-PID` for each that ended. However the launcher
ends, also by SIGKILL, the pipe closes, and the guard kills the process group of every task that is left: the
task and all its children. (The kernel's own parent-death signal reaches no grandchildren, and setting it
needs code between fork and exec, which is not safe beside threads.) What it cannot reach is a process that
moved to a group of its own.
"""

import os
import signal
import sys


def main() -> None:
    """Waits for the launcher's end, then kills what it left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change, pid = line[0], int(line[1:])
        (groups.add if change == "+" else groups.discard)(pid)
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue


if __name__ == "__main__":
    main()
