"""The reader of serving engines' Prometheus pages, which joins them with their processes' energy.

A page is believed only from a process of the engine (:mod:`wattspan.service.engine_finder`). No
redirect is followed.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import ceil, hypot
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from wattspan.config import ServingEngineSettings
from wattspan.http.access_policy import AccessError, bearer_token
from wattspan.inference.engine_energy import (
    EngineEnergy,
    EngineInterval,
    Estimate,
    by_model,
    edge_doubt,
)
from wattspan.inference.engine_metrics import (
    MAX_BODY,
    EngineReading,
    KnownSeries,
    OtherPageError,
    PageError,
    page_paths,
    progress,
    read_page,
)
from wattspan.inference.engine_totals import CounterEnergy, ModelTotals, ProcessStep
from wattspan.inference.host_energy import HostCounter
from wattspan.inference.latency_histograms import LatencyPage, read_tracked_page
from wattspan.model import (
    SECOND,
    Consumer,
    EngineRow,
    Failure,
    HwType,
    Microjoules,
    Payer,
    SourceHealth,
    SpanAccounts,
    Trouble,
    service_label,
)
from wattspan.ports import Clock
from wattspan.processes.inspector import ProcessInspector
from wattspan.processes.principals import PrincipalResolver
from wattspan.service.agent import ServiceGroup
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.engine_finder import (
    EngineFinder,
    EngineProcesses,
    ScrapeError,
    SeveralProgramsError,
)
from wattspan.service.engine_neighbours import EngineNeighbours
from wattspan.service.host_steps import HostStepReader
from wattspan.service.tuning_assembly import AgentCore
from wattspan.spans.aggregator import shortened_name
from wattspan.util.http_get import OK, FetchError, HttpAnswer, KeptConnection

if TYPE_CHECKING:
    from wattspan.tuning.engine_pages import EnginePages

TIMEOUT = 2.0
"""Seconds for a connection, and for a page."""

SETTLEMENT_TIMEOUT = 30 * SECOND
"""The energy of an interval that has not settled by then, and a counter's step, is unknown."""

SILENCE = 60 * SECOND
"""Figures vanish so long after the last reading, beyond two intervals."""

PAUSE = 600 * SECOND
"""Time without a reading after something else than a page: what JSON shows may then be lost."""

_MOST_MISSING = 20  # one part in so many of an interval
_BACK = 5 * SECOND  # a counter's step may begin before the first reading
_WAITING = 128  # readings whose energy has not settled


PageObserver = Callable[
    [
        ServingEngineSettings,
        int,
        EngineReading,
        LatencyPage,
        Consumer | None,
        Sequence[Consumer],
    ],
    object,
]
"""Takes each page: its time (monotonic), counters and latencies, the process that answers if the
kernel shows it, and all processes of the engine, that one first. It is called by
the scraper's thread."""


class _Reading(NamedTuple):
    """A page, the moment and the nanoseconds of its reading."""

    at: int
    took: int
    page: EngineReading


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
        neighbours: EngineNeighbours | None = None,
    ) -> None:
        place = urlsplit(settings.url)
        self._settings, self._clock, self._history = settings, clock, history
        self._finder, self._stop = finder, threading.Event()
        self._observe, self._neighbours = observe, neighbours or EngineNeighbours()
        self._connection = connection or KeptConnection(place.hostname or "", place.port or 80)
        self._paths = (place.path,) if place.path.strip("/") else page_paths(settings.kind)
        self._path = ""  # that of the last page, and its engine
        self._kind: str = settings.kind
        self._known = KnownSeries()
        self._readings: deque[_Reading] = deque(maxlen=_WAITING)
        self._boards: dict[str, CounterEnergy] = {}
        self._common: dict[str, CounterEnergy] = {}  # with the engines beside
        self._host = HostStepReader(history, share_idle=share_idle)
        self._counters: dict[HostCounter, CounterEnergy] = {}  # beyond the boards
        self._processes = EngineProcesses(None, frozenset(), "")
        self._whole = False  # the last reading had all series of the one before
        self._energies: dict[tuple[str, str], EngineEnergy] = {}  # by model and owner
        self._totals = ModelTotals(settings.label, earlier)  # by the same
        self._used: frozenset[str] = frozenset()  # boards
        self._beside: frozenset[Payer] = frozenset()  # processes of engines on these
        self._reads = self._failed = self._took = self._pause_until = 0
        self._failure: Failure | None = None
        self.rows = tuple(self._rows())
        """The newest totals. Safe from any thread."""

    def run(self, stop: threading.Event) -> None:
        """Read the page at each multiple of the interval until ``stop``, as all engines' threads.

        Missed times are left out.
        """
        self._stop = stop
        due, interval = self._clock.monotonic(), self._settings.interval
        while not stop.wait(max(0, due - self._clock.monotonic()) / 1e9):
            self.turn()
            due = (self._clock.monotonic() + interval // 2) // interval * interval + interval
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
            if isinstance(error, SeveralProgramsError):
                self._restart()
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
            if self._observe is None:
                page, latencies = read_page(body, self._kind, self._known), LatencyPage()
            else:
                page, latencies = read_tracked_page(body, self._kind, self._known)
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
            self._restart()
        former = self._history.known(self._processes.members)
        self._processes = processes._replace(members=processes.members | former)
        self._readings.append(_Reading(at, took, page))
        self._neighbours.add(self._settings.label, at, page)
        self._took = took
        if self._observe is not None:
            shown = sorted(one for one in processes.members if isinstance(one, Consumer))
            shown = shown if listener is None else list(dict.fromkeys([listener, *shown]))
            self._observe(self._settings, at, page, latencies, listener, shown)

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

    def _restart(self) -> None:
        """Begin anew: another process answers, with other counters."""
        self._readings.clear()
        self._forget_steps()
        self._neighbours.remove(self._settings.label)
        self._whole = False
        self._path, self._kind = "", self._settings.kind
        self._processes = EngineProcesses(None, frozenset(), "")
        for each in self._energies.values():
            each.restart()

    def _forget_steps(self) -> None:
        """Read the steps of all counters again, from the first reading on."""
        for counters in (self._boards, self._common, self._counters):
            counters.clear()
        self._host.reread(0)

    def _skip(self) -> None:
        for each in self._energies.values():
            each.skip()

    # ------------------------------------------------------------------------------ settling

    def _settle(self) -> None:
        """Add the intervals between readings whose energy has settled."""
        now = self._clock.monotonic()
        if self._readings and now - self._readings[-1].at > 2 * self._settings.interval + SILENCE:
            self._restart()
        if not self._readings:
            return
        label, members = self._settings.label, self._processes.members
        beside = self._neighbours.members(label)
        if beside != self._beside:
            self._forget_steps()  # they have no energy of these
            self._beside = beside
        since = self._readings[0].at - _BACK
        found = self._history.group_steps(
            [members, members | beside] if beside else [members],
            lambda key: self._boards[key].until if key in self._boards else since,
        )
        for key, steps in found.items():
            for group, of in ((0, self._boards), (-1, self._common)):
                of.setdefault(key, CounterEnergy()).add(
                    ProcessStep(one.start, one.end, one.energies[group], one.doubts[group])
                    for one in steps
                )
        boards = [key for key, board in self._boards.items() if board.used]
        (host,) = self._host.read([members], [boards], found, since, least=since)
        for counter, read in host.items():
            own = [ProcessStep(*one[:3], known=not one.blurred) for one in read]
            self._counters.setdefault(counter, CounterEnergy()).add(own)
        lengths = (one.length for one in chain(self._boards.values(), self._counters.values()))
        timeout = SETTLEMENT_TIMEOUT + max(lengths, default=0)
        while len(self._readings) > 1:
            before, after = self._readings[0], self._readings[1]
            used = [key for key, board in self._boards.items() if board.used]
            waiting = [key for key in used if self._boards[key].until < after.at]
            # A counter without steps for long is lost.
            least, most = after.at - timeout, after.at
            late = any(least < one.until < most for one in self._counters.values())
            late = late or self._neighbours.late(label, after.at)
            if not used or ((waiting or late) and now - after.at <= timeout):
                break
            self._readings.popleft()
            self._interval(before, after, used)
            for key in waiting:  # it has been lost, or the engine has left it
                self._boards[key].used = False
        present = frozenset(key for key, board in self._boards.items() if board.used)
        if self._used and present != self._used:
            for each in self._energies.values():
                each.restart()
        self._used = present
        self._neighbours.place(label, self._processes.owner, members, present)
        first = self._readings[0].at
        for counter, energy in [*self._counters.items()]:
            left = counter.domain in self._host.left and energy.until <= first
            if left or (counter.domain in self._boards and counter.domain not in present):
                del self._counters[counter]
        for energy in chain(self._boards.values(), self._common.values(), self._counters.values()):
            energy.trim(first)

    def _interval(self, before: _Reading, after: _Reading, used: list[str]) -> None:
        done = progress(before.page, after.page, whole=self._whole)
        self._whole = done is not None
        parts = [self._boards[key].between(before.at, after.at) for key in used]
        allowed = (after.at - before.at) // _MOST_MISSING
        if done is None or any(missing > allowed for *_, missing in parts):
            self._skip()
            return
        energy = Microjoules(sum(each for each, *_ in parts))
        host = self._parts(before.at, after.at, allowed, energy)
        key = self._totals.add(self._processes.owner, energy, done, host)
        self._energies = {one: own for one, own in self._energies.items() if one in self._totals}
        others = self._neighbours.work(self._settings.label, before.at, after.at)
        divided = [(self._common if others else self._boards)[board] for board in used]
        common = [board.between(before.at, after.at) for board in divided]
        edges = (
            hypot(*(_edge(board, before) for board in divided)),
            hypot(*(_edge(board, after) for board in divided)),
        )
        together = Microjoules(sum(each for each, *_ in common))
        doubt = sum(each for _, each, _ in common)
        whole = EngineInterval(before.at, after.at, energy, edges, done, doubt, others, together)
        intervals, rows = {key: whole}, self._totals.rows()
        # On several boards they may run at the same time, each on its own.
        for model, part in by_model(whole) if len(used) == 1 else ():
            if (own := (shortened_name(model), key[1])) in rows:
                intervals[own] = part
        for one, interval in intervals.items():
            self._energies.setdefault(one, EngineEnergy()).add(interval)
        for one in self._energies.keys() - intervals.keys():
            self._energies[one].skip()

    def _parts(self, start: int, end: int, allowed: int, gpu: Microjoules) -> Counter[str] | None:
        """The energy of the whole host by part; None if some is unknown."""
        parts = Counter[str]({HwType.GPU: gpu})
        for counter, steps in self._counters.items():
            if counter.domain in self._host.left and steps.until <= start:
                continue  # another counter measures the same by now
            energy, _, missing = steps.between(start, end)
            if missing > allowed:
                return None
            parts[counter.part] += energy
        return parts if HwType.CPU in parts else None

    def _rows(self) -> list[EngineRow]:
        rows = []
        for key, row in self._totals.rows().items():
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
        pages: EnginePages | None = None,
    ) -> None:
        """``pages`` takes those of the engines that it has."""
        self.services = ServiceGroup("serving")
        self._scrapers: list[EngineScraper] = []
        listeners, neighbours = dict[Consumer, str](), EngineNeighbours()
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
                observe=pages.offer if pages is not None and one.label in pages else None,
                neighbours=neighbours,
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
