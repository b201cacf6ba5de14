"""Language models and serving engines of the snapshot document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import Struct

from wattspan.model import (
    ENGINE_METRICS,
    EQUAL_PARTS,
    EngineRow,
    HostRequests,
    HwType,
    InferenceRow,
    Snapshot,
    SourceHealth,
    UnmeteredRow,
)

ENGINE_SOURCE = "engine:"
"""The beginning of the names of engines among the sources."""


class HostEnergyEntry(Struct, frozen=True):
    """The energy of requests or times on the whole host, by part.

    Parts are ``gpu``, ``cpu``, ``memory`` and ``idle``. GPU and CPU are known; a part that is
    missing is not counted. One may be known of some requests only: ``part_requests`` are those,
    and ``part_output_tokens`` their generated tokens. ``request_joules`` and
    ``output_token_joules`` are those of one request and of one generated token.

    ``requests`` is null if they are not counted, and ``uncertainty_joules``, the half-width of the
    95 % range of ``joules``, if it is unknown.
    """

    method: str
    joules: dict[str, float]
    request_joules: dict[str, float]
    output_token_joules: dict[str, float]
    requests: int | None
    tokens: dict[str, int]
    part_requests: dict[str, int]
    part_output_tokens: dict[str, int]
    uncertainty_joules: float | None = None

    @property
    def bounded(self) -> bool:
        """True if the sum of the parts is a lower bound, as the memory is not counted."""
        return HwType.MEMORY not in self.joules

    @property
    def alike(self) -> bool:
        """True if all parts are of the same requests, so that they have a sum."""
        counts = (self.part_requests, self.part_output_tokens)
        return all(len({each.get(part) for part in self.joules}) == 1 for each in counts)


class InferenceEntry(Struct, frozen=True):
    """Requests to one language model of one service, by token type and division of the energy.

    ``host`` is null if no request has known energy of the whole host.
    """

    service: str
    model: str
    gpu_joules: dict[str, float]
    tokens: dict[str, int]
    requests: dict[str, int]
    owner: str = ""
    host: HostEnergyEntry | None = None


class EngineEntry(Struct, frozen=True):
    """A configured serving engine and one of its models; no model if it has none or names none.

    ``up`` is false while its page cannot be read, and ``failure`` tells why. ``gpu_joules``,
    ``tokens``, ``requests`` and ``host`` are totals. The others are of the newest window:
    joules per token by `all`, `input` and `output`, joules per request, the half-widths of their
    95 % ranges, and the part of the energy while the engine waited for requests. ``host`` has its
    idle time too, and is null if no energy of the whole host is known.
    """

    engine: str
    model: str
    owner: str
    up: bool
    failure: str
    gpu_joules: float | None
    tokens: dict[str, int]
    requests: int | None
    token_joules: dict[str, float]
    token_uncertainty_joules: dict[str, float]
    request_joules: float | None
    request_uncertainty_joules: float | None
    idle_ratio: float | None
    host: HostEnergyEntry | None = None


def inference_entry(row: InferenceRow, text: Callable[[str], str]) -> InferenceEntry:
    """The requests of a row; ``text`` cleans names."""
    return InferenceEntry(
        text(row.service),
        text(row.model),
        {token_type: energy / 1e6 for token_type, energy in row.energy.items()},
        dict(row.tokens),
        dict(row.requests),
        text(row.owner),
        _host(row.host, EQUAL_PARTS, row.host.requests),
    )


def printable_row(row: UnmeteredRow, text: Callable[[str], str]) -> UnmeteredRow:
    """The row as it is served; ``text`` cleans names."""
    service, model, owner = map(text, (row.service, row.model, row.owner))
    return replace(row, service=service, model=model, owner=owner)


def engine_entries(snapshot: Snapshot, text: Callable[[str], str]) -> list[EngineEntry]:
    """The models of all configured engines, by name; ``text`` cleans names."""
    states = {
        one.source.removeprefix(ENGINE_SOURCE): one
        for one in snapshot.health
        if one.source.startswith(ENGINE_SOURCE)
    }
    rows = [row for row in snapshot.spans.engines if row.engine in states]
    rows += [EngineRow(name, "", "", None) for name in states.keys() - {row.engine for row in rows}]
    rows.sort(key=lambda row: row.key)
    return [_entry(row, states[row.engine], text) for row in rows]


def _entry(row: EngineRow, state: SourceHealth, text: Callable[[str], str]) -> EngineEntry:
    causes = (f"{one.cause}. {one.remedy}".strip() for one in state.failures)
    each, request = row.token_energy, row.request_energy
    return EngineEntry(
        text(row.engine),
        text(row.model),
        text(row.owner),
        state.up,
        text(" ".join(causes)),
        None if row.energy is None else row.energy / 1e6,
        dict(row.tokens),
        row.requests,
        {way: figure[0] / 1e6 for way, figure in each.items()},
        {way: figure[1] / 1e6 for way, figure in each.items()},
        None if request is None else request[0] / 1e6,
        None if request is None else request[1] / 1e6,
        row.idle,
        _host(row.host, ENGINE_METRICS, None if row.requests is None else row.host.requests),
    )


def _host(host: HostRequests, method: str, requests: int | None) -> HostEnergyEntry | None:
    """The energy by part; None without any. No token and no request: no energy of one."""
    if not host.energy:
        return None
    joules = {part: one / 1e6 for part, one in host.energy.items()}
    counts = {part: host.counts.get(part, (0, 0)) for part in joules}
    return HostEnergyEntry(
        method,
        joules,
        {part: joules[part] / n for part, (n, _) in counts.items() if n and requests},
        {part: joules[part] / n for part, (_, n) in counts.items() if n},
        requests,
        dict(host.tokens),
        {part: n for part, (n, _) in counts.items() if requests is not None},
        {part: n for part, (_, n) in counts.items()},
    )
