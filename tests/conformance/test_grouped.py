"""A few names of each family under `MirroredStrategy` on 2 devices; `test_sweep` has all names at all places."""

import keras
import pytest

from tests.conformance import branches, sweep
from tests.conformance.branch_programs import Branches
from tests.conformance.programs import PROGRAMS

CHOSEN = {
    "layers": ("Dense", "Conv2D", "Embedding"),
    "losses": ("CategoricalCrossentropy", "Dice", "Huber"),
    "metrics": ("AUC", "Mean", "MeanIoU", "F1Score", "R2Score", "Precision"),
    "optimizers": ("Adam",),
    "schedules": ("CosineDecay",),
    "regularizers": ("L1L2",),
    "constraints": ("MaxNorm",),
    "initializers": ("Orthogonal",),
    "callbacks": ("EarlyStopping",),
}


@pytest.fixture(scope="module")
def verdicts():
    only = {name for names in CHOSEN.values() for name in names}
    programs = {name: PROGRAMS[name] for name in CHOSEN}
    seen = sweep.run_all(("mirrored 2",), programs, only, threads=1)
    return sweep.verdicts_of(seen, ("mirrored 2",), programs)["mirrored 2"]


@pytest.mark.parametrize("program", CHOSEN)
def test_names_of_each_family_are_equal(verdicts, program):
    for name in CHOSEN[program]:
        found = verdicts[PROGRAMS[program].family][name]
        assert found.status == "equal", f"{name}: {found.text}"


@pytest.mark.parametrize("program", [name for name in PROGRAMS if isinstance(PROGRAMS[name], Branches)])
def test_the_branches_of_a_program_can_be_made(program):
    policy = keras.config.dtype_policy()
    keras.config.set_floatx(PROGRAMS[program].floatx)
    keras.config.set_dtype_policy(PROGRAMS[program].floatx)  # Another test of the process may have set one.
    try:
        model = branches.model_of(PROGRAMS[program].recipes)
        assert model.output_shape == (None, branches.WIDTH * len(PROGRAMS[program].items))
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        keras.backend.clear_session()
