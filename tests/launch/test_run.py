"""`tfdist-ext run` with real processes, none of which imports TensorFlow."""

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch.command", "run"]
PREAMBLE = """
import json, os, signal, sys, threading, time
config = json.loads(os.environ["TF_CONFIG"])
task = "{type}:{index}".format(**config["task"])
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
    """Writes a script that knows its task; in it, `stay()` waits to be stopped."""

    def write(body):
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


def run(command, *flags):
    return subprocess.run(
        [*LAUNCHER, *flags, "--", *command], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )


def start(command, *flags):
    return subprocess.Popen([*LAUNCHER, *flags, "--", *command], stdout=subprocess.PIPE, text=True)


def read_pids(launcher, count):
    """Reads `[worker:0] pid 123` until every task has said it."""
    pids = []
    while len(pids) < count:
        line = launcher.stdout.readline()
        assert line, "the launcher ended early"
        if "] pid " in line:
            pids.append(int(line.split()[-1]))
    return pids


def wait_until_gone(pids):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a task outlived the launcher"
        threading.Event().wait(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_prefixes_tf_configs_and_log_files(script, tmp_path):
    command = script("""
        print(json.dumps(config))
        sys.stdout.write("10%\\r20%\\r100%")
        sys.stderr.buffer.write(b"bad \\xff byte")
    """)
    done = run(command, "--workers", "2", "--evaluator", "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    configs = {}
    for line in done.stdout.splitlines():
        name, _, text = line.partition("] ")
        if text.startswith("{"):
            configs[name.removeprefix("[")] = json.loads(text)
    assert set(configs) == {"worker:0", "worker:1", "evaluator:0"}
    assert configs["worker:1"]["task"] == {"type": "worker", "index": 1}
    assert configs["worker:0"]["cluster"] == configs["evaluator:0"]["cluster"]
    assert list(configs["worker:0"]["cluster"]) == ["worker"]
    assert "[worker:0] 100%\n" in done.stdout and "10%" not in done.stdout
    assert "[worker:1] bad \ufffd byte\n" in done.stderr
    log = (tmp_path / "logs" / "worker-0.log").read_bytes()
    assert b"10%\r20%\r100%" in log and b"bad \xff byte" in log


def test_the_first_failure_is_named_last_with_its_last_lines_and_its_exit_code(script):
    command = script("""
        if task == "worker:1":
            for line in range(30):
                print("line", line)
            raise SystemExit(7)
        stay()
    """)
    done = run(command, "--workers", "3")
    assert done.returncode == 7
    report = done.stderr[done.stderr.index("first failure") :]
    assert report.startswith("first failure: worker:1 ended with exit code 7\n")
    assert "line 29" in report.splitlines()[-1]
    assert "line 10" in report and "line 9\n" not in report


def test_a_signal_is_the_exit_code_and_has_a_name(script):
    done = run(script("""
        if task == "worker:0":
            os.kill(os.getpid(), signal.SIGKILL)
        stay()
    """), "--workers", "2")  # fmt: skip
    assert done.returncode == 128 + signal.SIGKILL
    assert "first failure: worker:0 was ended by SIGKILL" in done.stderr


def test_a_task_that_ignores_sigterm_is_killed(script, tmp_path):
    done = run(script(f"""
        mark = os.path.join({str(tmp_path)!r}, "ignores_sigterm")
        if task == "worker:0":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(mark, "w").close()
            stay()
        await_file(mark)
        sys.exit(1)
    """), "--workers", "2", "--grace-seconds", "0.2")  # fmt: skip
    assert done.returncode == 1
    assert "first failure: worker:1" in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_once(script, signum):
    command = script("""
        def stop(signum, frame):
            # Not `print`, inside of which the signal may come.
            os.write(1, f"got {signal.Signals(signum).name}\\n".encode())
            sys.exit(0)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, stop)
        print("pid", os.getpid(), flush=True)
        stay()
    """)
    launcher = start(command, "--workers", "2")
    read_pids(launcher, 2)
    launcher.send_signal(signum)
    out, _ = launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 128 + signum
    assert sorted(out.splitlines()) == [f"[worker:{index}] got {signum.name}" for index in range(2)]


def test_a_second_signal_kills(script):
    command = script("""
        # Not `print`, inside of which the signal may come.
        signal.signal(signal.SIGINT, lambda *_: os.write(1, f"pid {os.getpid()}\\n".encode()))
        print("pid", os.getpid(), flush=True)
        while True:
            stay()
    """)
    launcher = start(command, "--workers", "1", "--grace-seconds", "60")
    pids = read_pids(launcher, 1)
    launcher.send_signal(signal.SIGINT)
    read_pids(launcher, 1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 130
    wait_until_gone(pids)


def test_a_signal_that_comes_in_the_moment_before_a_wait_is_noticed(script):
    # Such a signal does not end the wait; nor does one that another thread takes, which does not need luck.
    command = script("""
        print("pid", os.getpid(), flush=True)
        stay()
    """)
    program = """
        import signal, sys, threading
        from tfdist_ext.launch.command import main
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        sys.exit(main(sys.argv[1:]))
    """
    arguments = ["run", "--workers", "1", "--grace-seconds", "0.1", "--", *command]
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments], stdout=subprocess.PIPE, text=True
    )
    pids = read_pids(launcher, 1)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=DEADLINE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGTERM
    wait_until_gone(pids)


def test_no_task_nor_its_children_outlive_a_killed_launcher(script):
    command = script("""
        import subprocess
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        print("pid", os.getpid(), flush=True)
        subprocess.run([sys.executable, "-c", "import os, signal; print('pid', os.getpid(), flush=True);"
                        "signal.pause()"])
    """)
    launcher = start(command, "--workers", "2")
    pids = read_pids(launcher, 4)
    launcher.kill()
    wait_until_gone(pids)
    launcher.communicate()


def test_a_worker_with_ps_is_restarted_alone_and_ps_are_stopped_without_blame(script, tmp_path):
    command = script(f"""
        mark = os.path.join({str(tmp_path)!r}, "second_life")
        if task == "chief:0":
            await_file(mark)
        elif task == "worker:0":
            print("attempt", flush=True)
            if os.path.exists(mark + "_begins"):
                open(mark, "w").close()
                stay()
            open(mark + "_begins", "w").close()
            sys.exit(5)
        else:
            stay()
    """)
    flags = ["--chief", "--workers", "1", "--ps", "1", "--grace-seconds", "0.2"]
    done = run(command, *flags, "--log-dir", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[worker:0] attempt") == 2
    assert "worker:0 ended with exit code 5; restarting it alone (restart 1 of 3)" in done.stderr
    assert "first failure" not in done.stderr
    assert (tmp_path / "logs" / "worker-0.log").read_text().count("attempt") == 2


def test_restarts_are_bounded(script):
    command = script("""
        if task == "worker:0":
            sys.exit(6)
        stay()
    """)
    done = run(command, "--chief", "--workers", "1", "--ps", "1", "--worker-restarts", "2")
    assert done.returncode == 6
    assert done.stderr.count("restarting it alone") == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "no command to run"),
        (["--"], "no command to run"),
        (["--", "train.py"], "Try: -- python train.py"),
        (["--", "no-such-program"], "'no-such-program' was not found"),
        (["--workers", "0", "--", "true"], "at least one worker"),
        (["--threads", "0", "--", "true"], "must be at least 1"),
    ],
)
def test_wrong_arguments(arguments, part):
    done = subprocess.run([*LAUNCHER, *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 2
    assert part in done.stderr
