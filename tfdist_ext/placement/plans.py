"""Which operation goes where? A plan is data: to print, to store, to compare, to apply. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from tfdist_ext.placement.machine import Machine
from tfdist_ext.placement.operations import OperationGraph
from tfdist_ext.placement.schedule import PartialSchedule, Schedule, simulate, transfers


class InfeasiblePlacementError(ValueError):
    """No placement that was tried fits into the memory of the devices.

    Attributes:
        device: Where it came closest to fitting.
        missing_bytes: By how much that device is too small.
    """

    def __init__(self, message: str, *, device: str = "", missing_bytes: int = 0):
        super().__init__(message)
        self.device = device
        self.missing_bytes = missing_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement with what is predicted of it.

    Attributes:
        devices: Device by operation.
        method: The planner that made it.
        predicted_seconds: Of one step.
        cut_bytes: Bytes that cross between devices in a step, each tensor once for each destination.
        peak_bytes: By device, variables included.

    Example:
        >>> plan = Plan(devices={"a": "CPU:0", "b": "CPU:1"}, method="by hand", predicted_seconds=1e-3, cut_bytes=8)
        >>> Plan.from_json(plan.to_json()) == plan
        True
        >>> print(plan)
        by hand: 1.000 ms predicted, 8 bytes cross
          CPU:0: 1 operations, 0 bytes at most
          CPU:1: 1 operations, 0 bytes at most
    """

    devices: Mapping[str, str]
    method: str
    predicted_seconds: float
    cut_bytes: int
    peak_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"{self.method}: {1e3 * self.predicted_seconds:.3f} ms predicted, {self.cut_bytes:,} bytes cross"
        ]
        for device in sorted({*self.devices.values(), *self.peak_bytes}):
            number = sum(other == device for other in self.devices.values())
            lines.append(f"  {device}: {number} operations, {self.peak_bytes.get(device, 0):,} bytes at most")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Returns the plan as text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote."""
        fields = json.loads(text)
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(fields, dict) or set(fields) != known:
            raise ValueError(f"Argument `text` must be a plan with the fields {sorted(known)}.")
        return cls(**fields)

    def differences(self, other: Plan) -> dict[str, tuple[str | None, str | None]]:
        """Returns (device here, device there) of each operation that another plan has elsewhere."""
        names = {**self.devices, **other.devices}
        pairs = {name: (self.devices.get(name), other.devices.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def evaluated(
    graph: OperationGraph, placement: Mapping[str, str], machine: Machine, method: str, order=None
) -> Plan:
    """Returns the plan of a placement."""
    schedule = simulate(graph, placement, machine, order)
    return plan_of_schedule(graph, placement, schedule, method)


def plan_of_schedule(
    graph: OperationGraph, placement: Mapping[str, str], schedule: Schedule, method: str
) -> Plan:
    """Returns the plan of a placement whose schedule is known."""
    return Plan(
        devices={name: placement[name] for name in graph.operations},
        method=method,
        predicted_seconds=schedule.seconds,
        cut_bytes=sum(transfer.num_bytes for transfer in transfers(graph, placement)),
        peak_bytes=dict(schedule.peak_bytes),
    )


def first_excess(schedule: Schedule, machine: Machine) -> tuple[str, int] | None:
    """Returns a device whose memory a schedule exceeds, and by how much, or None."""
    for device in machine.devices:
        excess = schedule.peak_bytes[device.name] - device.memory_bytes
        if excess > 0:
            return device.name, int(excess)
    return None


def infeasible(name: str, partial: PartialSchedule) -> InfeasiblePlacementError:
    """Returns the error for an operation that fits nowhere: it names the device with the smallest shortfall."""
    missing = {device: partial.missing_bytes(name, device) for device in partial.free_at}
    device = min(missing, key=lambda one: missing[one])
    return InfeasiblePlacementError(
        f"Operation {name!r} fits on no device: {device} comes closest, and is {missing[device]:,} bytes too small. "
        "Give it more memory (`memory_bytes`), add a device, or make the model smaller.",
        device=device,
        missing_bytes=missing[device],
    )
