"""What lies in a checkpoint directory, and what do the names mean?

    DIR/checkpoint-0000000500-3f9a1c2e/    a committed checkpoint: its files, and manifest.json
    DIR/.draft-0000000500-3f9a1c2e/        one that is being written, by one or several tasks
    DIR/.deleted-0000000500-3f9a1c2e/      one that is being removed
    DIR/not-finite-0000000500-3f9a1c2e/    one that was set aside: a run failed, and these weights were not finite

The number is the step. The letters are the *attempt*, a random token that the chief makes for each save and tells
the others. With the attempt in the name a step that is saved again never stands in the way of its predecessor:
both are there until the older one is deleted, and the manifest with the later date is the newer one.
"""

from __future__ import annotations

import os
import re
import secrets

from tfdist_ext.checkpoint.file_system import FileSystem, remove_tree
from tfdist_ext.checkpoint.manifest import FILE_NAME, CheckpointRecord, Manifest
from tfdist_ext.errors import CheckpointError

_NAME = re.compile(r"(checkpoint|\.draft|\.deleted)-(\d{10,})-([0-9A-Za-z]{1,64})")
SET_ASIDE = "not-finite"
COMMITTED, DRAFT, DELETED = "checkpoint", ".draft", ".deleted"


def new_attempt() -> str:
    """Makes the token of a save.

    Returns:
        Eight random hexadecimal digits.
    """
    return secrets.token_hex(4)


def folder_name(kind: str, step: int, attempt: str) -> str:
    """Names a folder.

    Args:
        kind: COMMITTED, DRAFT or DELETED.
        step: Of the checkpoint.
        attempt: Of the save.

    Returns:
        The name in the directory.

    Raises:
        ValueError: If the step or the attempt can be in no name.

    Example:
        >>> folder_name(COMMITTED, 500, "3f9a1c2e")
        'checkpoint-0000000500-3f9a1c2e'
    """
    name = f"{kind}-{step:010d}-{attempt}"
    if parse_name(name) != (kind, step, attempt):
        raise ValueError(
            "Arguments `step` and `attempt` must be a whole number of at least 0 and up to 64 letters and digits; "
            f"received {step!r} and {attempt!r}. Try `attempt=new_attempt()`."
        )
    return name


def parse_name(name: str) -> tuple[str, int, str] | None:
    """Reads a name.

    Args:
        name: Of something in a checkpoint directory.

    Returns:
        (kind, step, attempt), or None if it is not ours.

    Example:
        >>> parse_name(".draft-0000000500-3f9a1c2e"), parse_name("tensorboard")
        (('.draft', 500, '3f9a1c2e'), None)
    """
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def read_record(file_system: FileSystem, directory: str, name: str) -> CheckpointRecord | None:
    """Reads what a committed checkpoint says of itself.

    Args:
        file_system: Where.
        directory: The checkpoint directory.
        name: Of something in it.

    Returns:
        The record; None if the name is no checkpoint's, or the checkpoint was deleted meanwhile.
    """
    kind, step, attempt = parse_name(name) or ("", 0, "")
    if kind != COMMITTED:
        return None
    path = os.path.join(directory, name)
    try:
        manifest = Manifest.from_json(
            file_system.read(os.path.join(path, FILE_NAME)), source=os.path.join(path, FILE_NAME)
        )
        problem = _other_name(manifest, step, attempt)
    except OSError as error:
        if not os.path.isdir(path):
            return None
        manifest, problem = None, f"{FILE_NAME} cannot be read ({error.strerror}), so this is no checkpoint."
    except CheckpointError as error:
        manifest, problem = None, str(error)
    return CheckpointRecord(
        step=step, path=path, attempt=attempt, manifest=None if problem else manifest, problem=problem
    )


def delete_folder(file_system: FileSystem, directory: str, name: str) -> None:
    """Deletes a committed checkpoint so that nobody sees half of one, not even after a power failure.

    Args:
        file_system: Where.
        directory: The checkpoint directory.
        name: Of a checkpoint in it. It may be gone already.
    """
    _, step, attempt = parse_name(name) or ("", 0, "")
    target = os.path.join(directory, folder_name(DELETED, step, attempt))
    try:
        file_system.replace(os.path.join(directory, name), target)
    except FileNotFoundError:
        return
    # Only when the new name is durable: else the old one could come back, with files missing.
    file_system.fsync_folder(directory)
    remove_tree(file_system, target)


def set_folder_aside(file_system: FileSystem, directory: str, name: str) -> None:
    """Gives a committed checkpoint a name that no reader takes for one; a person may look at it, or delete it.

    Args:
        file_system: Where.
        directory: The checkpoint directory.
        name: Of a checkpoint in it.
    """
    target = name.replace(f"{COMMITTED}-", f"{SET_ASIDE}-", 1)
    file_system.replace(os.path.join(directory, name), os.path.join(directory, target))
    file_system.fsync_folder(directory)


def _other_name(manifest: Manifest, step: int, attempt: str) -> str | None:
    if (manifest.step, manifest.attempt) == (step, attempt):
        return None
    return (
        f"The folder is named for step {step}, attempt {attempt}, its {FILE_NAME} for step {manifest.step}, attempt "
        f"{manifest.attempt}: somebody renamed or mixed them."
    )
