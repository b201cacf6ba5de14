"""The cycle of the agent: sample sources and processes, update the ledger, publish snapshots.

The poller is the only owner of the ledger. All others read its newest snapshot, which is immutable
and is replaced by one assignment.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, ParamSpec

from wattspan.attribution.cover import Cover
from wattspan.attribution.frozen_counters import FrozenCounters, frozen_failure
from wattspan.attribution.ledger import Ledger
from wattspan.attribution.metering import CounterMeters, MeteredPeriod
from wattspan.model import (
    SECOND,
    AgentStats,
    Attribution,
    Checkpoint,
    Consumer,
    DevicePod,
    Failure,
    Footprint,
    GpuStatus,
    Payer,
    PayerInfo,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    Tick,
    Trouble,
    TuningAccounts,
    TuningState,
    Usage,
)
from wattspan.model.snapshot import FleetAccounts
from wattspan.ports import (
    Batch,
    Clock,
    CounterSource,
    CoverFollower,
    PacedSource,
    ProcessDirectory,
    UsageBatch,
    UsageSource,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.sampling_demand import ASKED_FOR, Reason, RecentTicks, SamplingDemand, Ticker
from wattspan.util.files import shortage_remedy

SILENT_SOURCE_AFTER = 5 * SECOND
"""A source without readings for longer is down."""

PUBLISH_EVERY = SECOND
"""A snapshot is published by the first cycle in each of these periods of monotonic time.

The usage source reads idle processes in the same cycle, so that it settles no other one for them.
"""

PUBLISH_FOR_SPANS = SECOND // 2
"""The period of snapshots while spans wait for the energy of processes or queries use it."""

STARTUP = 2 * SECOND
"""For this time, a snapshot is published at each tick, so that the first figures are known soon."""

SETTLE_AFTER = SECOND // 5
"""Awaited energy is settled this long after the last settlement."""

HISTORY, DEVICES, TUNING = "history", "device history", "tuning"
STATIC_POWERS = "static power"
"""Names of the observers in health: both histories, the users of devices for the tuner, and the
static powers of GPUs."""

_MAX_ANCESTORS = 16  # described above a device's user
_MAX_TRACED = 4096
_COMPARED = (TuningState.EXPLORING, TuningState.HOLDING)  # jobs whose settings are compared


def measured(batch: Batch, counters: FrozenCounters) -> Batch:
    """``batch`` without readings that measure nothing, and with failures of frozen counters."""
    measure, frozen = counters.moves(batch.domains, batch.readings)
    if not frozen and all(measure):
        return batch
    readings = tuple(itertools.compress(batch.readings, measure))
    failures = (frozen_failure(one) for one in batch.domains if one.id in frozen)
    return replace(batch, readings=readings, failures=(*batch.failures, *failures))


def raised(
    error: Exception, source: str, thing: str, loss: str, bug: str = "This is a bug"
) -> Failure:
    """The failure of a part that raised ``error``: a bug, unless descriptors or memory lack."""
    remedy = shortage_remedy(error)
    trouble = Trouble.RETRY if remedy else Trouble.MALFORMED
    cause = f"it raised {type(error).__name__}: {error}"
    return Failure(source, thing, trouble, cause, f"{remedy or bug}; {loss}.")


class MonitoredSource:
    """A counter source whose reads are timed and counted and whose exceptions are caught."""

    def __init__(
        self, source: CounterSource, clock: Clock, counters: FrozenCounters | None = None
    ) -> None:
        """``counters`` are shared by all sources of a host."""
        self.source = source
        self._counters = counters or FrozenCounters()
        self.batch = Batch(domains=())
        self._clock = clock
        self._reads = 0
        self._failed = 0
        self._last_reading: int | None = None
        self._duration = 0

    def read(self) -> Batch:
        """Read once. An exception of the source becomes a failure of the whole source."""
        before = self._clock.monotonic()
        try:
            batch = Batch.checked(self.source.read())
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not stop the others
            name, loss = self.source.name, "its energy counts as a gap meanwhile"
            failure = raised(error, name, f"source {name!r}", loss, "This is a bug in the source")
            batch = Batch(domains=self.batch.domains, failures=(failure,))
        self._duration = self._clock.monotonic() - before
        self._reads += 1
        self.batch = batch = measured(batch, self._counters)
        self._failed += len(batch.failures)
        if batch.readings:
            self._last_reading = batch.readings[-1].at.mono
        return batch

    def pace(self, interval: int, members: frozenset[str]) -> None:
        """Tell a source that follows them the interval of ticks, and the members of the cover."""
        with contextlib.suppress(Exception):  # a plugin's bug costs its resolution only
            if isinstance(self.source, PacedSource):
                self.source.pace(interval)
            if isinstance(self.source, CoverFollower):
                self.source.follow_cover(members)

    def integrates_power(self) -> bool:
        """True if the source needs fine ticks, as far as it tells."""
        if isinstance(self.source, PacedSource):
            with contextlib.suppress(Exception):
                return self.source.integrates_power()
        return False

    def without(self, foreign: Mapping[str, frozenset[str]]) -> Batch:
        """The last batch without the domains whose ids belong to other sources."""
        name, batch = self.source.name, self.batch
        if not (ids := foreign.get(name)):
            return batch
        cause = "another source lists a domain of this id"
        remedy = "Rename the domain, or disable one of the two sources."
        failures = [Failure(name, one, Trouble.MALFORMED, cause, remedy) for one in sorted(ids)]
        self.batch = replace(
            batch,
            readings=tuple(one for one in batch.readings if one.domain_id not in ids),
            failures=(*batch.failures, *failures),
            usages=tuple(one for one in batch.usages if one.resource not in ids),
            gpus=tuple(one for one in batch.gpus if one.domain_id not in ids),
        )
        return self.batch

    def health(self) -> SourceHealth:
        name, batch, counts = self.source.name, self.batch, (self._reads, self._failed)
        last = self._last_reading
        up = last is not None and self._clock.monotonic() - last <= SILENT_SOURCE_AFTER
        # Nothing is wrong with devices that are left alone, so that the kernel can suspend them.
        alone = {bool(one.suspended or one.rest) for one in batch.domains}
        alone |= {one.trouble is Trouble.SUSPENDED for one in batch.failures}
        up |= alone == {True}
        return SourceHealth(name, up, *counts, batch.failures, self._duration, batch.calls)


class MonitoredUsage:
    """The usage source; its polls are counted and its exceptions are caught."""

    def __init__(self, source: UsageSource) -> None:
        self.source = source
        self.batch = UsageBatch()
        self._polls = self._failed = 0

    def poll(self, *, settle: bool, watched: frozenset[Payer] | None) -> UsageBatch:
        """Poll once. Energy is measured even if no usage is known."""
        self._polls += 1
        try:
            self.batch = self.source.poll(settle=settle, watched=watched)
        except Exception as error:  # noqa: BLE001 - energy is measured even without usage
            loss = "energy goes to unattributed meanwhile"
            failure = raised(error, "processes", "the processes' CPU time", loss)
            self.batch = UsageBatch(failures=(failure,))
        self._failed += len(self.batch.failures)
        return self.batch

    def health(self) -> SourceHealth:
        failures = self.batch.failures
        bad = {Trouble.MALFORMED} if self.batch.processes else {Trouble.MALFORMED, Trouble.RETRY}
        up = not any(failure.trouble in bad for failure in failures)
        return SourceHealth("processes", up, self._polls, self._failed, failures)


class MeteredTick:
    """A tick and the periods that it ends."""

    __slots__ = ("_meter", "metered", "tick")

    def __init__(self, tick: Tick, meter: TickMeter) -> None:
        self.tick, self._meter = tick, meter
        self.metered: Sequence[MeteredPeriod] | None = None

    def periods(self) -> Sequence[MeteredPeriod]:
        """The periods; meters all ticks up to this one before. Safe from any thread."""
        if self.metered is None:
            self._meter.catch_up()
        return self.metered or ()


class TickMeter:
    """Meters the ticks of a host in their order, each once, when somebody needs it first.

    Ticks wait for the next settlement or a query: at each tick, the code and the counters would not
    be in the CPU's caches.
    """

    def __init__(self, meters: CounterMeters) -> None:
        self._meters = meters
        self._lock = threading.Lock()
        self._waiting: deque[MeteredTick] = deque()

    def add(self, tick: Tick) -> MeteredTick:
        """Append the next tick."""
        added = MeteredTick(tick, self)
        self._waiting.append(added)
        return added

    def catch_up(self) -> None:
        """Meter all ticks."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting[0]
                waiting.metered = self._meters.advance(waiting.tick)
                self._waiting.popleft()


TickObserver = Callable[[Tick, Sequence[Attribution]], None]
"""Receives each tick and the attributions that it has settled, in the poller's thread."""

TickRecorder = Callable[[MeteredTick, Sequence[GpuStatus]], None]
"""Receives each tick when it is sampled, and the statuses of GPUs, in the poller's thread."""

P = ParamSpec("P")


class MonitoredObserver(Generic[P]):
    """An observer of ticks whose exceptions are caught: the accounts do not need it."""

    def __init__(self, name: str, observe: Callable[P, None]) -> None:
        self._name, self._observe = name, observe
        self._ticks = 0
        self._failed = 0
        self._failures: tuple[Failure, ...] = ()

    def apply(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Pass a tick on. After an exception, the observer lacks that tick and gets the next."""
        self._ticks += 1
        try:
            self._observe(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a bug here must not stop the accounts
            self._failed += 1
            loss = "its figures may be wrong, and all totals of energy continue"
            self._failures = (raised(error, self._name, f"the {self._name}", loss),)

    def health(self) -> tuple[SourceHealth, ...]:
        """Empty without a failure. A later tick does not mend the state: the failure stands."""
        if not self._failures:
            return ()
        return (SourceHealth(self._name, False, self._ticks, self._failed, self._failures),)


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """Resource usage of the agent itself: CPU seconds since its start, resident bytes."""

    cpu_seconds: float
    rss_bytes: int | None


@dataclass(frozen=True, slots=True)
class SnapshotProviders:
    """The parts of a snapshot that the poller does not own.

    Each is called once per snapshot, and ``agent_usage`` and ``ramps`` once a second.
    """

    agent_usage: Callable[[], AgentUsage] = lambda: AgentUsage(0.0, None)
    health: Callable[[], tuple[SourceHealth, ...]] = tuple
    exporter_drops: Callable[[], Mapping[str, int]] = dict
    refusals: Callable[[], Mapping[tuple[str, str], int]] = dict
    pool_refusals: Callable[[], Mapping[tuple[str, str], int]] = dict
    pools_used: Callable[[], Mapping[str, float]] = dict
    spans: Callable[[], SpanAccounts] = SpanAccounts
    tuning: Callable[[], TuningAccounts] = TuningAccounts
    footprint: Callable[[Snapshot], Footprint] = lambda _: Footprint()
    device_pods: Callable[[], tuple[DevicePod, ...]] = tuple
    ramps: Callable[[], Mapping[int, int]] = dict
    fleet: Callable[[], FleetAccounts | None] = lambda: None


class LatestSnapshot:
    """The newest snapshot. The poller replaces it; reading is safe from any thread."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def view(self) -> Snapshot:
        return self._snapshot

    def publish(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot


class Poller:
    """Samples, updates the ledger and the energy history, and publishes snapshots."""

    def __init__(
        self,
        clock: Clock,
        ledger: Ledger,
        history: EnergyHistory,
        sources: Sequence[CounterSource],
        usage: UsageSource,
        directory: ProcessDirectory,
        latest: LatestSnapshot,
        *,
        demand: SamplingDemand,
        providers: SnapshotProviders,
        observers: Mapping[str, TickObserver] = MappingProxyType({}),
        recorders: Mapping[str, TickRecorder] = MappingProxyType({}),
        save: Callable[[Checkpoint], None] | None = None,
        alive: Callable[[], None] = lambda: None,
        sleep: Callable[[int], None] | None = None,
    ) -> None:
        """``observers`` and ``recorders`` have names that health shows.

        ``demand`` has the interval of ticks. ``save`` receives the checkpoint of each snapshot
        before it is published. ``alive`` is called in every cycle, and at least every ``MAX_SLEEP``
        between cycles. ``sleep`` returns at a monotonic time, or earlier when the interval may have
        changed.
        """
        self._clock = clock
        self._ledger = ledger
        self.history = history
        self._cover = Cover()
        self._counters = FrozenCounters()
        self._sources = [self._monitored(source) for source in sources]
        self._added = deque[CounterSource]()
        self._usage = MonitoredUsage(usage)
        self._directory = directory
        self._traced: set[Consumer] = set()  # users of devices whose ancestors were described
        self._latest = latest
        self._providers = providers
        self._observers = [
            MonitoredObserver(name, observe)
            for name, observe in {HISTORY: history.apply, **observers}.items()
        ]
        self._recorders = [MonitoredObserver(name, record) for name, record in recorders.items()]
        self._save = save
        self._alive = alive
        self.demand = demand
        self._ticker = Ticker(clock, demand.interval, sleep)
        self._told: tuple[int, frozenset[str]] | None = None
        self._meter = TickMeter(ledger.meters)
        self._recent = RecentTicks()
        self._started = clock.now()
        self._published = self._settled = self._started.mono
        self._agent_usage = AgentUsage(0.0, None)
        self._ramps: Mapping[int, int] = {}
        self._checkpoint: Checkpoint | None = None
        self._sampled: list[MeteredTick] = []
        self._gpus: tuple[GpuStatus, ...] = ()

    def _monitored(self, source: CounterSource) -> MonitoredSource:
        return MonitoredSource(source, self._clock, self._counters)

    def view(self) -> Snapshot:
        """The newest snapshot. Safe from any thread."""
        return self._latest.view()

    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint. Safe from any thread."""
        return self._checkpoint

    def run(self, stop: threading.Event) -> None:
        """Run a cycle at every tick until ``stop``, and one for the time since; closes nothing."""

        def stopped() -> bool:
            self._alive()
            return stop.is_set()

        while not stopped():
            began, missed = self._clock.monotonic(), self._ticker.missed
            self.turn()
            took = self._clock.monotonic() - began
            self._ticker.wait(stopped)
            if began - self._started.mono > STARTUP:  # the first polls read much that stays known
                self._recent.add(self._clock.monotonic(), self._ticker.missed - missed, took)
        self.turn(last=True)

    def turn(self, *, last: bool = False) -> None:
        """Run one cycle: sample, and settle and publish if it is time for that or the ``last``."""
        now = self._clock.monotonic()
        self._pace()
        period = PUBLISH_FOR_SPANS if self.history.in_use else PUBLISH_EVERY
        due = last or (
            now // period != self._published // period
            or self._ticker.interval >= period
            or now - self._started.mono <= STARTUP
        )
        awaited = self.history.awaited and now - self._settled >= SETTLE_AFTER
        tick = self._meter.add(self._sample(settle=due or awaited))
        self._sampled.append(tick)
        for recorder in self._recorders:
            recorder.apply(tick, self._gpus)
        if due:
            self.publish()
        elif awaited:
            self._settle()

    def _settle(self) -> None:
        """Apply the ticks since the last settlement, in their order.

        The result is the same as with settlement at each tick, at a fraction of its cost: the CPU's
        caches keep the code and the accounts for all ticks of a batch, and lose them between two
        ticks.
        """
        ticks, self._sampled = self._sampled, []
        self._settled = self._clock.monotonic()
        for one in ticks:
            settled = self._ledger.apply(one.tick, one.periods())
            for observer in self._observers:
                observer.apply(one.tick, settled)

    def _pace(self) -> None:
        """Tell the sources the interval of ticks and the cover once one has changed."""
        if (told := (self._ticker.interval, self._cover.members)) != self._told:
            self._told = told
            for source in self._sources:
                source.pace(*told)

    def _ask_for_samples(self, tuning: TuningAccounts) -> None:
        """Ask for fine samples for what the agent itself learns, integrates and compares."""
        if self._ledger.learns_idle_power(self._clock.monotonic()):
            self.demand.hold(Reason.IDLE_POWER, ASKED_FOR)
        if any(one.integrates_power() for one in self._sources):
            self.demand.hold(Reason.INTEGRATION, ASKED_FOR)
        if any(row.state in _COMPARED for row in tuning.rows):
            self.demand.hold(Reason.TUNING, ASKED_FOR)

    def publish(self) -> None:
        """Settle all ticks and replace the newest snapshot.

        Its checkpoint is saved before, so that no published counter is lower after a restart.
        """
        self._settle()
        tuning = self._providers.tuning()
        self._ask_for_samples(tuning)
        now = self._clock.now()
        self._published = now.mono
        latest = self._latest.view()
        if now.mono // SECOND != latest.at.mono // SECOND:
            self._agent_usage = self._providers.agent_usage()
            self._ramps = self._providers.ramps()
        snapshot = replace(
            self._ledger.snapshot(now, latest.host),
            gpus=self._gpus,
            health=(
                *(source.health() for source in self._sources),
                self._usage.health(),
                *(one for observer in self._observers for one in observer.health()),
                *(one for recorder in self._recorders for one in recorder.health()),
                *self._providers.health(),
            ),
            stats=AgentStats(
                started=self._started,
                interval=self._ticker.interval,
                demands=self.demand.reasons(),
                ticks=self._ticker.ticks,
                missed_ticks=self._ticker.missed,
                recent_ticks=self._recent.counts(now.mono),
                cpu_seconds=self._agent_usage.cpu_seconds,
                rss_bytes=self._agent_usage.rss_bytes,
                processes=self._usage.batch.processes,
                late_usages=self._ledger.late_usages,
                unnamed_groups=self._ledger.unnamed_groups,
                dropped_history=self.history.dropped,
                exporter_drops=self._providers.exporter_drops(),
                refusals=self._providers.refusals(),
                pool_refusals=self._providers.pool_refusals(),
                pools_used=self._providers.pools_used(),
            ),
            spans=self._providers.spans(),
            tuning=tuning,
            device_pods=self._providers.device_pods(),
            ramps=self._ramps,
            fleet=self._providers.fleet(),
        )
        snapshot = replace(snapshot, footprint=self._providers.footprint(snapshot))
        if self._save is not None:
            self._checkpoint = self._ledger.checkpoint(snapshot)
            self._save(self._checkpoint)
        self._latest.publish(snapshot)

    def finish(self) -> None:
        """Publish the final snapshot and its checkpoint, after the last cycle."""
        self.publish()
        self._checkpoint = self._ledger.checkpoint(self.view())

    def add(self, source: CounterSource) -> None:
        """Read one more source, from the next cycle on. Safe from any thread."""
        self._added.append(source)

    def close(self) -> None:
        """Close all sources, whether or not others fail."""
        with contextlib.ExitStack() as every:
            every.callback(self._usage.source.close)
            for source in (*self._added, *(one.source for one in self._sources)):
                every.callback(source.close)

    def _sample(self, *, settle: bool) -> Tick:
        while self._added:
            self._sources.append(self._monitored(self._added.popleft()))
            self._told = None
        batches = {source.source.name: source.read() for source in self._sources}
        changed = self._cover.update(
            self._clock.monotonic(),
            {name: batch.domains for name, batch in batches.items()},
            {reading.domain_id for batch in batches.values() for reading in batch.readings},
        )
        if self._cover.foreign:
            for source in self._sources:
                batches[source.source.name] = source.without(self._cover.foreign)
        domains = {name: self._cover.domains[name] for name in changed}
        readings = [reading for batch in batches.values() for reading in batch.readings]
        usages = [usage for batch in batches.values() for usage in batch.usages]
        frozen = frozenset().union(*(batch.frozen for batch in batches.values()))
        self._gpus = self._cover.statuses([gpu for one in batches.values() for gpu in one.gpus])
        watched = None if settle or self.demand.learns else self.history.payees
        polled = self._usage.poll(settle=settle, watched=watched)
        self._counters.add_usages(polled.usages)
        births = (*polled.infos, *self._unknown_users(usages, polled.infos))
        spent = (*polled.usages, *usages)
        return Tick(self._clock.now(), domains, readings, births, spent, polled.exited, frozen)

    def _unknown_users(
        self, usages: Sequence[Usage], known: Sequence[PayerInfo]
    ) -> list[PayerInfo]:
        """Descriptions of the payers that only a device has reported so far, and of launchers.

        The processes above a device's user may be idle, and belong to its service.
        """
        if not usages:
            return []
        sampled = itertools.chain(known, *(one.tick.births for one in self._sampled))
        seen: set[Payer] = {info.payer for info in sampled}
        found: list[PayerInfo] = []
        for usage in usages:
            for payer in (*usage.spent, *usage.present):  # holders may pay for idle power
                if not isinstance(payer, Consumer) or (
                    payer in self._traced and self._ledger.knows(payer)
                ):
                    continue
                if len(self._traced) >= _MAX_TRACED:
                    self._traced.clear()
                self._traced.add(payer)
                for info in self._with_ancestors(payer):
                    if info.payer not in seen and not self._ledger.knows(info.payer):
                        seen.add(info.payer)
                        found.append(info)
        return found

    def _with_ancestors(self, consumer: Consumer) -> Iterator[PayerInfo]:
        for _ in range(_MAX_ANCESTORS):
            info = self._directory.describe(consumer)
            if info is None:
                return
            yield info
            above = self._directory.identify(info.parent) if info.parent else None
            if above is None or above.started > consumer.started:
                return
            consumer = above
