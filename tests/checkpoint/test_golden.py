"""A checkpoint that the first version wrote is restored by every later one."""

import shutil

import numpy as np

from tests.checkpoint import make_golden
from tfdist_ext.checkpoint import TrainingCheckpointManager


def test_the_golden_checkpoint_is_restored(tmp_path):
    shutil.copytree(make_golden.FOLDER, tmp_path / "golden")
    tally = make_golden.Tally()
    state = make_golden.job(tally)
    restored = TrainingCheckpointManager(state, tmp_path / "golden").restore_or_initialize()
    # 4 batches a pass: 7 steps are one epoch and 3 steps of the next.
    assert (restored.step, restored.epoch, restored.batch) == (7, 1, 3)
    # Every gradient is 1: velocity m = m / 2 - 1 / 4 comes to -(1 - 2^-7) / 2, and w and b are the sum of the
    # velocities: -(7 - (1 - 2^-7)) / 2.
    velocity = -(1 - 2.0**-7) / 2
    weight = -(7 - (1 - 2.0**-7)) / 2
    assert [w.item() for w in state.model.get_weights()[:2]] == [weight, weight]
    slots = {variable.path: variable.numpy() for variable in state.model.optimizer.variables}
    assert sorted(value.item() for name, value in slots.items() if "momentum" in name) == [velocity] * 2
    assert int(state.model.optimizer.iterations.numpy()) == 7
    # The batches of steps 0..3 and 0..2 were counted.
    np.testing.assert_array_equal(tally.counts, [7, 9])
    # The layer's generator has drawn 7 times since it was seeded: its second number counts.
    generator = state.model.layers[1].seed_generator.state.numpy()
    np.testing.assert_array_equal(generator, [11, 7])
    # What is read next is the last batch of the second pass.
    assert len(list(state.dataset)) == 1
