"""BUILD says who may import whom; the modules do exactly that."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "tfdist_ext"


def read_build():
    """Reads each py_library: name to (patterns of its files, deps)."""
    libraries = {}
    for statement in ast.parse((ROOT / "BUILD").read_text()).body:
        call = statement.value
        if call.func.id != "py_library":
            continue
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        sources = arguments["srcs"]
        patterns = ast.literal_eval(sources.args[0] if isinstance(sources, ast.Call) else sources)
        deps = ast.literal_eval(arguments["deps"]) if "deps" in arguments else []
        libraries[ast.literal_eval(arguments["name"])] = (patterns, {dep.removeprefix(":") for dep in deps})
    return libraries


LIBRARIES = read_build()
FILES = {
    name: {path for pattern in patterns for path in ROOT.glob(pattern)}
    for name, (patterns, _) in LIBRARIES.items()
}


def library_of(module):
    """Finds the library of a dotted name, or of the module that the name is in."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            for name, files in FILES.items():
                if candidate in files:
                    return name
    raise AssertionError(f"no library of BUILD has {module}")


def imports_of(path):
    """Lists the modules of ours that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "tfdist_ext")


def test_every_module_is_in_exactly_one_library():
    modules = set(PACKAGE.rglob("*.py"))
    listed = [path for files in FILES.values() for path in files]
    assert sorted(listed) == sorted(modules)


def test_every_folder_has_a_library_of_its_name():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders == set(LIBRARIES) - {"base", "tfdist_ext"}


def test_the_graph_has_no_cycle():
    graphlib.TopologicalSorter({name: deps for name, (_, deps) in LIBRARIES.items()}).prepare()


@pytest.mark.parametrize("name", LIBRARIES)
def test_deps_are_the_imports(name):
    used = {library_of(module) for path in FILES[name] for module in imports_of(path)} - {name}
    assert used == LIBRARIES[name][1]


def test_base_imports_nothing_of_ours():
    assert LIBRARIES["base"][1] == set()
