"""A past in which everything draws constant power, and the handler's requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from testbed.snapshots import busy_host
from wattspan.api.authorization import Authorization
from wattspan.api.service import (
    CapsState,
    DecisionHistoryView,
    QueryService,
    StoredEnergy,
    TuningView,
)
from wattspan.config import AutotuneSettings
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.sockets import Peer
from wattspan.model import (
    SECOND,
    Consumer,
    Domain,
    GpuStatus,
    HwType,
    Microjoules,
    Milliwatts,
    PayerInfo,
    Principal,
    Provenance,
    StaticBasis,
    StaticSplit,
    energy_at,
)
from wattspan.ports import EnergyStep, SnapshotView
from wattspan.spans.values import IntervalEnergy
from wattspan.testing import FakeDirectory, ManualClock
from wattspan.tuning.declared_jobs import DeclaredJobs

PACKAGE = Domain("package-0", HwType.CPU, "package-0", "rapl", Provenance.MEASURED)
SECOND_PACKAGE = Domain("package-1", HwType.CPU, "package-1", "rapl", Provenance.DERIVED)
DRAM = Domain("dram-0", HwType.MEMORY, "dram-0", "rapl", Provenance.MEASURED)
GPU = Domain("GPU-0", HwType.GPU, "GPU 0", "nvml", Provenance.MEASURED)

OURS = Consumer(100, 5000)
CHILD = Consumer(101, 5001)
ROOTS = Consumer(1, 3)
USER = 1000


def local_peer(pid: int | None, uid: int) -> Peer:
    """A peer on the Unix socket, outside of containers."""
    return Peer(pid=pid, uid=uid, principal=Principal(uid))


OURSELVES = local_peer(OURS.pid, USER)


@dataclass
class ConstantPast:
    """Measured from ``horizon`` to ``until``, power in milliwatts.

    Implements ports.EnergyQueries and, with one reading at either end, ports.DeviceQueries.
    """

    until: int
    horizon: int = 0
    devices: dict[str, int] = field(
        default_factory=lambda: {PACKAGE.id: 10_000, SECOND_PACKAGE.id: 20_000, DRAM.id: 3_000}
    )
    idles: dict[str, int] = field(default_factory=lambda: {PACKAGE.id: 6_000, DRAM.id: 1_000})
    known_domains: tuple[Domain, ...] = (PACKAGE, SECOND_PACKAGE, DRAM)
    powers: dict[Consumer, int] = field(default_factory=lambda: {OURS: 4_000, CHILD: 1_000})
    others: int = 0  # power of every other process
    gpu_power: int = 0  # of each process or family
    static_power: tuple[Milliwatts, StaticBasis] | None = None  # a part of ``gpu_power``
    members: dict[Consumer, tuple[Consumer, ...]] = field(
        default_factory=lambda: {OURS: (OURS, CHILD)}
    )
    watched: list[tuple[Consumer, bool]] = field(default_factory=list)
    samples: dict[Consumer, Callable[[], Iterable[tuple[int, int]]] | None] = field(
        default_factory=dict
    )
    forgotten: list[Consumer] = field(default_factory=list)
    on_settled: list[int] = field(default_factory=list)  # settled time at each read
    silenced: set[str] = field(default_factory=set)
    asked_cells: set[str] = field(default_factory=set)
    gpus: dict[str, GpuStatus] = field(default_factory=dict)
    bounds: dict[HwType, int] = field(default_factory=dict)  # time before which energy is missing
    knowing: list[object] = field(default_factory=list)  # edges that each reader may know

    def expect(self, end: int) -> None:
        pass

    def settled(self, consumer: Consumer | None = None) -> int:
        if self.on_settled:
            self.until = self.on_settled.pop(0)
        return self.until

    def known(self, domain_id: str) -> int:
        return self.settled()

    def silent(self, domain_id: str) -> bool:
        return domain_id in self.silenced

    def cells(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        self.asked_cells.add(domain_id)
        return self.device(domain_id, start, end, own)._replace(uncertainty={})

    def timeline(
        self, domain_id: str, start: int, end: int, *, common: bool = False
    ) -> list[EnergyStep]:
        self.knowing.append(common)
        energy = energy_at(self.devices[domain_id], self.until - self.horizon)
        return [EnergyStep(self.horizon, self.until, energy)]

    def gpu(self, domain_id: str) -> GpuStatus | None:
        return self.gpus.get(domain_id)

    def temperatures(self, domain_id: str, start: int, end: int) -> list[tuple[int, int]]:
        status = self.gpus.get(domain_id)
        if status is None or status.temperature_celsius is None:
            return []
        return [(status.at.mono, status.temperature_celsius)]

    def domains(self) -> Mapping[str, Domain]:
        return {domain.id: domain for domain in self.known_domains}

    def device(
        self, domain_id: str, start: int, end: int, own: Sequence[int] | None = None
    ) -> IntervalEnergy:
        domain = self.domains()[domain_id]
        self.knowing.append(own)
        if domain_id not in self.devices:
            return IntervalEnergy({}, {}, 0)
        return self._spent({domain.hw_type: self.devices[domain_id]}, start, end)

    def idle(self, domain_id: str, start: int, end: int) -> Microjoules | None:
        power = self.idles.get(domain_id)
        return None if power is None else energy_at(power, end - start)

    def watch(
        self,
        consumer: Consumer,
        *,
        family: bool = False,
        samples: Callable[[], Iterable[tuple[int, int]]] | None = None,
        holder: str = "spans",
    ) -> None:
        self.watched.append((consumer, family))
        self.samples[consumer] = samples

    def forget(self, consumer: Consumer, *, holder: str = "spans") -> None:
        self.forgotten.append(consumer)

    def process(
        self, consumer: Consumer, start: int, end: int, *, family: bool = False
    ) -> IntervalEnergy:
        members: Iterable[Consumer] = self.members.get(consumer, (consumer,))
        power = sum(
            self.powers.get(one, self.others) for one in (members if family else (consumer,))
        )
        powers = {HwType.CPU: power, HwType.MEMORY: power // 10}
        if not self.gpu_power:
            return self._spent(powers, start, end)
        spent = self._spent(powers | {HwType.GPU: self.gpu_power}, start, end)
        if self.static_power is None:
            return spent
        milliwatts, basis = self.static_power
        static = energy_at(milliwatts, spent.covered)
        dynamic = Microjoules(spent.energy[HwType.GPU] - static)
        return spent._replace(split=(StaticSplit(static, dynamic), basis))

    def bounded(self, consumer: Consumer, start: int, *, family: bool = False) -> frozenset[HwType]:
        return frozenset(kind for kind, until in self.bounds.items() if start < until)

    def _spent(self, powers: Mapping[HwType, int], start: int, end: int) -> IntervalEnergy:
        covered = max(0, min(end, self.until) - max(start, self.horizon))
        if not covered and start < end:
            return IntervalEnergy({}, {}, 0)
        energy = {kind: energy_at(power, covered) for kind, power in powers.items()}
        return IntervalEnergy(
            energy, {kind: Microjoules(e // 100) for kind, e in energy.items()}, covered
        )


@dataclass
class Asked:
    """A query service over a constant history, with its responses; each pause takes a second."""

    clock: ManualClock = field(default_factory=ManualClock)
    tuning: TuningView | None = None
    history: DecisionHistoryView | None = None
    settings: AutotuneSettings | None = None  # of declared jobs
    view: SnapshotView = busy_host
    resolution: int = 0
    caps: CapsState | None = None
    stored: StoredEnergy | None = None
    uids: dict[int, int] = field(
        default_factory=lambda: {OURS.pid: USER, CHILD.pid: USER, ROOTS.pid: 0}
    )

    def __post_init__(self) -> None:
        self.now = self.clock.monotonic()
        self.past = ConstantPast(until=self.now)
        self.directory = FakeDirectory(
            PayerInfo(one, f"job{one.pid}") for one in (OURS, CHILD, ROOTS)
        )
        self.pauses: list[float] = []
        self.registered: list[Consumer] = []
        self.jobs = DeclaredJobs(
            self.settings or AutotuneSettings(mode="advise"), self.directory, "instance"
        )
        self.service = QueryService(
            self.past,
            self.directory,
            self.clock,
            devices=self.past,
            view=self.view,
            host="testhost",
            version="1.2.3",
            authorization=Authorization(self._owner),
            sleep=self._pause,
            registered=lambda process, owner: self.registered.append(process),
            tuning=self.tuning,
            history=self.history,
            jobs=self.jobs,
            resolution=self.resolution,
            edges=lambda pid: (pid,),
            caps=self.caps,
            stored=self.stored,
        )

    def _owner(self, consumer: Consumer) -> Principal | None:
        uid = self.uids.get(consumer.pid) if consumer in self.directory.infos else None
        return None if uid is None else Principal(uid)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.clock.advance(seconds)

    def get(
        self,
        path: str = "/v1/energy",
        *,
        method: str = "GET",
        peer: Peer = OURSELVES,
        body: bytes = b"",
        **query: object,
    ) -> HttpResponse:
        words = {key: str(value) for key, value in query.items()}
        return asyncio.run(self._ask(HttpRequest(method, path, words, {}, body, peer)))

    async def _ask(self, request: HttpRequest) -> HttpResponse:
        return await self.service(request)

    def energy(self, seconds: float = 2.0, **query: Any) -> dict[str, Any]:
        """Response for the last ``seconds``."""
        end = query.pop("end", f"mono:{self.now}")
        response = self.get(start=f"mono:{self.now - round(seconds * SECOND)}", end=end, **query)
        assert response.status == 200, response.body
        told = json.loads(response.body)
        assert isinstance(told, dict)
        return told

    def problem(self, status: int, path: str = "/v1/energy", **query: Any) -> str:
        """The sentence of a refusal with this status."""
        response = self.get(path, **query)
        assert response.status == status, response.body
        assert response.content_type == "application/problem+json"
        told = json.loads(response.body)
        assert told["status"] == status
        assert all(told[part] for part in ("thing", "cause", "remedy"))
        return str(told["detail"])
