"""The linter, the formatter and the type checker have nothing to say."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_lint():
    run("ruff", "check", ".")


def test_ruff_format():
    run("ruff", "format", "--check", ".")


def test_mypy():
    run("mypy")


def test_mypy_is_content_with_a_strict_user_of_the_public_names():
    run("mypy", "--strict", "--follow-imports=silent", "tests/architecture/public_api_program.py")
