"""Metrics of energy and power by domain, of attribution, and of spans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from wattspan.model import (
    SECOND,
    Certainty,
    Consumer,
    Domain,
    DomainAccount,
    Exemplar,
    GapReason,
    HwType,
    ProcessRow,
    Provenance,
    Snapshot,
)
from wattspan.model.settings import Duration
from wattspan_exporters.catalogue.definition import (
    Draw,
    Labels,
    Metric,
    Sample,
    declared,
    each,
    each_item,
    items_of,
    single,
)

OUTSIDE_COVER = "outside-cover"
"""``hw_parent`` of a domain outside of the cover without a parent."""


def worst_provenance(domains: tuple[DomainAccount, ...]) -> Provenance | None:
    """Return the provenance of the sum of the energies of ``domains``; None without domains."""
    return max((one.provenance for one in domains), key=attrgetter("rank"), default=None)


def parent(domain: Domain) -> str:
    """Return "" for the cover: the sum over ``hw_parent=""`` counts every joule once."""
    return "" if domain.in_cover else domain.parent or OUTSIDE_COVER


# ------------------------------------------------------------------------------------ domains


def _hardware(account: DomainAccount) -> tuple[str, ...]:
    domain = account.domain
    return domain.id, domain.hw_type, domain.name, parent(domain), domain.provenance


def _with_energy(snapshot: Snapshot) -> Iterable[DomainAccount]:
    """The accounts that have a number: the energy of the others is unknown, not 0."""
    return (one for one in snapshot.domains if one.energy_certainty is not Certainty.UNKNOWN)


def domain_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield every known energy of a domain, that from outside the cover as a series of its own.

    So the sum over ``hw_parent=""`` is the host's energy, also after a change of the cover.
    """
    for account in _with_energy(snapshot):
        domain, counted, origin = account.domain, account.counted, account.provenance
        if domain.in_cover or counted:
            yield (*_hardware(account)[:3], "", origin), counted
        if not domain.in_cover or account.energy > counted:
            above = domain.parent or OUTSIDE_COVER
            yield (*_hardware(account)[:3], above, origin), account.energy - counted


def _of_attributed(field: str, *, lasting: bool = False) -> Draw:
    """One field of the account of every domain with energy that is or was attributed.

    A ``lasting`` field, a counter, has the least reliable provenance of its energy.
    """

    def rows(snapshot: Snapshot) -> Iterable[DomainAccount]:
        return (
            account
            for account in _with_energy(snapshot)
            if account.attributed or (account.counted and account.divided)
        )

    return each(rows, _lasting if lasting else _typed, attrgetter(field))


def _typed(account: DomainAccount) -> tuple[str, ...]:
    return account.domain.id, account.domain.hw_type, account.domain.provenance


def _lasting(account: DomainAccount) -> tuple[str, ...]:
    return account.domain.id, account.domain.hw_type, account.provenance


def host_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the sum of the cover; nothing if the energy of every part is unknown."""
    energy, certainty = snapshot.host_energy
    if certainty is not Certainty.UNKNOWN:
        yield (worst_provenance(snapshot.summed) or "",), energy


def host_power(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield the sum of the cover; nothing if the power of a part is unknown."""
    power, certainty = snapshot.host_power
    if certainty is Certainty.KNOWN:
        now = (one.domain.provenance for one in snapshot.cover if one.present)
        yield (max(now, key=attrgetter("rank"), default=""),), power


def host_certainty(snapshot: Snapshot) -> Iterator[Sample]:
    if snapshot.cover:
        yield ("energy", snapshot.host_energy[1]), 1
        yield ("power", snapshot.host_power[1]), 1


def domain_certainty(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        yield (account.domain.id, "energy", account.energy_certainty), 1
        yield (account.domain.id, "power", account.power_certainty), 1


def host_ramps(snapshot: Snapshot) -> Iterator[Sample]:
    for window, ramp in snapshot.ramps.items():
        yield (f"{window // SECOND}s",), ramp


def domain_up(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        yield (account.domain.id,), int(account.present and not account.silent)


def gap_time(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield every reason of every domain, including zeros.

    ``increase()`` misses the first gap of a counter that appears with it.
    """
    for account in snapshot.domains:
        for reason in GapReason:
            yield (account.domain.id, reason), account.gaps.get(reason, 0)


def domain_info(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        d = account.domain
        resolution = str(Duration(d.resolution))
        in_cover = "true" if d.in_cover else "false"
        labels = (
            d.id, d.hw_type, d.name, parent(d), d.source, d.provenance, account.method,
            in_cover, resolution,
        )  # fmt: skip
        yield labels, 1


ENERGY = (
    declared("hw.energy", domain_energy),
    declared("hw.power", each(attrgetter("domains"), _hardware, attrgetter("power"))),
    declared("hw.host.energy", host_energy),
    declared("hw.host.power", host_power),
    declared("wattspan.host.power.ramp", host_ramps),
    declared("wattspan.host.certainty.info", host_certainty),
    declared("wattspan.domain.certainty.info", domain_certainty),
    declared("wattspan.domain.up", domain_up),
    declared("wattspan.gap.time", gap_time),
    declared("wattspan.domain.info", domain_info),
)

# ------------------------------------------------------------------------ processes and groups


def process_energy(snapshot: Snapshot) -> Iterator[Sample]:
    """Yield listed processes, then one row ``other`` for each hardware type."""
    provenance = snapshot.provenance
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
    # An unlisted process is in `other`, an account of the ledger.
    return lambda labels: known.get(labels[1:4], books or None)


_TICKS = os.sysconf("SC_CLK_TCK")


def boot_time(snapshot: Snapshot) -> int:
    """Return the boot time of the host in Unix nanoseconds, rounded to a second.

    The clocks are read one after the other, and the result must be equal across restarts.
    """
    at = snapshot.at
    return (at.wall - at.since_boot) // SECOND * SECOND


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
    provenance = snapshot.provenance
    for row in snapshot.groups:
        kind, name = row.group
        for hw_type, energy in row.energy.items():
            yield (hw_type, kind, name, provenance.get(hw_type, "")), energy


def attribution_certainty(snapshot: Snapshot) -> Iterator[Sample]:
    for hw_type, certainty in snapshot.attribution_certainty.items():
        yield (hw_type, certainty), 1


def baseline_quality(snapshot: Snapshot) -> Iterator[Sample]:
    for account in snapshot.domains:
        if account.baseline is not None:
            yield (*_typed(account), account.baseline), 1


ACCOUNTS = (
    declared("wattspan.process.energy", process_energy, begins=process_start_times),
    declared("wattspan.group.energy", group_energy),
    declared("wattspan.idle.energy", _of_attributed("idle", lasting=True)),
    declared("wattspan.unattributed.energy", _of_attributed("unattributed", lasting=True)),
    declared("wattspan.pending.energy", _of_attributed("pending")),
    declared("wattspan.idle.power", _of_attributed("idle_power")),
    declared("wattspan.idle.power_error", _of_attributed("idle_power_error")),
    declared("wattspan.baseline.info", baseline_quality),
    declared("wattspan.attribution.certainty.info", attribution_certainty),
    declared("wattspan.baseline_unknown.energy", _of_attributed("withheld", lasting=True)),
)

# --------------------------------------------------------------------------------------- spans


def span_energy(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = snapshot.provenance
    for row in snapshot.spans.rows:
        for hw_type, spent in row.energy.items():
            yield (hw_type, *row.key, provenance.get(hw_type, "")), spent


def _split_energy(part: str) -> Draw:
    """The static or the dynamic part of the GPU energy of the spans of every name."""

    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        provenance = snapshot.provenance.get(HwType.GPU, "")
        for row in snapshot.spans.rows:
            for basis, split in row.splits.items():
                yield (HwType.GPU, *row.key, provenance, basis), getattr(split, part)

    return draw


def span_exemplars(snapshot: Snapshot) -> dict[Labels, Exemplar]:
    """Return one exemplar for each series of ``energy`` with a span."""
    provenance = snapshot.provenance
    return {
        (hw_type, *row.key, provenance.get(hw_type, "")): exemplar
        for row in snapshot.spans.rows
        for hw_type, exemplar in row.exemplars.items()
    }


def energy_outside_spans(snapshot: Snapshot) -> Iterator[Sample]:
    provenance = snapshot.provenance
    for (service, owner, hw_type), spent in snapshot.spans.outside.items():
        yield (hw_type, service, owner, provenance.get(hw_type, "")), spent


def _of_names(field: str) -> Draw:
    """One field of the spans of every name."""
    return each(attrgetter("spans.rows"), attrgetter("service", "name", "owner"), attrgetter(field))


def _total(name: str) -> Metric:
    """A metric of the field of SpanAccounts with the same name, without labels."""
    field = name.replace(".", "_")
    return declared(f"wattspan.spans.{name}", single(attrgetter(f"spans.{field}")))


def _by_reason(field: str) -> Draw:
    """A field of SpanAccounts that counts by reason."""
    return items_of(attrgetter(f"spans.{field}"))


SPANS = (
    declared("wattspan.span.energy", span_energy, exemplars=span_exemplars),
    declared("wattspan.span.static.energy", _split_energy("static")),
    declared("wattspan.span.dynamic.energy", _split_energy("dynamic")),
    declared("wattspan.span.time", _of_names("time")),
    declared("wattspan.spans", _of_names("count")),
    declared(
        "wattspan.span.tokens",
        each_item(attrgetter("spans.rows"), attrgetter("key"), attrgetter("tokens")),
    ),
    declared("wattspan.span.outside.energy", energy_outside_spans),
    declared("wattspan.span.outcomes", _by_reason("outcomes")),
    _total("received"),
    declared("wattspan.spans.refused", _by_reason("refused")),
    _total("deferred"),
    _total("open"),
    _total("announcers"),
    declared("wattspan.spans.announcers.refused", _by_reason("announcers_refused")),
    _total("announcements.lost"),
    _total("announcements.conflicts"),
    _total("forwarded"),
    declared("wattspan.spans.forward.drops", _by_reason("forward_drops")),
    _total("forward.repeats"),
    _total("forward.queue"),
)
