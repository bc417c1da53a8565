"""The documentation builds without warnings, and the reference has every public name."""

import pathlib
import subprocess
import sys

import tfdist_ext

ROOT = pathlib.Path(__file__).parents[2]


def test_the_documentation_builds_without_warnings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "text", "docs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    reference = "\n".join(path.read_text() for path in (tmp_path / "api").glob("*.txt"))
    missing = [
        name for name in tfdist_ext.__all__ if f".{name}(" not in reference and f".{name}\n" not in reference
    ]
    folders = {"checkpoint", "cluster", "collectives", "data", "errors", "events", "layers", "placement", "ps",
               "strategies", "testing", "training", "transport"}  # fmt: skip
    assert set(missing) == folders
