"""Every block of code of README and docs runs."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from tests.cluster.processes import environment_of_a_task
from tests.docs.pages import PAGES, ROOT, commands, read

READ = {str(path.relative_to(ROOT)): read(path) for path in PAGES}
PROGRAMS = [program for page in READ.values() for program in page.programs]
COMMANDS = [(page, line, command) for page in READ.values() for line, command in page.commands]
# What installs the package, or starts this very test: `.ci/run` runs the lines of README in a new environment, and
# tests/launch runs the demo.
RUN_BY_CI = {
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[cpu]' && tfdist-ext demo",
    *(command for page, _, command in COMMANDS if page.path == "README.md" and "pytest" in command),
}
# Nothing else on a page may be of another language than these.
LANGUAGES = {"python", "bash", "text", "json", "toctree", "eval-rst", ""}


def run(arguments, folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**environment_of_a_task(), "MPLBACKEND": "Agg", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def test_pages_have_code_and_no_other_languages():
    # A pattern that finds nothing would pass everything.
    assert len(PROGRAMS) >= 12 and len(COMMANDS) >= 6
    for page in READ.values():
        assert set(page.languages) <= LANGUAGES, page.path


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.page}:{program.line}")
def test_python_runs(program, tmp_path):
    # As many empty lines as put each line where an error message can name it.
    script = tmp_path / (pathlib.Path(program.page).stem.replace("-", "_").lower() + "_page.py")
    script.write_text(program.source)
    launcher = [sys.executable, "-m", "tfdist_ext.launch.command", "run", *(program.flags or []), "--"]
    prefix = [] if program.flags is None else launcher
    run([*prefix, sys.executable, str(script)], tmp_path, READ[program.page].files)


@pytest.mark.parametrize(
    ("page", "line", "command"), COMMANDS, ids=[f"{page.path}:{line}" for page, line, _ in COMMANDS]
)
def test_commands_run(page, line, command, tmp_path):
    if command in RUN_BY_CI:
        return
    words = shlex.split(command)
    assert words[0] in ("tfdist-ext", "python"), f"{page.path}:{line}: who runs `{command}`?"
    programs = {"tfdist-ext": [sys.executable, "-m", "tfdist_ext.launch.command"], "python": [sys.executable]}
    arguments = [part for word in words for part in programs.get(word, [word])]
    run(arguments, tmp_path, page.files)


def test_commands_are_split_from_their_comments():
    block = "# A comment.\ntfdist-ext run --workers 2 -- python train.py   # two\n\npython -m x"
    assert commands(block, 5) == [
        (6, "tfdist-ext run --workers 2 -- python train.py"),
        (8, "python -m x"),
    ]


def test_links_between_pages_lead_somewhere():
    import re

    for path in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path}: {target}"
    assert os.path.exists(ROOT / "docs/guides")
