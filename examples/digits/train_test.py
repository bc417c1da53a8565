"""The example reaches its accuracy alone and under the launcher, and says the same."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "examples.digits.main", "--epochs", "2"]
LAUNCHER = [sys.executable, "-m", "tfdist_ext.launch.command", "run", "--workers", "2", "--"]


def last_words(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.partition("test loss ")[2] for line in done.stdout.splitlines() if "test loss" in line]


def test_one_process_and_two_workers_say_the_same():
    (alone,) = last_words(PROGRAM)
    workers = last_words([*LAUNCHER, *PROGRAM])
    assert len(workers) == 2 and workers[0] == workers[1]
    loss, accuracy = (float(text.split()[-1]) for text in alone.split(", "))
    other_loss, other_accuracy = (float(text.split()[-1]) for text in workers[0].split(", "))
    # float32: 90 steps of Adam after a rounding of 2**-24 relative each stay far below a percent.
    assert abs(loss - other_loss) < 1e-2 * loss
    # One of 360 images may be a close call. Guessing gets 0.1.
    assert abs(accuracy - other_accuracy) < 2 / 360 and accuracy > 0.8
