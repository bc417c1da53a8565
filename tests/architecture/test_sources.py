"""Rules about every source file of the package that no linter knows."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "tfdist_ext"
MODULES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
PRIVATE = ("tensorflow.python", "tensorflow.core", "tensorflow.__internal__", "tensorflow._api", "keras.src")
RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def imports_and_names(tree):
    """Yields every imported module and every dotted name, written out through the file's import aliases."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}", node.lineno
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = [node.attr]
            value = node.value
            while isinstance(value, ast.Attribute):
                parts.append(value.attr)
                value = value.value
            if isinstance(value, ast.Name):
                yield ".".join([aliases.get(value.id, value.id), *reversed(parts)]), node.lineno


def texts(tree):
    """Yields the strings of a module that are no docstrings: names for importlib or getattr."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value, node.lineno


@pytest.fixture(params=MODULES)
def module(request):
    return request.param, ast.parse(MODULES[request.param].read_text())


def test_private_names_of_tensorflow_and_keras_only_in_compat(module):
    name, tree = module
    if name == "compat.py":
        return
    found = [*imports_and_names(tree), *texts(tree)]
    assert not [f"line {line}: {text}" for text, line in found if text.startswith(PRIVATE)]


def test_nothing_that_runs_code_from_bytes(module):
    _, tree = module
    found = [(text, line) for text, line in imports_and_names(tree) if text.split(".")[0] in RUNS_CODE]
    allowed = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and node.value.value is not False
    ]
    assert not found and not allowed


def test_no_print_outside_the_shell_command(module):
    name, tree = module
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    printed = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert name.startswith("launch/") or not printed


def test_the_environment_is_read_in_one_file(module):
    name, tree = module
    found = [
        f"line {line}: {text}"
        for text, line in imports_and_names(tree)
        if text.startswith(("os.environ", "os.getenv", "os.putenv"))
    ]
    assert name == "cluster/environment.py" or not found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import tensorflow as tf\ntf.__internal__.x()", "tensorflow.__internal__"),
        ("from tensorflow.python.distribute import values", "tensorflow.python.distribute.values"),
        ("from keras import src\nsrc.x", "keras.src"),
        ("from os import environ as e\ne.get('x')", "os.environ"),
    ],
)
def test_the_checks_see_through_aliases(code, expected):
    assert any(text.startswith(expected) for text, _ in imports_and_names(ast.parse(code)))
