"""`tfdist-ext run --max-restarts` with real processes, none of which imports TensorFlow."""

import signal
import subprocess
import sys
import textwrap

import pytest

LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch.command", "run"]
PREAMBLE = """
import json, os, signal, sys, threading
config = json.loads(os.environ["TF_CONFIG"])
task = "{type}:{index}".format(**config["task"])
restart = int(os.environ["TFDIST_RESTART_COUNT"])
def stay():
    # Python notices a signal that comes in the moment before a wait only when the wait is over.
    for _ in range(600):
        threading.Event().wait(0.1)
def await_file(path):
    while not os.path.exists(path):
        threading.Event().wait(0.01)
"""
DEADLINE_SECONDS = 30


@pytest.fixture
def script(tmp_path):
    """Writes a script that knows its task and how often the group was started before."""

    def write(body):
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


def run(command, *flags):
    return subprocess.run(
        [*LAUNCHER, "--restart-backoff-seconds", "0.01", *flags, "--", *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )


def start(command, *flags):
    return subprocess.Popen(
        [*LAUNCHER, *flags, "--", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def read_until(stream, text):
    """Reads lines until one has the text; returns that line."""
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"the launcher ended without {text!r}")


def test_the_group_starts_again_on_new_ports_and_finishes(script, tmp_path):
    command = script("""
        print("restart", restart, "cluster", config["cluster"]["worker"], flush=True)
        if restart < 2:
            if task == "worker:1":
                sys.exit(3 + restart)
            stay()
    """)
    done = run(command, "--workers", "2", "--max-restarts", "4", "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    begun = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[worker:1]")]
    # Attempts 0, 1 and 2, each with addresses of its own.
    assert [line.split()[1] for line in begun] == ["0", "1", "2"]
    assert len({line.partition("cluster")[2] for line in begun}) == 3
    assert "starting all tasks again in 0.01 s (restart 1 of 4)" in done.stderr
    assert "starting all tasks again in 0.02 s (restart 2 of 4)" in done.stderr
    heading, first, second = done.stderr.splitlines()[-3:]
    assert heading == "[tfdist-ext] finished after 2 restarts:"
    assert first.startswith("[tfdist-ext]   attempt 1 failed at ")
    assert first.endswith("worker:1 ended with exit code 3")
    assert second.endswith("worker:1 ended with exit code 4")
    log = (tmp_path / "logs" / "worker-1.log").read_text()
    parts = log.split("--- tfdist-ext: attempt ")
    assert [part.count("restart") for part in parts] == [1, 1, 1]
    assert parts[1].startswith("2, ") and parts[2].startswith("3, ")


def test_the_budget_ends_with_the_history_and_the_last_failure(script):
    command = script("""
        print("this is attempt", restart + 1)
        os.kill(os.getpid(), signal.SIGKILL) if restart < 2 else sys.exit(7)
    """)
    done = run(command, "--workers", "1", "--max-restarts", "2")
    assert done.returncode == 7
    lines = [line.removeprefix("[tfdist-ext] ") for line in done.stderr.splitlines()]
    report = lines[next(index for index, line in enumerate(lines) if line.startswith("failed after")) :]
    # All three end at once: a crash loop.
    assert report[0].startswith("failed after 2 restarts; crash loop: the last 3 attempts")
    assert [line.rpartition(": ")[2] for line in report[1:4]] == [
        "worker:0 was ended by SIGKILL",
        "worker:0 was ended by SIGKILL",
        "worker:0 ended with exit code 7",
    ]
    assert report[4:] == [
        "first failure: worker:0 ended with exit code 7",
        "the last lines of worker:0:",
        "  this is attempt 3",
    ]


def test_a_wrong_command_line_is_not_started_again(script):
    done = run(script("sys.exit(2)"), "--workers", "1", "--max-restarts", "5")
    assert done.returncode == 2
    assert "starting all tasks again" not in done.stderr
    assert "exit code 2 says that the command itself is wrong" in done.stderr


def test_a_preempted_task_saves_with_the_others_and_the_group_starts_again(script, tmp_path):
    command = script(f"""
        ready = os.path.join({str(tmp_path)!r}, "ready")
        if restart == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            if task == "worker:1":
                await_file(ready)
                os.kill(os.getpid(), signal.SIGTERM)
            open(ready, "w").close()
            stay()
    """)
    done = run(command, "--workers", "2", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "worker:1 ended with exit code 143 (preempted)" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_job_that_is_stopped_while_it_trains_is_not_started_again(script, signum):
    command = script("""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        print("ready", flush=True)
        stay()
    """)
    launcher = start(command, "--workers", "1", "--max-restarts", "5")
    read_until(launcher.stdout, "ready")
    launcher.send_signal(signum)
    _, errors = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 128 + signum
    assert "starting all tasks again" not in errors


def test_a_job_that_is_stopped_between_two_attempts_ends_at_once(script):
    flags = ["--workers", "1", "--max-restarts", "5", "--restart-backoff-seconds", "600"]
    launcher = start(script("sys.exit(9)"), *flags)
    read_until(launcher.stderr, "starting all tasks again in 600 s")
    launcher.send_signal(signal.SIGTERM)
    _, errors = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 143
    heading, line = errors.splitlines()
    assert heading == "[tfdist-ext] stopped by SIGTERM after 0 restarts:"
    assert line.endswith("worker:0 ended with exit code 9")


def test_a_worker_with_ps_is_restarted_alone_first_and_then_the_group(script):
    command = script("""
        if restart == 0 and task == "worker:0":
            sys.exit(5)
        if task != "chief:0" or restart == 0:
            stay()
    """)
    flags = ["--chief", "--workers", "1", "--ps", "1", "--grace-seconds", "0.2"]
    done = run(command, *flags, "--worker-restarts", "2", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarting it alone") == 2
    assert done.stderr.count("starting all tasks again") == 1
    assert "finished after 1 restart:" in done.stderr


@pytest.mark.parametrize(
    "flags", [["--max-restarts", "-1"], ["--restart-backoff-seconds", "-1"], ["--max-restarts", "many"]]
)
def test_wrong_flags(flags):
    done = subprocess.run(
        [*LAUNCHER, *flags, "--", "true"], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert done.returncode == 2
