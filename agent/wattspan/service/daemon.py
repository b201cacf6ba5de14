"""The agent as a daemon: its reloads in one process, its threads, and its log of failures.

A reload stops the agent and starts it with the new configuration, from the checkpoint at which it
stopped; an emulated host with the same settings keeps running. With an invalid configuration, or
one with which the agent cannot start, the old one stays in force.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wattspan.config import changed_keys
from wattspan.model import SECOND, Checkpoint, Failure, Snapshot, SourceHealth, Trouble
from wattspan.plugins import exporter_faults
from wattspan.ports import Clock, ConfigError, SnapshotView, WattspanError
from wattspan.service.agent import SELF_REPORTING, merge_failures, require_readable_counters
from wattspan.service.assembly import build_agent
from wattspan.service.capper_process import CAPPER_LABEL as CAPPER
from wattspan.service.configuration import (
    forward_faults,
    publish_settings,
    selected_emulated_host,
    withdraw_settings,
)
from wattspan.service.systemd import StopRequest, SystemdNotifier, Watchdog, agent_status
from wattspan.util.process import LONGEST_RESTART, release_memory, thread_continues
from wattspan.util.throttle import RateLimitedLog

if TYPE_CHECKING:
    from wattspan.config import Config, EmulationSettings
    from wattspan.emulation.host import EmulatedHost
    from wattspan.service.agent import Agent
    from wattspan.service.configuration import LoadedConfiguration

THREADS = "threads"  # the name of failed threads among the sources
SHOWN_FOR = 300 * SECOND
"""A thread that runs again is in health until it has run for so long without an error."""

MAX_THREADS = 64


class ThreadFailures:
    """Counts and logs the unexpected errors of threads, which do not end the agent.

    A thread that has ended is in health until `forget_ended`. Safe from any thread.
    """

    def __init__(self, clock: Clock, log: Callable[[str], None]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._log = RateLimitedLog(clock.monotonic, log)
        self._failed = 0
        self._recent: dict[str, tuple[int, str]] = {}
        self._ended: dict[str, str] = {}

    def record(self, thread: str, error: BaseException) -> None:
        """Count an error, and log it unless the thread has logged one just now.

        The current thread is the failed one: it runs again, or ends.
        """
        cause = f"{type(error).__name__}: {str(error)[:200]}"
        with self._lock:
            self._failed += 1
            if not thread_continues():
                if thread in self._ended or len(self._ended) < MAX_THREADS:
                    self._ended[thread] = cause
            elif thread in self._recent or len(self._recent) < MAX_THREADS:
                self._recent[thread] = self._clock.monotonic(), cause
            self._log.write(
                f"The thread {thread!r} failed: {cause}. Please report this; the agent continues.",
                thread,
            )

    def forget_ended(self) -> None:
        """No thread is left that ended by an error: all parts are started anew."""
        with self._lock:
            self._ended.clear()

    def health(self) -> tuple[SourceHealth, ...]:
        """The threads that ended, or failed in the last minutes; empty before the first error."""
        shown = SHOWN_FOR + round(LONGEST_RESTART * SECOND)
        with self._lock:
            now = self._clock.monotonic()
            self._recent = {k: v for k, v in self._recent.items() if now - v[0] < shown}
            failed = self._failed
            causes = {thread: cause for thread, (_, cause) in self._recent.items()}
            ended = dict(self._ended)
        if not failed:
            return ()
        failures = tuple(
            Failure(
                THREADS,
                f"the thread {thread!r}",
                Trouble.MALFORMED,
                cause,
                "This is a bug; report it. "
                + (
                    "Restart the agent: its part is missing until then."
                    if thread in ended
                    else "Its part may lack figures; the agent continues."
                ),
                verb="run",
            )
            for thread, cause in sorted((causes | ended).items())
        )
        return (SourceHealth(THREADS, not failures, 0, failed, failures),)


@contextmanager
def report_thread_failures(report: Callable[[str, BaseException], None]) -> Iterator[None]:
    """Report the unexpected error that ends a thread."""

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            report(args.thread.name if args.thread is not None else "?", args.exc_value)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield
    finally:
        threading.excepthook = before


# ------------------------------------------------------------------------------------------- daemon


REPEAT_INTERVAL = 600 * SECOND  # between two log messages about one failure

Log = Callable[[str], None]


class FailureReporter:
    """Logs the failures of sources, except of the things in ``known``, which others report."""

    def __init__(self, log: Log, known: Iterable[str] = ()) -> None:
        self._log = log
        self._known = frozenset(known)
        self._logged: dict[tuple[str, str, Trouble], int] = {}

    def report(self, sources: Iterable[SourceHealth], now: int) -> None:
        """Log the new failures of ``sources``; ``now`` is monotonic."""
        new: list[Failure] = []
        for health in sources:
            if health.source in SELF_REPORTING:
                continue
            for failure in health.failures:
                key = failure.source, failure.thing, failure.trouble  # causes may contain figures
                if key not in self._logged and failure.thing not in self._known:
                    new.append(failure)
                    self._logged[key] = now
        self._logged = {key: at for key, at in self._logged.items() if now - at < REPEAT_INTERVAL}
        for failure in merge_failures(new):
            self._log(str(failure))


class HealthWatch:
    """Wakes the main thread when a snapshot has other failures or devices than the one before.

    The poller calls it in each cycle; without news, the main thread sleeps.
    """

    def __init__(self, alive: Callable[[], None]) -> None:
        """``alive`` is called in each cycle as well, for a watchdog."""
        self._alive = alive
        self._agent: tuple[SnapshotView, Callable[[], None]] | None = None
        self._seen: Snapshot | None = None
        self._facts: tuple[Hashable, ...] = ()

    def attach(self, view: SnapshotView, wake: Callable[[], None]) -> None:
        """Begin to watch the snapshots of a started agent, which ``wake`` wakes."""
        self._agent = view, wake

    def __call__(self) -> None:
        self._alive()
        if self._agent is None:
            return
        view, wake = self._agent
        snapshot = view()
        if snapshot is self._seen:
            return
        self._seen, before = snapshot, self._facts
        self._facts = (
            *((one.source, one.up) for one in snapshot.health),
            *((f.source, f.thing, f.trouble) for one in snapshot.health for f in one.failures),
            *((account.domain.id, account.present) for account in snapshot.domains),
        )
        if self._facts != before:
            wake()


RELEASE_EVERY = 300 * SECOND
"""Free memory is returned to the kernel once in this time."""

ATTEND_INTERVAL = 60.0
"""Seconds after which failures that stand may be logged again, and memory may be released."""
STEP_TIMEOUT = 60 * SECOND  # of a step of the start or the end; a driver may have boards to wake
CONFIGURATION = "configuration"  # the name of a refused configuration among the sources
_THING = "the configuration"


class EmulatedHosts:
    """The running emulated hosts, by their settings; None is the real host."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._open: dict[EmulationSettings, tuple[EmulatedHost | None, ExitStack]] = {}

    def get(self, chosen: EmulationSettings) -> EmulatedHost | None:
        """The host of these settings, started if it does not run yet."""
        if chosen not in self._open:
            stack = ExitStack()
            host = stack.enter_context(selected_emulated_host(chosen))
            self._open[chosen] = host, stack
            if host is not None:
                about, where = host.profile.about, host.directory
                self._log(f"Emulated host in {where}: {about}. No figure is of real hardware.")
        return self._open[chosen][0]

    def keep_only(self, *chosen: EmulationSettings) -> None:
        """Stop all others."""
        for other in [one for one in self._open if one not in chosen]:
            self._open.pop(other)[1].close()


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """A started agent and its configuration."""

    loaded: LoadedConfiguration
    agent: Agent
    failures: FailureReporter


class AgentDaemon:
    """Runs the agent until ``request`` stops it; ``load`` reads the configuration again."""

    def __init__(
        self,
        request: StopRequest,
        notify: SystemdNotifier,
        clock: Clock,
        load: Callable[[], LoadedConfiguration],
        info: Log,
        warn: Log,
    ) -> None:
        self._request, self._notify, self._clock = request, notify, clock
        self._load, self._info, self._warn = load, info, warn
        self._hosts = EmulatedHosts(info)
        self._closings: dict[EmulationSettings, Checkpoint] = {}
        self._refused = ""
        self._health: tuple[SourceHealth, ...] = ()
        self._threads = ThreadFailures(clock, warn)

    def run(self, loaded: LoadedConfiguration) -> None:
        """Serve. Raises the error of the first start, and WattspanError if a part fails later."""
        running: RunningAgent | None = None
        try:
            with report_thread_failures(self._threads.record):
                running = self._begin(loaded)
                self._notify.ready(self._status(running))
                while not self._attend(running):
                    running = self._reload(running)
        except _StopRequestedError:
            return
        finally:
            if running is not None:
                self._notify.stopping()
                self._notify.extend_timeout(STEP_TIMEOUT)
                self._end(running)
            self._hosts.keep_only()
        if running.agent.failure is not None:
            raise WattspanError(
                "The agent ended because a part of it failed; the log above names the cause."
            )

    # -------------------------------------------------------------------------- start and stop

    def _begin(self, loaded: LoadedConfiguration) -> RunningAgent:
        """Start an agent from the checkpoint of the previous one."""
        config, notes = loaded.config, list[str]()
        logging.getLogger("wattspan").setLevel(config.agent.log_level.upper())
        self._progress()
        try:
            emulated = self._hosts.get(config.emulation)
        except WattspanError:
            # Ctrl-C on a terminal also ends an emulated host that has no session of its own yet.
            if self._request.requested:
                raise _StopRequestedError from None
            raise
        if self._request.requested:
            raise _StopRequestedError
        self._progress()
        watch = HealthWatch(Watchdog(self._notify, self._clock))
        agent = build_agent(
            config,
            loaded.plugins,
            log=self._warn,
            info=notes.append,  # logged only after a successful start
            emulated=emulated,
            closing=self._closings.get(config.emulation),
            health=lambda: (*self._health, *self._threads.health()),
            alive=watch,
        )
        running = RunningAgent(loaded, agent, _failure_reporter(loaded, self._warn))
        with ExitStack() as undo:
            undo.callback(self._end, running)
            agent.start()
            require_readable_counters(agent.view().health)
            undo.pop_all()
        for sentence in (*notes, *address_lines(config, agent)):
            self._info(sentence)
        publish_settings(config, agent.addresses, self._warn, emulated=emulated is not None)
        self._request.register(agent.request_stop, agent.wake, wake=agent.wake)
        watch.attach(agent.view, agent.wake)
        configure_garbage_collector()
        return running

    def _attend(self, running: RunningAgent) -> bool:
        """Log new failures until the agent ends (True) or is to be reloaded (False)."""
        released = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            if now - released >= RELEASE_EVERY:
                released = now
                release_memory()
            snapshot = running.agent.view()
            running.failures.report(snapshot.health, snapshot.at.mono)
            self._notify.status(self._status(running))
            if running.agent.wait(ATTEND_INTERVAL):
                return True
            if self._request.take_reload():
                return False

    def _end(self, running: RunningAgent) -> None:
        self._progress()
        withdraw_settings(running.loaded.config)
        running.agent.stop()
        self._threads.forget_ended()
        closing = running.agent.closing
        if closing is not None:
            self._closings = {running.loaded.config.emulation: closing}

    # ------------------------------------------------------------------------------- reloads

    def _reload(self, running: RunningAgent) -> RunningAgent:
        """Apply the present configuration if it is valid; returns the agent that runs then."""
        self._notify.reloading(self._clock.monotonic())
        try:
            loaded = self._load()
            require_startable(loaded)
        except WattspanError as error:
            self._refuse(str(error))
        else:
            running = self._take_over(running, loaded)
        self._notify.ready(self._status(running))
        return running

    def _take_over(self, running: RunningAgent, loaded: LoadedConfiguration) -> RunningAgent:
        keys = changed_keys(running.loaded.config, loaded.config)
        if keys - {"agent.log_level"}:
            self._info(f"Reloading: {', '.join(sorted(keys))} changed.")
            return self._change(running, loaded)
        self._accept()
        logging.getLogger("wattspan").setLevel(loaded.config.agent.log_level.upper())
        self._info("Reloaded; no change requires a restart of the agent.")
        return RunningAgent(loaded, running.agent, running.failures)

    def _change(self, running: RunningAgent, loaded: LoadedConfiguration) -> RunningAgent:
        """Restart the agent; with the old configuration if it does not start with the new one."""
        self._end(running)
        if running.agent.left_behind:
            raise WattspanError(
                "The agent cannot restart because a part of it hangs, so this process ends. "
                "Its service manager starts a new one, with the new configuration."
            )
        old = running.loaded
        try:
            running = self._begin(loaded)
        except _StopRequestedError:
            raise
        except Exception as error:  # noqa: BLE001 - the old configuration can start
            self._refuse(str(error) or type(error).__name__)
            running = self._begin(old)
        else:
            self._accept()
        self._hosts.keep_only(running.loaded.config.emulation)
        return running

    def _refuse(self, faults: str) -> None:
        """Log the faults of the new configuration, and show them until it is accepted."""
        sentences = faults.splitlines()
        for sentence in sentences:
            self._warn(f"Not reloaded: {sentence}")
        self._warn("The previous configuration stays in force.")
        more = f" ({len(sentences) - 1} more in the log)" if len(sentences) > 1 else ""
        self._refused = f"Not reloaded{more}: {sentences[0]}"
        cause = sentences[0].rstrip(".")
        failure = Failure(
            CONFIGURATION,
            _THING,
            Trouble.MALFORMED,
            cause,
            "The previous one stays in force. Check the file with `wattspan config check`.",
            verb="reload",
        )
        self._health = (SourceHealth(CONFIGURATION, False, 0, len(sentences), (failure,)),)

    def _accept(self) -> None:
        self._refused, self._health = "", ()

    def _progress(self) -> None:
        """Begin another step of a start or an end, with its own timeout."""
        self._notify.extend_timeout(STEP_TIMEOUT)
        self._notify.alive()

    def _status(self, running: RunningAgent) -> str:
        return agent_status(running.agent.view(), running.agent.addresses, self._refused)


class _StopRequestedError(Exception):
    """The program is to end before the agent has started."""


def require_startable(loaded: LoadedConfiguration) -> None:
    """ConfigError for faults that can be found while the old configuration is in force."""
    faults = (*forward_faults(loaded.config), *exporter_faults(loaded.plugins, loaded.config))
    if faults:
        raise ConfigError("\n".join(faults))


def address_lines(config: Config, agent: Agent) -> Iterator[str]:
    """The log lines of all addresses, the live page first."""
    if getattr(config.exporters.get("prometheus"), "page", False):
        pages = (one for one in agent.addresses if one.endswith("/metrics"))
        yield from (f"See it: {address.removesuffix('metrics')}" for address in pages)
    yield from (f"Serving {address}" for address in agent.addresses)


def configure_garbage_collector() -> None:
    """Exclude objects that live as long as the agent from collections of garbage."""
    gc.unfreeze()  # objects of a stopped agent
    gc.collect()
    gc.freeze()


def _failure_reporter(loaded: LoadedConfiguration, warn: Log) -> FailureReporter:
    known = [_THING, *(f"[{one.table}]" for one in loaded.plugins.broken)]
    if loaded.config.autotune.mode != "off":
        known.append(CAPPER)  # the tuner reports its failures
    return FailureReporter(warn, known)
