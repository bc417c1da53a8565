"""Which subcommand does `tfdist-ext` run?

Flags are argparse's, not absl's: absl has one set of flags for a whole process and no subcommands, so that
`tfdist-ext run --help` would list every flag of every module. A subcommand's module is imported only when
it is called, which keeps `--help` fast.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

import tfdist_ext

# Name, module, one line of help.
_SUBCOMMANDS = (
    ("demo", "tfdist_ext.launch.demo", "train on one device, then on two workers, and compare the results"),
    ("run", "tfdist_ext.launch.run", "start a script on a local cluster: tfdist-ext run -- python train.py"),
    ("doctor", "tfdist_ext.launch.doctor", "explain TF_CONFIG: what this task is, what is wrong, the fix"),
    ("inspect", "tfdist_ext.launch.inspect", "list the checkpoints in a directory; --verify reads them"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tfdist-ext`.

    Args:
        argv: Arguments after the program's name; None takes them from the process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        (sys.stdout if arguments else sys.stderr).write(_help())
        return 0 if arguments else 2
    name, *rest = arguments
    if name in ("--version", "version"):
        sys.stdout.write(f"tfdist-ext {tfdist_ext.__version__}\n")
        return 0
    modules = {known: module for known, module, _ in _SUBCOMMANDS}
    if name not in modules:
        close = difflib.get_close_matches(name, modules, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        sys.stderr.write(f"tfdist-ext: unknown subcommand {name!r}.{hint}\n\n{_help()}")
        return 2
    return importlib.import_module(modules[name]).main(rest)


def _help() -> str:
    lines = [f"  {name:<8} {text}" for name, _, text in _SUBCOMMANDS]
    return (
        "usage: tfdist-ext SUBCOMMAND [flags]\n\n"
        "Multi-worker Keras training that equals the single-device run.\n\n"
        "subcommands:\n" + "\n".join(lines) + "\n\n"
        "`tfdist-ext SUBCOMMAND --help` lists its flags; `tfdist-ext --version` prints the version.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
