"""How fast are the devices, how large, and what does it cost to send something from one to another? Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tfdist_ext.placement.operations import Operation

# Operations that move no data of their own and take next to no time.
_FREE = frozenset(
    {"Const", "Identity", "NoOp", "Placeholder", "ReadVariableOp", "VarHandleOp", "StopGradient", "Arg", "Retval"}
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """One device, as a roofline.

    Attributes:
        name: TensorFlow's name.
        flops_per_second: Peak arithmetic.
        bytes_per_second: Memory bandwidth.
        memory_bytes: What fits; infinite where nobody said.
        overhead_seconds: Least time of an operation.
    """

    name: str
    flops_per_second: float = 5e10
    bytes_per_second: float = 1e10
    memory_bytes: float = math.inf
    overhead_seconds: float = 2e-6

    def __post_init__(self):
        for field in ("flops_per_second", "bytes_per_second", "memory_bytes"):
            if not getattr(self, field) > 0:
                raise ValueError(f"Argument `{field}` must be positive; received {getattr(self, field)}.")

    def seconds(self, operation: Operation, bytes_read: float = 0) -> float:
        """Predicts the time of an operation for all its runs in a step: measured, or the roofline.

        Args:
            operation: The operation.
            bytes_read: Size of its inputs.

        References:
            Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model", CACM, 2009.
        """
        if self.name in operation.seconds:
            return operation.seconds[self.name]
        if operation.kind in _FREE:
            return 0.0
        touched = bytes_read + sum(operation.output_bytes)
        bound = max(operation.flops / self.flops_per_second, touched / self.bytes_per_second)
        return operation.times * (self.overhead_seconds + bound)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """What sending a tensor costs: latency + bytes / bandwidth.

    Attributes:
        latency_seconds: For each tensor.
        bytes_per_second: Bandwidth.
    """

    latency_seconds: float = 1e-5
    bytes_per_second: float = 1e10

    def __post_init__(self):
        if self.latency_seconds < 0 or not self.bytes_per_second > 0:
            raise ValueError(
                "Arguments `latency_seconds` and `bytes_per_second` must be at least 0 and positive; received "
                f"{self.latency_seconds} and {self.bytes_per_second}."
            )

    def seconds(self, num_bytes: float) -> float:
        """Time of one tensor."""
        return self.latency_seconds + num_bytes / self.bytes_per_second


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices and what links them.

    Attributes:
        devices: In the order of preference among equals.
        link: Between any two of them, unless `links` says otherwise.
        links: By (from, to).

    Example:
        >>> machine = Machine(devices=[Device(name="CPU:0"), Device(name="CPU:1")], link=Link(bytes_per_second=1e6))
        >>> round(machine.transfer_seconds("CPU:0", "CPU:1", 1000), 5), machine.transfer_seconds("CPU:0", "CPU:0", 9)
        (0.00101, 0.0)
    """

    devices: Sequence[Device]
    link: Link = dataclasses.field(default_factory=Link)
    links: Mapping[tuple[str, str], Link] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        names = [device.name for device in self.devices]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"Argument `devices` must be distinct, and at least one; received {names}.")
        for pair in self.links:
            for name in pair:
                if name not in names:
                    raise ValueError(f"Argument `links` must connect known devices {names}; received {pair}.")

    def device(self, name: str) -> Device:
        """Returns the device of a name; raises `ValueError` with those there are."""
        for device in self.devices:
            if device.name == name:
                return device
        raise ValueError(
            f"There is no device {name!r}; there are {[device.name for device in self.devices]}."
        )

    def transfer_seconds(self, source: str, destination: str, num_bytes: float) -> float:
        """Time of sending a tensor; 0 within a device."""
        if source == destination:
            return 0.0
        return self.links.get((source, destination), self.link).seconds(num_bytes)
