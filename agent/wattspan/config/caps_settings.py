"""Configuration table of power limits: [caps]."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, Literal

from wattspan.config.footprint import relative_paths
from wattspan.model import Knob
from wattspan.model.settings import Duration, Size, Table, about, quoted

BoolOrAuto = bool | Literal["auto"]


class FixedCapSettings(Table, frozen=True):
    """One cap that applies with and without tuning.

    Keys:
        device: UUID or index of a GPU, a zone such as "intel-rapl:0", or "*".
        watts: Power limit in watts.
        knob: `gpu_power` or `cpu_power`.
    """

    device: str
    watts: Annotated[int, about(least=1, most=100_000)]
    knob: Knob = Knob.GPU_POWER


class PrioritySettings(Table, frozen=True):
    """Priority of a device when the host's budget is smaller than the sum of demands.

    Keys:
        device: UUID or index of a GPU, or a zone.
        priority: Priority; the capper reduces devices with lower numbers first.
    """

    device: str
    priority: Annotated[int, about(least=0, most=1000)] = 100


class CapsSettings(Table, frozen=True):
    """Power limits, and the process that writes them: `wattspan capper`.

    Keys:
        capper: Let `wattspan run` start a capper if caps need one; `auto`: if it may write limits.
        users: Users whose processes may use the capper, besides root of this host and the capper's
            own user. `root` adds root of containers that have the socket.
        ceiling_users: Users that may use the capper and set a power ceiling for the host, on its
            socket or as owners of `budget_file`, besides root. `users` does not grant ceilings.
        actuators: Installed plugins of the entry points `wattspan.actuators` whose devices the
            capper limits besides its own. The capper imports them, with its rights, and no other
            one.
        lease: Time until the limits of a silent tuner are restored.
        largest_step: Largest step down of a cap, as a fraction of the default limit.
        floor_watts: Lower bound of every cap in watts, besides the hardware's minimum.
        ramp_watts_per_second: Largest change of the host's power limits together, up and down; 0
            for any. It delays no restore after the end of a cap, a tuner or the capper.
        fixed: Caps without tuning, `[[caps.fixed]]`.
        budget_watts: Power budget of all devices with a knob; 0 for none.
        reserve_watts: Watts of that budget for devices that cannot be capped.
        budget_file: File in which another program writes a power ceiling: `watts = 1200`, `ttl =
            "1h"`; "" for none. Its owner must be root, the user of the capper or one of
            `ceiling_users`; no other user may write it. Without further writes the last ceiling
            stays until its ttl has passed.
        priority: Priorities of devices, `[[caps.priority]]`.
        log_size: Half of the disk limit of all audit log files together.
        host_dir: Directory of the lock by which a host has one capper, and of the link to its
            socket; the same for every agent of the host.
    """

    capper: BoolOrAuto = "auto"
    users: tuple[str, ...] = ("wattspan",)
    ceiling_users: tuple[str, ...] = ()
    actuators: tuple[str, ...] = ()
    lease: Annotated[Duration, about(least="1s", most="10m")] = Duration.parse("10s")
    largest_step: Annotated[float, about(least=0.01, most=1)] = 0.25
    floor_watts: Annotated[int, about(least=0)] = 0
    ramp_watts_per_second: Annotated[int, about(least=0, most=1_000_000)] = 0
    fixed: tuple[FixedCapSettings, ...] = ()
    budget_watts: Annotated[int, about(least=0, most=1_000_000)] = 0
    reserve_watts: Annotated[int, about(least=0, most=1_000_000)] = 0
    budget_file: str = ""
    priority: tuple[PrioritySettings, ...] = ()
    log_size: Annotated[Size, about(least="64KiB")] = Size.parse("4MiB")
    host_dir: str = "/run/wattspan-capper"

    @property
    def imposes(self) -> bool:
        """True if limits are to be in force without a tuner: fixed caps or a power budget."""
        return bool(self.fixed or self.budget_watts or self.budget_file)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for number, cap in enumerate(self.fixed):
            if cap.knob is Knob.GPU_CLOCK:
                yield (
                    f"fixed[{number}].knob",
                    'a clock limit is not in watts. Name "gpu_power" or "cpu_power".',
                )
            if not cap.device:
                yield f"fixed[{number}].device", '"" names no device.'
        for number in duplicate_positions([(cap.device, cap.knob) for cap in self.fixed]):
            device = quoted(self.fixed[number].device)
            yield f"fixed[{number}]", f"{device} already has a cap of this knob. Remove one."
        if self.budget_watts and self.budget_watts <= self.reserve_watts:
            yield (
                "budget_watts",
                f"reserve_watts = {self.reserve_watts} leaves nothing of "
                f"{self.budget_watts} W for devices. Raise the budget or lower the reserve.",
            )
        yield from relative_paths(self, "budget_file", "host_dir")
        if not self.host_dir:
            yield "host_dir", 'it is "". Write an absolute path.'
        for number in duplicate_positions([priority.device for priority in self.priority]):
            device = quoted(self.priority[number].device)
            yield f"priority[{number}]", f"{device} already has a priority. Remove one."

    def warnings(self) -> Iterator[str]:
        """Sentences about settings without effect."""
        if not self.budget_watts and not self.budget_file:
            idle = "reserve_watts" if self.reserve_watts else "[[caps.priority]]"
            if self.reserve_watts or self.priority:
                yield (
                    f"{idle} has no effect without a power budget. Set [caps] budget_watts or "
                    "budget_file."
                )
        for number, cap in enumerate(self.fixed):
            if cap.watts < self.floor_watts:
                yield (
                    f"caps.fixed[{number}] asks for {cap.watts} W, below [caps] floor_watts = "
                    f"{self.floor_watts}, which applies."
                )


def duplicate_positions(values: Sequence[Hashable]) -> Iterator[int]:
    """Yield the positions of values that also occur earlier."""
    return (position for position, value in enumerate(values) if value in values[:position])
