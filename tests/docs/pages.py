"""Which programs do the pages of the documentation hold?

Blocks of Python on a page run one after another in one process, as a reader would paste them. Comments that a reader
of the page does not see say what the blocks need:

    <!-- program FLAGS -->          a new process from here on; FLAGS are those of `tfdist-ext run`, none for one task
    <!-- setup ...code... -->       code that runs before the next block
    <!-- file NAME ...text... -->   a file in the folder where programs and commands run
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_PARTS = re.compile(
    r"<!-- program(?P<program>[^\n]*?) -->"
    r"|<!-- setup\n(?P<setup>.*?)\n-->"
    r"|<!-- file (?P<name>\S+)\n(?P<file>.*?)\n-->"
    r"|^```(?P<language>[a-z-]*)\n(?P<block>.*?)\n```$",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass
class Program:
    """Python that runs in one process, or in each task of a cluster.

    Attributes:
        page: Path of the page from the top of the checkout.
        line: Where its first block begins.
        flags: Of `tfdist-ext run`; None for a process of its own.
        source: The code.
        has_block: Whether a reader sees any of it.
    """

    page: str
    line: int
    flags: list[str] | None = None
    source: str = ""
    has_block: bool = False


@dataclasses.dataclass
class Page:
    """What a page holds.

    Attributes:
        path: From the top of the checkout.
        programs: Its Python.
        commands: (line of the page, command) of its shell blocks.
        files: Text by name.
        languages: Of all fenced blocks.
    """

    path: str
    programs: list[Program] = dataclasses.field(default_factory=list)
    commands: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    languages: list[str] = dataclasses.field(default_factory=list)


def read(path: pathlib.Path) -> Page:
    """Reads a page."""
    text = path.read_text()
    page = Page(str(path.relative_to(ROOT)))
    open_program = Program(page.path, 1)
    for part in _PARTS.finditer(text):
        line = text.count("\n", 0, part.start()) + 1
        if part["program"] is not None:
            flags = part["program"].split()
            open_program = Program(page.path, line, flags or None)
        elif part["setup"] is not None:
            open_program.source += part["setup"] + "\n"
        elif part["file"] is not None:
            page.files[part["name"]] = part["file"] + "\n"
        else:
            page.languages.append(part["language"])
            if part["language"] == "python":
                if not open_program.has_block:
                    open_program.has_block, open_program.line = True, line
                    page.programs.append(open_program)
                open_program.source += part["block"] + "\n"
            elif part["language"] == "bash":
                page.commands += commands(part["block"], line + 1)
    return page


def commands(block: str, first_line: int) -> list[tuple[int, str]]:
    """Splits a shell block into commands without their comments."""
    found = []
    for number, text in enumerate(block.splitlines(), first_line):
        command = re.sub(r"\s+#.*$", "", text).strip()
        if command and not command.startswith("#"):
            found.append((number, command))
    return found
