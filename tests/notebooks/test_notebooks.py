"""Every notebook runs from its first to its last cell in a fresh kernel, and is stored without what running it adds."""

import json
import os
import pathlib
import re
import sys

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
CELL_TIMEOUT_SECONDS = 300
INSTALLS = "# Installs what this notebook needs, unless it is there"


@pytest.fixture(params=NOTEBOOKS)
def path(request):
    return NOTEBOOKS[request.param]


@pytest.fixture
def jupyter_folders(tmp_path, monkeypatch):
    """Keeps what Jupyter and IPython write, and the settings they read, in a folder of this test."""
    for name in (
        "IPYTHONDIR",
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "MPLCONFIGDIR",
    ):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # Set by this test's own pytest plugins or by a launcher, they would reach the kernel.
    for name in ("TF_CONFIG", "TFDIST_RESTART_COUNT", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)


def environment():
    """Returns a kernel's environment: no GPU, and any use of pip is an error rather than a download."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "PIP_NO_INDEX": "1"}


def executed(path):
    """Runs a notebook in this Python, whatever kernels are installed; no kernel is left behind."""
    notebook = nbformat.read(path, as_version=4)
    kernel = KernelManager()
    # The manager takes its command from an installed description of a kernel; there may be none, or another Python's.
    kernel.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client = NotebookClient(
        notebook, km=kernel, timeout=CELL_TIMEOUT_SECONDS, resources={"metadata": {"path": str(path.parent)}}
    )
    try:
        client.execute(env=environment())
    except CellExecutionError as error:
        pytest.fail(f"{path.name}: {error}", pytrace=False)
    finally:
        if kernel.has_kernel:
            kernel.shutdown_kernel(now=True)
    return notebook


def test_runs_from_its_first_to_its_last_cell_and_draws(path, jupyter_folders):
    outputs = [output for cell in executed(path).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"


def test_is_stored_without_what_running_it_adds(path):
    notebook = json.loads(path.read_text())
    nbformat.validate(nbformat.reads(path.read_text(), as_version=4))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert len(set(identifiers)) == len(identifiers)
    first = "".join(code[0]["source"])
    assert first.startswith(INSTALLS) and "%pip install" in first


def test_there_are_notebooks():
    assert set(NOTEBOOKS) == {"synchronous_and_asynchronous", "crash_and_resume", "placement", "colab_tpu"}


def test_a_cell_that_fails_is_shown(tmp_path, jupyter_folders):
    cells = [
        nbformat.v4.new_code_cell("kept = 1"),
        nbformat.v4.new_code_cell(
            "import os; assert kept == 2, os.environ['PIP_NO_INDEX'] + os.environ['CUDA_VISIBLE_DEVICES']"
        ),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "fails.ipynb")
    with pytest.raises(pytest.fail.Exception) as failure:
        executed(tmp_path / "fails.ipynb")
    assert "fails.ipynb" in str(failure.value)
    assert "assert kept == 2" in str(failure.value)
    # The environment has arrived.
    assert "AssertionError: 1-1" in re.sub(r"\x1b\[[0-9;]*m", "", str(failure.value))
