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
    Instrument,
    Labels,
    Metric,
    Sample,
    each,
    each_item,
    items_of,
    single,
)

COUNTER, UPDOWN = Instrument.COUNTER, Instrument.UPDOWN
GAUGE, INFO = Instrument.GAUGE, Instrument.INFO

HARDWARE_ATTRIBUTES = ("hw.id", "hw.type", "hw.name", "hw.parent", "provenance")
TYPE_ATTRIBUTES = ("hw.id", "hw.type", "provenance")

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
    Metric("hw.energy", COUNTER, "J",
           "Energy of one domain since its discovery; the part from outside the cover is a series "
           "of its own, with another `hw_parent`.",
           HARDWARE_ATTRIBUTES, domain_energy, lasting=True),
    Metric("hw.power", GAUGE, "W", "Mean power of one domain over about the last second.",
           HARDWARE_ATTRIBUTES, each(attrgetter("domains"), _hardware, attrgetter("power"))),
    Metric("hw.host.energy", COUNTER, "J",
           "Energy of all domains of the cover, without double counting.",
           ("provenance",), host_energy, lasting=True),
    Metric("hw.host.power", GAUGE, "W",
           "Mean power of the cover; absent while the power of any member is unknown.",
           ("provenance",), host_power),
    Metric("wattspan.host.power.ramp", GAUGE, "W/s",
           "Largest change of the cover's mean power between two neighbouring windows in the last "
           "minute, divided by their length; absent while the energy of all such windows is "
           "unknown.",
           ("window",), host_ramps),
    Metric("wattspan.host.certainty.info", INFO, "",
           "Certainty of the two sums of the cover (`energy`, `power`): `known`; `lower_bound` if "
           "a member's is unknown, which the sum then lacks; `unknown` if every member's is.",
           ("figure", "certainty"), host_certainty),
    Metric("wattspan.domain.certainty.info", INFO, "",
           "Certainty of the energy and the power of one domain: `known`; `lower_bound` if time "
           "with unknown energy is in the period that the counter covers; `unknown`.",
           ("hw.id", "figure", "certainty"), domain_certainty),
    Metric("wattspan.domain.up", GAUGE, "",
           "Readings of the domain: 1 if it gives them, 0 if not, or if only its account remains.",
           ("hw.id",),
           each(attrgetter("domains"), lambda a: (a.domain.id,),
                lambda a: int(a.present and not a.silent))),
    # The translation rules would keep "time" in the name.
    Metric("wattspan.gap.time", COUNTER, "s",
           "Time with unknown energy, by reason. The agent does not interpolate it.",
           ("hw.id", "reason"), gap_time, lasting=True, series="wattspan_gap_seconds_total"),
    Metric("wattspan.domain.info", INFO, "",
           "Description of a domain and of the origin of its figures.",
           (*HARDWARE_ATTRIBUTES[:4], "source", "provenance", "method", "in_cover", "resolution"),
           domain_info),
)  # fmt: skip

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
    Metric("wattspan.process.energy", COUNTER, "J",
           "Energy attributed to one listed process, or to all other processes as `other`.",
           ("hw.type", "pid", "command", "group", "provenance"), process_energy,
           lasting=True, begins=process_start_times),
    Metric("wattspan.group.energy", COUNTER, "J",
           "Energy attributed to one group of processes, including ended processes.",
           ("hw.type", "group_kind", "group", "provenance"), group_energy, lasting=True),
    Metric("wattspan.idle.energy", COUNTER, "J",
           "Idle energy of a domain, by its learned idle power.",
           TYPE_ATTRIBUTES, _of_attributed("idle", lasting=True), lasting=True),
    Metric("wattspan.unattributed.energy", COUNTER, "J",
           "Active energy of a domain that cannot be attributed to a process.",
           TYPE_ATTRIBUTES, _of_attributed("unattributed", lasting=True), lasting=True),
    Metric("wattspan.pending.energy", UPDOWN, "J",
           "Measured energy before its division; no counter includes it yet.",
           TYPE_ATTRIBUTES, _of_attributed("pending")),
    Metric("wattspan.idle.power", GAUGE, "W", "Learned idle power of the domain.",
           TYPE_ATTRIBUTES, _of_attributed("idle_power")),
    Metric("wattspan.idle.power_error", GAUGE, "W",
           "Half-width of the 95 % range of a learned idle power. That of a GPU is its mean power "
           "without users, and has 0.",
           TYPE_ATTRIBUTES, _of_attributed("idle_power_error")),
    Metric("wattspan.baseline.info", INFO, "",
           "Origin of the idle power of a domain: `baseline_learned`, `baseline_remembered` from "
           "an earlier run or the configuration, `baseline_doubtful` if an equal device, an "
           "earlier run or the range of all devices contradicts it, or `baseline_unknown`.",
           (*TYPE_ATTRIBUTES, "quality"), baseline_quality),
    Metric("wattspan.attribution.certainty.info", INFO, "",
           "Certainty of the energy of processes, groups, spans and requests: `known`; "
           "`lower_bound` if a part of a device's energy was not measured, or not divided "
           "without a known idle power; `unknown` if no device of the type was ever measured.",
           ("hw.type", "certainty"), attribution_certainty),
    Metric("wattspan.baseline_unknown.energy", COUNTER, "J",
           "Part of the unattributed energy that may be idle energy, from time with an unknown or "
           "doubtful idle power.",
           TYPE_ATTRIBUTES, _of_attributed("withheld", lasting=True), lasting=True),
)  # fmt: skip

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


def _total(name: str, instrument: Instrument, unit: str, text: str) -> Metric:
    """A metric of the field of SpanAccounts with the same name, without labels."""
    field = name.replace(".", "_")
    draw = single(attrgetter(f"spans.{field}"))
    return Metric(f"wattspan.spans.{name}", instrument, unit, text, (), draw)


def _by_reason(name: str, unit: str, text: str, field: str) -> Metric:
    """A counter of one field of SpanAccounts that counts by reason."""
    draw = items_of(attrgetter(f"spans.{field}"))
    return Metric(f"wattspan.{name}", COUNTER, unit, text, ("reason",), draw)


_NAMES = ("service.name", "span.name", "owner")

SPANS = (
    Metric("wattspan.span.energy", COUNTER, "J", "Exclusive energy of the spans of one name.",
           ("hw.type", *_NAMES, "provenance"), span_energy, exemplars=span_exemplars, lasting=True),
    *(
        Metric(f"wattspan.span.{part}.energy", COUNTER, "J", text,
               ("hw.type", *_NAMES, "provenance", "basis"), _split_energy(part), lasting=True)
        for part, text in (
            ("static", "Static part of the exclusive GPU energy of the spans of one name, by the "
                       "origin of the static power: `configured`, `fitted`, or `lower_bound`."),
            ("dynamic", "Dynamic part of that energy: static and dynamic energy add up to the "
                        "exclusive energy of spans with a known static power."),
        )
    ),
    # The translation rules would keep "time" in the name.
    Metric("wattspan.span.time", COUNTER, "s",
           "Sum of the measured durations of the spans of one name.",
           _NAMES, _of_names("time"), lasting=True, series="wattspan_span_seconds_total"),
    Metric("wattspan.spans", COUNTER, "{span}", "Number of spans of one name.",
           _NAMES, _of_names("count"), lasting=True),
    Metric("wattspan.span.tokens", COUNTER, "{token}",
           "Tokens of the spans of one name, at the innermost span that has them; without those of "
           "calls of a model elsewhere.",
           (*_NAMES, "direction"),
           each_item(attrgetter("spans.rows"), attrgetter("key"), attrgetter("tokens")),
           lasting=True),
    Metric("wattspan.span.outside.energy", COUNTER, "J",
           "Energy of a service's processes outside of their spans.",
           ("hw.type", "service.name", "owner", "provenance"), energy_outside_spans, lasting=True),
    _by_reason("span.outcomes", "{span}",
               "Spans by outcome of the attribution.",
               "outcomes"),
    _total("received", COUNTER, "{span}", "Accepted spans."),
    _by_reason("spans.refused", "{span}", "Rejected spans, by reason.", "refused"),
    _total("deferred", COUNTER, "{span}",
           "Spans answered with a retry status because of a full buffer, once for each attempt."),
    _total("open", UPDOWN, "{span}", "Announced spans that have not ended."),
    _total("announcers", UPDOWN, "{connection}",
           "Connections to the side channel, on which processes announce spans."),
    _by_reason("spans.announcers.refused", "{connection}",
               "Side-channel connections closed by the agent, by reason: limit or protocol error.",
               "announcers_refused"),
    _total("announcements.lost", COUNTER, "{record}",
           "Announced starts and ends overwritten before the agent read them."),
    _total("announcements.conflicts", COUNTER, "{request}",
           "Requests with spans that a process of another user, container or pod announced; the "
           "sender that the kernel proves counts."),
    _total("forwarded", COUNTER, "{span}",
           "Spans accepted by the collector to which the agent forwards."),
    _by_reason("spans.forward.drops", "{span}",
               "Spans not forwarded to the collector, by reason.", "forward_drops"),
    _total("forward.repeats", COUNTER, "{span}",
           "Spans sent again after an unknown result; the collector may have duplicates."),
    _total("forward.queue", UPDOWN, "By", "Bytes in the queue for the collector."),
)  # fmt: skip
