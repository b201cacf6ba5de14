"""What fails, told: many that fail alike in one sentence, and what lasts only now and then.

The agent as a service: one configuration after another, in one process.

A reload ends the agent in order and begins it again with the new configuration, from the books at
which it ended; an emulated host whose settings are the same goes on meanwhile. A configuration
that cannot be, or with which nothing can start, changes nothing: the old one goes on.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wattspan.config import changed_keys
from wattspan.model import SECOND, Checkpoint, Failure, SourceHealth, Trouble
from wattspan.otlp.destination import LOGS, METRICS, SPANS
from wattspan.plugins import exporter_faults
from wattspan.ports import Clock, ConfigError, SourceError, WattspanError
from wattspan.service.assembly import build_agent
from wattspan.service.capper_health import CAPPER_LABEL as CAPPER
from wattspan.service.configuration import selected_emulated_host
from wattspan.service.destinations import forward_faults
from wattspan.service.signals import StopRequest
from wattspan.service.systemd import SystemdNotifier, Watchdog, agent_status

if TYPE_CHECKING:
    from wattspan.config import Config, EmulationSettings
    from wattspan.emulation.host import EmulatedHost
    from wattspan.service.agent import Agent
    from wattspan.service.configuration import LoadedConfiguration


REPEAT_INTERVAL = 600 * SECOND
"""A failure that lasts, or comes and goes, is told no more often than this."""

_SELF_REPORTING = {"store", "files", *(signal.name for signal in (SPANS, LOGS, METRICS))}
_NON_COUNTER_SOURCES = {
    "processes",
    "cost",
    "carbon",
    "capper",
    "tuner",
    "configuration",
    *_SELF_REPORTING,
}


class FailureReporter:
    """Tells the failures that the health of sources shows, but for those ``known`` already."""

    def __init__(self, tell: Callable[[str], None], known: Iterable[str] = ()) -> None:
        """``known``: the things whose failure the user has been told of in other words."""
        self._tell = tell
        self._known = frozenset(known)
        self._told: dict[tuple[str, str, Trouble], int] = {}

    def look(self, sources: Iterable[SourceHealth], now: int) -> None:
        """Tell what is new in ``sources``; ``now`` is monotonic."""
        new: list[Failure] = []
        for health in sources:
            if health.source in _SELF_REPORTING:
                continue
            for failure in health.failures:
                key = failure.source, failure.thing, failure.trouble  # a cause may hold figures
                if key not in self._told and failure.thing not in self._known:
                    new.append(failure)
                    self._told[key] = now
        self._told = {key: at for key, at in self._told.items() if now - at < REPEAT_INTERVAL}
        for failure in merge_failures(new):
            self._tell(str(failure))


def require_readable_counters(sources: Iterable[SourceHealth]) -> None:
    """SourceError if no counter at all can be read for want of rights: waiting will not help."""
    counters = [health for health in sources if health.source not in _NON_COUNTER_SOURCES]
    failures = [failure for health in counters for failure in health.failures]
    denied = [failure for failure in failures if failure.trouble is Trouble.DENIED]
    if denied and all(health.failures and not health.up for health in counters):
        raise SourceError(f"No energy counter can be read. {merge_failures(denied)[0]}")


def merge_failures(failures: Iterable[Failure]) -> list[Failure]:
    """Those that differ only in the thing as one, which names the first and counts the others."""
    alike: dict[Failure, list[str]] = {}
    for failure in failures:
        alike.setdefault(replace(failure, thing="", domain_id=None), []).append(failure.thing)
    return [replace(kind, thing=_named(things)) for kind, things in alike.items()]


def _named(things: list[str]) -> str:
    return things[0] if len(things) == 1 else f"{things[0]} and {len(things) - 1} more"


CHECK_INTERVAL = 1.0  # seconds between looks for what has begun to fail
STEP_TIMEOUT = 60 * SECOND
"""What one step of a start or an end may take: a driver may have boards to wake."""

CONFIGURATION = "configuration"
"""What the health of sources calls a configuration that was refused."""
_THING = "the configuration"
_LEVEL = frozenset({"agent.log_level"})

Log = Callable[[str], None]


class EmulatedHosts:
    """Emulated hosts, each for as long as a configuration chooses it; None is the real one."""

    def __init__(self, tell: Log) -> None:
        self._tell = tell
        self._open: dict[EmulationSettings, tuple[EmulatedHost | None, ExitStack]] = {}

    def of(self, chosen: EmulationSettings) -> EmulatedHost | None:
        """The host that is chosen; it is started if it is not there yet."""
        if chosen not in self._open:
            stack = ExitStack()
            host = stack.enter_context(selected_emulated_host(chosen))
            self._open[chosen] = host, stack
            if host is not None:
                about = host.profile.about
                self._tell(f"Emulated host: {about}. No figure of it is true of any machine.")
        return self._open[chosen][0]

    def keep_only(self, *chosen: EmulationSettings) -> None:
        """End every other one."""
        for other in [one for one in self._open if one not in chosen]:
            self._open.pop(other)[1].close()


@dataclass(frozen=True, slots=True)
class RunningAgent:
    """An agent that serves, and the configuration that it has."""

    loaded: LoadedConfiguration
    agent: Agent
    troubles: FailureReporter


class AgentDaemon:
    """Runs the agent until it is told to stop; ``again`` reads the configuration anew."""

    def __init__(
        self,
        request: StopRequest,
        notify: SystemdNotifier,
        clock: Clock,
        *,
        again: Callable[[], LoadedConfiguration],
        tell: Log,
        warn: Log,
    ) -> None:
        self._request, self._notify, self._clock = request, notify, clock
        self._again, self._tell, self._warn = again, tell, warn
        self._hosts = EmulatedHosts(tell)
        self._agent: Agent | None = None  # the newest
        self._closings: dict[EmulationSettings, Checkpoint] = {}
        self._refused = ""
        self._health: tuple[SourceHealth, ...] = ()

    def run(self, loaded: LoadedConfiguration) -> None:
        """Serve; the first start's error is passed on, and WattspanError if a part fails later."""
        life: RunningAgent | None = None
        try:
            with report_thread_failures(self._fail):
                life = self._begin(loaded)
                self._notify.ready(self._status(life))
                while not self._attend(life):
                    life = self._reload(life)
        except _StopRequestedError:
            return
        finally:
            if life is not None:
                self._notify.stopping()
                self._notify.patience(STEP_TIMEOUT)
                self._end(life)
            self._hosts.keep_only()
        if life.agent.failure is not None:
            raise WattspanError("The agent ended because a part of it failed, as said above.")

    # ------------------------------------------------------------------------------ one life

    def _begin(self, loaded: LoadedConfiguration) -> RunningAgent:
        """Start an agent, from the books at which the one before it ended."""
        config, without = loaded.config, list[str]()
        logging.getLogger("wattspan").setLevel(config.agent.log_level.upper())
        self._progress()
        try:
            emulated = self._hosts.of(config.emulation)
        except WattspanError:
            # Before it is in a session of its own, Ctrl-C in a terminal ends it as well.
            if self._request.asked:
                raise _StopRequestedError from None
            raise
        if self._request.asked:
            raise _StopRequestedError
        self._progress()
        agent = build_agent(
            config,
            loaded.plugins,
            log=self._warn,
            tell=without.append,  # told when all else is well: an error stands alone
            emulated=emulated,
            closing=self._closings.get(config.emulation),
            health=lambda: self._health,
            alive=Watchdog(self._notify, self._clock),
        )
        self._agent = agent
        life = RunningAgent(loaded, agent, _failure_reporter(loaded, self._warn))
        with ExitStack() as undo:
            undo.callback(self._end, life)
            agent.start()
            require_readable_counters(agent.view().health)
            undo.pop_all()
        for sentence in (*without, *address_lines(config, agent)):
            self._tell(sentence)
        self._request.tell(agent.request_stop, agent.wake)
        configure_garbage_collector()
        return life

    def _fail(self, thread: str, error: BaseException) -> None:
        if self._agent is not None:
            self._agent.fail(f"The thread {thread!r}", error)

    def _attend(self, life: RunningAgent) -> bool:
        """Look what begins to fail, until the agent is to end (True) or to be reloaded (False)."""
        while True:
            snapshot = life.agent.view()
            life.troubles.look(snapshot.health, snapshot.at.mono)
            self._notify.status(self._status(life))
            if life.agent.wait(CHECK_INTERVAL):
                return True
            if self._request.take_reload():
                return False

    def _end(self, life: RunningAgent) -> None:
        self._progress()
        life.agent.stop()
        closing = life.agent.closing
        if closing is not None:
            self._closings = {life.loaded.config.emulation: closing}

    # ------------------------------------------------------------------------------- reloads

    def _reload(self, life: RunningAgent) -> RunningAgent:
        """Take over the configuration as it is now, if it can be; the life that goes on."""
        self._notify.reloading(self._clock.monotonic())
        try:
            loaded = self._again()
            require_startable(loaded)
        except WattspanError as error:
            self._refuse(str(error))
        else:
            life = self._take_over(life, loaded)
        self._notify.ready(self._status(life))
        return life

    def _take_over(self, life: RunningAgent, loaded: LoadedConfiguration) -> RunningAgent:
        keys = changed_keys(life.loaded.config, loaded.config)
        if keys - _LEVEL:
            self._tell(f"Reloading: {', '.join(sorted(keys))} changed.")
            return self._change(life, loaded)
        self._accept()
        logging.getLogger("wattspan").setLevel(loaded.config.agent.log_level.upper())
        self._tell("Reloaded: nothing has changed that the agent would have to begin again for.")
        return RunningAgent(loaded, life.agent, life.troubles)

    def _change(self, life: RunningAgent, loaded: LoadedConfiguration) -> RunningAgent:
        """End the agent and begin it again; with the old configuration if it must be."""
        self._end(life)
        if life.agent.left_behind:
            raise WattspanError(
                "The agent cannot begin again in this process, a part of which hangs: it ends. "
                "Its service manager starts it anew, with the new configuration."
            )
        old = life.loaded
        try:
            life = self._begin(loaded)
        except _StopRequestedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the old one could start
            self._refuse(str(error) or type(error).__name__)
            life = self._begin(old)
        else:
            self._accept()
        self._hosts.keep_only(life.loaded.config.emulation)
        return life

    def _refuse(self, faults: str) -> None:
        """Say what is wrong with the new configuration, now and for as long as it is."""
        sentences = faults.splitlines()
        for sentence in sentences:
            self._warn(f"Not reloaded: {sentence}")
        self._warn("The configuration of before goes on.")
        more = f" ({len(sentences) - 1} more in the log)" if len(sentences) > 1 else ""
        self._refused = f"Not reloaded{more}: {sentences[0]}"
        cause = sentences[0].rstrip(".")
        failure = Failure(
            CONFIGURATION,
            _THING,
            Trouble.MALFORMED,
            cause,
            "The one of before goes on; `wattspan config check` says when it can be reloaded.",
            verb="reload",
        )
        self._health = (SourceHealth(CONFIGURATION, False, 0, len(sentences), (failure,)),)

    def _accept(self) -> None:
        self._refused, self._health = "", ()

    # ------------------------------------------------------------------------ what is told

    def _progress(self) -> None:
        """Another step of a start or an end begins: each has time of its own."""
        self._notify.patience(STEP_TIMEOUT)
        self._notify.alive()

    def _status(self, life: RunningAgent) -> str:
        return agent_status(life.agent.view(), life.agent.addresses, self._refused)


class _StopRequestedError(Exception):
    """Somebody wants the program to end before there is an agent."""


@contextmanager
def report_thread_failures(tell: Callable[[str, BaseException], None]) -> Iterator[None]:
    """Tell of every thread that is ended by an error which nothing in it expected."""

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            tell(args.thread.name if args.thread is not None else "?", args.exc_value)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield
    finally:
        threading.excepthook = before


def require_startable(loaded: LoadedConfiguration) -> None:
    """ConfigError for what could not start, as far as that is seen while the old one goes on."""
    faults = (*forward_faults(loaded.config), *exporter_faults(loaded.plugins, loaded.config))
    if faults:
        raise ConfigError("\n".join(faults))


def address_lines(config: Config, agent: Agent) -> Iterator[str]:
    """Sentences that say where everything can be had, the live page first."""
    if getattr(config.exporters.get("prometheus"), "page", False):
        pages = (one for one in agent.addresses if one.endswith("/metrics"))
        yield from (f"See it: {address.removesuffix('metrics')}" for address in pages)
    yield from (f"Serving {address}" for address in agent.addresses)


def configure_garbage_collector() -> None:
    """Have the collector pass over what lives as long as the agent, and come by seldom."""
    gc.unfreeze()  # an agent that has ended is let go of
    gc.collect()
    gc.freeze()
    # Spans are tens of thousands of small values that wait for a second and go: nothing that
    # a collector would find.
    gc.set_threshold(50_000, 20, 100)


def _failure_reporter(loaded: LoadedConfiguration, warn: Log) -> FailureReporter:
    known = [_THING, *(f"[{one.table}]" for one in loaded.plugins.broken)]
    if loaded.config.autotune.mode != "off":
        known.append(CAPPER)  # the tuner tells what is done meanwhile
    return FailureReporter(warn, known)
