"""Writes `docs/guides/what-is-equal.md` from the catalogue and the tables: what must hold, not what once was seen."""

import pathlib
import textwrap

from tests.conformance.catalogue import catalogue
from tests.conformance.known_differences import EVERYWHERE, KNOWN, REPLICAS, SERVERS, SUMMED, known
from tests.conformance.places import DISTRIBUTED, PLACES
from tests.conformance.programs import PROGRAMS

PATH = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "what-is-equal.md"
WIDTH = 120

HEAD = """
# What is equal to one device

Every public layer, loss, metric, optimizer, schedule, regularizer, constraint, initializer and callback of
Keras {keras}, found from its modules, is trained in a small program in double precision: 13 rows in batches of 6, so
that the last batch has one row and fewer than there are replicas. Weights, optimizer, logs, `evaluate` and `predict`
are compared with the run of one device on the same batches (for `Synchronous()`, on the batch that a round makes up),
and models are saved and loaded. A class without a program and without a line below fails the tests by name.

This page is written by `python -m tests.conformance --docs`, and the programs run with `python -m tests.conformance`.

## How many

A cell says how many names are equal, and how many are refused by name or differ, as told below. Not run are those that
need a package that TensorFlow does not bring.
"""
READING = """
Optimizers, schedules and callbacks are equal in their own state and effects too: learning rates, files, the epoch in
which they stop. *Programs* are those that no class stands for: {programs}.

Random layers are compared twice: two workers with two devices of one process, where all numbers are the same, and the
moments of what they give with those of one device (five standard errors). Under `BoundedStaleness(0)` one batch is one
step, and they draw what one device draws.
"""
WHERE = {
    EVERYWHERE: "",
    SUMMED: " where several replicas or batches make one step",
    REPLICAS: " on replicas",
    SERVERS: " on parameter servers",
    ("rounds",): " in rounds of `Synchronous()`",
    ("one at a time",): " under `BoundedStaleness(0)`",
    ("workers",): " on several workers",
}
WORDS = {"refused": "refused", "differs": "differ"}


def names_of(family):
    """Returns all names of a family: of Keras, and of programs that stand for no class."""
    tried = [item for program in PROGRAMS.values() if program.family == family for item in program.items]
    return sorted({*catalogue().get(family, ()), *tried, *KNOWN.get(family, ())})


def families():
    """Returns the families in the order of the page."""
    return [*catalogue(), "programs"]


def _kinds(family, place):
    """Returns kind -> names; what has no entry is equal."""
    kinds = {"equal": [], "refused": [], "differs": [], "not run": []}
    for name in names_of(family):
        entry = known(place, family, name)
        kinds[entry.kind if entry else "equal"].append(name)
    return kinds


def _cell(family, place):
    kinds = _kinds(family, place)
    parts = [str(len(kinds["equal"]))]
    parts += [
        f"{len(kinds[kind])} {word}"
        for kind, word in (("refused", "refused"), ("differs", "differ"))
        if kinds[kind]
    ]
    return ", ".join(parts)


def _table():
    titles = [PLACES[place].title for place in DISTRIBUTED]
    lines = ["| | names | not run | " + " | ".join(titles) + " |", "|---" * (3 + len(titles)) + "|"]
    for family in families():
        not_run = len(_kinds(family, DISTRIBUTED[0])["not run"])
        cells = [_cell(family, place) for place in DISTRIBUTED]
        lines.append(f"| {family} | {len(names_of(family))} | {not_run or ''} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _entries(kind):
    """Returns the lines of one kind: names with the same reason and places stand together."""
    together = {}
    for family in families():
        for name, entries in sorted(KNOWN.get(family, {}).items()):
            for entry in entries:
                if entry.kind == kind:
                    together.setdefault((family, entry.places, entry.reason), []).append(name)
    lines = []
    for (family, places, reason), names in together.items():
        where = "" if kind == "not run" else WHERE[places]
        text = f"- {family}: " + ", ".join(f"`{name}`" for name in names) + f"{where}. {reason}"
        lines.append(
            textwrap.fill(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        )
    return "\n".join(lines) + "\n"


def _filled(text, **options):
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False, **options)


def page():
    """Returns the text of the page."""
    import keras

    programs = ", ".join(names_of("programs"))
    reading = "\n\n".join(_filled(part) for part in READING.format(programs=programs).strip().split("\n\n"))
    version = ".".join(keras.__version__.split(".")[:2])
    return "\n".join(
        [
            HEAD.lstrip().format(keras=version),
            _table(),
            reading,
            "\n## What differs, and why\n",
            _entries("differs"),
            "## What is refused by name\n",
            _entries("refused"),
            "## What is not run\n",
            _entries("not run"),
        ]
    )
