"""The reader of serving engines' Prometheus pages, which joins them with their processes' energy.

Any user of this host may listen at the port of an engine that does not run. A figure is believed,
and a token is sent, only if the kernel shows that the other end of the very connection belongs to
the engine: to a process of the service whose processes use a GPU, or to the unit, container, pod or
pid that the operator names. Root may stand in for those, as the proxy of a published port does.
Without rights to see the descriptors of other users, as the packaged agent runs, the kernel shows
the principal of the other end only: its single program on GPUs is the engine, or the named one if
it has the same principal. No redirect is followed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, hypot
from typing import NamedTuple
from urllib.parse import urlsplit

from wattspan.config import ServingEngineSettings
from wattspan.http.access_policy import AccessError, bearer_token
from wattspan.http.sockets import Peer
from wattspan.inference.engine_energy import EngineEnergy, EngineInterval, Estimate, edge_doubt
from wattspan.inference.engine_metrics import (
    MAX_BODY,
    EngineReading,
    OtherPageError,
    PageError,
    page_paths,
    progress,
    read_page,
)
from wattspan.inference.engine_totals import CounterEnergy, EngineTotals, ProcessStep
from wattspan.inference.host_energy import HostCounter
from wattspan.ingest.identity_verification import Sender, SenderResolver
from wattspan.ingest.process_lookups import LookupBudget, RequestLookup
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    EngineRow,
    Failure,
    GroupKind,
    HwType,
    Microjoules,
    Payer,
    PayerInfo,
    Principal,
    SourceHealth,
    SpanAccounts,
    Trouble,
    service_label,
)
from wattspan.ports import Clock, ProcessDirectory
from wattspan.processes.inspector import ProcessInspector
from wattspan.processes.metadata import starts_others
from wattspan.processes.principals import PrincipalResolver, owner_label
from wattspan.service.agent import ServiceGroup
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.host_steps import HostStepReader
from wattspan.service.tuning_assembly import AgentCore
from wattspan.sharing.pools import Pools
from wattspan.spans.aggregator import shortened_name
from wattspan.util.http_get import OK, FetchError, HttpAnswer, KeptConnection

TIMEOUT = 2.0
"""Seconds for a connection, and for a page."""

ACCEPTANCE = SECOND // 4
"""The longest wait for the acceptance of a connection."""

SETTLEMENT_TIMEOUT = 30 * SECOND
"""The energy of an interval that has not settled by then is unknown."""

SILENCE = 60 * SECOND
"""Figures vanish so long after the last reading, beyond two intervals."""

PAUSE = 600 * SECOND
"""Time without a reading after something else than a page: what JSON shows may then be lost."""

MAX_ROWS = 8
"""Models and owners of one engine with a row; tokens of further models count as ``other``."""

_NAMED = frozenset({GroupKind.UNIT, GroupKind.CONTAINER, GroupKind.POD})
_LOOK_EVERY = 5 * MILLISECOND
_MOST_MISSING = 20  # one part in so many of an interval
_BACK = 5 * SECOND  # a counter's step may begin before the first reading
_WAITING = 64  # readings whose energy has not settled


class ScrapeError(Exception):
    """No figure of an engine is known: the cause as a clause, and the remedy."""

    def __init__(self, cause: str, remedy: str, trouble: Trouble = Trouble.DENIED) -> None:
        super().__init__(cause)
        self.remedy, self.trouble = remedy, trouble


class EngineProcesses(NamedTuple):
    """The process that answers, the processes that use its GPUs, and the label of its owner."""

    listener: Consumer | None
    members: frozenset[Payer]
    owner: str


PageObserver = Callable[
    [ServingEngineSettings, int, bytes, EngineReading, Sequence[Consumer]], object
]
"""Takes each page with its time (monotonic), its counters, and the engine's processes, the one that
answered first. It is called by the scraper's thread."""


class _Reading(NamedTuple):
    """A page, the moment and the nanoseconds of its reading."""

    at: int
    took: int
    page: EngineReading


class EngineFinder:
    """Finds the processes of engines. For one thread; ``listeners`` is common to all engines."""

    def __init__(
        self,
        settings: ServingEngineSettings,
        clock: Clock,
        history: EnergyHistory,
        directory: ProcessDirectory,
        kernel: ProcessInspector,
        listeners: dict[Consumer, str],
        pools: Pools | None = None,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._history, self._directory, self._listeners = history, directory, listeners
        self._request = RequestLookup(kernel)
        self._senders = SenderResolver(self._request, LookupBudget(clock), pools or Pools())
        self._last: int | None = None  # the pid that answered last

    def find(self, ends: tuple[tuple[str, int], tuple[str, int]] | None) -> EngineProcesses:
        """The processes of the engine at the other end of our connection; ScrapeError."""
        sender = Sender(None, None)
        if ends is not None and self._is_accepted(*ends):
            self._request.forget()
            peer = Peer(address=ends[1], local=ends[0])
            sender = self._senders.resolve(peer, self._last, self._clock.now())
        if ends is None or sender.principal is None:
            cause = "the kernel shows no process of this network namespace behind the connection"
            raise ScrapeError(cause, "Name an address or published port of this host in `url`.")
        who = owner_label(sender.principal)
        listener = None if sender.process is None else sender.process.consumer
        self._last = None if listener is None else listener.pid
        if listener is None and self._settings.token_file and not self._is_proven(*ends):
            cause = "the kernel shows only the user that listens there, perhaps in a container"
            remedy = "Grant the agent CAP_SYS_PTRACE, or use the unified cgroup hierarchy."
            raise ScrapeError(cause, remedy)
        if self._settings.process:
            return self._named(sender, listener)
        if listener is None:
            if sender.principal.is_host_root:
                cause = "root listens there, perhaps for the port of a container"
                raise ScrapeError(cause, "Name the engine's unit, container or pid in `process`.")
            return EngineProcesses(None, self._of_principal(sender.principal, who), who)
        self._register((listener,))
        found = self._history.service_group(listener, dict(self._listeners)).members
        if self._history.gpu_users().isdisjoint(found):
            cause = f"the service of process {listener.pid} of {who}, which listens there, has used"
            remedy = "Wait for its first request, or name its unit or container in `process`."
            raise ScrapeError(f"{cause} no GPU", remedy, Trouble.ABSENT)
        return EngineProcesses(listener, found, who)

    def _is_accepted(self, end: tuple[str, int], other: tuple[str, int]) -> bool:
        """True once a process has accepted the connection, which has no owner before."""
        until = self._clock.monotonic() + ACCEPTANCE
        while self._request.owner_of(other, end) is None:
            if (now := self._clock.monotonic()) >= until:
                return False
            self._clock.sleep_until(now + _LOOK_EVERY)
        return True

    def _is_proven(self, end: tuple[str, int], other: tuple[str, int]) -> bool:
        """True if the kernel shows the cgroup at the other end: a user may be in any container."""
        owner = self._request.owner_of(other, end)
        return owner is not None and self._request.socket_principal(owner) is not None

    def _of_principal(self, principal: Principal, who: str) -> frozenset[Payer]:
        """The only program of a principal on GPUs, where the rights do not show its listener."""
        users = {one: self._describe(one) for one in self._history.gpu_users()}
        parents = {
            one.pid: info.parent or 0
            for one, info in users.items()
            if isinstance(one, Consumer) and info is not None and info.principal == principal
        }
        roots = [parent for parent in parents.values() if parent not in parents]
        found = frozenset(one for one in users if isinstance(one, Consumer) and one.pid in parents)
        if not found or (len(roots) > 1 and not self._is_launcher(roots, principal)):
            cause = f"{who} listens there and has {'several programs' if found else 'none'} on GPUs"
            raise ScrapeError(cause, "Name the engine's unit, container or pid in `process`.")
        others = {self._listeners.get(one, self._settings.label) for one in found}
        if others != {self._settings.label}:
            cause = f"{who} has one program on GPUs for {' and '.join(sorted(others))}"
            raise ScrapeError(cause, "Name the unit, container or pid of each in `process`.")
        self._register(found)
        return found

    def _is_launcher(self, parents: Sequence[int], principal: Principal) -> bool:
        """True for one parent that is no shell or service manager: workers of one engine."""
        above = self._directory.identify(parents[0]) if len(set(parents)) == 1 else None
        info = None if above is None else self._describe(above)
        if info is None or info.principal != principal:
            return False
        return not (info.starts_others or starts_others(info.command))

    def _register(self, processes: Iterable[Consumer]) -> None:
        """Note the processes of this engine, for the others."""
        for other, label in tuple(self._listeners.items()):
            if label == self._settings.label:
                del self._listeners[other]
        self._listeners.update(dict.fromkeys(processes, self._settings.label))

    def _describe(self, payer: Payer) -> PayerInfo | None:
        return self._directory.describe(payer) if isinstance(payer, Consumer) else None

    def _named(self, sender: Sender, listener: Consumer | None) -> EngineProcesses:
        """The processes that the operator names, if one of them or root of this host listens."""
        name, users = self._settings.process, self._history.gpu_users()
        name = name[:12] if len(name) == 64 and name.isalnum() else name  # the id of a container
        found: frozenset[Payer] = frozenset(one for one in users if self._is_in(one, name))
        if name.isdecimal() and (root := self._directory.identify(int(name))) is not None:
            found = self._history.service_group(root).members
        if users.isdisjoint(found):
            remedy = "Correct `process`: a pid, or the name of a systemd unit, container or pod."
            raise ScrapeError(f"no process of {name!r} uses a GPU", remedy, Trouble.ABSENT)
        infos = [info for one in found if (info := self._describe(one)) is not None]
        owners = {info.principal for info in infos if info.principal is not None}
        inside = sender.principal in owners
        if listener is not None:
            inside = listener in found or self._is_in(listener, name)
        if not inside and not (sender.principal and sender.principal.is_host_root):
            cause = f"{owner_label(sender.principal)} listens there, and no process of {name!r}"
            raise ScrapeError(cause, "Correct `url` or `process`.")
        # Any of its API servers may have answered, all with the same counters.
        return EngineProcesses(None, found, min(map(owner_label, owners), default=""))

    def _is_in(self, payer: Payer, name: str) -> bool:
        info = self._describe(payer)
        groups = () if info is None else info.groups
        return any(group.name == name and group.kind in _NAMED for group in groups)


class EngineScraper:
    """Reads the page of one engine; ``run`` is its thread."""

    def __init__(
        self,
        settings: ServingEngineSettings,
        clock: Clock,
        history: EnergyHistory,
        finder: EngineFinder,
        connection: KeptConnection | None = None,
        earlier: Iterable[EngineRow] = (),
        *,
        share_idle: bool = False,
        observe: PageObserver | None = None,
    ) -> None:
        place = urlsplit(settings.url)
        self._settings, self._clock, self._history = settings, clock, history
        self._finder, self._stop = finder, threading.Event()
        self._observe = observe
        self._connection = connection or KeptConnection(place.hostname or "", place.port or 80)
        self._paths = (place.path,) if place.path.strip("/") else page_paths(settings.kind)
        self._path = ""  # that of the last page, and its engine
        self._kind: str = settings.kind
        self._readings: deque[_Reading] = deque(maxlen=_WAITING)
        self._boards: dict[str, CounterEnergy] = {}
        self._host = HostStepReader(history, share_idle=share_idle)
        self._counters: dict[HostCounter, CounterEnergy] = {}  # beyond the boards
        self._processes = EngineProcesses(None, frozenset(), "")
        self._since = 0  # the first reading of the present process
        self._whole = False  # the last reading had all series of the one before
        self._energies: dict[tuple[str, str], EngineEnergy] = {}  # by model and owner
        own = [row for row in earlier if row.engine == settings.label]
        self._totals = {(row.model, row.owner): EngineTotals(row) for row in own}  # by the same
        self._present: tuple[str, str] | None = None
        self._used: frozenset[str] = frozenset()  # boards
        self._reads = self._failed = self._took = self._pause_until = 0
        self._failure: Failure | None = None
        self.rows = tuple(self._rows())
        """The newest totals. Safe from any thread."""

    def run(self, stop: threading.Event) -> None:
        """Read the page at each interval until ``stop``; missed times are left out."""
        self._stop = stop
        due = self._clock.monotonic()
        while not stop.wait(max(0, due - self._clock.monotonic()) / 1e9):
            self.turn()
            interval = self._settings.interval
            due = max(due + interval, self._clock.monotonic() + interval // 2)
        self._connection.close()

    def turn(self) -> None:
        """Read the page once, and settle earlier readings; ``health`` reports a failure."""
        if self._clock.monotonic() >= self._pause_until:
            self._reads += 1
            self._failure = self._failure_of_reading()
        self._settle()
        self.rows = tuple(self._rows())

    def _failure_of_reading(self) -> Failure | None:
        try:
            self._scrape()
        except ScrapeError as error:
            self._failed += 1
            self._path, self._kind = "", self._settings.kind
            self._connection.close()
            thing = f"the page of the engine {self._settings.label!r} at {self._settings.url}"
            return Failure(self.source, thing, error.trouble, str(error), error.remedy)
        return None

    @property
    def members(self) -> frozenset[Payer]:
        """The processes of the engine. Safe from any thread."""
        return self._processes.members

    @property
    def source(self) -> str:
        """Its name among the sources."""
        return f"engine:{self._settings.label}"

    def health(self) -> tuple[SourceHealth, ...]:
        failure = self._failure  # of the scraper's thread
        failures, up = () if failure is None else (failure,), failure is None and self._reads > 0
        return (SourceHealth(self.source, up, self._reads, self._failed, failures, self._took),)

    # ------------------------------------------------------------------------------- reading

    def _scrape(self) -> None:
        """Add a reading of the engine's page; ScrapeError."""
        try:
            token = bearer_token(self._settings.token_file, "in [[serving.engine]]")
            body, at, took, processes = self._fetched(token)
            page = read_page(body, self._kind)
            self._kind = page.page.kind  # the names of one engine only are sought from now on
        except FetchError as error:
            remedy = "Start the engine with its metrics, or correct `url`."
            raise ScrapeError(str(error), remedy, Trouble.RETRY) from None
        except AccessError as error:
            raise ScrapeError(str(error).rstrip("."), "") from None
        except PageError as error:
            if isinstance(error, OtherPageError):
                self._pause_until = self._clock.monotonic() + PAUSE
            remedy = "Name the engine in `kind`, or its page in `url`."
            raise ScrapeError(str(error), remedy, Trouble.MALFORMED) from None
        # One of several API servers of an engine answers.
        known, listener = self._processes.members, processes.listener
        other = listener not in (None, self._processes.listener) and listener not in known
        if other or known.isdisjoint(processes.members):
            self._restart(at)
        former = self._history.known(self._processes.members)
        self._processes = processes._replace(members=processes.members | former)
        self._readings.append(_Reading(at, took, page))
        self._took = took
        if self._observe is not None:
            shown = sorted(one for one in processes.members if isinstance(one, Consumer))
            shown = shown if listener is None else [listener, *shown]
            self._observe(self._settings, at, body, page, shown)

    def _fetched(self, token: str) -> tuple[bytes, int, int, EngineProcesses]:
        """The page, the moment and duration of its reading, and who sent it."""
        cause = ""
        for path in (self._path,) if self._path else self._paths:
            kept = self._connection.ends is not None
            try:
                answer, start, took, found = self._asked(path, token)
            except (FetchError, ScrapeError):
                if not kept or self._stop.is_set():
                    raise
                # The engine has closed the connection since the last reading.
                self._connection.close()
                answer, start, took, found = self._asked(path, token)
            if answer.status == OK:
                if len(answer.body) > MAX_BODY:
                    raise PageError(f"it is larger than {MAX_BODY >> 20} MiB")
                self._path = path
                return answer.body, start + took // 2, took, found
            cause = f"it answers {answer.status}; redirects are not followed"
        remedy = "Switch its metrics on, correct `url`, or name a `token_file`."
        raise ScrapeError(cause, remedy, Trouble.MALFORMED)

    def _asked(self, path: str, token: str) -> tuple[HttpAnswer, int, int, EngineProcesses]:
        """One answer, and who sent it. A token is sent to a proven engine only.

        Without one, an engine may accept the connection with the request.
        """
        self._connection.open(TIMEOUT)
        found = None
        try:
            found = self._finder.find(self._connection.ends)
        except ScrapeError:
            if token:
                raise
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        start = self._clock.monotonic()
        answer = self._connection.get(path, timeout=TIMEOUT, most=MAX_BODY, headers=headers)
        took = self._clock.monotonic() - start
        return answer, start, took, found or self._finder.find(self._connection.ends)

    def _restart(self, at: int) -> None:
        """Begin anew: another process answers, with other counters."""
        self._readings.clear()
        self._boards.clear()
        self._counters.clear()
        self._host.reread(at - _BACK)
        self._since, self._whole = at, False
        self._path, self._kind = "", self._settings.kind
        self._processes = EngineProcesses(None, frozenset(), "")
        for each in self._energies.values():
            each.restart()

    def _skip(self) -> None:
        for each in self._energies.values():
            each.skip()

    # ------------------------------------------------------------------------------ settling

    def _settle(self) -> None:
        """Add the intervals between readings whose energy has settled."""
        now = self._clock.monotonic()
        if self._readings and now - self._readings[-1].at > 2 * self._settings.interval + SILENCE:
            self._restart(now)
        if not self._readings:
            return
        members = self._processes.members
        found = self._history.group_steps(
            [members],
            lambda key: self._boards[key].until if key in self._boards else self._since - _BACK,
        )
        for key, steps in found.items():
            own = [ProcessStep(one.start, one.end, one.energies[0], one.doubts[0]) for one in steps]
            self._boards.setdefault(key, CounterEnergy()).add(own)
        boards = [key for key, board in self._boards.items() if board.used]
        (host,) = self._host.read([members], [boards], found, self._since - _BACK)
        for counter, read in host.items():
            own = [ProcessStep(*one[:3], known=not one.blurred) for one in read]
            self._counters.setdefault(counter, CounterEnergy()).add(own)
        while len(self._readings) > 1:
            before, after = self._readings[0], self._readings[1]
            used = [board for board in self._boards.values() if board.used]
            waiting = [board for board in used if board.until < after.at]
            # A counter without steps for long is lost.
            least, most = after.at - SETTLEMENT_TIMEOUT, after.at
            late = any(least < one.until < most for one in self._counters.values())
            if not used or ((waiting or late) and now - after.at <= SETTLEMENT_TIMEOUT):
                break
            self._readings.popleft()
            self._interval(before, after, used)
            for board in waiting:  # it has been lost, or the engine has left it
                board.used = False
        present = frozenset(key for key, board in self._boards.items() if board.used)
        if self._used and present != self._used:
            for each in self._energies.values():
                each.restart()
        self._used = present
        for counter in [*self._counters]:
            if counter.domain in self._boards and counter.domain not in present:
                del self._counters[counter]
        for board in (*self._boards.values(), *self._counters.values()):
            board.trim(self._readings[0].at)

    def _interval(self, before: _Reading, after: _Reading, used: list[CounterEnergy]) -> None:
        done = progress(before.page, after.page, whole=self._whole)
        self._whole = done is not None
        parts = [board.between(before.at, after.at) for board in used]
        allowed = (after.at - before.at) // _MOST_MISSING
        if done is None or any(missing > allowed for *_, missing in parts):
            self._skip()
            return
        key = shortened_name(done.model), self._processes.owner
        if key not in self._totals and len(self._totals) >= MAX_ROWS:
            key = "other", key[1] if ("other", key[1]) in self._totals else ""
        if key != self._present:
            self._skip()
            self._present = key
        edges = (
            hypot(*(_edge(board, before) for board in used)),
            hypot(*(_edge(board, after) for board in used)),
        )
        energy = Microjoules(sum(each for each, *_ in parts))
        doubt = sum(each for _, each, _ in parts)
        self._energies.setdefault(key, EngineEnergy()).add(
            EngineInterval(before.at, after.at, energy, edges, done, doubt)
        )
        totals = self._totals.setdefault(key, EngineTotals(EngineRow(self._settings.label, *key)))
        totals.add(energy, done, self._parts(before.at, after.at, allowed, energy))

    def _parts(self, start: int, end: int, allowed: int, gpu: Microjoules) -> Counter[str] | None:
        """The energy of the whole host by part; None if some is unknown."""
        parts = Counter[str]({HwType.GPU: gpu})
        for counter, steps in self._counters.items():
            energy, _, missing = steps.between(start, end)
            if missing > allowed:
                return None
            parts[counter.part] += energy
        return parts if HwType.CPU in parts else None

    def _rows(self) -> list[EngineRow]:
        rows = []
        for key, totals in self._totals.items():
            row = totals.row()
            if key in self._energies:
                figures = self._energies[key].figures()
                row = replace(
                    row,
                    token_energy={way: _rounded(each) for way, each in figures.tokens.items()},
                    request_energy=None if figures.request is None else _rounded(figures.request),
                    idle=figures.idle,
                )
            rows.append(row)
        return rows


def _edge(board: CounterEnergy, reading: _Reading) -> float:
    """The half-width of the energy of a board up to a reading."""
    if (step := board.at(reading.at)) is None:
        return 0.0
    return edge_doubt(Microjoules(step.energy), step.end - step.start, reading.took)


def _rounded(estimate: Estimate) -> tuple[int, int]:
    return round(estimate.value), ceil(estimate.uncertainty)


def _run(scraper: EngineScraper, stop: threading.Event, _: threading.Event) -> None:
    scraper.run(stop)


class EngineScrapers:
    """The scrapers of all configured engines; ``services`` are not started yet."""

    def __init__(
        self,
        core: AgentCore,
        principals: PrincipalResolver,
        earlier: Iterable[EngineRow] = (),
        observe: PageObserver | None = None,
    ) -> None:
        self.services = ServiceGroup("serving")
        self._scrapers: list[EngineScraper] = []
        listeners: dict[Consumer, str] = {}
        stop = threading.Event()  # of all: requests that hang end at the same time
        for number, one in enumerate(core.config.serving.engine):
            kernel = ProcessInspector(principals=principals)  # for one thread
            finder = EngineFinder(
                one, core.clock, core.history, core.directory, kernel, listeners, core.pools
            )
            scraper = EngineScraper(
                one,
                core.clock,
                core.history,
                finder,
                earlier=earlier,
                share_idle=core.config.serving.idle == "proportional",
                observe=observe,
            )
            self._scrapers.append(scraper)
            self.services.add(lambda: None, kernel.close)
            name, run = f"wattspan-engine-{number}", partial(_run, scraper, stop)
            self.services.add_thread(name, run, timeout=2 * TIMEOUT, wake=stop.set)
            self.services.health_checks.append(scraper.health)

    def rows(self, spans: SpanAccounts) -> tuple[EngineRow, ...]:
        """The newest totals of all engines beside those of ``spans``. Safe from any thread."""
        return engine_rows(self._scrapers, spans)


def engine_rows(scrapers: Iterable[EngineScraper], spans: SpanAccounts) -> tuple[EngineRow, ...]:
    """The newest totals of engines, with the services whose spans report the same requests."""
    metered = {service_label(row.service, row.owner): row.service for row in spans.inference}
    found: list[EngineRow] = []
    for one in scrapers:
        services = {
            metered[label]
            for label, senders in spans.senders.items()
            if label in metered and not one.members.isdisjoint(senders)
        }
        found += (replace(row, services=tuple(sorted(services))) for row in one.rows)
    return tuple(found)
