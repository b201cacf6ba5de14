"""The agent as a service: one configuration after another, in one process.

A reload ends the agent in order and begins it again with the new configuration, from the books at
which it ended; an emulated host whose settings are the same goes on meanwhile. A configuration
that cannot be, or with which nothing can start, changes nothing: the old one goes on.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wattspan.cli.compose import build_agent
from wattspan.cli.destinations import forward_faults
from wattspan.cli.emulated import emulated_host
from wattspan.cli.signals import StopRequest
from wattspan.cli.troubles import Troubles, refuse_if_blind
from wattspan.config import changed_keys
from wattspan.model import SECOND, Checkpoint, Failure, SourceHealth, Trouble
from wattspan.plugins import exporter_faults
from wattspan.ports import Clock, ConfigError, WattspanError
from wattspan.service.capper_health import CAPPER_LABEL as CAPPER
from wattspan.supervisor import Notify, Watchdog
from wattspan.supervisor.status import status

if TYPE_CHECKING:
    from wattspan.cli.options import Loaded
    from wattspan.config import Config, EmulationSettings
    from wattspan.emulation.host import EmulatedHost
    from wattspan.service.agent import Agent

LOOK_EVERY = 1.0  # seconds between looks for what has begun to fail
STEP = 60 * SECOND
"""What one step of a start or an end may take: a driver may have boards to wake."""

CONFIGURATION = "configuration"
"""What the health of sources calls a configuration that was refused."""
_THING = "the configuration"
_LEVEL = frozenset({"agent.log_level"})

Log = Callable[[str], None]


class Hosts:
    """Emulated hosts, each for as long as a configuration chooses it; None is the real one."""

    def __init__(self, tell: Log) -> None:
        self._tell = tell
        self._open: dict[EmulationSettings, tuple[EmulatedHost | None, ExitStack]] = {}

    def of(self, chosen: EmulationSettings) -> EmulatedHost | None:
        """The host that is chosen; it is started if it is not there yet."""
        if chosen not in self._open:
            stack = ExitStack()
            host = stack.enter_context(emulated_host(chosen))
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
class Life:
    """An agent that serves, and the configuration that it has."""

    loaded: Loaded
    agent: Agent
    troubles: Troubles


class Running:
    """Runs the agent until it is told to stop; ``again`` reads the configuration anew."""

    def __init__(
        self,
        request: StopRequest,
        notify: Notify,
        clock: Clock,
        *,
        again: Callable[[], Loaded],
        tell: Log,
        warn: Log,
    ) -> None:
        self._request, self._notify, self._clock = request, notify, clock
        self._again, self._tell, self._warn = again, tell, warn
        self._hosts = Hosts(tell)
        self._agent: Agent | None = None  # the newest
        self._closings: dict[EmulationSettings, Checkpoint] = {}
        self._refused = ""
        self._health: tuple[SourceHealth, ...] = ()

    def run(self, loaded: Loaded) -> None:
        """Serve; the first start's error is passed on, and WattspanError if a part fails later."""
        life: Life | None = None
        try:
            with failed_threads(self._fail):
                life = self._begin(loaded)
                self._notify.ready(self._status(life))
                while not self._attend(life):
                    life = self._reload(life)
        except _EndedError:
            return
        finally:
            if life is not None:
                self._notify.stopping()
                self._notify.patience(STEP)
                self._end(life)
            self._hosts.keep_only()
        if life.agent.failure is not None:
            raise WattspanError("The agent ended because a part of it failed, as said above.")

    # ------------------------------------------------------------------------------ one life

    def _begin(self, loaded: Loaded) -> Life:
        """Start an agent, from the books at which the one before it ended."""
        config, without = loaded.config, list[str]()
        logging.getLogger("wattspan").setLevel(config.agent.log_level.upper())
        self._progress()
        try:
            emulated = self._hosts.of(config.emulation)
        except WattspanError:
            # Before it is in a session of its own, Ctrl-C in a terminal ends it as well.
            if self._request.asked:
                raise _EndedError from None
            raise
        if self._request.asked:
            raise _EndedError
        self._progress()
        agent = build_agent(
            config,
            loaded.plugins,
            log=self._warn,
            tell=without.append,  # told when all else is well: an error stands alone
            emulated=emulated,
            closing=self._closings.get(config.emulation),
            health=lambda: self._health,
        )
        self._agent = agent
        agent.watch(Watchdog(self._notify, self._clock))
        life = Life(loaded, agent, _troubles(loaded, self._warn))
        with ExitStack() as undo:
            undo.callback(self._end, life)
            agent.start()
            refuse_if_blind(agent.view().health)
            undo.pop_all()
        for sentence in (*without, *reached(config, agent)):
            self._tell(sentence)
        self._request.tell(agent.request_stop, agent.wake)
        settle_memory()
        return life

    def _fail(self, thread: str, error: BaseException) -> None:
        if self._agent is not None:
            self._agent.fail(f"The thread {thread!r}", error)

    def _attend(self, life: Life) -> bool:
        """Look what begins to fail, until the agent is to end (True) or to be reloaded (False)."""
        while True:
            snapshot = life.agent.view()
            life.troubles.look(snapshot.health, snapshot.at.mono)
            self._notify.status(self._status(life))
            if life.agent.wait(LOOK_EVERY):
                return True
            if self._request.take_reload():
                return False

    def _end(self, life: Life) -> None:
        self._progress()
        life.agent.stop()
        closing = life.agent.closing
        if closing is not None:
            self._closings = {life.loaded.config.emulation: closing}

    # ------------------------------------------------------------------------------- reloads

    def _reload(self, life: Life) -> Life:
        """Take over the configuration as it is now, if it can be; the life that goes on."""
        self._notify.reloading(self._clock.monotonic())
        try:
            loaded = self._again()
            refuse_at_once(loaded)
        except WattspanError as error:
            self._refuse(str(error))
        else:
            life = self._take_over(life, loaded)
        self._notify.ready(self._status(life))
        return life

    def _take_over(self, life: Life, loaded: Loaded) -> Life:
        keys = changed_keys(life.loaded.config, loaded.config)
        if keys - _LEVEL:
            self._tell(f"Reloading: {', '.join(sorted(keys))} changed.")
            return self._change(life, loaded)
        self._accept()
        logging.getLogger("wattspan").setLevel(loaded.config.agent.log_level.upper())
        self._tell("Reloaded: nothing has changed that the agent would have to begin again for.")
        return Life(loaded, life.agent, life.troubles)

    def _change(self, life: Life, loaded: Loaded) -> Life:
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
        except _EndedError:
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
        self._notify.patience(STEP)
        self._notify.alive()

    def _status(self, life: Life) -> str:
        return status(life.agent.view(), life.agent.addresses, self._refused)


class _EndedError(Exception):
    """Somebody wants the program to end before there is an agent."""


@contextmanager
def failed_threads(tell: Callable[[str, BaseException], None]) -> Iterator[None]:
    """Tell of every thread that is ended by an error which nothing in it expected."""

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            tell(args.thread.name if args.thread is not None else "?", args.exc_value)

    before, threading.excepthook = threading.excepthook, hook
    try:
        yield
    finally:
        threading.excepthook = before


def refuse_at_once(loaded: Loaded) -> None:
    """ConfigError for what could not start, as far as that is seen while the old one goes on."""
    faults = (*forward_faults(loaded.config), *exporter_faults(loaded.plugins, loaded.config))
    if faults:
        raise ConfigError("\n".join(faults))


def reached(config: Config, agent: Agent) -> Iterator[str]:
    """Sentences that say where everything can be had, the live page first."""
    if getattr(config.exporters.get("prometheus"), "page", False):
        pages = (one for one in agent.addresses if one.endswith("/metrics"))
        yield from (f"See it: {address.removesuffix('metrics')}" for address in pages)
    yield from (f"Serving {address}" for address in agent.addresses)


def settle_memory() -> None:
    """Have the collector pass over what lives as long as the agent, and come by seldom."""
    gc.unfreeze()  # an agent that has ended is let go of
    gc.collect()
    gc.freeze()
    # Spans are tens of thousands of small values that wait for a second and go: nothing that
    # a collector would find.
    gc.set_threshold(50_000, 20, 100)


def _troubles(loaded: Loaded, warn: Log) -> Troubles:
    known = [_THING, *(f"[{one.table}]" for one in loaded.plugins.broken)]
    if loaded.config.autotune.mode != "off":
        known.append(CAPPER)  # the tuner tells what is done meanwhile
    return Troubles(warn, known)
