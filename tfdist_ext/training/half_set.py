"""What is a set while only its first half is computed?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist_ext.training.set_delivery import ComputedSet
from tfdist_ext.training.worker import Worker


@dataclasses.dataclass(eq=False)
class HalfSet(ComputedSet):
    """A set whose first half is computed.

    Attributes:
        batch: Remote tensors of its batch, on its worker.
        inputs: `(cached, draw, arguments)` of its first half.
        shown: Remote tensors on the ps.
        pulled: Called with its worker and the bytes that the second half pulls.
        told: What all sets of the step showed, and its slot there.
    """

    batch: list = dataclasses.field(default_factory=list)
    inputs: tuple = ()
    shown: list = dataclasses.field(default_factory=list)
    pulled: Any = None
    told: Any = None

    @property
    def needs_others(self) -> bool:
        """True: nobody can bring it to the ps before its step is known."""
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes that went to the ps, or will, as far as they are known."""
        shown = sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in self.shown)
        return shown + self.program.layout.num_bytes

    def deliver(self, worker: Worker) -> None:
        """Computes the second half, which brings the set to the ps."""
        whole, slot = self.told
        halves, program = self.program.halves, self.program
        outputs = halves.second(halves.batch_of(self.batch), *self.inputs, whole, worker.constant(slot))
        counts, wires, kept = program.divide(outputs)
        self.pulled(worker, program.bytes_pulled(counts, wires))
        self.wires, self.kept, self.delivered = wires, self.kept or kept, True


def tell_each_other(sets: Sequence[Any]) -> list[Any]:
    """Gives the sets of a step what all of them showed.

    Returns:
        The sets that the step is made of: all, or the first one if that computes the whole.
    """
    halves = sets[0].program.halves
    whole = halves.put_together([computed.shown for computed in sets])
    makers = sets[:1] if halves.is_whole else sets
    for slot, computed in enumerate(makers):
        computed.told, computed.delivered = (whole, slot), False
    return list(makers)
