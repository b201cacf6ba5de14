"""Money and carbon, as a scrape tells of them.

A running agent's snapshot, rebuilt from what its Prometheus exporter serves.

The exporter gives counters, so the watts of processes and groups are the difference of two
scrapes over the time between them. What the exporter does not tell is unknown here too: start
times of processes, and what processes spent that are no longer listed.

A scraped view with what metrics do not tell: how tuning stands, and its sentences.

The agent tells that on its own host only, on its Unix socket.
"""

from __future__ import annotations

import http.client
import math
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeVar

from wattspan.cli.local_agent import AgentCredentials
from wattspan.model import (
    AgentStats,
    Consumer,
    Domain,
    DomainAccount,
    Footprint,
    GapReason,
    GpuStatus,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    PayerInfo,
    PowerLimits,
    ProcessRow,
    Provenance,
    RatedEnergy,
    RateOrigin,
    Remainder,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    SpanRow,
    TuningAccounts,
    mean_power,
)
from wattspan.model.settings import Duration
from wattspan.ports import Clock, WattspanError
from wattspan.sdk.agent import MeasurementError
from wattspan.sdk.client import request_json
from wattspan.tuning.serialization import accounts_from_json

if TYPE_CHECKING:
    from prometheus_client import Metric


Samples = Callable[[str], list[tuple[Mapping[str, str], float]]]
"""The samples of a series by its name."""


def footprint_of(samples: Samples) -> Footprint:
    """What the scrape says of cost and carbon; what it says in no known way is left out."""
    unknown = {
        labels.get("footprint", ""): round(value * 1e6)
        for labels, value in samples("wattspan_unweighed_energy_joules_total")
        if math.isfinite(value)
    }

    def weighed(kind: str, total: str, rate: str, unit: str) -> RatedEnergy | None:
        for labels, value in samples(total):
            if labels.get("origin") in list(RateOrigin) and math.isfinite(value):
                now = [one for _, one in samples(rate) if math.isfinite(one)]
                return RatedEnergy(
                    labels.get("currency", unit),
                    RateOrigin(labels["origin"]),
                    round(now[0] * 1e9) if now else None,
                    round(value * 1e9),
                    Microjoules(unknown.get(kind, 0)),
                )
        return None

    return Footprint(
        weighed("cost", "wattspan_host_cost_total", "wattspan_energy_price_per_kwh", ""),
        weighed(
            "carbon",
            "wattspan_host_carbon_grams_total",
            "wattspan_carbon_intensity_grams_per_kwh",
            "g",
        ),
    )


TIMEOUT = 5.0  # seconds a scrape may take
_LARGEST = 64 * 2**20  # more than that is no agent's scrape

K = TypeVar("K")
Labels = Mapping[str, str]


class MetricsScrapeError(WattspanError):
    """A running agent cannot be read."""


# ---------------------------------------------------------------------------------- the client


class MetricsScraper:
    """A view of a running agent: each call scrapes it once.

    An agent that stops answering leaves the last snapshot standing, and ``notice`` says so. The
    first scrape must succeed.
    """

    def __init__(self, address: str, clock: Clock, fetch: Callable[[str], str] | None = None):
        self._url = _url(address)
        self._clock = clock
        self._fetch = fetch or _fetch
        self._last: Snapshot | None = None
        self.notice = ""

    def __call__(self) -> Snapshot:
        try:
            snapshot = snapshot_of(self._fetch(self._url), self._clock.now())
        except MetricsScrapeError as error:
            if self._last is None:
                raise
            age = Duration(self._clock.now().wall - self._last.at.wall)
            self.notice = f"{error} These figures are {age // 10**9} s old."
            return self._last
        self.notice = ""
        if self._last is None or snapshot.at.wall > self._last.at.wall:
            # the same figures scraped again would only lose the watts they have
            self._last = with_power(snapshot, self._last) if self._last else snapshot
        return self._last


def _url(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    return url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"


def authenticated_fetch(entry: AgentCredentials) -> Callable[[str], str]:
    """The way to an agent that asks clients for ``entry``."""
    return lambda url: _fetch(url, entry)


def _fetch(url: str, entry: AgentCredentials | None = None) -> str:
    if not url.startswith(("http://", "https://")):
        raise MetricsScrapeError(f"Cannot read {url}: not an http or https address.")
    try:
        request = urllib.request.Request(url, headers={"Accept": "text/plain"})  # noqa: S310
        # an agent is on this host or near it: a proxy for the rest of the world is in the way
        ways: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if entry is not None and entry.context is not None:
            ways.append(urllib.request.HTTPSHandler(context=entry.context))
        if entry is not None and entry.token:
            request.add_unredirected_header("Authorization", f"Bearer {entry.token}")
        opener = urllib.request.build_opener(*ways)
        with opener.open(request, timeout=TIMEOUT) as answer:
            body: bytes = answer.read(_LARGEST + 1)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        remedy = _GUARDED if getattr(error, "code", 0) == HTTPStatus.UNAUTHORIZED else _REMEDY
        raise MetricsScrapeError(f"Cannot read {url}: {_cause(error)}. {remedy}") from None
    if len(body) > _LARGEST:
        raise MetricsScrapeError(f"Cannot read {url}: it answers more than {_LARGEST >> 20} MiB.")
    return body.decode("utf-8", "replace")


_GUARDED = "It wants a token: call this as a user who may read its token_file, as root may."
_REMEDY = "Start the agent with `wattspan run`, or name one that runs with --address."


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    if isinstance(reason, TimeoutError | socket.timeout):
        return f"no answer within {TIMEOUT:.0f} s"
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} {error.reason}"
    text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
    return str(text[:1].lower() + text[1:])


# ----------------------------------------------------------------------------- text to snapshot


@dataclass(slots=True)
class _ParsedMetrics:
    """The samples of one scrape, by series name."""

    series: dict[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    def get(self, name: str) -> list[tuple[Labels, float]]:
        return self.series.get(name, [])

    def one(self, name: str) -> float | None:
        samples = self.get(name)
        return samples[0][1] if samples else None

    def by_id(self, name: str) -> dict[str, float]:
        return {labels.get("hw_id", ""): value for labels, value in self.get(name)}


def snapshot_of(text: str, now: Instant) -> Snapshot:
    """The snapshot that ``text`` was rendered from, as far as it tells; watts come later.

    ScrapeError if it is not the exposition of an agent.
    """
    from prometheus_client.parser import text_string_to_metric_families

    scrape = _ParsedMetrics()
    try:
        families: list[Metric] = list(text_string_to_metric_families(text))
    except (ValueError, KeyError, IndexError) as error:
        raise MetricsScrapeError(
            f"Cannot understand the answer: {error}. Is it an agent's?"
        ) from None
    for family in families:
        for sample in family.samples:
            scrape.series.setdefault(sample.name, []).append((sample.labels, sample.value))
    if not any(name.startswith("wattspan_") for name in scrape.series):
        raise MetricsScrapeError(
            "The answer holds no series of wattspan. Is it another exporter's?"
        )
    at = Instant(now.mono, _nanoseconds(scrape.one("wattspan_snapshot_time_seconds")) or now.wall)
    host = scrape.get("wattspan_host_info")
    started = _nanoseconds(scrape.one("wattspan_agent_start_time_seconds")) or 0
    return Snapshot(
        at=at,
        sequence=0,
        host=host[0][0].get("host_name", "") if host else "",
        domains=_domains(scrape),
        processes=_processes(scrape),
        other=_other(scrape),
        groups=_groups(scrape),
        gpus=_gpus(scrape, at),
        health=_health(scrape),
        stats=AgentStats(
            started=Instant(0, started),
            ticks=int(scrape.one("wattspan_agent_ticks_total") or 0),
            missed_ticks=int(scrape.one("wattspan_agent_missed_ticks_total") or 0),
            cpu_seconds=scrape.one("wattspan_agent_cpu_seconds_total") or 0.0,
            rss_bytes=_whole(scrape.one("wattspan_agent_resident_memory_bytes")),
            processes=int(scrape.one("wattspan_agent_processes") or 0),
        ),
        spans=_spans(scrape),
        footprint=footprint_of(scrape.get),
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _uj(value: float) -> Microjoules:
    return Microjoules(round(value * 1e6))


def _mw(value: float | None) -> Milliwatts | None:
    return None if value is None else Milliwatts(round(value * 1e3))


def _hw_type(labels: Labels) -> HwType | None:
    try:
        return HwType(labels.get("hw_type", ""))
    except ValueError:
        return None  # a newer agent's word


def _provenance(labels: Labels) -> Provenance:
    try:
        return Provenance(labels.get("provenance", ""))
    except ValueError:
        return Provenance.ESTIMATED  # of what is not told, no more is claimed


def _domains(scrape: _ParsedMetrics) -> tuple[DomainAccount, ...]:
    infos = {labels.get("hw_id", ""): labels for labels, _ in scrape.get("wattspan_domain_info")}
    power = scrape.by_id("hw_power_watts")
    idle = scrape.by_id("wattspan_idle_energy_joules_total")
    unattributed = scrape.by_id("wattspan_unattributed_energy_joules_total")
    pending = scrape.by_id("wattspan_pending_energy_joules")
    idle_power = scrape.by_id("wattspan_idle_power_watts")
    up = scrape.by_id("wattspan_domain_up")
    accounts = []
    for labels, joules in scrape.get("hw_energy_joules_total"):
        hw_type = _hw_type(labels)
        if hw_type is None:
            continue
        identity = labels.get("hw_id", "")
        energy = _uj(joules)
        rest = _uj(idle.get(identity, 0.0)) + _uj(unattributed.get(identity, 0.0))
        accounts.append(
            DomainAccount(
                domain=_domain(labels, infos.get(identity, {}), hw_type, identity in idle),
                energy=energy,
                consumers=Microjoules(max(0, energy - rest) if identity in idle else 0),
                idle=_uj(idle.get(identity, 0.0)),
                unattributed=_uj(unattributed.get(identity, 0.0)),
                pending=_uj(pending.get(identity, 0.0)),
                gaps=_gaps(scrape, identity),
                power=_mw(power.get(identity)),
                idle_power=_mw(idle_power.get(identity)),
                present=bool(up.get(identity, 1.0)),
            )
        )
    return tuple(accounts)


def _domain(labels: Labels, info: Labels, hw_type: HwType, attributed: bool) -> Domain:
    identity, parent = labels.get("hw_id", ""), labels.get("hw_parent", "")
    return Domain(
        id=identity,
        hw_type=hw_type,
        name=labels.get("hw_name", identity),
        source=info.get("source", ""),
        provenance=_provenance(labels),
        in_cover=not parent,
        parent=parent or None,
        resource=identity if attributed and not parent else None,
        method=info.get("method", "none"),
    )


def _gaps(scrape: _ParsedMetrics, identity: str) -> dict[GapReason, int]:
    reasons = set(GapReason)
    return {
        GapReason(labels["reason"]): round(value * 1e9)
        for labels, value in scrape.get("wattspan_gap_seconds_total")
        if labels.get("hw_id") == identity and labels.get("reason") in reasons and value
    }


def _processes(scrape: _ParsedMetrics) -> tuple[ProcessRow, ...]:
    found: dict[tuple[str, str, str], dict[HwType, Microjoules]] = {}
    for labels, joules in scrape.get("wattspan_process_energy_joules_total"):
        hw_type = _hw_type(labels)
        key = (labels.get("pid", ""), labels.get("command", ""), labels.get("group", ""))
        if hw_type is not None and not _is_other(labels):
            found.setdefault(key, {})[hw_type] = _uj(joules)
    return tuple(ProcessRow(_payer(*key), energy=energy, power={}) for key, energy in found.items())


def _is_other(labels: Labels) -> bool:
    return not labels.get("pid") and labels.get("command") == "other"


def _payer(pid: str, command: str, group: str) -> PayerInfo:
    known = pid.isascii() and pid.isdecimal()
    payer = Consumer(int(pid[:18]), 0) if known else Remainder(f"{command} {group}")
    # The kind of the group is not told here; the view shows its name only.
    groups = (Group(GroupKind.CGROUP, group),) if group else ()
    return PayerInfo(payer, command, groups)


def _other(scrape: _ParsedMetrics) -> dict[HwType, Microjoules]:
    return {
        hw_type: _uj(joules)
        for labels, joules in scrape.get("wattspan_process_energy_joules_total")
        if _is_other(labels) and (hw_type := _hw_type(labels)) is not None
    }


def _groups(scrape: _ParsedMetrics) -> tuple[GroupRow, ...]:
    kinds = set(GroupKind)
    found: dict[Group, dict[HwType, Microjoules]] = {}
    for labels, joules in scrape.get("wattspan_group_energy_joules_total"):
        hw_type = _hw_type(labels)
        if hw_type is not None and labels.get("group_kind") in kinds:
            group = Group(GroupKind(labels["group_kind"]), labels.get("group", ""))
            found.setdefault(group, {})[hw_type] = _uj(joules)
    return tuple(GroupRow(group, energy, {}) for group, energy in found.items())


def _gpus(scrape: _ParsedMetrics, at: Instant) -> tuple[GpuStatus, ...]:
    limits: dict[str, dict[str, Milliwatts | None]] = {}
    names = {"minimum", "default", "maximum", "requested", "enforced"}
    for labels, watts in scrape.get("wattspan_power_limit_watts"):
        if labels.get("limit") in names:
            of_gpu = limits.setdefault(labels.get("hw_id", ""), {})
            of_gpu[labels["limit"]] = _mw(watts)
    held: dict[str, list[str]] = {}
    for labels, value in scrape.get("wattspan_gpu_throttling"):
        if value:
            held.setdefault(labels.get("hw_id", ""), []).append(labels.get("reason", ""))
    clocks = {
        labels.get("hw_id", ""): value
        for labels, value in scrape.get("wattspan_gpu_clock_hertz")
        if labels.get("clock") == "sm"
    }
    busy = scrape.by_id("hw_gpu_utilization_ratio")
    heat = scrape.by_id("hw_temperature_celsius")
    identities = [labels.get("hw_id", "") for labels, _ in scrape.get("wattspan_gpu_info")]
    return tuple(
        GpuStatus(
            domain_id=identity,
            at=at,
            limits=PowerLimits(**limits.get(identity, {})),
            sm_clock_hz=_whole(clocks.get(identity)),
            utilisation=busy.get(identity),
            temperature_celsius=_whole(heat.get(identity)),
            throttling=tuple(held.get(identity, ())),
        )
        for identity in identities
    )


def _health(scrape: _ParsedMetrics) -> tuple[SourceHealth, ...]:
    return tuple(
        SourceHealth(labels.get("source", ""), up=bool(value), reads=0, failed=0)
        for labels, value in scrape.get("wattspan_source_up")
    )


def _spans(scrape: _ParsedMetrics) -> SpanAccounts:
    energies: dict[tuple[str, str], dict[HwType, Microjoules]] = {}
    for labels, joules in scrape.get("wattspan_span_energy_joules_total"):
        if (hw_type := _hw_type(labels)) is not None:
            energies.setdefault(_span(labels), {})[hw_type] = _uj(joules)
    tokens: dict[tuple[str, str], dict[str, int]] = {}
    for labels, count in scrape.get("wattspan_span_tokens_total"):
        tokens.setdefault(_span(labels), {})[labels.get("direction", "")] = int(count)
    times = {_span(labels): s for labels, s in scrape.get("wattspan_span_seconds_total")}
    return SpanAccounts(
        rows=tuple(
            SpanRow(
                *key,
                energies.get(key, {}),
                Nanoseconds(_nanoseconds(times.get(key)) or 0),
                int(count),
                tokens.get(key, {}),
            )
            for key, count in (
                (_span(labels), count) for labels, count in scrape.get("wattspan_spans_total")
            )
        ),
        outside={
            (labels.get("service_name", ""), hw_type): _uj(joules)
            for labels, joules in scrape.get("wattspan_span_outside_energy_joules_total")
            if (hw_type := _hw_type(labels)) is not None
        },
        outcomes=_by_reason(scrape, "wattspan_span_outcomes_total"),
        received=int(scrape.one("wattspan_spans_received_total") or 0),
        refused=_by_reason(scrape, "wattspan_spans_refused_total"),
        forwarded=int(scrape.one("wattspan_spans_forwarded_total") or 0),
        forward_drops=_by_reason(scrape, "wattspan_spans_forward_drops_total"),
        forward_queue=int(scrape.one("wattspan_spans_forward_queue_bytes") or 0),
        open=int(scrape.one("wattspan_spans_open") or 0),
        deferred=int(scrape.one("wattspan_spans_deferred_total") or 0),
        forward_repeats=int(scrape.one("wattspan_spans_forward_repeats_total") or 0),
        announcers=int(scrape.one("wattspan_spans_announcers") or 0),
        announcers_refused=_by_reason(scrape, "wattspan_spans_announcers_refused_total"),
        announcements_lost=int(scrape.one("wattspan_spans_announcements_lost_total") or 0),
    )


def _span(labels: Labels) -> tuple[str, str]:
    return labels.get("service_name", ""), labels.get("span_name", "")


def _by_reason(scrape: _ParsedMetrics, name: str) -> dict[str, int]:
    return {labels.get("reason", ""): int(count) for labels, count in scrape.get(name)}


# ------------------------------------------------------------------------ two scrapes to watts


def with_power(after: Snapshot, before: Snapshot) -> Snapshot:
    """``after`` with the mean power of its rows since ``before``.

    A row that is new, or whose counter fell, has no power yet: unknown, not zero.
    """
    elapsed = _elapsed(after, before)
    processes = {row.info: row.energy for row in before.processes}
    groups = {row.group: row.energy for row in before.groups}
    return replace(
        after,
        processes=tuple(
            replace(row, power=_power(processes.get(row.info), row.energy, elapsed))
            for row in after.processes
        ),
        groups=tuple(
            replace(row, power=_power(groups.get(row.group), row.energy, elapsed))
            for row in after.groups
        ),
    )


def _elapsed(after: Snapshot, before: Snapshot) -> dict[HwType, int]:
    """Of how much time the energy is that was settled between two scrapes, by hardware type.

    A row's energy is settled late, by more or less from one scrape to the next. What was measured
    is not, for what is pending is told as well: as much of the time between the scrapes was
    settled as of the energy that was measured in it. Without any energy nothing is known.
    """
    passed = after.at.wall - before.at.wall
    old = {account.domain.id: account for account in before.cover}
    settled: dict[HwType, int] = {}
    measured: dict[HwType, int] = {}
    for account in after.cover:
        past = old.get(account.domain.id)
        if past is None or not account.attributed:
            continue
        kind, energy = account.domain.hw_type, account.energy - past.energy
        settled[kind] = settled.get(kind, 0) + energy
        measured[kind] = measured.get(kind, 0) + energy + account.pending - past.pending
    return {
        kind: passed * settled[kind] // whole
        for kind, whole in measured.items()
        if whole > 0 and passed * settled[kind] >= whole
    }


def _power(
    before: Mapping[HwType, int] | None,
    after: Mapping[HwType, int],
    elapsed: Mapping[HwType, int],
) -> dict[HwType, Milliwatts]:
    if before is None:
        return {}
    return {
        kind: mean_power(energy - before[kind], elapsed[kind])
        for kind, energy in after.items()
        if kind in before and kind in elapsed and energy >= before[kind]
    }


class AgentView:
    """The scraper's view, and the tuning of the same agent if it is on this host."""

    def __init__(self, scraper: MetricsScraper, directories: tuple[str, ...]) -> None:
        self._scraper, self._directories = scraper, directories

    @property
    def notice(self) -> str:
        return self._scraper.notice

    def __call__(self) -> Snapshot:
        snapshot = self._scraper()
        accounts = self._ask(snapshot.host)
        return snapshot if accounts is None else replace(snapshot, tuning=accounts)

    def _ask(self, host: str) -> TuningAccounts | None:
        """None if nobody says: it may be elsewhere, or older, and another host's is not meant."""
        try:
            told = request_json("/v1/tuning", {}, directories=self._directories)
            return accounts_from_json(told) if told.get("host_name") == host else None
        except (MeasurementError, LookupError, TypeError, ValueError, AttributeError):
            return None
