"""An extract of the history as JSON, for users who may not read the store, and back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import Struct

from wattspan.model import GroupKind
from wattspan.storage.deltas import EnergyOwner
from wattspan.storage.query import DomainTotal, HistoryExtract, NoHistory


def own_extract(extract: HistoryExtract, user: str) -> HistoryExtract:
    """``extract`` for one user: the host's totals, and the row of ``user``.

    The rows of others become the rest of their kind, so that every kind has the same sum. A stored
    name of a command, unit or span is no proof of its user, so these rows are others' too.
    """
    owners = Counter[EnergyOwner]()
    for owner, energy in extract.owners.items():
        own = owner.kind == GroupKind.USER and owner.name == user and not owner.rest
        owners[owner if own else EnergyOwner(owner.kind, owner.hw_type, "", "", True)] += energy
    return replace(extract, owners=owners, spans={})


class _Owned(Struct, frozen=True):
    owner: EnergyOwner
    microjoules: int


class _SharedExtract(Struct, frozen=True):
    start: int
    end: int
    steps: tuple[int, ...]
    domains: tuple[DomainTotal, ...]
    owners: list[_Owned]


class _SharedAnswer(Struct, frozen=True):
    """``extract`` is None without data in the interval, ``reach`` without any data."""

    extract: _SharedExtract | None = None
    reach: tuple[int, int] | None = None


def extract_to_json(found: HistoryExtract | NoHistory) -> Any:
    """JSON values of an extract without spans and weights."""
    if isinstance(found, NoHistory):
        return msgspec.to_builtins(_SharedAnswer(reach=found.reach))
    owners = [_Owned(owner, energy) for owner, energy in found.owners.items()]
    shared = _SharedExtract(found.start, found.end, found.steps, found.domains, owners)
    return msgspec.to_builtins(_SharedAnswer(shared))


def extract_from_json(facts: Any) -> HistoryExtract | NoHistory:
    """The extract of ``extract_to_json``; ValueError for other facts."""
    answer = msgspec.convert(facts, _SharedAnswer)
    if answer.extract is None:
        return NoHistory(answer.reach)
    shared = answer.extract
    return HistoryExtract(
        shared.start,
        shared.end,
        shared.steps,
        shared.domains,
        {one.owner: one.microjoules for one in shared.owners},
    )
