"""Which saved value belongs to which variable of this program, and which has no partner?

Both sides are graphs of objects with named edges, walked together from the root. Pure: works on the descriptions
alone.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Mapping, Sequence
from typing import Any

Spec = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a checkpoint and a program differ.

    Attributes:
        only_saved: Names that only the checkpoint has.
        only_here: Names that only the program has.
        changed: Name and sentence of each value of another shape or dtype.
    """

    only_saved: tuple[str, ...] = ()
    only_here: tuple[str, ...] = ()
    changed: tuple[tuple[str, str], ...] = ()

    def sorted_out(self, allowed: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns sentences about what is allowed to differ, and about what is not.

        Args:
            allowed: Patterns as of a shell (`*`, `?`), or parts of names up to a `/`.
        """
        notes: list[str] = []
        problems: list[str] = []
        sentences = [(name, f"only in the checkpoint: {name}") for name in self.only_saved]
        sentences += [(name, f"only in the program: {name}") for name in self.only_here]
        for name, sentence in sentences:
            (notes if matches(name, allowed) else problems).append(sentence)
        # Other shapes cannot be restored, whatever is allowed.
        return notes, problems + [sentence for _, sentence in self.changed]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Returns True if `name`, or a folder that it is in, matches one of the patterns."""
    # A readable name may stand behind the key.
    parts = name.split(" ")[0].split("/")
    folders = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(folder, pattern) for pattern in patterns for folder in folders)


def compare(
    saved,
    saved_specs: Mapping[str, Spec],
    here,
    specs_here: Mapping[str, Spec | None],
    path_of: Mapping[str, str],
) -> Difference:
    """Walks two graphs of objects together.

    Args:
        saved: `TrackableObjectGraph` of the checkpoint.
        saved_specs: dtype and shape by key of the checkpoint.
        here: `TrackableObjectGraph` of the program.
        specs_here: dtype and shape by key of the program, None where not known.
        path_of: Readable names of keys of the checkpoint.

    Returns:
        What has no partner, and what has changed.
    """
    partners = _partners(saved, here)
    found_here: set[str] = set()
    only_saved, changed = [], []
    for number, node in enumerate(saved.nodes):
        attributes_here = {
            a.name: a.checkpoint_key for n in partners.get(number, ()) for a in here.nodes[n].attributes
        }
        for attribute in node.attributes:
            key = attribute.checkpoint_key
            key_here = attributes_here.get(attribute.name)
            if key_here is None:
                only_saved.append(_named(key, path_of))
                continue
            found_here.add(key_here)
            sentence = _change(_named(key, path_of), saved_specs.get(key), specs_here.get(key_here))
            if sentence:
                changed.append((key, sentence))
    all_here = {a.checkpoint_key for node in here.nodes for a in node.attributes}
    return Difference(
        tuple(sorted(only_saved)), tuple(sorted(map(_short, all_here - found_here))), tuple(sorted(changed))
    )


def matched(saved, here) -> dict[str, str]:
    """Returns which key of a checkpoint has the value of each key of a program, of those that both have.

    Args:
        saved: `TrackableObjectGraph` of the checkpoint.
        here: `TrackableObjectGraph` of the program.
    """
    keys = {}
    for number, others in _partners(saved, here).items():
        saved_keys = {a.name: a.checkpoint_key for a in saved.nodes[number].attributes}
        for other in others:
            for attribute in here.nodes[other].attributes:
                if attribute.name in saved_keys:
                    keys[attribute.checkpoint_key] = saved_keys[attribute.name]
    return keys


def with_parts(matched: Mapping[str, str], keys: Collection[str]) -> dict[str, str]:
    """Returns what was matched, by the keys of the tensors.

    A lookup table has one key in the graph of objects and a tensor for each end of it: `table` is `table-keys` and
    `table-values`.

    Args:
        matched: What `matched` returned.
        keys: Those of all tensors of the program.
    """
    found = {key: saved for key, saved in matched.items() if key in keys}
    for key in keys:
        owner, dash, part = key.rpartition("-")
        if key not in found and dash and owner in matched:
            found[key] = f"{matched[owner]}-{part}"
    return found


def _partners(saved, here) -> dict[int, set[int]]:
    partners: dict[int, set[int]] = {0: {0}}
    pending = [(0, 0)]
    while pending:
        number, other = pending.pop()
        children = {child.local_name: child.node_id for child in here.nodes[other].children}
        for child in saved.nodes[number].children:
            partner = children.get(child.local_name)
            if partner is not None and partner not in partners.setdefault(child.node_id, set()):
                partners[child.node_id].add(partner)
                pending.append((child.node_id, partner))
    return partners


def _change(name: str, saved: Any, here: Any) -> str | None:
    if saved is None or here is None or saved == here:
        return None
    return f"{name}: {saved[0]}{list(saved[1])} in the checkpoint, {here[0]}{list(here[1])} in the program"


def _named(key: str, path_of: Mapping[str, str]) -> str:
    path = path_of.get(key)
    return f"{_short(key)} ({path})" if path else _short(key)


def _short(key: str) -> str:
    return key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE").replace("/.ATTRIBUTES/", "/")
