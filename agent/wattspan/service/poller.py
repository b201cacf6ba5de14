"""Deadlines that do not drift.

How each source is doing: the one place where a broken source is caught and counted.

One poll: sources, then usage, then the books, then the next snapshot.

The poller is the only owner of the ledger. Everybody else reads its newest snapshot, which is
replaced by one assignment and never changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from wattspan.attribution.ledger import Ledger
from wattspan.model import (
    MILLISECOND,
    SECOND,
    AgentStats,
    Checkpoint,
    Consumer,
    Failure,
    Footprint,
    GpuStatus,
    Payer,
    PayerInfo,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    Trouble,
    TuningAccounts,
    Usage,
)
from wattspan.ports import Batch, Clock, CounterSource, ProcessDirectory, UsageBatch, UsageSource
from wattspan.service.energy_history import EnergyHistory

MAX_SLEEP = 200 * MILLISECOND
"""Nobody who wants it to stop waits for longer than this."""


class Ticker:
    """Wakes at absolute multiples of an interval; what was missed is counted, never replayed."""

    def __init__(self, clock: Clock, interval: int) -> None:
        self._clock = clock
        self._interval = interval
        self._next = clock.monotonic()
        self.ticks = 0
        self.missed = 0

    def wait(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Return at the next deadline, at once if it has just passed, or soon if ``stopped``."""
        self._next += self._interval
        late = self._clock.monotonic() - self._next
        if late >= self._interval:
            skipped = late // self._interval
            self.missed += skipped
            self._next += skipped * self._interval
        while (now := self._clock.monotonic()) < self._next and not stopped():
            self._clock.sleep_until(min(self._next, now + MAX_SLEEP))
        self.ticks += 1


SILENT_SOURCE_AFTER = 5 * SECOND
"""A source that yielded no reading for longer is down, whatever it says."""


class MonitoredSource:
    """A counter source whose every turn is timed, counted and survived."""

    def __init__(self, source: CounterSource, clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self._reads = 0
        self._failed = 0
        self._failures: tuple[Failure, ...] = ()
        self._last_reading: int | None = None
        self._took = 0
        self._batch = Batch(domains=())

    def read(self) -> Batch:
        """One turn. What the source raises becomes a failure of the source as a whole."""
        before = self._clock.monotonic()
        try:
            batch = self.source.read()
        except Exception as error:  # noqa: BLE001 - a plugin's bug must not stop the others
            failure = Failure(
                self.source.name,
                f"source {self.source.name!r}",
                Trouble.MALFORMED,
                f"it raised {type(error).__name__}: {error}",
                "This is a bug in the source; its energy counts as a gap meanwhile.",
            )
            batch = Batch(domains=self._batch.domains, failures=(failure,))
        self._took = self._clock.monotonic() - before
        self._reads += 1
        self._failed += len(batch.failures)
        self._failures = batch.failures
        if batch.readings:
            self._last_reading = batch.readings[-1].at.mono
        self._batch = batch
        return batch

    def health(self) -> SourceHealth:
        """Whether it is up, and what fails."""
        up = (
            self._last_reading is not None
            and self._clock.monotonic() - self._last_reading <= SILENT_SOURCE_AFTER
        )
        return SourceHealth(
            self.source.name, up, self._reads, self._failed, self._failures, self._took
        )


PUBLISH_EVERY = SECOND // 2


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """What the agent itself costs: CPU seconds since it began, resident bytes."""

    cpu_seconds: float
    rss_bytes: int | None


class Poller:
    """Drives sources and ledger; ``turn`` is one poll and can be called by a test."""

    def __init__(
        self,
        clock: Clock,
        ledger: Ledger,
        past: EnergyHistory,
        sources: Sequence[CounterSource],
        usage: UsageSource,
        directory: ProcessDirectory,
        *,
        interval: int,
        host: str,
        measure: Callable[[], AgentUsage] = lambda: AgentUsage(0.0, None),
        extra_health: Callable[[], tuple[SourceHealth, ...]] = lambda: (),
        checkpoint_every: int | None = None,
        keep: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self.past = past
        self._sources = [MonitoredSource(source, clock) for source in sources]
        self._usage = usage
        self._directory = directory
        self._host = host
        self._measure = measure
        self._extra_health = extra_health
        self._checkpoint_every = checkpoint_every
        self._keep = keep
        self._ticker = Ticker(clock, interval)
        self._started = clock.now()
        self._domains: dict[int, object] = {}
        self._gpus: dict[int, tuple[GpuStatus, ...]] = {}
        self._usage_failures: tuple[Failure, ...] = ()
        self._usage_reads = self._usage_failed = self._processes = 0
        self._published = self._checkpointed = self._started.mono
        self._self = AgentUsage(0.0, None)
        self._checkpoint: Checkpoint | None = None
        self._any_settled = False
        self.exporter_drops: Callable[[], dict[str, int]] = dict
        self.refusals: Callable[[], Mapping[tuple[str, str], int]] = dict
        self.exporter_health: Callable[[], tuple[SourceHealth, ...]] = tuple
        self.span_accounts: Callable[[], SpanAccounts] = SpanAccounts
        self.tuning_accounts: Callable[[], TuningAccounts] = TuningAccounts
        self.weigh: Callable[[Snapshot], Footprint] = lambda _: Footprint()
        self.see_gpu_use: Callable[[Sequence[Usage]], None] = lambda _: None
        self.see_cpu_use: Callable[[Sequence[Usage]], None] = lambda _: None
        self.alive: Callable[[], None] = lambda: None
        self._snapshot = ledger.snapshot(self._started, host, stats=AgentStats(self._started))

    def view(self) -> Snapshot:
        """The newest snapshot. Safe from any thread."""
        return self._snapshot

    def checkpoint(self) -> Checkpoint | None:
        """The newest closed books. Safe from any thread."""
        return self._checkpoint

    def run(self, stop: threading.Event) -> None:
        """Poll at every tick until ``stop``; closes nothing.

        ``alive`` is called at every turn, and often enough between turns that are far apart.
        """

        def stopped() -> bool:
            self.alive()
            return stop.is_set()

        while not stopped():
            self.turn()
            self._ticker.wait(stopped)

    def turn(self) -> None:
        """One poll."""
        usages: list[Usage] = []
        for position, source in enumerate(self._sources):
            batch = source.read()
            if self._domains.get(position) is not batch.domains:
                self._domains[position] = batch.domains
                self._ledger.register(source.source.name, batch.domains)
                self.past.register(batch.domains)
            self._ledger.read(batch.readings)
            self._gpus[position] = batch.gpus
            usages.extend(batch.usages)
        did = self._poll_usage()
        self._ledger.meet(did.infos)
        self.past.meet(did.infos)
        self._introduce(usages)
        self.see_gpu_use(usages)
        self.see_cpu_use(did.usages)
        self._ledger.use(did.usages)
        self._ledger.use(usages)
        if did.exited:
            self._ledger.leave(did.exited, self._clock.now())
        now = self._clock.now()
        settled = self._ledger.settle(now)
        self.past.add(settled, now)
        first = bool(settled) and not self._any_settled
        if first or now.mono - self._published >= PUBLISH_EVERY:
            self._any_settled |= first
            self.publish()

    def publish(self) -> None:
        """Replace the snapshot by one of now.

        Its books are kept before anybody sees it, so that no counter that was ever seen falls.
        """
        now = self._clock.now()
        self._published = now.mono
        if now.mono // SECOND != self._snapshot.at.mono // SECOND:
            self._self = self._measure()
        snapshot = self._ledger.snapshot(
            now,
            self._host,
            gpus=tuple(status for gpus in self._gpus.values() for status in gpus),
            health=(
                *(source.health() for source in self._sources),
                self._usage_health(),
                *self._extra_health(),
                *self.exporter_health(),
            ),
            stats=AgentStats(
                started=self._started,
                ticks=self._ticker.ticks,
                missed_ticks=self._ticker.missed,
                cpu_seconds=self._self.cpu_seconds,
                rss_bytes=self._self.rss_bytes,
                processes=self._processes,
                late_usages=self._ledger.late_usages,
                unnamed_groups=self._ledger.unnamed_groups,
                dropped_history=self.past.timeline.dropped,
                exporter_drops=self.exporter_drops(),
                refusals=self.refusals(),
            ),
            spans=self.span_accounts(),
            tuning=self.tuning_accounts(),
        )
        snapshot = replace(snapshot, footprint=self.weigh(snapshot))
        if self._checkpoint_every is not None:
            books = self._ledger.close(now, snapshot)
            self._keep(books)
            due = now.mono - self._checkpointed >= self._checkpoint_every
            if due or self._checkpoint is None:
                self._checkpointed, self._checkpoint = now.mono, books
        self._snapshot = snapshot

    def finish(self) -> None:
        """Show and close the books as they stand, after the last turn."""
        self.publish()
        self._checkpoint = self._ledger.close(self._snapshot.at, self._snapshot)

    def close(self) -> None:
        """Let go of sources; each closes whatever the others do."""
        with contextlib.ExitStack() as every:
            every.callback(self._usage.close)
            for source in self._sources:
                every.callback(source.source.close)

    # ------------------------------------------------------------------------------- details

    def _poll_usage(self) -> UsageBatch:
        self._usage_reads += 1
        try:
            did = self._usage.poll()
        except Exception as error:  # noqa: BLE001 - energy is measured even when nobody is charged
            did = UsageBatch(
                failures=(
                    Failure(
                        "processes",
                        "the processes' CPU time",
                        Trouble.MALFORMED,
                        f"{type(error).__name__}: {error}",
                        "This is a bug; energy goes to unattributed meanwhile.",
                    ),
                )
            )
        self._usage_failures = did.failures
        self._usage_failed += len(did.failures)
        self._processes = did.processes
        return did

    def _usage_health(self) -> SourceHealth:
        broken = any(failure.trouble is Trouble.MALFORMED for failure in self._usage_failures)
        return SourceHealth(
            "processes", not broken, self._usage_reads, self._usage_failed, self._usage_failures
        )

    def _introduce(self, usages: Iterable[Usage]) -> None:
        """Tell the ledger who the payers are that only a device has seen so far."""
        strangers: dict[Payer, PayerInfo] = {}
        for usage in usages:
            for payer in usage.spent:
                if payer not in strangers and not self._ledger.knows(payer):
                    info = self._describe(payer)
                    if info is not None:
                        strangers[payer] = info
        self._ledger.meet(strangers.values())
        self.past.meet(strangers.values())

    def _describe(self, payer: Payer) -> PayerInfo | None:
        return self._directory.describe(payer) if isinstance(payer, Consumer) else None
