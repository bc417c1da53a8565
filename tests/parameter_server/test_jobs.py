"""One script on every task, started by `tfdist-ext run`: how does the job end?"""

import json
import pathlib
import signal
import subprocess
import sys

from tests.cluster.processes import environment_of_a_task

SCRIPT = pathlib.Path(__file__).with_name("train.py")


def run(directory, *flags, arguments=()):
    launcher = [sys.executable, "-m", "tfdist_ext.launch.command", "run", "--chief", *flags, "--"]
    return subprocess.run(
        [*launcher, sys.executable, str(SCRIPT), str(directory), *arguments],
        env=environment_of_a_task(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_p1_p18_m14_fit_on_a_plain_dataset_with_all_callbacks_and_an_evaluator(tmp_path):
    # K#18624, TF#38514, TF#46169.
    done = run(tmp_path, "--workers", "2", "--ps", "1", "--evaluator")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[chief:0] facts ")]
    facts = json.loads(line.removeprefix("[chief:0] facts "))
    # Two steps an epoch. A step at rate r takes w to w + 2 r (3 - w): the distance to 3 shrinks by 1 - 2 r.
    left = [3 * 0.5**2, 3 * 0.5**2 * 0.75**2, 3 * 0.5**2 * 0.75**2 * 0.875**2]
    assert facts["loaded"] == [3 - left[0], 3 - left[1], 3 - left[2], 3 - left[2]]
    assert facts["weight"] == 3 - left[2]
    assert facts["iterations"] == 6
    history = facts["history"]
    assert history["learning_rate"] == [0.25, 0.125, 0.0625]
    # The mean of the losses before each of two steps; validation comes after them.
    assert history["loss"] == [
        (9 + 1.5**2) / 2,
        (left[0] ** 2 + (left[0] * 0.75) ** 2) / 2,
        history["loss"][2],
    ]
    assert history["val_mae"] == left
    assert "Epoch 3/3" in done.stdout
    assert {"whole-3.keras", "3.weights.h5", "log.csv", "after.keras"} <= set(facts["files"])
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
    assert facts["has_board"] == bool(list((tmp_path / "board").glob("train/events*")))
    assert f"[evaluator:0] evaluates [[{3 - left[2]}]]" in done.stdout
    # ps and workers ended by themselves, with 0.
    assert "ends with exit code" not in done.stderr and "no goodbye" not in done.stderr


def test_p13_a_job_that_loses_its_ps_fails_and_says_so(tmp_path):
    # TF#7767.
    done = run(tmp_path, "--workers", "1", "--ps", "1", arguments=["lose-ps"])
    assert done.returncode == 128 + signal.SIGKILL
    assert "first failure: ps:0 was ended by SIGKILL" in done.stderr
