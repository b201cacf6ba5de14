"""The poller, the recorder and the lifecycle of the agent."""

import errno
import itertools
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from testbed.simulated_host import GPU, PACKAGE, imbalances
from testbed.synthetic_kernel import SyntheticKernel
from testbed.tuned import HELD

from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.model import (
    MILLISECOND,
    SECOND,
    AgentStats,
    Attribution,
    BaselineQuality,
    Checkpoint,
    Consumer,
    Failure,
    GpuStatus,
    Group,
    GroupKind,
    HwType,
    IdlePolicy,
    Instant,
    Microjoules,
    Milliwatts,
    Payer,
    PayerInfo,
    Principal,
    Reading,
    Snapshot,
    SourceHealth,
    Tick,
    Trouble,
    TuningAccounts,
    TuningState,
    Usage,
)
from wattspan.ports import Batch, ExporterError, UsageBatch
from wattspan.service.agent import Agent, CheckpointRecorder, ExporterGroup
from wattspan.service.device_history import DeviceHistory
from wattspan.service.energy_history import SPANS, EnergyHistory
from wattspan.service.poller import (
    SILENT_SOURCE_AFTER,
    AgentUsage,
    LatestSnapshot,
    MonitoredSource,
    Poller,
    SnapshotProviders,
)
from wattspan.service.sampling_demand import FINE, REST, Intervals, Reason, SamplingDemand, fixed
from wattspan.testing import FakeDirectory, ManualClock, ReplaySource, ReplayUsage

TICK = SECOND // 10
ME = Consumer(5, 50)
WHO = PayerInfo(ME, "trainer", (Group(GroupKind.USER, "ada"),), "ada")


DEVICES = DeviceHistory(TICK, 10 * SECOND)


class Burning:
    """A counter source of steady power, and a usage source in which one process uses one CPU."""

    def __init__(self, clock: ManualClock, watts: int = 50) -> None:
        self._clock, self._watts = clock, watts
        self._domains = (PACKAGE,)
        self._last = clock.now()
        self.closed = False

    name = "rapl"

    def read(self) -> Batch:
        now = self._clock.now()
        counter = Microjoules(now.mono * self._watts // 1000 % (65_533 * 10**6))
        return Batch(self._domains, (Reading(PACKAGE.id, now, counter),))

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        start, self._last = self._last, self._clock.now()
        span = self._last.mono - start.mono
        usage = Usage("cpu:0", start, self._last, {ME: span}, capacity=2 * span)
        return UsageBatch((usage,), (WHO,), processes=1)

    def close(self) -> None:
        self.closed = True


class Raising:
    name = "broken"

    def read(self) -> Batch:
        raise RuntimeError("no such luck")

    def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
        raise RuntimeError("no such luck")

    def close(self) -> None: ...


def poller(
    clock: ManualClock,
    sources: list[object],
    usage: object,
    exporters: ExporterGroup | None = None,
    directory: FakeDirectory | None = None,
    history: EnergyHistory | None = None,
    settings: LedgerSettings | None = None,
    **rest: object,
) -> Poller:
    exporters = exporters or ExporterGroup()
    ledger = Ledger(settings or LedgerSettings(), boot_id="b", now=clock.monotonic())
    return Poller(
        clock,
        ledger,
        history or EnergyHistory(300 * SECOND, 10**6),
        sources,  # type: ignore[arg-type]
        usage,  # type: ignore[arg-type]
        directory or FakeDirectory([WHO]),
        LatestSnapshot(ledger.snapshot(clock.now(), "h")),
        **{
            "demand": fixed(clock, TICK),
            "providers": SnapshotProviders(health=exporters.health, exporter_drops=exporters.drops),
            **rest,
        },  # type: ignore[arg-type]
    )


def test_added_source_is_read_from_the_next_cycle_on_and_closed() -> None:
    clock = ManualClock()
    first, second = Burning(clock), ReplaySource([Batch(domains=())])
    one = poller(clock, [first], first)
    one.add(second)
    ticks(clock, one, 2)
    assert [row.source for row in one.view().health][:2] == [first.name, "replay"]
    late = ReplaySource([])
    one.add(late)
    one.close()
    assert (second.closed, late.closed) == (True, True)


def test_tick_is_recorded_when_sampled_and_before_it_is_settled() -> None:
    clock, recorded = ManualClock(), list[Tick]()
    source = Burning(clock)
    one = poller(
        clock,
        [source],
        source,
        recorders={"test": lambda metered, gpus: recorded.append(metered.tick)},
        observers={"test": lambda tick, settled: recorded.remove(tick)},
    )
    ticks(clock, one, 25)  # past the start, in which each tick is published
    assert recorded == []
    clock.advance(ns=TICK)
    one.turn()
    assert [tick.at for tick in recorded] == [clock.now()]


def test_id_of_two_sources_is_read_from_the_first_one_and_is_a_failure() -> None:
    clock = ManualClock()
    source, other = Burning(clock, watts=50), Burning(clock, watts=70)
    other.name = "plugin"
    snapshot = ticks(clock, poller(clock, [source, other], source), 30)
    assert snapshot.account(PACKAGE.id).power == 50_000
    (failure,) = snapshot.health[1].failures
    assert (failure.source, failure.thing) == ("plugin", PACKAGE.id)
    assert "another source lists a domain of this id" in failure.cause


def ticks(clock: ManualClock, one: Poller, n: int) -> Snapshot:
    for _ in range(n):
        clock.advance(ns=TICK)
        one.turn()
    one.publish()
    return one.view()


def test_energy_of_a_busy_host_without_baseline_is_withheld() -> None:
    clock = ManualClock()
    host = Burning(clock)
    snapshot = ticks(clock, poller(clock, [host], host), 40)
    account = snapshot.account(PACKAGE.id)
    assert account.energy + account.pending == 39 * 5_000_000
    assert account.baseline is BaselineQuality.UNKNOWN
    assert account.unattributed == account.withheld
    assert account.consumers + account.withheld == account.energy
    assert 0 < account.consumers < account.energy / 10
    assert snapshot.processes[0].info == WHO
    assert imbalances(snapshot) == []


def test_source_that_raises_is_down_and_others_continue() -> None:
    clock = ManualClock()
    host = Burning(clock)
    snapshot = ticks(clock, poller(clock, [Raising(), host], host), 20)
    assert snapshot.account(PACKAGE.id).energy > 0
    broken, good, processes = snapshot.health
    assert not broken.up
    assert "no such luck" in str(broken.failures[0])
    assert broken.failed == broken.reads == 20
    assert good.up
    assert processes.up


@pytest.mark.parametrize(
    ("returned", "cause"),
    [
        (None, "NoneType, no Batch"),
        (Batch((PACKAGE,), (Reading(PACKAGE.id, Instant(5, 5), 1.5),)), "1.5 of rapl:package-0"),
        (Batch((PACKAGE,), (Reading(PACKAGE.id, 5, 5),)), "at 5 is no reading"),
    ],
    ids=["nothing", "fraction", "number"],
)
def test_plugin_that_returns_no_batch_is_down_and_others_continue(
    returned: Any, cause: str
) -> None:
    clock, plugin = ManualClock(), Raising()
    host = Burning(clock)
    plugin.read = lambda: returned  # type: ignore[method-assign]
    snapshot = ticks(clock, poller(clock, [plugin, host], host), 20)
    broken, good, _ = snapshot.health
    assert not broken.up
    assert cause in str(broken.failures[0])
    assert good.up
    assert snapshot.account(PACKAGE.id).energy > 0


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "too many"), MemoryError()])
def test_shortage_of_a_source_is_no_bug(error: Exception) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise error

    clock, broken = ManualClock(), Raising()
    broken.read = broken.poll = fail  # type: ignore[method-assign]
    named = {"observers": {"tuning": fail}}
    snapshot = ticks(clock, poller(clock, [broken, Burning(clock)], broken, **named), 20)
    down = [one for one in snapshot.health if not one.up]
    assert len(down) == 3  # the source, the processes and the observer
    for health in down:
        (failure,) = health.failures
        assert failure.trouble is Trouble.RETRY
        assert "bug" not in str(failure)
        assert re.search(r"LimitNOFILE=|MemoryMax=", failure.remedy)


@pytest.mark.parametrize("kind", ["observers", "recorders"])
def test_failing_observer_is_down_and_the_accounts_continue(kind: str) -> None:
    clock = ManualClock()
    host = Burning(clock)
    seen: list[Tick] = []

    def fail_once(tick: Tick, _: Sequence[object]) -> None:
        seen.append(tick)
        if len(seen) == 1:
            raise RuntimeError("no such luck")

    named = {kind: {"tuning": fail_once}}
    snapshot = ticks(clock, poller(clock, [host], host, **named), 20)
    assert snapshot.account(PACKAGE.id).energy > 0
    assert len(seen) == 20, "the observer gets the next ticks"
    (broken,) = (one for one in snapshot.health if not one.up)
    assert (broken.source, broken.reads, broken.failed) == ("tuning", 20, 1)
    assert "no such luck" in str(broken.failures[0])
    assert imbalances(snapshot) == []


def test_energy_is_counted_without_usage() -> None:
    clock = ManualClock()
    snapshot = ticks(clock, poller(clock, [Burning(clock)], Raising()), 60)
    account = snapshot.account(PACKAGE.id)
    assert account.energy > 0
    assert account.unattributed == account.energy
    assert not snapshot.health[-1].up


def test_source_without_readings_is_down_after_a_timeout() -> None:
    clock = ManualClock()
    host = Burning(clock)
    watched = MonitoredSource(ReplaySource([host.read(), Batch((PACKAGE,))], "rapl"), clock)
    watched.read()
    assert watched.health().up
    watched.read()
    assert watched.health().up
    clock.advance(ns=SILENT_SOURCE_AFTER + 1)
    assert not watched.health().up


def test_source_of_suspended_devices_is_up() -> None:
    asleep = Batch((replace(PACKAGE, suspended=True),))
    watched = MonitoredSource(ReplaySource([asleep], "hwmon"), ManualClock())
    watched.read()
    assert watched.health().up


def test_view_returns_the_same_snapshot_until_the_next_one() -> None:
    clock = ManualClock()
    host = Burning(clock)
    one = poller(clock, [host], host)
    ticks(clock, one, 20)
    assert one.view() is one.view()


@pytest.mark.parametrize(("holder", "most"), [("", 3), ("queries", 6), (SPANS, 3)])
def test_snapshots_are_rare_after_startup_while_nobody_waits(holder: str, most: int) -> None:
    clock = ManualClock()
    host = Burning(clock)
    one = poller(clock, [host], host)
    if holder:
        one.history.watch(ME, holder=holder)
    published = []
    for _ in range(50):
        clock.advance(ns=TICK)
        before = one.view()
        one.turn()
        published.append(one.view() is not before)
    assert published[:20] == [True] * 20
    assert published[20:].count(True) == most


def test_payers_reported_by_a_device_are_described_by_the_directory() -> None:
    clock = ManualClock()
    start, spent = clock.now(), {ME: 100, Consumer(404, 4): 100}
    holder = PayerInfo(Consumer(6, 60), "notebook")  # of a context, without any work

    def batches() -> Iterator[Batch]:
        while True:
            now = clock.now()
            yield Batch(
                (GPU,),
                (Reading(GPU.id, now, Microjoules(now.mono // 10)),),
                usages=(Usage("gpu:GPU-0", start, now, spent, present=frozenset({holder.payer})),),
                gpus=(GpuStatus(GPU.id, now, temperature_celsius=40),),
            )

    one = poller(
        clock,
        [ReplaySource(batches(), "nvml")],
        ReplayUsage(),
        directory=FakeDirectory([WHO, holder]),
        settings=LedgerSettings(
            idle=IdlePolicy.EQUAL, idle_powers={HwType.GPU: Milliwatts(50_000)}
        ),
    )
    snapshot = ticks(clock, one, 40)
    assert {row.info.command for row in snapshot.processes} == {"trainer", "notebook", "unknown"}
    assert snapshot.gpus[0].temperature_celsius == 40


def test_idle_launcher_of_a_device_user_is_described() -> None:
    clock = ManualClock()
    start, user = clock.now(), Principal(1000)
    launcher, api, worker = Consumer(50, 1), Consumer(51, 2), Consumer(52, 3)
    infos = [
        PayerInfo(launcher, "vllm", parent=1, principal=user),
        PayerInfo(api, "python", parent=launcher.pid, principal=user),
        PayerInfo(worker, "python", parent=launcher.pid, principal=user),
    ]
    history = EnergyHistory(300 * SECOND, 10**6)

    def batches() -> Iterator[Batch]:
        while True:
            now = clock.now()
            reading = Reading(GPU.id, now, Microjoules(now.mono // 10))
            usage = Usage("gpu:GPU-0", start, now, {worker: now.mono - start.mono})
            yield Batch((GPU,), (reading,), usages=(usage,))

    # Only the API server has used CPU time.
    used = ReplayUsage([UsageBatch(infos=infos[1:2])])
    one = poller(
        clock,
        [ReplaySource(batches(), "nvml")],
        used,
        directory=FakeDirectory(infos),
        history=history,
    )
    ticks(clock, one, 40)
    assert history.service_group(api)[:2] == ({launcher, api, worker}, launcher)


def test_snapshot_has_the_agent_resource_usage() -> None:
    clock = ManualClock()
    host = Burning(clock)
    providers = SnapshotProviders(
        agent_usage=lambda: AgentUsage(1.5, 40_000_000), exporter_drops=lambda: {"otlp": 3}
    )
    one = poller(clock, [host], host, providers=providers)
    stats: AgentStats = ticks(clock, one, 30).stats
    assert stats.cpu_seconds == 1.5
    assert stats.rss_bytes == 40_000_000
    assert stats.processes == 1
    assert stats.exporter_drops == {"otlp": 3}


def test_exits_reach_the_ledger_after_the_last_usage() -> None:
    clock = ManualClock()
    host = Burning(clock)
    exited = False

    class Usage:
        def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
            return UsageBatch(exited=(ME,)) if exited else host.poll()

    one = poller(clock, [host], Usage())
    ticks(clock, one, 40)
    exited = True
    assert not ticks(clock, one, 1).processes[0].alive


def test_observers_receive_each_tick_with_its_settled_attributions() -> None:
    clock = ManualClock()
    host = Burning(clock)
    seen: list[tuple[Tick, Sequence[Attribution]]] = []
    one = poller(clock, [host], host, observers={"test": lambda *of: seen.append(of)})
    ticks(clock, one, 3)
    assert [tick.domains for tick, _ in seen] == [{"rapl": (PACKAGE,)}, {}, {}]
    assert [tick.births for tick, _ in seen] == [(WHO,)] * 3
    assert [len(settled) for _, settled in seen] == [0, 1, 1]
    assert seen[1][1][0].interval.energy == 5_000_000


def settled_ticks(
    *, awaited: bool = False, each: bool = False
) -> tuple[list[int], list[Attribution], Snapshot]:
    """The number of ticks settled in each cycle, their attributions, and the last snapshot."""
    clock = ManualClock()
    host = Burning(clock)
    seen: list[Attribution] = []
    counts: list[int] = []

    def observe(_: Tick, settled: Sequence[Attribution]) -> None:
        counts[-1] += 1
        seen.extend(settled)

    one = poller(clock, [host], host, observers={"test": observe})
    for _ in range(40):
        counts.append(0)
        clock.advance(ns=TICK)
        if awaited:
            one.history.expect(clock.monotonic())
        one.turn()
        if each:
            one.publish()
    one.publish()
    return counts, seen, one.view()


def test_ticks_are_settled_with_each_snapshot() -> None:
    counts, _, _ = settled_ticks()
    assert counts[:20] == [1] * 20  # for the first figures
    assert counts[20:] == [*[0] * 9, 10] * 2


def test_awaited_ticks_are_settled_before_the_next_snapshot() -> None:
    counts, _, _ = settled_ticks(awaited=True)
    assert counts[20:] == [0, 2] * 10


def test_usage_of_known_processes_is_settled_once_a_second() -> None:
    kernel = SyntheticKernel()
    busy, idle = kernel.spawn(), kernel.spawn()
    source = kernel.source(vigil=True)
    settled: list[int] = []

    class Counted:
        close = source.close

        def poll(self, *, settle: bool, watched: frozenset[Payer] | None) -> UsageBatch:
            batch = source.poll(settle=settle, watched=watched)
            settled.append(bool(batch.usages))
            return batch

    one = poller(kernel.clock, [Burning(kernel.clock)], Counted())
    start, delays = kernel.clock.monotonic(), random.Random(3)
    for at in range(1, 321):
        tick = start + at * TICK + delays.randrange(MILLISECOND)
        kernel.clock.advance(ns=tick - kernel.clock.monotonic())
        kernel.run(busy, MILLISECOND)
        kernel.run(idle, at % 20 * 100)
        one.turn()
    assert sum(settled[20:]) == 30


def test_usage_source_is_told_the_watched_processes_once_nothing_is_learned() -> None:
    clock = ManualClock()
    host = Burning(clock)
    told: list[frozenset[Payer] | None] = []

    class Told:
        close = host.close

        def poll(self, *, settle: bool, watched: frozenset[Payer] | None) -> UsageBatch:
            if not settle:
                told.append(watched)
            return host.poll()

    one = poller(clock, [], Told())
    one.history.watch(ME)
    ticks(clock, one, 90)
    assert set(told) == {None}
    ticks(clock, one, 20)
    told.clear()
    ticks(clock, one, 20)
    assert set(told) == {frozenset({ME})}
    one.demand.hold(Reason.IDLE_POWER, SECOND)
    told.clear()
    ticks(clock, one, 9)
    assert set(told) == {None}


def test_settlement_in_batches_equals_settlement_at_each_tick() -> None:
    each_counts, each, last = settled_ticks(each=True)
    assert each_counts == [1] * 40
    assert len(each) == 39
    for awaited in (False, True):
        _, batches, same = settled_ticks(awaited=awaited)
        assert batches == each
        assert last.domains == same.domains
        assert last.processes == same.processes


# -------------------------------------------------------------------------- agent, recorder


class Shelf:
    """Checkpoints in a list; ``refuse`` makes writes fail."""

    def __init__(self) -> None:
        self.kept: list[Checkpoint] = []
        self.refuse = False
        self.closed = False

    def write(self, opening: Checkpoint) -> bool:
        if self.refuse:
            return False
        self.kept.append(opening)
        return True

    @property
    def health(self) -> SourceHealth:
        return SourceHealth("store", True, 0, 0)

    def close(self) -> None:
        self.closed = True


def test_checkpoint_is_written_once_and_retried_after_a_refusal() -> None:
    shelf = Shelf()
    opening = Checkpoint(Instant(0, 0), "b")
    recorder = CheckpointRecorder(shelf, lambda: opening)
    shelf.refuse = True
    recorder.turn()
    shelf.refuse = False
    recorder.turn()
    recorder.turn()
    assert shelf.kept == [opening]
    CheckpointRecorder(shelf, lambda: None).turn()
    assert len(shelf.kept) == 1


class Window:
    """An exporter that records its calls."""

    name = "window"
    address = "http://127.0.0.1:9949"
    drops = 3

    def __init__(self, fails: bool = False) -> None:
        self.events: list[str] = []
        self._fails = fails

    def start(self, view: object) -> None:
        if self._fails:
            raise OSError("port in use")
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")


def test_stop_stores_all_measured_energy() -> None:
    clock = ManualClock()
    host = Burning(clock)
    shelf, window = Shelf(), Window()
    polled = threading.Event()
    clock.on_sleep = lambda mono: polled.set() if mono > 10**12 + 5 * SECOND else None
    one = poller(clock, [host], host)
    agent = Agent(one, ExporterGroup([window]), devices=DEVICES, store=shelf, log=print)  # type: ignore[list-item]
    agent.start()
    assert agent.addresses == ("http://127.0.0.1:9949",)
    assert polled.wait(20)
    agent.request_stop()
    assert agent.wait(5)
    agent.stop()
    assert window.events == ["start", "stop"]
    assert shelf.closed
    assert host.closed
    final = {a.domain.id: a.energy for a in shelf.kept[-1].accounts}
    assert final[PACKAGE.id] == one.view().account(PACKAGE.id).energy
    assert agent.failure is None


def test_exporter_drops_are_counted_despite_an_exporter_that_raises() -> None:
    class Mute(Window):
        name = "mute"

        @property
        def drops(self) -> int:  # type: ignore[override]
            raise RuntimeError("no idea")

    clock = ManualClock()
    host = Burning(clock)
    exporters = ExporterGroup([Window(), Mute()])  # type: ignore[list-item]
    one = poller(clock, [host], host, exporters)
    agent = Agent(one, exporters, devices=DEVICES, log=print)
    agent.start()
    agent.stop()
    assert one.view().stats.exporter_drops == {"window": 3}


def test_exporter_whose_health_raises_is_down() -> None:
    class Confused(Window):
        name = "confused"

        @property
        def health(self) -> SourceHealth:
            raise RuntimeError("no idea")

    clock = ManualClock()
    host = Burning(clock)
    exporters = ExporterGroup([Window(), Confused()])  # type: ignore[list-item]
    one = poller(clock, [host], host, exporters)
    agent = Agent(one, exporters, devices=DEVICES, log=print)
    agent.start()
    agent.stop()
    assert agent.failure is None
    (health,) = (each for each in one.view().health if each.source == "confused")
    assert not health.up
    assert str(health.failures[0]).startswith(
        "Cannot read the health of the exporter 'confused': RuntimeError: no idea."
    )


def test_failed_start_of_an_exporter_stops_all_parts() -> None:
    clock = ManualClock()
    host = Burning(clock)
    good, bad = Window(), Window(fails=True)
    exporters = ExporterGroup([good, bad])  # type: ignore[list-item]
    agent = Agent(poller(clock, [host], host), exporters, devices=DEVICES, log=print)
    with pytest.raises(ExporterError, match="'window': OSError: port in use"):
        agent.start()
    assert good.events == ["start", "stop"]
    assert host.closed


def test_failed_stop_of_a_part_does_not_prevent_the_stop_of_others() -> None:
    class Stuck(Window):
        def stop(self) -> None:
            raise RuntimeError("it sticks")

    clock = ManualClock()
    host, shelf, said = Burning(clock), Shelf(), list[str]()
    one = poller(clock, [host], host)
    exporters = ExporterGroup([Stuck()])  # type: ignore[list-item]
    agent = Agent(one, exporters, devices=DEVICES, store=shelf, log=said.append)
    agent.start()
    agent.stop()
    agent.stop()
    assert said == ["Stopping the exporter 'window' failed: RuntimeError: it sticks."]
    assert (shelf.closed, host.closed, agent.failure) == (True, True, None)


def test_checkpoint_is_saved_before_its_snapshot_is_published() -> None:
    clock = ManualClock()
    host = Burning(clock)
    kept: list[tuple[int, int]] = []

    def keep(books: Checkpoint) -> None:
        seen = {a.domain.id: a.energy for a in one.view().domains}
        kept.append((sum(a.energy for a in books.accounts), sum(seen.values())))

    one = poller(clock, [host], host, save=keep)
    for _ in range(30):
        one.turn()
        clock.advance(0.1)
    one.finish()
    assert kept[-1][0] > 0
    assert all(earlier[0] == later[1] for earlier, later in itertools.pairwise(kept))


@pytest.mark.parametrize("interval", [FINE, REST])
def test_energy_up_to_the_stop_is_measured_and_charged(interval: int) -> None:
    class Patient(Burning):
        """Its samples wait until they are settled."""

        def poll(self, *, settle: bool = True, watched: object = None) -> UsageBatch:
            return super().poll() if settle else UsageBatch()

    clock, stop = ManualClock(), threading.Event()
    host, first = Patient(clock), clock.monotonic()

    def sleep(until: int) -> None:
        clock.advance(ns=until - clock.monotonic())
        if clock.monotonic() - first > 5 * SECOND + SECOND // 2:
            clock.advance(ns=interval * 2 // 3)
            stop.set()

    one = poller(clock, [host], host, demand=fixed(clock, interval), sleep=sleep)
    one.run(stop)
    one.finish()
    account = one.view().account(PACKAGE.id)
    assert account.energy == 50 * (clock.monotonic() - first) // 1000
    assert (account.pending, account.unattributed) == (0, account.withheld)


def test_failure_of_a_thread_ends_the_agent() -> None:
    clock = ManualClock()
    host = Burning(clock)
    said: list[str] = []

    def explode(_: int) -> None:
        raise RuntimeError("the clock is broken")

    one = poller(clock, [host], host)
    agent = Agent(one, ExporterGroup(), devices=DEVICES, log=said.append)
    clock.on_sleep = explode
    agent.start()
    assert agent.wait(20)
    agent.stop()
    assert isinstance(agent.failure, RuntimeError)
    assert "the clock is broken" in said[0]


def test_failure_prints_as_a_sentence_with_a_remedy() -> None:
    failure = Failure("rapl", "/sys/x", Trouble.DENIED, "permission denied", "Run as root.")
    assert str(failure) == "Cannot read /sys/x: permission denied. Run as root."


def test_missed_ticks_of_the_last_minute_are_in_the_snapshot() -> None:
    """Polls take 250 ms for ten seconds, which is two missed ticks each; then they are quick."""
    clock = ManualClock()
    started, host, stop = clock.monotonic(), Burning(clock), threading.Event()

    class Slow:
        name = host.name
        close = host.close

        def read(self) -> Batch:
            if 5 * SECOND < clock.monotonic() - started < 15 * SECOND:
                clock.advance(0.25)
            return host.read()

    one = poller(clock, [Slow()], host)

    def run_until(seconds: int) -> None:
        stop.clear()
        clock.on_sleep = lambda now: stop.set() if now - started > seconds * SECOND else None
        one.run(stop)

    run_until(20)
    ticks = one.view().stats.recent_ticks
    assert ticks.longest_poll == SECOND // 4
    assert ticks.missed == one.view().stats.missed_ticks >= 50
    assert ticks.due == pytest.approx(180, abs=15)
    run_until(80)
    assert one.view().stats.recent_ticks.missed == 0
    assert one.view().stats.missed_ticks >= 50


@pytest.mark.parametrize(
    ("state", "expected"), [("exploring", 1), ("holding", 1), ("waiting", 0), ("ended", 0)]
)
def test_compared_job_asks_for_fine_samples(state: str, expected: int) -> None:
    clock = ManualClock()
    host, demand = Burning(clock), SamplingDemand(clock, Intervals())
    row = replace(HELD, state=TuningState(state))
    accounts = SnapshotProviders(tuning=lambda: TuningAccounts(rows=(row,)))
    snapshot = ticks(clock, poller(clock, [host], host, demand=demand, providers=accounts), 1)
    assert snapshot.stats.demands["tuning"] == expected


def test_idle_power_and_integrated_power_ask_for_fine_samples() -> None:
    clock = ManualClock()
    host, demand = Burning(clock), SamplingDemand(clock, Intervals())
    one = poller(clock, [host], host, demand=demand)
    assert ticks(clock, one, 1).stats.demands["idle_power"] == 0, "nothing is observed yet"
    asked = ticks(clock, one, 10).stats.demands
    assert (asked["idle_power"], asked["integration"]) == (1, 0)


def test_counter_that_fails_while_its_idle_power_is_learned_lets_the_agent_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    host, demand = Burning(clock), SamplingDemand(clock, Intervals())
    one = poller(clock, [host], host, demand=demand)
    assert ticks(clock, one, 30).stats.demands["idle_power"] == 1
    monkeypatch.setattr(host, "read", lambda: Batch(host._domains))
    assert ticks(clock, one, 160).stats.demands["idle_power"] == 0
    monkeypatch.undo()
    assert ticks(clock, one, 30).stats.demands["idle_power"] == 1


class Paced(Burning):
    """A source that integrates power, and follows the interval and the cover."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.paces: list[int] = []
        self.members: list[frozenset[str]] = []

    def follow_cover(self, members: frozenset[str]) -> None:
        self.members.append(members)

    def pace(self, interval: int) -> None:
        self.paces.append(interval)

    def integrates_power(self) -> bool:
        return True


def test_source_that_integrates_power_asks_for_fine_samples_and_is_told_the_interval() -> None:
    clock = ManualClock()
    host, demand = Paced(clock), SamplingDemand(clock, Intervals())
    one = poller(clock, [host], host, demand=demand)
    assert ticks(clock, one, 1).stats.demands["integration"] == 1
    assert host.paces == [FINE], "once, not at every tick"
    ticks(clock, one, 30)
    assert host.members == [frozenset(), {PACKAGE.id}]


def test_source_that_fails_to_follow_the_interval_stops_nothing() -> None:
    clock = ManualClock()

    class Failing(Paced):
        def follow_cover(self, members: frozenset[str]) -> None:
            raise RuntimeError("no such luck")

        def integrates_power(self) -> bool:
            raise RuntimeError("no such luck")

    host = Failing(clock)
    one = poller(clock, [host], host, demand=SamplingDemand(clock, Intervals()))
    snapshot = ticks(clock, one, 30)
    assert snapshot.account(PACKAGE.id).energy > 0
    assert snapshot.stats.demands["integration"] == 0


def test_agent_at_rest_publishes_each_second_and_charges_the_same_energy() -> None:
    fine, coarse = ManualClock(), ManualClock()
    snapshots = []
    for clock, step in ((fine, SECOND // 10), (coarse, SECOND)):
        host = Burning(clock)
        one = poller(clock, [host], host, demand=fixed(clock, step))
        stop, end = threading.Event(), clock.monotonic() + 60 * SECOND
        clock.on_sleep = lambda now, stop=stop, end=end: now >= end and stop.set()
        one.run(stop)
        one.turn()
        one.publish()
        snapshots.append(one.view())
    first, second = (one.account(PACKAGE.id) for one in snapshots)
    assert first.energy + first.pending == second.energy + second.pending
    assert snapshots[1].sequence >= 60
