"""Invariants of every scrape under any fault, and the condition of recovery.

Pure: it receives scrapes one after the other and reports violations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from testbed.faults.observation import NANO, Sight, series_of

DURABLE = (
    "hw_energy_joules_total",
    "hw_host_energy_joules_total",
    "wattspan_gap_seconds_total",
    "wattspan_group_energy_joules_total",
    "wattspan_idle_energy_joules_total",
    "wattspan_unattributed_energy_joules_total",
    "wattspan_span_energy_joules_total",
    "wattspan_spans_total",
)
"""Counters that go on where they were in the agent's next life."""

_OF_ONE_DOMAIN = frozenset(
    (
        "hw_energy_joules_total",
        "wattspan_idle_energy_joules_total",
        "wattspan_unattributed_energy_joules_total",
    )
)
_SUMS = frozenset(("wattspan_process_energy_joules_total", "wattspan_group_energy_joules_total"))
_NOBODY = ("wattspan_idle_energy_joules_total", "wattspan_unattributed_energy_joules_total")


@dataclass(frozen=True)
class Breach:
    """Something that must never be: invariant, series, and figures."""

    what: str
    series: str
    told: str

    def __str__(self) -> str:
        return f"{self.what}: {self.series}: {self.told}"


class Judge:
    """Follows the scrapes of one agent, through all its runs."""

    def __init__(self, ceilings: Mapping[str, float], slack: float = 6.0) -> None:
        """``ceilings``: the most watts that one domain of a hardware type can draw.

        A counter may rise by as much as they allow for the time since it last rose, and for
        ``slack`` seconds more: energy is published after its attribution, which takes up to
        three seconds, and one snapshot later, on a possibly very busy machine.
        """
        self._ceilings = ceilings
        self._slack = round(slack * NANO)
        self._last: Sight | None = None
        self._rose: dict[str, int] = {}

    def see(self, sight: Sight) -> list[Breach]:
        """Violations in a scrape, alone and relative to the previous one."""
        last, self._last = self._last, sight
        found = [Breach("twice in a scrape", key, "") for key in sight.twice]
        found.extend(_imbalances(sight))
        if last is not None:
            another = _life(sight) != _life(last)
            found.extend(_falls(last, sight, another_life=another))
            found.extend(self._spikes(last, sight))
        return found

    def _spikes(self, last: Sight, sight: Sight) -> Iterable[Breach]:
        sizes = _sizes(sight)
        for key, value in sight.values.items():
            series = series_of(key)
            watts = self._most(series.name, series.labels.get("hw_type", ""), sizes)
            if watts is None or key not in last.values:
                continue
            rise = value - last.values[key]
            since = self._rose.setdefault(key, last.at)
            if rise > 0:
                self._rose[key] = sight.at
                most = watts * (sight.at - since + self._slack)
                if rise > most:
                    seconds = (sight.at - since) / NANO
                    told = f"{rise / NANO:.3f} J in {seconds:.2f} s, at most {watts:g} W"
                    yield Breach("spike", key, told)

    def _most(self, name: str, hw_type: str, sizes: Mapping[str, int]) -> float | None:
        """The watts of a series; None without such a bound."""
        if name in _OF_ONE_DOMAIN:
            return self._ceilings.get(hw_type)
        if name in _SUMS and hw_type in self._ceilings:
            return self._ceilings[hw_type] * sizes.get(hw_type, 1)
        if name == "hw_host_energy_joules_total":
            return sum(self._ceilings.get(kind, 0.0) * size for kind, size in sizes.items())
        return None


def _imbalances(sight: Sight) -> Iterable[Breach]:
    """Measured is consumers, idle and unattributed; processes shown are never more than consumers.

    Consumers are compared in total by user: every process has one, the unknown one included.
    """
    for kind in _sizes(sight):
        measured = sum(
            value
            for series, value in sight.pick("hw_energy_joules_total", hw_type=kind)
            if "hw_parent" not in series.labels
        )
        groups, rows = "wattspan_group_energy_joules_total", "wattspan_process_energy_joules_total"
        consumers = sight.total(groups, hw_type=kind, group_kind="user")
        told = consumers + sum(sight.total(name, hw_type=kind) for name in _NOBODY)
        if measured != told:
            words = f"{measured / NANO:.6f} J measured, {told / NANO:.6f} J accounted for"
            yield Breach("imbalance", f"hw_type={kind}", words)
        if (shown := sight.total(rows, hw_type=kind)) > consumers:
            words = f"{shown / NANO:.6f} J of processes, {consumers / NANO:.6f} J of their users"
            yield Breach("imbalance", f"hw_type={kind}", words)


def _falls(last: Sight, sight: Sight, *, another_life: bool) -> Iterable[Breach]:
    for key, before in last.values.items():
        name = series_of(key).name
        if name not in (DURABLE if another_life else last.counters):
            continue
        after = sight.values.get(key)
        if after is None:
            lasting = name in DURABLE and "group" not in name and "span" not in name
            if lasting:
                yield Breach("loss", key, f"{before / NANO:.6f} before, nothing after")
        elif after < before:
            yield Breach("fall", key, f"{before / NANO:.6f} before, {after / NANO:.6f} after")


def _sizes(sight: Sight) -> dict[str, int]:
    """Number of domains of each hardware type in the cover."""
    sizes: dict[str, int] = {}
    for series, _ in sight.pick("hw_energy_joules_total"):
        if "hw_parent" not in series.labels:
            kind = series.labels["hw_type"]
            sizes[kind] = sizes.get(kind, 0) + 1
    return sizes


def _life(sight: Sight) -> int:
    return sight.total("wattspan_agent_start_time_seconds")


# ------------------------------------------------------------------------------- being well

Well = Callable[[Sight, Sight, Sight], bool]
"""Health of the agent: before the fault, at the fault's end, and now."""


def flowing(before: Sight, at_end: Sight, now: Sight) -> bool:
    """True if every domain is up, and its energy has risen since the fault's end."""
    ended, risen = at_end.domains(), now.domains()
    return (
        before.domains().keys() <= risen.keys()
        and all(risen[name] > ended.get(name, 0) for name in risen)
        and all(value for _, value in now.pick("wattspan_domain_up"))
        and all(value for _, value in now.pick("wattspan_source_up"))
        and now.total("wattspan_source_unreadable") <= before.total("wattspan_source_unreadable")
    )


def recovery(
    sights: Sequence[Sight],
    ended: int,
    before: Sight,
    well: Well = flowing,
) -> float | None:
    """Seconds from ``ended`` until a sight shows an agent that is well; None if none does."""
    at_end = next((one for one in reversed(sights) if one.at <= ended), before)
    for sight in sights:
        if sight.at > ended and well(before, at_end, sight):
            return (sight.at - ended) / NANO
    return None


# -------------------------------------------------------------------------------- the truth


@dataclass(frozen=True)
class Deviation:
    """Published and true energy of one domain in joules, and the seconds in gaps."""

    domain: str
    told: float
    true: float
    gaps: float
    seconds: float

    @property
    def in_gaps(self) -> float:
        """The energy of the gaps, if power was the same as on the whole."""
        return self.true * min(1.0, self.gaps / self.seconds) if self.seconds else 0.0

    @property
    def unexplained(self) -> float:
        """Excess (or, below zero, shortage) of published energy, without the energy in gaps.

        An estimate, which is valid while gaps are short relative to the rest.
        """
        return self.told + self.in_gaps - self.true

    @property
    def percent(self) -> float:
        return 100 * self.unexplained / self.true if self.true else 0.0


def measured(sight: Sight, domain: str) -> int:
    """A domain's energy, that which is not divided yet included, in billionths of a joule."""
    names = ("hw_energy_joules_total", "wattspan_pending_energy_joules")
    return sum(sight.total(name, hw_id=domain) for name in names)


def deviations(
    before: Sight, after: Sight, true: Mapping[str, float], seconds: float, asleep: float = 0.0
) -> list[Deviation]:
    """Published and true energy of each domain between two scrapes; ``true`` is in joules.

    ``seconds`` passed by the monotonic clock, and the host was ``asleep`` for others, which its
    gaps count as well.
    """
    return [
        Deviation(
            domain,
            (measured(after, domain) - measured(before, domain)) / NANO,
            joules,
            max(0.0, (_gaps(after, domain) - _gaps(before, domain)) / NANO - asleep),
            seconds,
        )
        for domain, joules in true.items()
    ]


def _gaps(sight: Sight, domain: str) -> int:
    return sight.total("wattspan_gap_seconds_total", hw_id=domain)
