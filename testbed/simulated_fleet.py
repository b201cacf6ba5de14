"""A fleet in one thread and in simulated time: real agents' code, devices that are numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from testbed.memory_cluster import MemoryCluster
from wattspan.capper.ceilings import (
    FleetCeiling,
)
from wattspan.capper.protocol import AllotmentRow
from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, accept_budgets, drain_host, remove_host
from wattspan.fleet.coordination import Coordination, KeyWrite
from wattspan.fleet.member import AllottedCapper, FleetMember
from wattspan.fleet.participant import LEAVE_TIME, FleetParticipant
from wattspan.fleet.records import FleetKeys, encode, read_state
from wattspan.ports import CapsError
from wattspan.testing import ManualClock
from wattspan.util.unix_sockets import PeerCredentials

W = 1000
AGENT = PeerCredentials(1, 0)
STEP = 0.25
"""Seconds of one step."""


class Cluster(Protocol):
    """A coordination service, in memory or real."""

    def client(self) -> Coordination: ...


class SimulatedHost:
    """A host: its capper and devices, and an agent that may run, hang or lose its connection.

    ``enforced`` follows the capper's limit upwards at once, and downwards ``lag`` seconds late.
    """

    def __init__(
        self, name: str, settings: FleetSettings, cluster: Cluster, clock: ManualClock,
        path: Path, *, floor: int, original: int, ramp: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.settings, self.clock = name, settings, clock
        self.floor, self.original, self.ramp = floor, original, ramp
        self.lag = 0.0
        self.power: int | None = None
        self.held: dict[str, tuple[int, int]] = {}
        self.powers: dict[str, int] = {}
        self.is_on, self.capper_runs = True, True
        self.is_hung = self.is_stuck = False
        self.enforced = floor
        self.participant: FleetParticipant | None = None
        self._leaving: FleetParticipant | None = None
        self._leaves_until = 0
        self.client: Any = cluster.client()
        self._cluster, self._path = cluster, path
        self._sessions, self._noted = 0, ""
        self._above_since: int | None = None
        self.restart_capper()
        self.start_agent()

    # --------------------------------------------------------------------------------- capper

    def restart_capper(self) -> None:
        self.ceiling = FleetCeiling(self._path, self.clock, enabled=True)
        self.capper_runs = True

    def lose_record(self) -> None:
        self._path.unlink(missing_ok=True)

    def allotment(self) -> AllotmentRow:
        if not self.capper_runs:
            raise CapsError("No capper answers.")
        self.settle()
        return AllotmentRow(
            limit=self.ceiling.limit or 0,
            safe=self.ceiling.safe,
            until=self.ceiling.until,
            floor=self.enforced if self.is_stuck else self.floor,
            original=self.original,
            enforced=self.enforced,
            held=self.held,
        )

    def allot(self, limit: int, safe: int, until: int, why: str) -> AllotmentRow:
        self.allotment()
        self.ceiling.allot(limit, safe, until, why, AGENT)
        return self.allotment()

    def settle(self) -> None:
        """Bring the devices to the capper's limit, as far as they are ready."""
        if not self.capper_runs or self.is_stuck:
            return
        self.ceiling.poll()
        target = max(self.floor, min(self.original, self.ceiling.limit or 0))
        now = self.clock.monotonic()
        if target >= self.enforced:
            self.enforced, self._above_since = target, None
            return
        if self._above_since is None:
            self._above_since = now
        if now - self._above_since >= self.lag * 1e9:
            lowest = self.enforced - round(self.ramp * STEP) if self.ramp else target
            self.enforced = max(target, lowest)
            if self.enforced == target:
                self._above_since = None

    # ---------------------------------------------------------------------------------- agent

    def start_agent(self) -> None:
        self.client = self._cluster.client()
        former = self._noted if self.participant is None else ""  # its record is locked
        self.participant = self.new_participant(self.client, self, former_session=former)
        self._leaving = None

    def new_participant(
        self,
        coordination: Coordination,
        capper: AllottedCapper,
        log: Callable[[str], None] = lambda line: None,
        former_session: str = "",
    ) -> FleetParticipant:
        """Another agent's participant, which is not started."""
        member = FleetMember(
            self.name,
            self.settings,
            coordination,
            capper,
            self.clock,
            power=lambda: None if self.power is None else min(self.power, self.enforced),
            powers=lambda: self.powers,
            new_session=self._new_session,
            former_session=former_session,
            note_session=self._note_session,
            ramp=self.ramp,
        )
        return FleetParticipant(self.settings, coordination, member, self.clock, log)

    def kill_agent(self) -> None:
        self.participant = None

    def stop_agent(self) -> None:
        """End the agent in order, which may take some steps."""
        if self.participant is not None:
            self._leaving, self.participant = self.participant, None
            self._leaves_until = self.clock.monotonic() + LEAVE_TIME
            self._leave()

    def _leave(self) -> None:
        if self._leaving is not None and (
            self._leaving.leave() or self.clock.monotonic() >= self._leaves_until
        ):
            self._leaving.close()
            self._leaving = None

    def switch_off(self) -> None:
        """The host and its devices draw nothing; only the capper's file remains."""
        self.is_on, self.participant, self._leaving = False, None, None
        self._noted = ""  # of another boot
        self.is_stuck, self.enforced = False, 0

    def switch_on(self) -> None:
        self.is_on, self.enforced = True, self.floor
        self._above_since = None
        self.restart_capper()
        self.settle()
        self.start_agent()

    def step(self) -> None:
        if self.is_on:
            self.settle()
            self._leave()
            if self.participant is not None and not self.is_hung:
                self.participant.observe(0.0)
                self.participant.round()

    def _note_session(self, session: str) -> None:
        self._noted = session

    def _new_session(self) -> str:
        self._sessions += 1
        return f"{self.name}-{self._sessions}-{self.clock.monotonic()}"


class SimulatedFleet:
    """Some hosts of one place, and the service that they use."""

    def __init__(
        self, folder: Path, hosts: int, *, budgets: Mapping[str, int], floor: int = 300 * W,
        original: int = 1500 * W, ramp: int = 0, places: Sequence[str] = ("",),
        cluster: Cluster | None = None, **settings: object,
    ) -> None:  # fmt: skip
        self.clock = ManualClock()
        self.cluster: Any = cluster or MemoryCluster(self.clock)
        self.budgets = dict(budgets)
        self.is_strict = False
        """True to check every budget at every moment."""
        self.keys = FleetKeys(FleetSettings().prefix)
        self.operator = self.cluster.client()
        self.set_budgets(budgets)
        self.hosts = {
            name: SimulatedHost(
                name,
                FleetSettings(
                    endpoints=("http://etcd",),
                    name=name,
                    place=places[number % len(places)],
                    **settings,
                ),
                self.cluster,
                self.clock,
                folder / f"{name}.json",
                floor=floor,
                original=original,
                ramp=ramp,
            )
            for number, name in enumerate(f"host{number}" for number in range(hosts))
        }

    def set_budgets(self, budgets: Mapping[str, int]) -> None:
        self._change(lambda book: accept_budgets(book, budgets))

    def drain(self, name: str) -> None:
        self._change(lambda book: drain_host(book, name))

    def operator_removes(self, name: str) -> None:
        """Remove a host that is off; its session has ended, or is ended here."""
        writes = (self.keys.allotment(name), self.keys.report(name))
        self._change(lambda book: remove_host(book, name, None), *writes)

    def _change(self, change: Callable[[AllotmentBook], AllotmentBook], *ended: str) -> None:
        state = read_state(self.keys, self.operator.read(self.keys.prefix))
        writes = [KeyWrite(self.keys.book, encode(change(state.book)))]
        writes += [KeyWrite(key, None) for key in ended]
        self.operator.commit(writes, [state.condition(self.keys.book)])

    @property
    def enforced(self) -> int:
        return sum(host.enforced for host in self.hosts.values())

    @property
    def limits(self) -> list[int]:
        return [host.enforced for host in self.hosts.values()]

    def excess(self) -> str:
        """The places whose limits exceed their budget; "" if there are none."""
        sums = {
            place: sum(
                host.enforced
                for host in self.hosts.values()
                if not place or host.settings.place == place
            )
            for place in self.budgets
        }
        over = {place: one for place, one in sums.items() if one > self.budgets[place]}
        return f"{over} of {self.budgets}: {self.limits}" if over else ""

    def run(self, seconds: float, budget: int | None = None) -> int:
        """Pass time; the highest sum of limits, which is asserted to be within ``budget``."""
        highest = self.enforced
        for _ in range(round(seconds / STEP)):
            self.clock.advance(STEP)
            for host in self.hosts.values():
                host.step()
                highest = max(highest, self.enforced)
                assert budget is None or self.enforced <= budget, (self.limits, budget)
                assert not self.is_strict or not self.excess(), self.excess()
        return highest
