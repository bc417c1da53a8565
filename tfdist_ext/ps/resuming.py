"""How do the books of parameter-server training go on in another process?"""

from __future__ import annotations

from typing import Any

from tfdist_ext.ps.leases import Leases
from tfdist_ext.ps.ledger import Ledger


class ResumableLedger(Ledger):
    """A ledger that goes on where a checkpoint found another one.

    The sets in flight are not saved: `Leases.state_dict` has their batches among the unread ones, and they are
    dispatched again, on the variables of the checkpoint.
    """

    _saved_rule: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next sets depend on besides leases and variables, and what was counted, as plain data.

        Within an epoch that is the rule's memory too, such as its clocks.
        """
        rule: Any = self._rule
        remembers = self._open and hasattr(rule, "state_dict")
        return {
            "version": self.version,
            "statistics": self.statistics.state_dict(),
            "rule": {"name": type(rule).__name__, "state": rule.state_dict(self._state)}
            if remembers
            else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`.

        Args:
            state: Of a ledger of any number of workers. What a rule remembered is used by one of the same kind.

        Raises:
            RuntimeError: An epoch is open.
        """
        if self._open:
            raise RuntimeError("An epoch is open. Call `close_epoch` first.")
        self._state.version, self._saved_rule = state["version"], state["rule"]
        self.statistics.load_state_dict(state["statistics"])

    def begin_epoch(self, leases: Leases, max_steps: int | None = None) -> None:
        """Opens an epoch; the first one after `load_state_dict` with what the rule remembered.

        Args:
            leases: See `Ledger`.
            max_steps: See `Ledger`.
        """
        super().begin_epoch(leases, max_steps)
        saved, self._saved_rule = self._saved_rule, None
        rule: Any = self._rule
        if saved is not None and saved["name"] == type(rule).__name__:
            rule.load_state_dict(saved["state"], self._state)
