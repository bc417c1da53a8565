"""How does a benchmark write down what it measured, and on what?"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tfdist_ext.launch.machine import describe_machine


def write_results(path: str | pathlib.Path, results: Sequence[dict[str, Any]]) -> None:
    """Writes `{"machine": ..., "results": [...]}`; the machine without its name or address."""
    document = {"machine": describe_machine(), "results": list(results)}
    pathlib.Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
