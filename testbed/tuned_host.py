"""A host of numbers for the tuner: GPUs that obey caps, jobs that step, a capper in memory.

Time passes only in ``Host.run``. A GPU follows a law of two numbers: how much of a step the cap
slows down, and how power falls with it; so the truth about every setting is known.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from testbed.saved_state import saved
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    CapKey,
    CapRow,
    Consumer,
    DeclaredTerms,
    Domain,
    GpuStatus,
    Group,
    HwType,
    Instant,
    Knob,
    KnobState,
    Microjoules,
    Milliwatts,
    Move,
    Payer,
    PayerInfo,
    PowerLimits,
    Principal,
    Provenance,
    RecordedDecision,
    RequestedTerms,
    Snapshot,
    TuningRow,
    Usage,
    energy_at,
)
from wattspan.ports import Caps, CapsError, CapTotals, Clock, ProcessDirectory
from wattspan.spans.values import IntervalEnergy, Span, SpanColumns
from wattspan.testing import ManualClock
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.engine_load import EnginePageRead
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint
from wattspan.tuning.declared_jobs import DeclaredJobs, ProcessDeclaration
from wattspan.tuning.host_turns import JobRecords
from wattspan.tuning.host_view import DeviceUsers, HostView
from wattspan.tuning.job_context import TuningContext
from wattspan.tuning.permissions import GpuPermissions, JobOwner, ProcessOwners, job_owner
from wattspan.tuning.pipeline.plan import ClockPlan
from wattspan.tuning.pipeline.session_state import PlanTask
from wattspan.tuning.tuner import Tuner
from wattspan.tuning.work_units import ReceivedSpanQueue

TICK = 250_000_000  # half a turn of the tuner
MINIMUM, DEFAULT = 200_000, 700_000
LEASE = 10_000_000_000


@dataclass
class Gpu:
    """``slope``: a cap 1 % below the draw makes work that much of a percent slower."""

    device: str
    draw: int = 640_000
    slope: float = 0.25
    cap: int = DEFAULT
    mig: bool = False
    mig_users_known: bool = False
    partition_mode: str | None = None
    lost: bool = False  # it has no status
    throttling: tuple[str, ...] = ()
    energy: int = 0
    knob: Knob = Knob.GPU_POWER  # a package's is another

    @property
    def resource(self) -> str:
        return f"{'cpu' if self.knob is Knob.CPU_POWER else 'gpu'}:{self.device}"

    @property
    def index(self) -> int:
        return int(re.sub(r"\D", "", self.device) or 0)

    @property
    def aliases(self) -> tuple[str, ...]:
        return (str(self.index),)

    @property
    def power(self) -> int:
        return min(self.draw, self.cap)

    @property
    def slowdown(self) -> float:
        missing = max(0.0, 1.0 - self.cap / self.draw)
        return 1.0 + self.slope * missing + 2.0 * missing * missing


def no_work(chance: random.Random) -> None:
    """The work of a step that reports none."""


def training_command(consumer: Consumer) -> str:
    return "python train.py"


@dataclass
class Job:
    """Steps of ``step`` seconds, one after the other, on one GPU, until it is ended."""

    service: str
    gpu: Gpu
    consumer: Consumer
    step: float = 0.1
    noise: float = 0.01
    span: str = "train_step"
    work: Callable[[random.Random], float | None] = no_work
    alive: bool = True
    paused: bool = False
    since: int = 0
    left: float | None = None
    random: random.Random = field(default_factory=lambda: random.Random(1))
    steps: int = 0

    def advance(self, start: int, end: int) -> list[Span]:
        """The steps that finish between two moments."""
        done = []
        at = start
        if not self.since:
            self.since = start
        while at < end and self.alive and not self.paused:
            if self.left is None:
                self.left = self.step * math.exp(self.random.gauss(0.0, self.noise))
                self.since = at
            rest = self.left * self.gpu.slowdown
            if at + rest * 1e9 > end:
                self.left -= (end - at) / 1e9 / self.gpu.slowdown
                break
            at += max(1, round(rest * 1e9))
            self.left = None
            self.steps += 1
            ident = self.steps.to_bytes(8, "big")
            work = self.work(self.random)
            own = b"t" * 16, ident, b"", self.service, self.span
            done.append(Span(*own, self.since, at, work=work))
        return done


class MemoryCapper:
    """Implements ports.Caps over the GPUs of the host; tests break it as they like."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.originals: dict[str, int] = {}
        self.holders: dict[str, str] = {}
        self.wanted: dict[str, int] = {}
        self.clocks, self.clocked, self.highest_clock = False, dict[str, int](), 1980
        self.deaf = False  # clocks are accepted, and not written
        self.unusable = False  # clocks cannot be written
        self.rejects: Knob | None = None  # the boards cannot be set by it, which a write shows
        self.largest = DEFAULT
        self.foreign: set[str] = set()
        self.refusal: tuple[str, str] | None = None
        self.renewed = 0
        self.closed = False

    @property
    def totals(self) -> CapTotals:
        return CapTotals()

    def rows(self, *, renew: bool = False) -> tuple[CapRow, ...]:
        self._refuse()
        self.renewed += renew
        rows = [self._row(gpu) for gpu in self._host.devices]
        return (*rows, *(self._clock(gpu) for gpu in self._host.gpus if self.clocks))

    def hold(self, job: str, caps: Mapping[CapKey, int], why: str) -> tuple[CapRow, ...]:
        self._refuse()
        assert why
        for key, value in caps.items():
            if self.holders.get(key.device, job) != job:
                raise CapsError(f"{key.device} is held by another tuner.", "held", key.device)
            if key.knob is self.rejects:
                raise CapsError(f"{key.device} does not support it.", "lost", key.device)
            if key.knob is Knob.GPU_CLOCK:
                self.holders[key.device] = job
                if not self.deaf:
                    self.clocked[key.device] = value
                continue
            gpu = self._host.gpu(key.device)
            self.originals.setdefault(key.device, gpu.cap)
            assert MINIMUM <= value <= self.originals[key.device], "out of bounds"
            self.holders[key.device] = job
            self.wanted[key.device] = value
            gpu.cap = max(value, gpu.cap - self.largest)
        for device in [d for d, holder in self.holders.items() if holder == job]:
            if not any(key.device == device for key in caps):
                self._give_back(device)
        return self.rows()

    def release(self, job: str = "") -> None:
        self._refuse()
        for device in [d for d, holder in self.holders.items() if job in ("", holder)]:
            self._give_back(device)

    def close(self) -> None:
        self.closed = True

    def lapse(self) -> None:
        """Action of the capper without a renewal."""
        for device in list(self.holders):
            self._give_back(device)

    def _give_back(self, device: str) -> None:
        del self.holders[device]
        if self.clocked.pop(device, None) is not None or device not in self.originals:
            return
        original = self.originals.pop(device)
        if device not in self.foreign:
            self._host.gpu(device).cap = original

    def _refuse(self) -> None:
        if self.refusal is not None:
            raise CapsError(self.refusal[1], self.refusal[0])

    def _clock(self, gpu: Gpu) -> CapRow:
        key, held = CapKey(Knob.GPU_CLOCK, gpu.device), gpu.device in self.clocked
        return CapRow(
            KnobState(key, gpu.device, 210, None, self.highest_clock, aliases=gpu.aliases),
            wanted=self.clocked.get(gpu.device),
            holder=self.holders.get(gpu.device, ""),
            expires=self._host.clock.monotonic() + LEASE if held else None,
            usable=not self.unusable,
        )

    def _row(self, gpu: Gpu) -> CapRow:
        held = gpu.device in self.holders
        return CapRow(
            KnobState(
                CapKey(gpu.knob, gpu.device),
                gpu.device,
                MINIMUM,
                DEFAULT,
                DEFAULT,
                gpu.cap,
                gpu.cap,
                gpu.aliases,
            ),
            original=self.originals.get(gpu.device),
            wanted=self.wanted.get(gpu.device) if held else None,
            holder=self.holders.get(gpu.device, ""),
            expires=self._host.clock.monotonic() + LEASE if held else None,
            foreign=gpu.device in self.foreign,
        )


class Memory:
    def __init__(self) -> None:
        self.kept: dict[Fingerprint, CertifiedLevels] = {}

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        return self.kept.get(fingerprint)

    def certified(self, fingerprint: Fingerprint, knob: Knob, setting: CertifiedLevels) -> None:
        self.kept[fingerprint] = setting

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None:
        self.kept.pop(fingerprint, None)


class MemoryAccounts:
    """Slowdown accounts of running jobs, by name and processes."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[frozenset[Consumer], SlowdownAccount]] = {}

    def recall(self, job: str, processes: Collection[Consumer]) -> SlowdownAccount | None:
        known, account = self.kept.get(job, (frozenset(), None))
        return account if known.intersection(processes) else None

    def store(self, job: str, processes: Collection[Consumer], account: SlowdownAccount) -> None:
        self.kept[job] = frozenset(processes), account


class MemoryEvidence:
    """Evidence about the loads of running servers, by name and processes."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[frozenset[Consumer], TrackingPolicy, TrackingEvidence]] = {}

    def recall(
        self, job: str, processes: Collection[Consumer], policy: TrackingPolicy
    ) -> TrackingEvidence | None:
        known = self.kept.get(job)
        same = known is not None and known[0].intersection(processes) and known[1] == policy
        return known[2] if known is not None and same else None

    def store(
        self,
        job: str,
        processes: Collection[Consumer],
        policy: TrackingPolicy,
        evidence: TrackingEvidence,
    ) -> None:
        self.kept[job] = frozenset(processes), policy, evidence


def search_at_once(task: PlanTask) -> Future[ClockPlan | None]:
    future: Future[ClockPlan | None] = Future()
    future.set_result(task.solved())
    return future


class Book:
    def __init__(self) -> None:
        self.decided: list[RecordedDecision] = []

    def add(self, decided: RecordedDecision) -> bool:
        self.decided.append(decided)
        return True


class Host(ProcessDirectory):
    """Everything the tuner is handed; ``run`` lets seconds pass, turn by turn."""

    def __init__(
        self,
        gpus: int = 1,
        *,
        packages: int = 0,
        settings: AutotuneSettings | None = None,
        capper: bool = True,
        caps: Callable[[Clock], Caps] | None = None,
        records: Callable[[Clock], JobRecords] | None = None,
        clock: ManualClock | None = None,
        seed: int = 7,
    ) -> None:
        """``caps`` makes the way to a capper that is not of this host, ``records`` to others."""
        self.seed = seed
        self.clock = clock or ManualClock()
        self.gpus = [Gpu(f"GPU-{number}") for number in range(gpus)]
        self.packages = [
            Gpu(f"intel-rapl:{number}", knob=Knob.CPU_POWER) for number in range(packages)
        ]
        self.groups: dict[Consumer, tuple[Group, ...]] = {}
        self.jobs: list[Job] = []
        self.tap, self.device_users = ReceivedSpanQueue(announced=True), DeviceUsers()
        self.capper = MemoryCapper(self) if capper else None
        self.memory, self.book = Memory(), Book()
        self.logged: list[str] = []
        self.strangers: list[Consumer] = []
        self.pages: dict[str, EnginePageRead] = {}  # the newest one of each engine
        self.page_intervals: dict[str, int] = {}
        self._history: dict[str, list[tuple[int, int]]] = {gpu.device: [] for gpu in self.devices}
        settings = settings or quick()
        self.owners: dict[Consumer, Principal | None] = {}
        permissions = GpuPermissions(settings.gpus, self.host_view)
        self.declared = DeclaredJobs(settings, self, "instance", permissions)
        self.accounts, self.evidence = MemoryAccounts(), MemoryEvidence()
        self._settings, self._caps = settings, caps
        self._job_records = None if records is None else records(self.clock)
        self.restart()
        self._record()

    def restart(self) -> None:
        """Start the tuner, as after a crash of the agent: only stores remain."""
        self.tuner = Tuner(
            self.clock,
            self._settings,
            self.tap,
            TuningContext(
                certified=self.memory,
                owner_of=ProcessOwners(self),
                accounts=self.accounts,
                evidence=self.evidence,
                search_plan=search_at_once,
                records=self._job_records,
                command=training_command,
                seed=self.seed,
                page_intervals=self.page_intervals,
            ),
            host=self.host_view,
            directory=self,
            caps=self.capper if self._caps is None else self._caps(self.clock),
            record=self.book.add,
            declared=self.declared.tuned,
            pages=self.newest_pages,
            log=self.logged.append,
        )

    def newest_pages(self) -> list[EnginePageRead]:
        return list(self.pages.values())

    @property
    def devices(self) -> list[Gpu]:
        return self.gpus + self.packages

    def gpu(self, device: str) -> Gpu:
        return next(one for one in self.devices if one.device == device)

    def compute(self, service: str = "trainer", package: int = 0, **more: object) -> Job:
        """A job without a GPU."""
        consumer = Consumer(100 + len(self.jobs), 1)
        job = Job(service, self.packages[package], consumer, **more)  # type: ignore[arg-type]
        self.jobs.append(job)
        return job

    def train(self, service: str = "trainer", gpu: int = 0, **more: object) -> Job:
        job = Job(service, self.gpus[gpu], Consumer(100 + len(self.jobs), 1), **more)  # type: ignore[arg-type]
        self.jobs.append(job)
        return job

    def declare(
        self, job: Job, uid: int = 1000, *, name: str = "train", work: str = "", **asked: object
    ) -> DeclaredTerms:
        """Declare a job by its own process."""
        return self.declared.declare(
            ProcessDeclaration(
                job.consumer,
                job_owner(self.describe(job.consumer)) or JobOwner(Principal(uid)),
                uid,
                name,
                job.service,
                job.span,
                work,
                RequestedTerms(**asked),  # type: ignore[arg-type]
            )
        )

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass; the tuner turns twice a second."""
        for tick in range(round(seconds * 1e9 / TICK)):
            self.turn(tick)
            if tick % 2 and until():
                return

    def turn(self, tick: int) -> None:
        """Let one tick pass; the tuner turns in every second one."""
        self._pass()
        if tick % 2:
            self.tuner.step()

    def row(self, job: str = "trainer/train_step") -> TuningRow | None:
        return next((one for one in self.tuner.accounts().rows if one.job == job), None)

    def host_view(self) -> HostView:
        return HostView(
            self.clock.now(), self.view(), self.domains(), self, self, self.device_users
        )

    # ------------------------------------------------------------------------- inputs

    def view(self) -> Snapshot:
        now = self.clock.now()
        limits = (MINIMUM, DEFAULT, DEFAULT)
        return Snapshot(
            now,
            1,
            "emulated",
            gpus=tuple(
                GpuStatus(
                    gpu.device,
                    now,
                    power_instant=Milliwatts(gpu.power),
                    limits=PowerLimits(*map(Milliwatts, (*limits, gpu.cap, gpu.cap))),
                    throttling=gpu.throttling,
                    mig=gpu.mig,
                    partition_mode=gpu.partition_mode,
                    model="H100",
                    driver="550",
                    index=gpu.index,
                )
                for gpu in self.gpus
                if not gpu.lost
            ),
        )

    def expect(self, end: int) -> None:
        pass

    def settled(self, consumer: Consumer | None = None) -> int:
        return self.clock.monotonic() - 1_500_000_000

    def domains(self) -> Mapping[str, Domain]:
        return {
            gpu.device: Domain(
                gpu.device,
                HwType.CPU if gpu.knob is Knob.CPU_POWER else HwType.GPU,
                gpu.device,
                "nvml",
                Provenance.EMULATED,
                resource=gpu.resource,
                method="mig-gpm" if gpu.mig_users_known else "none",
            )
            for gpu in self.devices
        }

    def family(self, consumer: Consumer) -> frozenset[Payer]:
        return frozenset({consumer})

    def device(self, domain_id: str, start: int, end: int) -> IntervalEnergy:
        energy = self._spent_by(domain_id, end) - self._spent_by(domain_id, start)
        return IntervalEnergy({HwType.GPU: Microjoules(energy)}, {}, end - start)

    def identify(self, pid: int) -> Consumer | None:
        return next((j.consumer for j in self.jobs if j.consumer.pid == pid and j.alive), None)

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        principal = self.owners.get(consumer, Principal(1000))
        groups = self.groups.get(consumer, ())
        return PayerInfo(consumer, "python", groups, principal=principal)

    # ------------------------------------------------------------------------------ time passes

    def _pass(self) -> None:
        start = self.clock.monotonic()
        end = start + TICK
        for job in self.jobs:
            done = job.advance(start, end)
            if done:
                self.tap.append(job.consumer, job.service, SpanColumns.of(done))
        for gpu in self.devices:
            users = [one.consumer for one in self.jobs if one.gpu is gpu and one.alive]
            users += self.strangers
            busy = any(one.gpu is gpu and one.alive and not one.paused for one in self.jobs)
            gpu.energy += energy_at(gpu.power if busy else 70_000, TICK)
            usage = Usage(gpu.resource, Instant(start, 0), Instant(end, 0), {})
            self.device_users.add([replace(usage, spent=dict.fromkeys(users, TICK // 2))])
        self.clock.advance(ns=TICK)
        self._record()

    def _record(self) -> None:
        for gpu in self.devices:
            self._history[gpu.device].append((self.clock.monotonic(), gpu.energy))

    def _spent_by(self, device: str, at: int) -> int:
        known = self._history[device]
        place = min(max(1, bisect(known, (at, 0))), len(known) - 1)
        (left, low), (right, high) = known[place - 1], known[place]
        inside = min(max(at, left), right) - left
        return low + (high - low) * inside // (right - left)


def quick(**more: object) -> AutotuneSettings:
    """Settings under which a search takes simulated minutes."""
    known: dict[str, object] = {
        "mode": "apply",
        "job": (TunedJobSettings(service="trainer", span="train_step", kind="steps"),),
        "block": 2_000_000_000,
        "settle": 1_000_000_000,
    }
    return AutotuneSettings(**(known | more))  # type: ignore[arg-type]


def held(host: Host, job: str = "trainer/train_step") -> bool:
    row = host.row(job)
    return row is not None and row.decision.move is Move.HOLD


@saved
def held_host(partition_mode: str | None = None) -> Host:
    """A host whose one job has a certified setting, which is in force for the first time."""
    host = Host()
    host.gpus[0].partition_mode = partition_mode
    host.train()
    host.run(3600, until=lambda: held(host))
    return host
