"""What does a mesh ask of the layer above?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Handler(Protocol):
    """What a mesh calls, always in its engine thread."""

    def receive(self, source: int, body: bytes, payload: memoryview) -> None:
        """A message came. `payload` stays valid for as long as it is referenced."""

    def peer_lost(self, rank: int, reason: str) -> None:
        """A peer died, or stopped answering."""

    def peer_left(self, rank: int, farewell: Mapping[str, Any]) -> None:
        """A peer said goodbye; nothing more will come from it."""

    def farewell(self) -> dict[str, Any]:
        """The JSON fields of this task's own goodbye."""

    def tick(self) -> float:
        """Looks after deadlines; returns the seconds until it must be called again."""

    def closed(self, error: Exception | None) -> None:
        """Nothing more can be sent; `error` is None after a normal close."""
