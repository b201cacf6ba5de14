"""Totals of spans and of requests to language models, and static power."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.model.consumers import Consumer
from wattspan.model.measurements import HwType, Microjoules, Milliwatts, ModelEnum, Nanoseconds


class Exemplar(NamedTuple):
    """An example span of a series."""

    trace: str  # 32 hexadecimal digits
    span: str  # 16
    energy: Microjoules  # exclusive, of the series' hardware type
    wall: int  # Unix nanoseconds of the span's end


class StaticBasis(ModelEnum):
    """The origin of the static power by which GPU energy is split, the most certain first."""

    CONFIGURED = "configured"  # the operator's figure
    FITTED = "fitted"  # of windows with different shares of waiting time
    LOWER_BOUND = "lower_bound"  # the idle power: the static power is at least that

    def worse(self, other: StaticBasis) -> StaticBasis:
        """The basis of a sum of two figures: the less certain one."""
        return max(self, other, key=_STATIC_BASES.__getitem__)


_STATIC_BASES = {one: rank for rank, one in enumerate(StaticBasis)}


class StaticPower(NamedTuple):
    """The power of a board while it is blocked on communication."""

    power: Milliwatts
    basis: StaticBasis


class StaticSplit(NamedTuple):
    """GPU energy in two parts: ``static + dynamic`` is the energy, exactly."""

    static: Microjoules
    dynamic: Microjoules

    def plus(self, static: int, dynamic: int) -> StaticSplit:
        """The split of a sum."""
        return StaticSplit(Microjoules(self.static + static), Microjoules(self.dynamic + dynamic))


NO_SPLIT = StaticSplit(Microjoules(0), Microjoules(0))


def service_label(service: str, owner: str) -> str:
    """A service with the owner of its processes: services of one name may have several owners."""
    return f"{service}@{owner}" if owner else service


@dataclass(frozen=True, slots=True)
class SpanRow:
    """The spans of one name in one service; energy is exclusive, so rows add up.

    ``service`` and ``name`` are claims of the application; ``owner`` is the label of the principal
    that the kernel proves for its process. The row of all names without a row has ``"other"`` for
    ``service`` and ``name``, and no owner. ``tokens``
    are by direction, ``input`` and ``output``. ``splits`` have the GPU energy of the spans whose
    static power was known, by its basis. ``bounded`` are the types of which the energy is a lower
    bound: a part of that of ``bounded_count`` spans is unknown.
    """

    service: str
    name: str
    energy: Mapping[HwType, Microjoules]
    time: Nanoseconds = Nanoseconds(0)
    count: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    exemplars: Mapping[HwType, Exemplar] = field(default_factory=dict)
    splits: Mapping[StaticBasis, StaticSplit] = field(default_factory=dict)
    owner: str = ""
    bounded: frozenset[HwType] = frozenset()
    bounded_count: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the row: service, name and owner."""
        return self.service, self.name, self.owner


REQUEST_ENERGY_BOUNDS = tuple(
    Microjoules(round(joules * 1e6))
    for joules in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000)
)
"""Upper bounds of the histogram of the energy of requests to language models."""


EQUAL_PARTS = "equal_parts"
"""The method of energy that the requests of an instant have in equal parts."""

ENGINE_METRICS = "engine_metrics"
"""The method of figures from an engine's own counters and the energy of its processes."""

IDLE_PART = "idle"
"""The part of a request's energy that is a share of the devices' idle energy."""


@dataclass(frozen=True, slots=True)
class HostRequests:
    """Requests of which the energy of the whole host is known, and that energy.

    ``energy`` is by part: the values of HwType, and ``IDLE_PART`` where requests share the idle
    energy of devices. Each joule is in one part. ``tokens`` are by ``input`` and ``output``;
    ``buckets`` count requests up to each of ``REQUEST_ENERGY_BOUNDS``, cumulatively. ``counts`` are
    the requests with a part, and their generated tokens: a part may be counted for some of them.
    """

    energy: Mapping[str, Microjoules] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    requests: int = 0
    buckets: tuple[int, ...] = ()
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferenceRow:
    """The requests to one language model of one service, and their GPU energy.

    ``service`` and ``model`` are both ``"other"`` in the row of all without a row. ``energy`` and
    ``tokens`` are by ``input`` and ``output``; requests are counted by the method of the division
    of energy. ``buckets`` count requests up to each of ``REQUEST_ENERGY_BOUNDS``, cumulatively.
    ``host`` are those of these requests with known energy beyond the GPUs.
    """

    service: str
    model: str
    energy: Mapping[str, Microjoules]
    tokens: Mapping[str, int]
    requests: Mapping[str, int]
    buckets: tuple[int, ...]
    owner: str = ""
    host: HostRequests = HostRequests()

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the row: service, model and owner."""
        return self.service, self.model, self.owner


@dataclass(frozen=True, slots=True)
class UnmeteredRow:
    """Requests to one language model of one service whose energy is unknown.

    ``role`` is ``client`` for calls of a model elsewhere, and ``engine`` for an engine of which no
    process is known to use a GPU. ``service`` and ``model`` are both ``"other"`` in the rows of all
    without a row. ``tokens`` are by ``input`` and ``output``.
    """

    service: str
    model: str
    role: str
    requests: int
    tokens: Mapping[str, int]
    owner: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The identity of the row: service, model, owner and role."""
        return self.service, self.model, self.owner, self.role


@dataclass(frozen=True, slots=True)
class EngineRow:
    """A serving engine by its own counters, and the GPU energy of its processes.

    These are totals of the same tokens and joules that spans may report, and no part of those.
    ``host`` counts the intervals with known energy of the whole host; without buckets.
    ``services`` send spans of the same requests. ``token_energy`` is by ``all``,
    ``input`` and ``output``: microjoules a token of the newest window and the half-width of their
    95 % range, as ``request_energy`` is a request's. ``idle`` is the part of the energy of that
    window while the engine waited for requests. What is not known is missing or None: of an engine
    with several models, the energy of each. Its rows have the tokens, one without a model the rest.
    """

    engine: str
    model: str
    owner: str
    energy: Microjoules | None = Microjoules(0)
    tokens: Mapping[str, int] = field(default_factory=dict)
    requests: int | None = None
    token_energy: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    request_energy: tuple[int, int] | None = None
    idle: float | None = None
    host: HostRequests = HostRequests()
    services: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """The identity of the row: engine, model and owner."""
        return self.engine, self.model, self.owner


MAX_FORMER_ENGINES = 64
"""Engines that are not configured any more whose totals are kept for their return."""


def former_engines(rows: Iterable[EngineRow], configured: Collection[str]) -> tuple[EngineRow, ...]:
    """The rows of engines that are not configured, those that were configured last first.

    ``rows`` are those of a checkpoint, with the engines of its run first.
    """
    own = [row for row in rows if row.engine not in configured]
    kept = [*dict.fromkeys(row.engine for row in own)][:MAX_FORMER_ENGINES]
    return tuple(row for row in own if row.engine in kept)


@dataclass(frozen=True, slots=True)
class SpanAccounts:
    """All totals of spans since the start of the agent; no counter ever falls."""

    rows: tuple[SpanRow, ...] = ()
    outside: Mapping[tuple[str, str, HwType], Microjoules] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    received: int = 0  # accepted by a receiver
    refused: Mapping[str, int] = field(default_factory=dict)  # not accepted, by reason
    forwarded: int = 0
    forward_drops: Mapping[str, int] = field(default_factory=dict)  # by reason
    forward_queue: int = 0  # bytes that wait for the collector
    open: int = 0  # announced and not ended
    deferred: int = 0  # whose senders were asked to retry
    forward_repeats: int = 0  # forwarded again, possibly received twice
    announcers: int = 0  # processes connected to the side channel
    announcers_refused: Mapping[str, int] = field(default_factory=dict)  # by reason
    announcements_lost: int = 0  # records overwritten before they were read
    announcements_conflicts: int = 0  # requests with spans that another principal announced
    senders: Mapping[str, tuple[Consumer, ...]] = field(default_factory=dict)  # by service, now
    inference: tuple[InferenceRow, ...] = ()
    inference_idle: Microjoules = Microjoules(0)  # of engines without active requests
    inference_host_idle: Mapping[str, Microjoules] = field(default_factory=dict)  # beyond GPUs
    inference_waiting: int = 0  # requests whose energy has not settled
    unmetered: tuple[UnmeteredRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    former_engines: tuple[EngineRow, ...] = ()  # configured in earlier runs: kept, not shown
