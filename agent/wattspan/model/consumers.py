"""Processes and their groups, their use of resources, and the energy that they are charged.

A :class:`Tick` is the input of the core: all facts that one cycle of the agent has sampled.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from wattspan.model.measurements import (
    Domain,
    Instant,
    Interval,
    Microjoules,
    ModelEnum,
    Reading,
)


class Consumer(NamedTuple):
    """A process: its pid, and its start time in clock ticks since boot (field 22 of stat).

    The kernel reuses a pid within one boot, but never the pair.
    """

    pid: int
    started: int


class Remainder(NamedTuple):
    """CPU time of a cgroup from processes that ended before they were discovered."""

    cgroup: str


Payer = Consumer | Remainder


class GroupKind(ModelEnum):
    """Kinds of groups, from the most to the least specific."""

    VM = "vm"  # a virtual machine that runs on this host
    CONTAINER = "container"
    POD = "pod"
    JOB = "job"  # a batch job: Slurm, PBS, LSF, OAR, HTCondor, Grid Engine, Flux, Nomad
    UNIT = "unit"  # a systemd unit
    CGROUP = "cgroup"  # none of the above: the bare path
    USER = "user"


class Group(NamedTuple):
    kind: GroupKind
    name: str


@dataclass(frozen=True, slots=True)
class PayerInfo:
    """Metadata of a payer. ``groups`` holds at most one group of each kind, most specific first.

    ``principal`` is None where the kernel proves none, as for a payer from a checkpoint.
    ``starts_others`` is True for a program that starts unrelated ones, such as a shell.
    """

    payer: Payer
    command: str
    groups: tuple[Group, ...] = ()
    user: str = ""
    parent: int | None = None
    principal: Principal | None = None
    starts_others: bool = False

    @property
    def group(self) -> str:
        """The name of the most specific group; "" without groups."""
        return self.groups[0].name if self.groups else ""


class PartUsage(NamedTuple):
    """The use of one part of a resource in one period, such as of a MIG instance of a GPU.

    ``domain_id`` names the part's own domain; "" is the rest, which has none. ``size`` is the part
    of the idle energy, in relation to the sizes of the others. ``spent``, ``unclaimed`` and
    ``present`` are as in :class:`Usage`. ``spread`` is the largest ratio of the powers of equal use
    in this part and in the others: 1 if use tells energy, infinite if the use is an assumption.
    ``users_guessed``: the use of its users in relation to each other is an assumption.
    """

    domain_id: str
    size: int
    spent: Mapping[Payer, int]
    unclaimed: int = 0
    present: frozenset[Payer] = frozenset()
    spread: float = 1.0
    users_guessed: bool = False

    @property
    def used(self) -> int:
        """The use by all users, unknown ones included."""
        return sum(self.spent.values()) + max(0, self.unclaimed)


class Counts(NamedTuple):
    """Sums of performance counters over the time in which a payer ran on one socket.

    ``time`` is that time in nanoseconds, as far as all counters counted; it differs from CPU time
    by lost pairs and by the kernel's way of counting that. ``cycles`` are those of the core at its
    present clock, ``reference`` those of a constant clock in the same time, ``misses`` those of the
    last level of cache.
    """

    time: int
    cycles: int
    reference: int
    instructions: int
    misses: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one resource by each payer in one period.

    ``spent`` and ``unclaimed`` are nanoseconds of the resource: CPU time, or GPU time weighted
    by utilisation. ``unclaimed`` is use by unknown processes; its share of the energy is
    *unattributed*. ``capacity`` is the largest possible use (CPUs times duration). ``present``
    lists the payers that hold the resource, used or not (GPU contexts). ``metered`` is the whole
    use by a meter of the resource itself, such as the idle times of CPUs; None without a precise
    one. ``parts`` divide the same use among the parts of the resource; () if it has none.
    ``counts`` are of the payers that performance counters have counted; None without such counters.
    """

    resource: str
    start: Instant
    end: Instant
    spent: Mapping[Payer, int]
    unclaimed: int = 0
    capacity: int | None = None
    present: frozenset[Payer] = frozenset()
    metered: int | None = None
    parts: tuple[PartUsage, ...] = ()
    counts: Mapping[Payer, Counts] | None = None

    @property
    def busy(self) -> int:
        return sum(self.spent.values()) + self.unclaimed

    @property
    def load(self) -> int:
        """The most precise figure of the whole use."""
        return self.busy if self.metered is None else self.metered


@dataclass(frozen=True, slots=True)
class Tick:
    """All facts that one cycle of the agent has sampled.

    ``domains`` holds the complete list of domains of each source whose list has changed, by
    source. ``births`` describe payers not later than their first usage; the last usage of
    ``exits`` is in this tick or in an earlier one, except usage that devices report late.
    ``frozen`` are ids of domains whose counters do not move while the hardware works.
    """

    at: Instant
    domains: Mapping[str, Sequence[Domain]] = field(default_factory=dict)
    readings: Sequence[Reading] = ()
    births: Sequence[PayerInfo] = ()
    usages: Sequence[Usage] = ()
    exits: Sequence[Payer] = ()
    frozen: frozenset[str] = frozenset()


class NamePolicy(ModelEnum):
    """The displayed name of a process."""

    COMMAND = "command"  # the kernel's name of the process
    SCRIPT = "script"  # the same; for interpreters with the name of their script
    NONE = "none"  # no name: processes differ by pid only


class IdlePolicy(ModelEnum):
    """The account of idle energy."""

    SEPARATE = "separate"  # an account of its own
    PROPORTIONAL = "proportional"  # the users of the device, in proportion to their use
    EQUAL = "equal"  # all users and holders of the device, in equal parts


class Share(NamedTuple):
    payer: Payer
    energy: Microjoules


class PartEnergy(NamedTuple):
    """The energy of one part of a domain in one interval, divided without remainder."""

    domain_id: str
    consumers: Microjoules
    idle: Microjoules
    unattributed: Microjoules

    @property
    def energy(self) -> Microjoules:
        return Microjoules(self.consumers + self.idle + self.unattributed)


_ENERGY = itemgetter(1)


@dataclass(frozen=True, slots=True)
class Attribution:
    """One interval, divided without remainder.

    ``interval.energy == sum(share.energy) + idle + unattributed``, checked on construction.
    ``withheld`` is the part of ``unattributed`` that may be idle or active energy, because the idle
    power is unknown. ``parts`` are those of the usage; together they have the whole energy.
    ``doubts`` are the largest possible errors of the shares, in their order, where the division is
    an assumption; () where no share is.
    """

    interval: Interval
    shares: tuple[Share, ...]
    idle: Microjoules
    unattributed: Microjoules
    withheld: Microjoules = Microjoules(0)
    parts: tuple[PartEnergy, ...] = ()
    doubts: tuple[Microjoules, ...] = ()

    def __post_init__(self) -> None:
        parts = self.idle + self.unattributed + sum(map(_ENERGY, self.shares))
        valid = self.idle >= 0 and 0 <= self.withheld <= self.unattributed
        valid &= len(self.doubts) in (0, len(self.shares))
        if self.parts:
            valid &= sum(part.energy for part in self.parts) == self.interval.energy
        if parts != self.interval.energy or not valid:
            raise ValueError(
                f"{self.interval.domain_id}: {self.interval.energy} uJ were divided into {parts} uJ"
            )


SHORT_CONTAINER = 12
"""Characters of a container's id in labels, as in the listings of container runtimes."""


class Principal(NamedTuple):
    """A user of a host as the kernel proves it: a pod; else a user id and a container; else a user.

    It owns processes, their energy, shares of bounded pools and the right to query them. Names that
    a user can choose (service, span, cgroup below a delegated directory) are claims and no part of
    it. `wattspan.processes.principals` finds the principal of a process or connection.

    ``user`` is None for a pod as a whole, since user ids separate nobody among pods. A subordinate
    user id (subuid) counts as its owner's. ``container`` and ``pod`` are names of cgroup
    directories that root created; directories below a delegated one belong to their owner.
    """

    user: int | None
    container: str = ""
    pod: str = ""

    @property
    def is_host_root(self) -> bool:
        """True for user 0 outside of containers and pods: root in a container is not root here."""
        return self == HOST_ROOT

    @property
    def path(self) -> tuple[Hashable, ...]:
        """The levels of fair shares: the owner, then the container.

        All containers of a user share the user's part of a pool, so that a user who creates
        containers gains nothing. A pod is an owner of its own.
        """
        if self.pod:
            pod: tuple[Hashable, ...] = (("pod", self.pod),)
            return pod if self.user is None else (*pod, ("uid", self.user))
        user = ("uid", self.user)
        return (user, ("container", self.container)) if self.container else (user,)


HOST_ROOT = Principal(0)


def principal_text(principal: Principal) -> str:
    """A stable text of a principal, for files: printable ASCII, another one for each principal."""
    return json.dumps(principal, separators=(",", ":"))
