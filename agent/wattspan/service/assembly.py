"""The composition root: from a configuration to an agent, every part handed what it needs."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan import __version__
from wattspan.attribution.history import AttributionHistory
from wattspan.attribution.ledger import Ledger, LedgerSettings
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.http.connection_limiter import RejectionCounter
from wattspan.model import Checkpoint, Failure, SourceHealth
from wattspan.plugins import OpenedPlugins, Plugins, open_exporters, open_sources
from wattspan.ports import (
    ExporterContext,
    SourceContext,
    SourceError,
    StoreError,
)
from wattspan.processes.host import open_processes
from wattspan.service.agent import Agent, ServiceGroup
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.footprint import FootprintTracker
from wattspan.service.poller import AgentUsage, Poller
from wattspan.service.span_assembly import ConnectionOwnerLookup, SpanAssembly
from wattspan.service.tuning_assembly import TuningAssembly
from wattspan.storage.checkpoint_store import CheckpointStore, DeferredCheckpointStore
from wattspan.storage.checkpoints import latest_checkpoint

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATM = Path("/proc/self/statm")

Log = Callable[[str], None]

NO_COUNTER_MESSAGE = (
    "No energy counter can be read on this host, so there is nothing to measure. "
    "`wattspan doctor` says what was looked for and what would help; "
    "`wattspan demo` shows everything on an emulated host; "
    "[sources.estimate] enabled = true estimates CPU energy from load."
)


def build_agent(
    config: Config,
    plugins: Plugins,
    *,
    log: Log,
    tell: Log = lambda _: None,
    emulated: EmulatedHost | None = None,
    closing: Checkpoint | None = None,
    health: Callable[[], tuple[SourceHealth, ...]] = lambda: (),
) -> Agent:
    """An agent that is ready to start. SourceError if there is no counter at all to read.

    ``log`` is told what goes wrong, ``tell`` what is done without. ``closing`` are the books of
    an agent of this process that has ended: its totals go on, with a store or without. ``health``
    is shown beside that of the agent's own parts.
    """
    clock = SystemClock()
    sysfs = emulated.sysfs if emulated is not None else None
    with contextlib.ExitStack() as undo:
        processes = open_processes(
            clock,
            sysfs=sysfs or Path("/sys"),
            events=config.processes.events,
            names=config.processes.names,
        )
        undo.callback(processes.usage.close)
        for means in processes.capabilities if config.processes.events else ():
            if not means.active:
                tell(f"Without {means.name}: {means.detail}. {means.remedy}")
        context = SourceContext(
            clock=clock,
            directory=processes.directory,
            emulated=emulated is not None,
            nvml=emulated.nvml() if emulated is not None else None,
            sysfs=sysfs,
            resolution=emulated.resolution if emulated is not None else None,
        )
        opened = _open_counters(config, plugins, context, log)
        for source in opened.sources.values():
            undo.callback(source.close)
        kept = _open_store(config, clock, log, closing, emulated=emulated is not None)
        if kept is not None:
            undo.callback(kept.close)
        opening = latest_checkpoint(closing, kept.opening if kept is not None else None)
        if opening is not None:
            named = processes.directory.rename(opening.processes)
            opening = replace(opening, processes=named)
        ledger = Ledger(
            LedgerSettings(
                idle=config.processes.idle,
                top=config.processes.top,
                groups=config.processes.groups,
            ),
            opening=opening,
            boot_id=_boot_id() if emulated is None else f"{emulated.directory} {_boot_id()}",
            now=clock.monotonic(),
        )
        refusals = RejectionCounter()
        uid_of = ConnectionOwnerLookup(clock)
        exporters = open_exporters(
            plugins, config, ExporterContext(clock, __version__, log, refusals.of, uid_of)
        )
        broken = _plugin_health(opened.failures + exporters.failures)
        past = EnergyHistory(AttributionHistory(config.agent.history, config.agent.history_bytes))
        workshop = TuningAssembly(
            config, clock, past, processes.directory, log, emulated, host=_host_name(emulated)
        )
        desk = SpanAssembly(
            config,
            clock,
            past,
            processes.directory,
            host=_host_name(emulated),
            log=log,
            view=lambda: poller.view(),
            opening=opening,
            workshop=workshop,
            refusals=refusals,
            uid_of=uid_of,
        )
        services, joiner = desk.services()
        footprints = FootprintTracker(config, clock, opening)
        poller = Poller(
            clock,
            ledger,
            past,
            tuple(opened.sources.values()),
            processes.usage,
            processes.directory,
            interval=config.agent.interval,
            host=_host_name(emulated),
            measure=measure_self,
            extra_health=lambda: (
                *broken,
                *((kept.health,) if kept is not None else ()),
                *desk.health(),
                *footprints.health(),
                *health(),
            ),
            checkpoint_every=config.store.interval if kept is not None else None,
            keep=kept.keep if kept is not None else lambda _: None,
        )
        if joiner is not None:
            poller.span_accounts = joiner.accounts
        poller.weigh = footprints.weigh
        poller.refusals = refusals.counts
        owners = ServiceGroup("owners of connections")
        owners.add(lambda: None, uid_of.close)
        undo.pop_all()
        return Agent(
            poller,
            tuple(exporters.exporters.values()),
            (owners, footprints.services, services, workshop.services(poller)),
            books=kept,
            record_every=config.store.interval,
            log=log,
        )


def measure_self() -> AgentUsage:
    """What this process has cost so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    try:
        rss = int(STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        rss = None
    return AgentUsage(used.ru_utime + used.ru_stime, rss)


def _open_counters(
    config: Config, plugins: Plugins, context: SourceContext, log: Log
) -> OpenedPlugins:
    opened = open_sources(plugins, config, context)
    if not opened.sources:
        for failure in opened.failures:
            log(str(failure))
        raise SourceError(NO_COUNTER_MESSAGE)
    return opened


def _open_store(
    config: Config, clock: SystemClock, log: Log, closing: Checkpoint | None, *, emulated: bool
) -> CheckpointStore | DeferredCheckpointStore | None:
    """The store, now or as soon as it can be had; None if it is off. StoreError if one insists."""
    if config.store.enabled is False:
        return None
    place = Path(config.agent.state_dir)

    def ask() -> CheckpointStore:
        return CheckpointStore.open(place, config.store, clock, emulated=emulated, log=log)

    try:
        return ask()
    except StoreError as error:
        if config.store.enabled is True:
            raise
        log(
            f"Going on without a store until it can be had; until then totals are lost with the "
            f"agent. {error}"
        )
        return DeferredCheckpointStore(ask, error, log, closing=closing)


def _plugin_health(failures: tuple[Failure, ...]) -> tuple[SourceHealth, ...]:
    return tuple(SourceHealth(one.source, False, 0, 1, (one,)) for one in failures)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _host_name(emulated: EmulatedHost | None) -> str:
    return socket.gethostname() if emulated is None else f"emulated-{emulated.profile.name}"
