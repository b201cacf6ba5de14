"""Who spends: processes and their groups, what they did, and what they are charged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from wattspan.model.measurements import Instant, Interval, Microjoules, ModelEnum


class Consumer(NamedTuple):
    """A process: its pid, and its start time in clock ticks since boot (field 22 of stat).

    The pair is never used twice in one boot; a pid alone is.
    """

    pid: int
    started: int


class Remainder(NamedTuple):
    """Work that a cgroup's own clock saw, by processes too short-lived to be seen themselves."""

    cgroup: str


Payer = Consumer | Remainder


class GroupKind(ModelEnum):
    """What a group is; the order is from the most to the least specific."""

    CONTAINER = "container"
    POD = "pod"
    JOB = "job"  # a batch job: Slurm
    UNIT = "unit"  # a systemd unit
    CGROUP = "cgroup"  # none of the above: the bare path
    USER = "user"


class Group(NamedTuple):
    kind: GroupKind
    name: str


@dataclass(frozen=True, slots=True)
class PayerInfo:
    """Who a payer is. ``groups`` holds at most one group of each kind, most specific first."""

    payer: Payer
    command: str
    groups: tuple[Group, ...] = ()
    user: str = ""
    parent: int | None = None

    @property
    def group(self) -> str:
        """The name of the most specific group, the one shown beside a process."""
        return self.groups[0].name if self.groups else ""


# -------------------------------------------------------------------------------------- usage


@dataclass(frozen=True, slots=True)
class Usage:
    """What each payer did with one resource in one stretch of time.

    ``spent`` and ``unclaimed`` are nanoseconds of the resource: CPU time, or GPU time weighted
    by utilisation. ``unclaimed`` was spent by nobody that can be named; it keeps its share of
    the energy, as *unattributed*. ``capacity`` is what could have been spent (CPUs times
    duration). ``present`` hold the resource without necessarily using it (GPU contexts).
    """

    resource: str
    start: Instant
    end: Instant
    spent: Mapping[Payer, int]
    unclaimed: int = 0
    capacity: int | None = None
    present: frozenset[Payer] = frozenset()

    @property
    def busy(self) -> int:
        return sum(self.spent.values()) + self.unclaimed


class NamePolicy(ModelEnum):
    """What a process is called wherever it is shown."""

    COMMAND = "command"  # what the kernel calls it
    SCRIPT = "script"  # the same, but for interpreters, which are told with their script
    NONE = "none"  # nothing: it is told apart by its pid alone


class IdlePolicy(ModelEnum):
    """Who pays for the energy a device draws while it does nothing."""

    SEPARATE = "separate"  # nobody: it is an account of its own
    PROPORTIONAL = "proportional"  # whoever uses the device, by use
    EQUAL = "equal"  # whoever uses or holds the device, in equal parts


class Share(NamedTuple):
    payer: Payer
    energy: Microjoules


_ENERGY = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Attribution:
    """One interval, divided without remainder.

    ``interval.energy == sum(share.energy) + idle + unattributed``, checked on construction.
    """

    interval: Interval
    shares: tuple[Share, ...]
    idle: Microjoules
    unattributed: Microjoules

    def __post_init__(self) -> None:
        parts = self.idle + self.unattributed + sum(map(_ENERGY, self.shares))
        if parts != self.interval.energy or self.idle < 0 or self.unattributed < 0:
            raise ValueError(
                f"{self.interval.domain_id}: {self.interval.energy} uJ were divided into {parts} uJ"
            )
