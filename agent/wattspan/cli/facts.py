"""A snapshot as plain facts for JSON: joules and watts as numbers, unknown as null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wattspan.cli.controls import Options
from wattspan.cli.rows import Row, group_rows, host, process_rows, span_rows
from wattspan.model import DomainAccount, HwType, RatedEnergy, Snapshot, SpanAccounts, SpanRow
from wattspan.tuning.serialization import accounts_to_json


def facts(snapshot: Snapshot, options: Options | None = None) -> dict[str, Any]:
    """Everything the view shows; rows sorted and filtered as ``options`` says."""
    chosen = options or Options()
    total = host(snapshot)
    return {
        "host": snapshot.host,
        "at_unix_seconds": snapshot.at.wall / 1e9,
        "emulated": snapshot.emulated,
        "power_watts": _watts(total.power),
        "energy_joules": _joules(total.energy),
        "idle_joules": _joules(total.idle),
        "unattributed_joules": _joules(total.unattributed),
        "cost": _weighed(snapshot.footprint.cost),
        "carbon": _weighed(snapshot.footprint.carbon),
        "domains": [_domain(account) for account in snapshot.domains],
        "groups": [_row(row, "kind") for row in group_rows(snapshot, chosen)],
        "processes": [_process(row) for row in process_rows(snapshot, chosen)],
        "other_joules": _by_type(snapshot.other),
        "ended_joules": _by_type(snapshot.retired),
        "spans": [_span(row) for row in span_rows(snapshot, chosen)],
        "outside_spans_joules": _outside(snapshot.spans),
        "tuning": accounts_to_json(snapshot.tuning),
        "failures": [str(failure) for health in snapshot.health for failure in health.failures],
    }


def _weighed(weighed: RatedEnergy | None) -> dict[str, Any] | None:
    if weighed is None:
        return None
    return {
        "unit": weighed.unit,
        "origin": weighed.origin,
        "per_kilowatt_hour": None if weighed.rate is None else weighed.rate / 1e9,
        "total": weighed.total / 1e9,
        "unknown_joules": _joules(weighed.unknown),
    }


def _domain(account: DomainAccount) -> dict[str, Any]:
    domain = account.domain
    split = {
        "consumers_joules": _joules(account.consumers),
        "idle_joules": _joules(account.idle),
        "unattributed_joules": _joules(account.unattributed),
    }
    return {
        "hw_id": domain.id,
        "hw_type": domain.hw_type,
        "hw_name": domain.name,
        "hw_parent": domain.parent,
        "source": domain.source,
        "provenance": domain.provenance,
        "in_cover": domain.in_cover,
        "present": account.present,
        "method": domain.method,
        "power_watts": _watts(account.power),
        "energy_joules": _joules(account.energy),
        **(split if account.attributed else dict.fromkeys(split)),
        "pending_joules": _joules(account.pending),
        "gap_seconds": {reason: time / 1e9 for reason, time in account.gaps.items()},
    }


def _process(row: Row) -> dict[str, Any]:
    pid = int(row.pid) if row.pid else None
    return {"pid": pid, "alive": row.alive, **_row(row, "group")}


def _span(row: SpanRow) -> dict[str, Any]:
    energy, made = sum(row.energy.values()), row.tokens.get("output", 0)
    return {
        "service": row.service,
        "name": row.name,
        "calls": row.count,
        "seconds": row.time / 1e9,
        "energy_joules": _joules(energy),
        "energy_joules_by_type": _by_type(row.energy),
        "joules_per_call": energy / 1e6 / row.count if row.count else None,
        "tokens": dict(row.tokens),
        "joules_per_output_token": energy / 1e6 / made if made else None,
    }


def _outside(spans: SpanAccounts) -> dict[str, dict[str, float]]:
    """What each service spent while none of its spans was open."""
    found: dict[str, dict[str, float]] = {}
    for (service, kind), energy in spans.outside.items():
        found.setdefault(service, {})[kind] = _joules(energy)
    return found


def _row(row: Row, detail: str) -> dict[str, Any]:
    return {
        "name": row.name,
        detail: row.detail,
        "power_watts": _watts(row.watts),
        "energy_joules": _joules(row.joules),
        "power_watts_by_type": {kind: power / 1e3 for kind, power in row.power.items()},
        "energy_joules_by_type": _by_type(row.energy),
    }


def _by_type(energy: Mapping[HwType, int]) -> dict[str, float]:
    return {kind: _joules(amount) for kind, amount in energy.items()}


def _joules(microjoules: int) -> float:
    return microjoules / 1e6


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3
