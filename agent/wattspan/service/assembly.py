"""The composition root: builds an agent from a configuration.

`build_agent` builds the agent of `wattspan run`. `standalone_agent` runs one without exporters,
store and listeners inside the process of `wattspan measure`.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan import __version__
from wattspan.advice.boards import StaticPowerLearner
from wattspan.api.energy import energy_response
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.config.tables import RateSettings
from wattspan.footprint.cost import CoverEnergy, RateAccumulator
from wattspan.http.limits import RejectionCounter
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Checkpoint,
    Consumer,
    Footprint,
    Instant,
    Principal,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    former_engines,
)
from wattspan.plugins import (
    AwaitedPlugins,
    Plugins,
    open_exporters,
    open_sources,
    source_advice,
)
from wattspan.ports import (
    Clock,
    Exporter,
    ExporterContext,
    SourceContext,
    SourceError,
    StoreError,
    WattspanError,
)
from wattspan.processes.cpu_sampler import CpuSampler
from wattspan.processes.host import open_processes
from wattspan.processes.metadata import RunningProcesses
from wattspan.processes.performance_counters import SOCKET_PATH, CountersClient
from wattspan.processes.pod_resources import open_pod_resources
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import ProcFs
from wattspan.service.agent import Agent, ExporterGroup, ServiceGroup, require_readable_counters
from wattspan.service.configuration import (
    LoadedConfiguration,
    host_name,
    selected_emulated_host,
)
from wattspan.service.device_history import DeviceHistory, WindowEdges
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import (
    DEVICES,
    STATIC_POWERS,
    AgentUsage,
    LatestSnapshot,
    Poller,
    SnapshotProviders,
)
from wattspan.service.sampling_demand import QUERY_TIME, Intervals, Reason, SamplingDemand
from wattspan.service.span_assembly import PeerPrincipalLookup, SpanAssembly
from wattspan.service.tuning_assembly import AgentCore, TuningAssembly, add_fleet
from wattspan.sharing.pools import Pools
from wattspan.storage.checkpoints import latest_checkpoint
from wattspan.storage.store import DeferredStore, Store
from wattspan.util.files import file_text

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost
    from wattspan.footprint.price_and_carbon import ConstantRate, PolledRate
    from wattspan.sdk.client import Measurement
    from wattspan.service.engine_scraper import EngineScrapers

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATM = Path("/proc/self/statm")

Log = Callable[[str], None]

NO_COUNTER_MESSAGE = (
    "No energy counter can be read on this host, so there is nothing to measure. "
    "`wattspan doctor` lists all checked counters and remedies; "
    "`wattspan demo` runs on an emulated host; "
    "[sources.estimate] enabled = true estimates CPU energy from load."
)


def build_agent(
    config: Config,
    plugins: Plugins,
    *,
    log: Log,
    info: Log = lambda _: None,
    emulated: EmulatedHost | None = None,
    closing: Checkpoint | None = None,
    health: Callable[[], tuple[SourceHealth, ...]] = lambda: (),
    alive: Callable[[], None] = lambda: None,
) -> Agent:
    """An agent that is ready to start. SourceError if no counter can be read.

    ``log`` receives failures, ``tell`` the capabilities that are missing. ``closing`` is the
    checkpoint of a stopped agent of this process, from which totals continue with or without a
    store. ``health`` is shown with that of the agent's own parts. ``alive`` is called from the
    poller's loop, for a watchdog.
    """
    clock = SystemClock()
    sysfs = emulated.sysfs if emulated is not None else None
    # The counters of this host tell nothing of an emulated one.
    helper = SOCKET_PATH if emulated is None else emulated.counters
    counters = CountersClient(clock, helper, of_kernel=emulated is None)
    resolver = PrincipalResolver.of_host(pods_by_user=config.spans.pod == "uid")
    with contextlib.ExitStack() as undo:
        processes = open_processes(
            clock,
            sysfs=sysfs or Path("/sys"),
            events=config.processes.events,
            counters=counters if config.processes.counters == "auto" else None,
            names=config.processes.names,
            principals=resolver,
        )
        undo.callback(processes.usage.close)
        for means in processes.capabilities if config.processes.events else ():
            if not means.active:
                info(f"Without {means.name}: {means.detail}. {means.remedy}")
        context = SourceContext(
            clock=clock,
            directory=processes.directory,
            emulated=emulated is not None,
            nvml=emulated.nvml() if emulated is not None else None,
            sysfs=sysfs,
            resolution=emulated.resolution if emulated is not None else None,
            amdsmi=emulated.amdsmi() if emulated is not None else None,
        )
        opened = open_sources(plugins, config, context)
        for name in opened.awaited:  # an open source reports its settings that match nothing
            for sentence in source_advice(plugins, config, name):
                log(sentence)
        for source in opened.sources.values():
            undo.callback(source.close)
        if not opened.sources:
            for failure in (*opened.failures, *opened.awaited_failures.values()):
                log(str(failure))
            raise SourceError(NO_COUNTER_MESSAGE)
        store = _open_store(config, clock, log, closing, emulated=emulated is not None)
        if store is not None:
            undo.callback(store.close)
        checkpoint = latest_checkpoint(closing, store.previous if store is not None else None)
        if checkpoint is not None:
            rows = processes.directory.restore(checkpoint.processes)
            checkpoint = replace(checkpoint, processes=rows)
        boot_id = file_text(BOOT_ID)
        ledger = Ledger(
            LedgerSettings(
                idle=config.processes.idle,
                idle_powers=config.processes.idle_powers,
                top=config.processes.top,
                groups=config.processes.groups,
            ),
            checkpoint=checkpoint,
            boot_id=boot_id if emulated is None else f"{emulated.directory} {boot_id}",
            now=clock.monotonic(),
        )
        latest = LatestSnapshot(ledger.snapshot(clock.now(), host_name(emulated)))
        refusals = RejectionCounter()
        principals = PeerPrincipalLookup(clock, resolver)
        pools = Pools()
        edges = WindowEdges(pools)
        awaited, late = AwaitedPlugins(clock, log), ServiceGroup("plugins")
        late.add_thread("wattspan-plugins", awaited.run, timeout=1.0)

        def open_all() -> Iterator[Exporter]:
            context = ExporterContext(clock, __version__, log, refusals.counter, principals, pools)
            found = open_exporters(plugins, config, context)
            awaited.expect("exporters", found.awaited, add_exporter, found.awaited_failures)
            yield from found.exporters.values()

        def add_exporter(exporter: Exporter) -> None:
            exporters.add(exporter, latest.view)

        # Opened at their start, after the first reading of the counters: the second, which gives
        # the first joules, is due by the time that their modules are imported.
        exporters = ExporterGroup(open_all())

        def principal_of(process: Consumer) -> Principal | None:
            info = processes.directory.describe(process)
            return None if info is None else info.principal

        static_powers = StaticPowerLearner(
            config.spans.waiting, latest.view, threading.Lock(), principal_of
        )
        history = EnergyHistory(
            config.agent.history,
            config.agent.history_bytes,
            static_powers.powers,
            ledger.baseline_errors,
            ledger.missing_until,
            pools,
            lambda process: edges.of(process.pid),
        )
        interval = config.agent.interval
        demand = SamplingDemand(
            clock,
            Intervals() if interval.is_auto else Intervals(int(interval), int(interval)),
            RunningProcesses(processes.directory, ProcFs()).has_ended,
            pools,
        )
        resolution = config.agent.api_resolution
        devices = DeviceHistory(interval, LedgerSettings().absence, resolution, edges)
        core = AgentCore(
            config,
            clock,
            history,
            devices,
            processes.directory,
            latest.view,
            log,
            emulated,
            static_powers,
            demand,
            pools,
            edges,
        )
        tuning = TuningAssembly(core)
        spans = SpanAssembly(core, tuning, checkpoint, refusals=refusals, principals=principals)
        footprint = FootprintTracker(config, clock, checkpoint)
        fleet = ServiceGroup("fleet")
        fleet_accounts = add_fleet(fleet, core, tuning, boot_id)
        kubelet = ServiceGroup("pods")
        pods = (
            None
            if emulated
            else open_pod_resources(
                config.processes.pod_resources, config.processes.kubernetes_node
            )
        )
        if pods is not None:
            kubelet.add_thread("wattspan-pods", pods.run)
            kubelet.health_checks.append(pods.health)
        engines: EngineScrapers | None = None
        earlier = checkpoint.engines if checkpoint else ()
        former = former_engines(earlier, [one.label for one in config.serving.engine])
        if config.serving.engine:
            from wattspan.service.engine_scraper import EngineScrapers  # most agents read none

            engines = EngineScrapers(core, resolver, earlier, tuning.pages)

        def span_accounts() -> SpanAccounts:
            found = replace(spans.accounts(), former_engines=former)
            return found if engines is None else replace(found, engines=engines.rows(found))

        serving = () if engines is None else (engines.services,)
        services = (
            late,
            footprint.services,
            kubelet,
            spans.services,
            *serving,
            tuning.services,
            fleet,
        )
        poller = Poller(
            clock,
            ledger,
            history,
            tuple(opened.sources.values()),
            processes.usage,
            processes.directory,
            latest,
            demand=demand,
            providers=SnapshotProviders(
                agent_usage=own_usage(),
                health=lambda: (
                    *(
                        SourceHealth(one.source, False, 0, 1, (one,))
                        for one in (*opened.failures, *awaited.failures)
                    ),
                    *((store.health,) if store is not None else ()),
                    *(one for group in services for one in group.health()),
                    *health(),
                    *exporters.health(),
                ),
                exporter_drops=exporters.drops,
                refusals=refusals.counts,
                pool_refusals=pools.refusals,
                pools_used=pools.used,
                spans=span_accounts,
                tuning=tuning.accounts,
                footprint=footprint.report,
                device_pods=pods.devices if pods is not None else tuple,
                ramps=devices.ramps,
                fleet=fleet_accounts,
            ),
            observers={
                DEVICES: devices.settle,
                STATIC_POWERS: static_powers.apply,
                **tuning.observers,
            },
            recorders={DEVICES: devices.record},
            save=store.write_latest if store is not None else None,
            alive=alive,
            sleep=demand.sleep_until,
        )
        awaited.expect("sources", opened.awaited, poller.add, opened.awaited_failures)
        undo.pop_all()
        return Agent(
            poller,
            exporters,
            services,
            devices=devices,
            store=store,
            record_every=config.store.interval,
            log=log,
        )


def own_usage() -> Callable[[], AgentUsage]:
    """A function that measures the CPU time of this process, and its memory at each fifth call.

    The kernel takes long to add the memory up.
    """
    calls = itertools.count()
    rss: int | None = None

    def measure() -> AgentUsage:
        nonlocal rss
        used = resource.getrusage(resource.RUSAGE_SELF)
        if next(calls) % 5 == 0:
            try:
                rss = int(STATM.read_text().split()[1]) * resource.getpagesize()
            except (OSError, ValueError, IndexError):
                rss = None
        return AgentUsage(used.ru_utime + used.ru_stime, rss)

    return measure


def _open_store(
    config: Config, clock: SystemClock, log: Log, closing: Checkpoint | None, *, emulated: bool
) -> Store | DeferredStore | None:
    """The store, or one that opens later; None if it is off. StoreError with ``enabled = true``."""
    if config.store.enabled is False:
        return None
    state_dir = Path(config.agent.state_dir)

    def open_store() -> Store:
        return Store(state_dir, config.store, clock, emulated=emulated, log=log)

    try:
        return open_store()
    except StoreError as error:
        if config.store.enabled is True:
            raise
        log(
            f"The agent continues without a store and retries; until the store opens, totals are "
            f"lost with the agent. {error}"
        )
        return DeferredStore(open_store, error, log, closing=closing)


# ---------------------------------------------------------------------------- cost and carbon


class FootprintTracker:
    """Cost and carbon of the cover's energy, and the threads that look up rates."""

    def __init__(self, config: Config, clock: Clock, checkpoint: Checkpoint | None) -> None:
        from wattspan.footprint.price_and_carbon import PolledRate, open_rate

        self.services = ServiceGroup("footprint")
        self._rates: dict[str, tuple[ConstantRate | PolledRate, RateAccumulator]] = {}
        self._cover = CoverEnergy(checkpoint.accounts if checkpoint is not None else ())
        before = checkpoint.footprint if checkpoint is not None else Footprint()
        lookups: list[PolledRate] = []
        self.services.health_checks.append(lambda: [lookup.health() for lookup in lookups])
        tables: dict[str, RateSettings] = {"cost": config.cost, "carbon": config.carbon}
        for name, table in tables.items():
            rate = open_rate(name, table, clock)
            if isinstance(rate, PolledRate):
                self.services.add_thread(f"wattspan-{name}", rate.run, timeout=1.0)
                lookups.append(rate)
            if rate is not None:
                total = RateAccumulator(table.unit, rate.origin, getattr(before, name))
                self._rates[name] = rate, total

    def report(self, snapshot: Snapshot) -> Footprint:
        """The totals up to a snapshot. To be called once per snapshot, by one thread."""
        if not self._rates:
            return Footprint()
        spent = self._cover.spent(snapshot.domains)
        return Footprint(
            **{
                name: total.add(spent, _rate_at(rate, snapshot.at))
                for name, (rate, total) in self._rates.items()
            }
        )


def _rate_at(rate: ConstantRate | PolledRate, at: Instant) -> int | None:
    try:
        return rate.at(at)
    except Exception:  # noqa: BLE001 - a failing rate is unknown and must not end the poller
        return None


# ----------------------------------------------------------------------- `wattspan measure` alone

STARTUP_TIMEOUT = 4 * SECOND  # GPU counters settle 1 to 3 s late
_POLL_INTERVAL = 20 * MILLISECOND


class StandaloneAgent:
    """Measures consumers with an agent in this process."""

    about = "wattspan measure itself, no agent"
    note = ""

    def __init__(self, agent: Agent, clock: SystemClock, sampler: CpuSampler) -> None:
        self._agent, self._clock, self._sampler = agent, clock, sampler

    def wait_until_ready(self) -> None:
        """Return when every counter has been read twice, or after STARTUP_TIMEOUT."""
        started = self._clock.monotonic()
        history, devices = self._agent.history, self._agent.devices

        def all_known() -> bool:
            now = self._clock.monotonic()
            known = (
                devices.device(one, started - SECOND, now).covered for one in history.domains()
            )
            return history.settled() > started and all(covered > 0 for covered in known)

        self._wait_for(all_known, STARTUP_TIMEOUT)

    def watch(self, consumer: Consumer) -> None:
        self._sampler.watch(consumer)
        samples = partial(self._sampler.take, consumer)
        self._agent.history.watch(consumer, family=True, samples=samples, holder="measure")
        self._agent.demand.register(Reason.WINDOWS, consumer, consumer)

    def read(self, consumer: Consumer, start: int, end: int, wait: float) -> Measurement:
        from wattspan.sdk.client import Measurement  # its http.client is not needed by `run`

        history = self._agent.history
        history.expect(end)
        self._agent.demand.register(Reason.WINDOWS, consumer, consumer)
        self._agent.demand.hold(Reason.QUERY, QUERY_TIME)
        self._wait_for(lambda: history.settled(consumer) >= end, round(wait * SECOND))
        response = energy_response(history, self._agent.devices, start, end, consumer, family=True)
        return Measurement.of({"host_name": self._agent.view().host, **response})

    def _wait_for(self, reached: Callable[[], bool], timeout: int) -> None:
        deadline = self._clock.monotonic() + timeout
        while not reached() and self._clock.monotonic() < deadline:
            self._clock.sleep_until(self._clock.monotonic() + _POLL_INTERVAL)


@contextlib.contextmanager
def standalone_agent(
    loaded: LoadedConfiguration, clock: SystemClock, log: Callable[[str], None]
) -> Iterator[StandaloneAgent]:
    """A running StandaloneAgent. SourceError if no counter can be read."""
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(selected_emulated_host(loaded.config.emulation))
        plugins = replace(loaded.plugins, exporters={})
        agent = build_agent(loaded.config, plugins, log=log, emulated=host)
        stack.callback(agent.stop)
        agent.start()
        require_readable_counters(agent.view().health)
        sampler = CpuSampler(clock)
        sampler.start()
        stack.callback(sampler.stop)
        standalone = StandaloneAgent(agent, clock, sampler)
        standalone.wait_until_ready()
        yield standalone
    if agent.failure is not None:
        raise WattspanError("The measurement failed, as logged above; the command itself did run.")
