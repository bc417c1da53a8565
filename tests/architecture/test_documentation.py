"""Every public name says what it takes, gives and raises; every example in a docstring runs."""

import ast
import doctest
import importlib
import inspect
import pathlib
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "tfdist_ext").rglob("*.py")
)
PACKAGES = [name for name in MODULES if (ROOT.joinpath(*name.split(".")) / "__init__.py").exists()]


def public_names(package):
    """Yields (name, function or class) for everything in `__all__` that is one."""
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name, value


def complaints_about(name, value):
    """Lists what the documentation of one public name lacks."""
    text = inspect.getdoc(value)
    if not text:
        return [f"{name} has no docstring"]
    return (
        complaints_about_class(name, value)
        if inspect.isclass(value)
        else complaints_about_function(name, value)
    )


def complaints_about_class(name, value):
    found = []
    # A Protocol has no constructor of its own; Python gives it one that refuses.
    constructor = None if getattr(value, "_is_protocol", False) else vars(value).get("__init__")
    if (
        constructor
        and parameters_of(constructor)[1:]
        and not {"Args:", "Attributes:"} & set(value.__doc__.split())
    ):
        found.append(f"{name} has neither Args nor Attributes")
    for attribute in vars(value):
        # getdoc of the class's attribute also finds the text of what it overrides.
        if not attribute.startswith("_") and callable(getattr(value, attribute)):
            if not inspect.getdoc(getattr(value, attribute)):
                found.append(f"{name}.{attribute} has no docstring")
    return found


def complaints_about_function(name, value):
    text = inspect.getdoc(value)
    parameters = parameters_of(value)
    found = [f"{name} has no Args"] if parameters and "Args:" not in text else []
    found += [
        f"{name} does not describe {parameter}" for parameter in parameters if f"{parameter}:" not in text
    ]
    returned = value.__annotations__.get("return")
    if returned not in (None, "None") and not {"Returns:", "Yields:"} & set(text.split()):
        found.append(f"{name} has no Returns")
    if raises(value) and "Raises:" not in text:
        found.append(f"{name} has no Raises")
    return found


def parameters_of(function):
    return [parameter for parameter in inspect.signature(function).parameters if parameter[0] != "_"]


def raises(function):
    """Says whether a function raises an exception by itself, other than again or as not implemented."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return any(exc is not None and "NotImplemented" not in ast.dump(exc) for exc in raised)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    assert importlib.import_module(package).__doc__
    complaints = [text for found in public_names(package) for text in complaints_about(*found)]
    assert not complaints


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_run(module):
    output = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(importlib.import_module(module)):
        runner.run(example, out=output.append)
    assert not runner.summarize(verbose=False).failed, "".join(output)


def test_every_public_name_at_the_top_can_be_loaded():
    import tfdist_ext

    for name in tfdist_ext.__all__:
        assert getattr(tfdist_ext, name) is not None
        assert name in dir(tfdist_ext)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tfdist_ext.no_such_name
