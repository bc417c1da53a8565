"""No build of TensorFlow is asked for, none is touched, and a missing one is one sentence."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# As in an environment without TensorFlow.
WITHOUT = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
sys.meta_path.insert(0, Nowhere())
import tfdist_ext
import tfdist_ext.ps, tfdist_ext.cluster
"""


def arguments_of_setup():
    tree = ast.parse((ROOT / "setup.py").read_text())
    call = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setuptools.setup"
    )
    return {keyword.arg: keyword.value for keyword in call.keywords}


def test_g13_an_install_asks_for_no_tensorflow():
    required = ast.literal_eval(arguments_of_setup()["install_requires"])
    builds = [one for one in required if one.startswith(("tensorflow", "tf-")) and "datasets" not in one]
    assert required and builds == []
    extras = {ast.literal_eval(key) for key in arguments_of_setup()["extras_require"].keys}
    assert {"cpu", "cuda", "tpu", "test"} <= extras


@pytest.mark.parametrize(
    "name",
    ["MirroredStrategy", "MultiWorkerMirroredStrategy", "strategy_from_environment", "layers", "training"],
)
def test_g13_without_tensorflow_the_first_use_is_one_sentence(name):
    program = (
        f"{WITHOUT}\ntry:\n    tfdist_ext.{name}\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"`tfdist_ext.{name}`: TensorFlow is not installed. Install the build"), (
        done
    )
    assert "pip install 'tfdist_ext[cpu]'" in done.stdout and done.stdout.count("\n") == 1
