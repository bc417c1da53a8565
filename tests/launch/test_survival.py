"""What happens around the launcher does not end the job: full disks, terminals that close."""

import io
import os
import signal
import subprocess
import sys

import pytest

from tfdist_ext.launch.output import LogFile, PrefixedPrinter

LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch.command", "run"]
DEADLINE_SECONDS = 30
# More than the pipes hold, so that a task whose output nobody reads never ends.
TALKATIVE = [
    sys.executable,
    "-c",
    "import sys; [print('x' * 99, file=f) for f in (sys.stdout, sys.stderr) for _ in range(5000)]",
]


def run(command, *flags, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([*LAUNCHER, *flags, "--", *command], text=True, timeout=DEADLINE_SECONDS, **streams)


@pytest.fixture
def full():
    """A file on a disk without room: every write is ENOSPC."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as file:
        yield file


def test_g2_a_full_disk_under_the_logs_is_one_warning(tmp_path, full):
    for index in range(2):
        (tmp_path / f"worker-{index}.log").symlink_to("/dev/full")
    done = run(TALKATIVE, "--workers", "2", "--log-dir", str(tmp_path))
    assert done.returncode == 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("[tfdist-ext] cannot write")]
    assert len(warnings) == 1 and "No space left on device. The job goes on" in warnings[0]
    assert done.stdout.count("x" * 99) == 2 * 5000


def test_g2_a_full_disk_under_a_restarted_log_is_one_warning(tmp_path, full):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    failing = [sys.executable, "-c", "import sys; print('x'); sys.exit(3)"]
    flags = ("--workers", "1", "--max-restarts", "1", "--restart-backoff-seconds", "0.01")
    done = run(failing, *flags, "--log-dir", str(tmp_path))
    assert done.returncode == 3
    assert done.stderr.count("cannot write") == 1 and "2 attempts" in done.stderr


def test_g2_a_full_disk_under_stdout_is_one_warning_and_the_logs_are_whole(tmp_path, full):
    done = run(TALKATIVE, "--workers", "1", "--log-dir", str(tmp_path), stdout=full)
    assert done.returncode == 0
    assert done.stderr.count("cannot write the output of the tasks any more: No space left on device") == 1
    assert (tmp_path / "worker-0.log").read_text().count("x" * 99) == 2 * 5000


def test_g2_with_no_room_for_any_word_the_exit_code_is_the_jobs(tmp_path, full):
    assert run(TALKATIVE, "--workers", "1", stdout=full, stderr=full).returncode == 0
    failing = [sys.executable, "-c", "import sys; print('x'); sys.exit(3)"]
    assert run(failing, "--workers", "1", stdout=full, stderr=full).returncode == 3


def test_g2_a_terminal_that_is_gone_is_one_loss():
    class Gone(io.BytesIO):
        def write(self, data):
            raise OSError(5, "Input/output error")

    losses = []
    printer = PrefixedPrinter(Gone(), on_loss=losses.append)
    for _ in range(2):
        printer.write("t", ["a"])
    assert len(losses) == 1 and "Input/output error" in losses[0]


def test_g2_a_log_says_what_is_missing_once_there_is_room_again(tmp_path):
    class Disk(io.BytesIO):
        room = 3

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = super().write(bytes(data)[: self.room])
            self.room -= taken
            return taken

    losses, disk = [], Disk()
    log = LogFile(tmp_path / "worker-0.log", losses.append)
    log._file = disk
    log.write(b"12345")
    log.write(b"67\n")
    disk.room = 1000
    log.write(b"end\n")
    assert disk.getvalue() == b"123\n--- tfdist-ext: 5 bytes are missing here ---\nend\n"
    assert len(losses) == 2


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT])
def test_g3_a_signal_that_was_ignored_at_the_start_stays_ignored(signum):
    """`nohup` has SIGHUP ignored, a script's `&` SIGINT: the job ends by itself, with 0."""
    task = (
        "import os, signal, sys\n"
        f"ignored = signal.getsignal({int(signum)}) is signal.SIG_IGN\n"
        f"os.kill(os.getppid(), {int(signum)})\n"
        "print('ignored here too', ignored)\n"
    )
    program = (
        "import signal, sys\n"
        "from tfdist_ext.launch.command import main\n"
        f"signal.signal({int(signum)}, signal.SIG_IGN)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["run", "--workers", "1", "--", sys.executable, "-c", task]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert "received" not in done.stderr
    assert "[worker:0] ignored here too True" in done.stdout
