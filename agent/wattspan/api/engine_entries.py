"""The serving engines of the snapshot document, each with the state of its page."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from wattspan.model import EngineRow, Snapshot, SourceHealth

ENGINE_SOURCE = "engine:"
"""The beginning of the names of engines among the sources."""


class EngineEntry(Struct, frozen=True):
    """A configured serving engine and one of its models; no model if it has none or names none.

    ``up`` is false while its page cannot be read, and ``failure`` tells why. ``gpu_joules``,
    ``tokens`` and ``requests`` are totals. The others are of the newest window:
    joules per token by `all`, `input` and `output`, joules per request, the half-widths of their
    95 % ranges, and the part of the energy while the engine waited for requests.
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


def engine_entries(snapshot: Snapshot, text: Callable[[str], str]) -> list[EngineEntry]:
    """The models of all configured engines, by name; ``text`` cleans names.

    Rows may remain of engines that are not configured any more.
    """
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
    )
