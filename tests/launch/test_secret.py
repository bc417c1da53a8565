"""The secret that `tfdist-ext run` draws, so that no other user of the host can join the job."""

import json
import os
import re
import subprocess
import sys

import pytest

LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch.command", "run"]
DEADLINE_SECONDS = 30
# Each task of each attempt tells what it was given, and whether it stands in anybody's command line.
SCRIPT = """
import glob, json, os, pathlib, sys
secret = os.environ["TFDIST_EXT_CLUSTER_SECRET"]
task = json.loads(os.environ["TF_CONFIG"])["task"]
attempt = os.environ["TFDIST_RESTART_COUNT"]
def command_line(path):
    try:
        return pathlib.Path(path).read_bytes()
    except OSError:
        return b""
shown = any(secret.encode() in command_line(path) for path in glob.glob("/proc/[0-9]*/cmdline"))
name = "{type}-{index}-of-attempt-".format(**task) + attempt
pathlib.Path(sys.argv[1], name).write_text(json.dumps([secret, shown]))
print("training")
sys.exit(3 if attempt == "0" and task == {"type": "worker", "index": 1} else 0)
"""
FLAGS = "--workers 2 --evaluator --max-restarts 1 --restart-backoff-seconds 0 --grace-seconds 5".split()


@pytest.fixture
def run(tmp_path):
    """Runs a job that fails once; returns its secrets, and every text that it left."""
    numbers = iter(range(10))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def call(secret):
        told, logs = tmp_path / f"told-{next(numbers)}", tmp_path / "logs"
        told.mkdir()
        variables = {**os.environ, "TFDIST_EXT_CLUSTER_SECRET": secret}
        if secret is None:
            del variables["TFDIST_EXT_CLUSTER_SECRET"]
        command = [*LAUNCHER, *FLAGS, "--log-dir", str(logs), "--", sys.executable, str(script), str(told)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=variables
        )
        assert done.returncode == 0, done.stderr
        found = {path.name: json.loads(path.read_text()) for path in told.iterdir()}
        # In the first attempt the others may have been stopped before they could tell.
        assert {"worker-1-of-attempt-0", "worker-0-of-attempt-1", "worker-1-of-attempt-1"} <= set(found)
        assert "evaluator-0-of-attempt-1" in found and not any(shown for _, shown in found.values())
        texts = [done.stdout, done.stderr, *(path.read_text() for path in logs.iterdir())]
        assert len(texts) == 5 and all("training" in text for text in texts if text != done.stderr)
        return {secret for secret, _ in found.values()}, "".join(texts)

    return call


def test_g9_all_tasks_of_a_job_share_one_new_secret_which_nobody_sees(run):
    drawn = []
    for unset in (None, ""):
        secrets, texts = run(unset)
        (secret,) = secrets
        assert re.fullmatch("[0-9a-f]{64}", secret) and secret not in texts
        drawn.append(secret)
    assert drawn[0] != drawn[1]


def test_g9_a_secret_of_the_environment_is_left_alone(run):
    secrets, texts = run("correct horse battery")
    assert secrets == {"correct horse battery"} and "horse" not in texts
