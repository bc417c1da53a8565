"""Both loops learn; the synchronous one takes one device's steps, and goes on after a crash where it was."""

import functools
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
EPOCHS, STEPS_PER_EPOCH = 2, 45  # 1,437 images in batches of 32.
ACCURACY = 0.8  # What README.md promises after two epochs; guessing gets 0.1.


def in_double_precision(directory, epochs):
    """Runs on a worker: trains in float64, and leaves the process as it was."""
    import keras

    from examples.custom_loop import train_synchronous

    keras.config.set_floatx("float64")
    try:
        return train_synchronous.train(directory, epochs)
    finally:
        keras.config.set_floatx("float32")


def test_synchronous_steps_are_those_of_one_device(worker_pool, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    run = functools.partial(worker_pool.run, in_double_precision, timeout_seconds=200)
    (alone,) = run(num_workers=1, directory=one, epochs=EPOCHS)
    both, same = run(num_workers=2, directory=two, epochs=1)
    # As if the workers had been killed soon after step 40 of 45: what was saved later is not there.
    for path in (tmp_path / "two").glob("checkpoint-0000000045-*"):
        shutil.rmtree(path)
    again, _ = run(num_workers=2, directory=two, epochs=1)
    assert alone["test_accuracy"] > ACCURACY and len(alone["step_losses"]) == EPOCHS * STEPS_PER_EPOCH
    assert both == same and len(both["step_losses"]) == STEPS_PER_EPOCH
    # Sums of 32 rows in another order: 32 roundings of 2**-53, 4e-15. In float32 the same roundings, 2e-6, grew to 3e-4
    # in these steps, since Adam divides small gradients by their size: 150 times, so that 6e-13 is left.
    np.testing.assert_allclose(both["step_losses"], alone["step_losses"][:STEPS_PER_EPOCH], rtol=1e-11)
    # The same workers again add in the same order: no bit differs.
    assert again["step_losses"] == both["step_losses"][40:]
    assert again["test_accuracy"] == both["test_accuracy"]


def test_parameter_servers(tmp_path):
    program = [sys.executable, "-m", "examples.custom_loop.main", "--strategy", "parameter_servers"]
    done = subprocess.run(
        [*program, "--epochs", str(EPOCHS), "--directory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # 1,437 images an epoch, each of them once.
    assert f"{EPOCHS * 1437} rows in {EPOCHS * STEPS_PER_EPOCH} updates, 0 dropped" in done.stdout
    assert int(re.search(r"at most (\d+) updates", done.stdout)[1]) <= 4
    assert float(re.search(r"test accuracy ([\d.]+)", done.stdout)[1]) > ACCURACY
