"""Were all tasks of the job started with the same settings?

Each task describes itself in a small record of plain values, transport carries the records, and the
comparison here is pure. What is compared is what would otherwise silently train another model.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from absl import logging

from tfdist_ext.cluster.specification import ClusterSpecification
from tfdist_ext.errors import ConfigurationMismatchError

# Raise it when tasks of two versions can no longer talk to each other.
PROTOCOL_VERSION = 1

_IDENTITY = frozenset(["task", "rank"])
# With one of these different the tasks cannot work together at all: no argument turns it into a warning.
_STRUCTURAL = frozenset(["protocol_version", "world_size"])

_FIXES = {
    "protocol_version": "Install the same version of tfdist_ext on every machine.",
    "world_size": "Give every task the same `cluster` in TF_CONFIG, and start them all again.",
    "rank": "Give every task an index of its own in TF_CONFIG.",
    "task": "Give every task an index of its own in TF_CONFIG.",
    "tfdist_ext_version": "Install the same version of tfdist_ext on every machine.",
    "tensorflow_version": "Install the same version of TensorFlow on every machine.",
    "keras_version": "Install the same version of Keras on every machine.",
    "python_version": "Use the same minor version of Python on every machine.",
    "main_script_sha256": "Copy the same training script to every machine, and start all tasks again.",
    "seed": "Call `keras.utils.set_random_seed` with the same number in every task.",
    "keras_floatx": "Call `keras.config.set_floatx` with the same value in every task.",
    "keras_backend": "Set KERAS_BACKEND to the same value in every task.",
}


def describe_this_task(
    cluster: ClusterSpecification, *, seed: int | None = None, main_script: str | None = None
) -> dict[str, Any]:
    """Builds the record that this task shows to the others.

    Runs on: every task.

    Args:
        cluster: The cluster as this task sees it.
        seed: The global random seed, or None if none was set.
        main_script: Path of the script to hash; None finds the one that Python runs, if there is one.

    Returns:
        A flat dictionary of JSON values. A fact that this task does not have (no script in a notebook, Keras
        not imported) is left out, and then not compared.
    """
    facts = {
        "task": str(cluster.task),
        "rank": cluster.rank if cluster.task in cluster.training_tasks else None,
        "protocol_version": PROTOCOL_VERSION,
        "world_size": cluster.world_size,
        "tfdist_ext_version": _own_version(),
        "tensorflow_version": _version("tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly"),
        "keras_version": _version("keras", "keras-nightly"),
        # The patch level changes no model.
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "main_script_sha256": _hash_of(main_script),
        **_keras_settings(),
    }
    record = {name: value for name, value in facts.items() if value is not None}
    # That no seed was set is a fact of its own: one task seeded and another not is a mistake.
    return {**record, "seed": seed}


def check_records(
    records: Sequence[Mapping[str, Any]], *, on_mismatch: Literal["error", "warn"] = "error"
) -> None:
    """Compares the records of all tasks; pure.

    Args:
        records: One of each task, from `describe_this_task`.
        on_mismatch: `"warn"` turns differences into logged warnings, for those who mean it; a different
            protocol version or world size, or two tasks of one rank, are errors all the same.

    Raises:
        ConfigurationMismatchError: A field differs. The message names the first such field, both tasks, both
            values and the fix, and lists every other field that differs.
        ValueError: `on_mismatch` is neither of the two.

    Example:
        >>> check_records([{"task": "worker:0", "seed": 1}, {"task": "worker:1", "seed": 1}])
    """
    if on_mismatch not in ("error", "warn"):
        raise ValueError(f"Argument `on_mismatch` must be 'error' or 'warn'; received {on_mismatch!r}.")
    differences = _differences(records)
    if not differences:
        return
    # Sorting is stable: within both groups the order of the fields stays.
    first, *others = sorted(differences, key=lambda difference: difference.field not in _STRUCTURAL)
    error = _as_error(first, [difference.field for difference in others])
    if on_mismatch == "error" or first.field in _STRUCTURAL:
        raise error
    for difference in differences:
        logging.warning("%s", _as_error(difference, []))


class _Difference:
    """A field, two tasks that disagree about it, and what each says."""

    def __init__(self, field: str, one: Mapping[str, Any], other: Mapping[str, Any]):
        self.field = field
        self.tasks = (one.get("task", "?"), other.get("task", "?"))
        self.values = (one[field], other[field])


def _differences(records: Sequence[Mapping[str, Any]]) -> list[_Difference]:
    """Finds for each field the first task that differs from the first one that has the field."""
    _refuse_twins(records)
    fields = dict.fromkeys(field for record in records for field in record if field not in _IDENTITY)
    found = []
    for field in fields:
        having = [record for record in records if field in record]
        odd = next((record for record in having[1:] if record[field] != having[0][field]), None)
        if odd is not None:
            found.append(_Difference(field, having[0], odd))
    return found


def _refuse_twins(records: Sequence[Mapping[str, Any]]) -> None:
    """Two processes that both believe to be worker:1 would each train and both write."""
    for field in ("task", "rank"):
        seen: dict[Any, Mapping[str, Any]] = {}
        for record in records:
            value = record.get(field)
            if value is not None and value in seen:
                raise ConfigurationMismatchError(
                    f"Two processes have the same {field} {value!r} (tasks "
                    f"{seen[value].get('task', '?')} and {record.get('task', '?')}). {_FIXES[field]}",
                    field=field,
                    tasks=(seen[value].get("task", "?"), record.get("task", "?")),
                    values=(value, value),
                )
            seen[value] = record


def _as_error(difference: _Difference, also: Sequence[str]) -> ConfigurationMismatchError:
    (one, other), (value, other_value) = difference.tasks, difference.values
    fix = _FIXES.get(difference.field, "Start every task with the same value.")
    tail = f" These differ too: {', '.join(also)}." if also else ""
    return ConfigurationMismatchError(
        f"Tasks {one} and {other} differ in {difference.field}: {value!r} on {one}, {other_value!r} on "
        f"{other}. {fix}{tail}",
        field=difference.field,
        tasks=difference.tasks,
        values=difference.values,
    )


def _own_version() -> str:
    # Not from the installed metadata, which an editable installation does not refresh.
    return getattr(sys.modules.get("tfdist_ext"), "__version__", "unknown")


@functools.cache
def _version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed, without importing it."""
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _hash_of(main_script: str | None) -> str | None:
    path = main_script or getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return None if path is None else hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def _keras_settings() -> dict[str, Any]:
    """Reads what a user may have set; a Keras that nobody imported has its defaults everywhere."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "config"):
        return {}
    return {"keras_floatx": keras.config.floatx(), "keras_backend": keras.config.backend()}
