"""Samples of the metrics of energy, power, attribution and spans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping

from wattspan.model import (
    SECOND,
    Consumer,
    Domain,
    DomainAccount,
    Exemplar,
    GapReason,
    HwType,
    ProcessRow,
    Provenance,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan.model.settings import Duration
from wattspan_exporters.catalogue.definition import Draw, Labels, Sample

OUTSIDE_COVER = "outside-cover"
"""``hw_parent`` of a domain outside of the cover without a parent."""


def worst_provenance(domains: tuple[DomainAccount, ...]) -> Provenance | None:
    """Return the provenance of the sum of ``domains``; None without domains."""
    found = [account.domain.provenance for account in domains]
    return max(found, key=lambda provenance: provenance.rank, default=None)


def provenances(snapshot: Snapshot) -> dict[HwType, str]:
    """Return the provenance of the sum over each measured hardware type."""
    known: dict[HwType, str] = {}
    for hw_type in HwType:
        of_type = tuple(a for a in snapshot.cover if a.domain.hw_type is hw_type)
        provenance = snapshot.provenance.get(hw_type) or worst_provenance(of_type)
        if provenance is not None:
            known[hw_type] = provenance
    return known


def parent(domain: Domain) -> str:
    """Return "" for the cover: the sum over ``hw_parent=""`` counts every joule once."""
    return "" if domain.in_cover else domain.parent or OUTSIDE_COVER


# ------------------------------------------------------------------------------------ domains


def domain_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        yield _hardware(account.domain), account.energy


def domain_power(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.power is not None:
            yield _hardware(account.domain), account.power


def _hardware(domain: Domain) -> tuple[str, ...]:
    return domain.id, domain.hw_type, domain.name, parent(domain), domain.provenance


def host_energy(snapshot: Snapshot) -> Iterator[Sample]:
    cover = snapshot.cover
    if (provenance := worst_provenance(cover)) is not None:
        yield (provenance,), sum(account.energy for account in cover)


def host_power(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the sum of the cover; nothing if the power of a part is unknown."""
    cover = tuple(account for account in snapshot.cover if account.present)
    parts = [account.power for account in cover if account.power is not None]
    if cover and len(parts) == len(cover):
        yield (worst_provenance(cover) or "",), sum(parts)


def idle_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.attributed:
            yield _typed(account.domain), account.idle


def unattributed_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.attributed:
            yield _typed(account.domain), account.unattributed


def pending_energy(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.attributed:
            yield _typed(account.domain), account.pending


def idle_power(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.idle_power is not None:
            yield _typed(account.domain), account.idle_power


def _typed(domain: Domain) -> tuple[str, ...]:
    return domain.id, domain.hw_type, domain.provenance


def gap_time(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield every reason of every domain, including zeros.

    ``increase()`` misses the first gap of a counter that appears with it.
    """
    for account in snapshot.domains:
        for reason in GapReason:
            yield (account.domain.id, reason), account.gaps.get(reason, 0)


def domain_up(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        yield (account.domain.id,), int(account.present)


def domain_info(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        d = account.domain
        resolution = str(Duration(d.resolution))
        in_cover = "true" if d.in_cover else "false"
        labels = (
            d.id, d.hw_type, d.name, parent(d), d.source, d.provenance, d.method,
            in_cover, resolution,
        )  # fmt: skip
        yield labels, 1


# ------------------------------------------------------------------------ processes and groups


def process_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield listed processes, then one row ``other`` for each hardware type."""
    provenance = provenances(snapshot)
    for row in _deduplicated(snapshot.processes):
        pid, command, group = _process_labels(row)
        for hw_type, energy in row.energy.items():
            yield (hw_type, pid, command, group, provenance.get(hw_type, "")), energy
    for hw_type, energy in snapshot.other.items():
        yield (hw_type, "", "other", "", provenance.get(hw_type, "")), energy


def _process_labels(row: ProcessRow) -> tuple[str, str, str]:
    """Return the labels of a row."""
    payer, command = row.info.payer, row.info.command
    if isinstance(payer, Consumer):
        return str(payer.pid), command, row.info.group
    # Several cgroups may share a command and a group, so the cgroup is named.
    command = command if payer.cgroup in command else f"{command} {payer.cgroup}"
    return "", command, row.info.group


def process_start_times(snapshot: Snapshot) -> Callable[[Labels], int | None]:
    """Return start times: the energy of a process is zero before its start.

    Rows of an earlier boot end with it. An emulated host ends with the agent, and its rows too.
    """
    boot = boot_time(snapshot)
    books = snapshot.since.wall if snapshot.since is not None else 0
    least = max(boot, books, snapshot.stats.started.wall if snapshot.emulated else 0)
    known: dict[Labels, int] = {}
    for row in _deduplicated(snapshot.processes):
        if isinstance(payer := row.info.payer, Consumer):
            known[_process_labels(row)] = max(least, boot + payer.started * SECOND // _TICKS)
        else:
            known[_process_labels(row)] = least
    # what is not listed is `other`, an account of the books
    return lambda labels: known.get(labels[1:4], books or None)


_TICKS = os.sysconf("SC_CLK_TCK")


def boot_time(snapshot: Snapshot) -> int:
    """Return the boot time of the host in Unix nanoseconds, rounded to a second.

    The clocks are read one after the other, and the result must be equal across restarts.
    """
    at = snapshot.at
    return (at.wall - at.mono - at.asleep) // SECOND * SECOND


def boot_start_times(snapshot: Snapshot) -> Callable[[Labels], int | None]:
    """Return the boot time as start time of counters outside of the agent."""
    boot = boot_time(snapshot)
    return lambda _: boot


def _deduplicated(rows: Iterable[ProcessRow]) -> Iterable[ProcessRow]:
    """Return the rows without rows whose labels a newer process has too.

    The kernel may reuse a pid for the same command while its first process is still listed. The
    series then shows the newer process, and its fall is a counter reset. A sum of
    both rows would fall when the older row leaves, and rates would count its energy twice.
    """
    firsts = [row.info.payer[0] for row in rows]  # pids, and cgroups
    if len(set(firsts)) == len(firsts):
        return rows
    newest: dict[object, ProcessRow] = {}
    for row in sorted(rows, key=_started):
        newest[row.info.payer[0], row.info.command, row.info.group] = row
    return newest.values()


def _started(row: ProcessRow) -> int:
    payer = row.info.payer
    return payer.started if isinstance(payer, Consumer) else 0


def group_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot)
    for row in snapshot.groups:
        kind, name = row.group
        for hw_type, energy in row.energy.items():
            yield (hw_type, kind, name, provenance.get(hw_type, "")), energy


def span_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot)
    for row in snapshot.spans.rows:
        for hw_type, spent in row.energy.items():
            yield (hw_type, row.service, row.name, provenance.get(hw_type, "")), spent


def span_exemplars(snapshot: Snapshot) -> dict[Labels, Exemplar]:
    """Return one exemplar for each series of ``energy`` with a span."""
    provenance = provenances(snapshot)
    return {
        (hw_type, row.service, row.name, provenance.get(hw_type, "")): exemplar
        for row in snapshot.spans.rows
        for hw_type, exemplar in row.exemplars.items()
    }


def span_gauge(field: Callable[[SpanRow], int]) -> Draw:
    """Return samples of one field by name, labelled ``service_name span_name``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for row in snapshot.spans.rows:
            yield (row.service, row.name), field(row)

    return draw


def span_tokens(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield tokens of names that have them."""
    for row in snapshot.spans.rows:
        for direction, count in row.tokens.items():
            yield (row.service, row.name, direction), count


def energy_outside_spans(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = provenances(snapshot)
    for (service, hw_type), spent in snapshot.spans.outside.items():
        yield (hw_type, service, provenance.get(hw_type, "")), spent


def span_total(field: Callable[[SpanAccounts], int]) -> Draw:
    """Return a sample of one field of all spans, without labels."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        yield (), field(snapshot.spans)

    return draw


def spans_by_reason(field: Callable[[SpanAccounts], Mapping[str, int]]) -> Draw:
    """Return samples of counts of spans, labelled ``reason``."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for reason, count in field(snapshot.spans).items():
            yield (reason,), count

    return draw
