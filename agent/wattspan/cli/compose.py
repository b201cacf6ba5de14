"""The composition root: from a configuration to an agent, every part handed what it needs."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from pathlib import Path

from wattspan import __version__
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.emulation.host import EmulatedHost
from wattspan.ledger import Ledger, Rules
from wattspan.model import Failure, SourceHealth, Trouble
from wattspan.plugins import Opened, Plugins, open_exporters, open_sources
from wattspan.ports import (
    ExporterContext,
    SourceContext,
    SourceError,
    StoreError,
)
from wattspan.processes.opening import open_processes
from wattspan.runtime.agent import Agent
from wattspan.runtime.poller import Poller, SelfMeasure
from wattspan.store import Store
from wattspan.timeline import Timeline

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
STATM = Path("/proc/self/statm")

Log = Callable[[str], None]

NOTHING_TO_READ = (
    "No energy counter can be read on this host, so there is nothing to measure. "
    "`wattspan doctor` says what was looked for and what would help; "
    "`wattspan demo` shows everything on an emulated host; "
    "[sources.estimate] enabled = true estimates CPU energy from load."
)


def build_agent(
    config: Config, plugins: Plugins, *, log: Log, emulated: EmulatedHost | None = None
) -> Agent:
    """An agent that is ready to start. SourceError if there is no counter at all to read."""
    clock = SystemClock()
    sysfs = emulated.sysfs if emulated is not None else None
    processes = open_processes(clock, sysfs=sysfs or Path("/sys"), events=config.processes.events)
    try:
        context = SourceContext(
            clock=clock,
            directory=processes.directory,
            emulated=emulated is not None,
            nvml=emulated.nvml() if emulated is not None else None,
            sysfs=sysfs,
        )
        opened = _open_counters(config, plugins, context, log)
        books = _open_store(config, clock, log, emulated=emulated is not None)
        boot_id = _boot_id() if emulated is None else f"emulated {os.getpid()} {_boot_id()}"
        ledger = Ledger(
            Rules(
                idle=config.processes.idle,
                top=config.processes.top,
                groups=config.processes.groups,
            ),
            opening=books.opening() if books is not None else None,
            boot_id=boot_id,
            now=clock.monotonic(),
        )
        poller = Poller(
            clock,
            ledger,
            Timeline(config.agent.history, config.agent.history_bytes),
            tuple(opened.sources.values()),
            processes.usage,
            processes.directory,
            interval=config.agent.interval,
            host=_host_name(emulated),
            measure=measure_self,
            extra_health=lambda: (
                _plugin_health(opened.failures) + ((books.health,) if books is not None else ())
            ),
            checkpoint_every=config.store.interval if books is not None else None,
        )
        exporters = open_exporters(plugins, config, ExporterContext(clock, __version__, log))
        for failure in exporters.failures:
            log(str(failure))
        return Agent(
            poller,
            tuple(exporters.exporters.values()),
            books=books,
            record_every=config.store.interval,
            log=log,
        )
    except BaseException:
        processes.usage.close()
        raise


def say_what_fails(sources: tuple[SourceHealth, ...], log: Log) -> None:
    """Tell at start what cannot be read; SourceError if that is everything, for want of rights."""
    counters = [health for health in sources if health.source not in {"processes", "store"}]
    failures = [failure for health in counters for failure in health.failures]
    for failure in failures:
        log(str(failure))
    denied = [failure for failure in failures if failure.trouble is Trouble.DENIED]
    if counters and not any(health.up for health in counters) and denied:
        raise SourceError(f"No energy counter is readable. {denied[0].remedy}".strip())


def measure_self() -> SelfMeasure:
    """What this process has cost so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    try:
        rss = int(STATM.read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        rss = None
    return SelfMeasure(used.ru_utime + used.ru_stime, rss)


def _open_counters(config: Config, plugins: Plugins, context: SourceContext, log: Log) -> Opened:
    opened = open_sources(plugins, config, context)
    for failure in opened.failures:
        log(str(failure))
    if not opened.sources:
        raise SourceError(NOTHING_TO_READ)
    return opened


def _open_store(config: Config, clock: SystemClock, log: Log, *, emulated: bool) -> Store | None:
    """The store, or None if it is off, or cannot be had and nobody insists."""
    if config.store.enabled is False:
        return None
    try:
        return Store.open(
            Path(config.agent.state_dir), config.store, clock, emulated=emulated, log=log
        )
    except StoreError as error:
        if config.store.enabled is True:
            raise
        log(f"Going on without a store, totals will not survive a restart. {error}")
        return None


def _plugin_health(failures: tuple[Failure, ...]) -> tuple[SourceHealth, ...]:
    return tuple(SourceHealth(one.source, False, 0, 1, (one,)) for one in failures)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _host_name(emulated: EmulatedHost | None) -> str:
    return socket.gethostname() if emulated is None else f"emulated-{emulated.profile.name}"
