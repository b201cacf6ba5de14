"""Which counters can be read: every source is opened and read twice, as the agent would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wattspan.attribution.energy import energy_between
from wattspan.cli import formatting
from wattspan.cli.doctor.findings import DiagnosisSection, Finding, Severity
from wattspan.config import Config
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Domain,
    Failure,
    GpuStatus,
    Interval,
    PayerInfo,
    Provenance,
    Reading,
    Trouble,
    mean_power,
)
from wattspan.model.settings import Table
from wattspan.plugins import Plugins
from wattspan.ports import Clock, CounterSource, SourceContext, SourcePlugin, WattspanError

_TIMEOUT = 3 * SECOND  # for a source whose first reading comes from a thread of its own
_STEP = 100 * MILLISECOND


class EmptyProcessDirectory:
    """The directory of processes for a look at counters alone."""

    def identify(self, pid: int) -> Consumer | None:
        return None

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return None


@dataclass(slots=True)
class SourceProbe:
    """What two looks at one source showed."""

    name: str
    domains: tuple[Domain, ...] = ()
    first: dict[str, Reading] = field(default_factory=dict)
    last: dict[str, Reading] = field(default_factory=dict)
    failures: dict[Failure, None] = field(default_factory=dict)
    gpus: dict[str, GpuStatus] = field(default_factory=dict)

    @property
    def readable(self) -> int:
        """How many counters gave a figure. An estimate is not a counter."""
        estimated = {d.id for d in self.domains if d.provenance is Provenance.ESTIMATED}
        return len(self.last.keys() - estimated)

    def power(self, domain: Domain) -> int | None:
        """Milliwatts between the two looks; None if they do not tell."""
        first, last = self.first.get(domain.id), self.last.get(domain.id)
        if first is None or last is None or last.at.mono <= first.at.mono:
            return None
        change = energy_between(domain, first, last)
        return mean_power(change.energy, change.duration) if isinstance(change, Interval) else None


@dataclass(frozen=True, slots=True)
class SourceExamination:
    """The sections of all sources, how many counters can be read, and what they measure."""

    sections: tuple[DiagnosisSection, ...]
    readable: int
    emulated: bool
    domains: tuple[Domain, ...] = ()


def examine_sources(
    plugins: Plugins, config: Config, context: SourceContext, stretch: int = SECOND
) -> SourceExamination:
    """Open every source, look twice, ``stretch`` nanoseconds apart, and close it."""
    sections: list[DiagnosisSection] = []
    domains: list[Domain] = []
    readable, emulated = 0, context.emulated
    for broken in plugins.broken:
        if broken.table.startswith("sources."):
            finding = Finding(Severity.FAIL, "plugin", broken.cause, broken.remedy)
            sections.append(
                DiagnosisSection(f"Source {broken.table.partition('.')[2]}", (finding,))
            )
    for name, plugin in plugins.sources.items():
        look = SourceProbe(name)
        settings = config.sources[name]
        opened = _open(plugin, settings, context)
        if isinstance(opened, Finding):
            findings = [opened]
        else:
            _probe(look, opened, context.clock, stretch)
            findings = [*_domains(look), *map(_failure, look.failures)]
            readable += look.readable
            domains += look.domains
            emulated |= any(d.provenance is Provenance.EMULATED for d in look.domains)
            if not look.domains and not look.failures:
                findings.append(
                    Finding(Severity.WARN, "counters", "it has none, and does not say why")
                )
        sections.append(DiagnosisSection(f"Source {name}", tuple(findings)))
        if not isinstance(opened, Finding):
            sections += _compare_readers(settings, context, look, stretch)
    return SourceExamination(tuple(sections), readable, emulated, tuple(domains))


def _open(plugin: SourcePlugin, settings: Table, context: SourceContext) -> CounterSource | Finding:
    """The source; or why there is none, in its own words."""
    if getattr(settings, "enabled", None) is False:
        return Finding(Severity.NOTE, "off", "enabled = false")
    try:
        source = plugin.open(settings, context)
        if source is not None:
            return source
        # Left to `auto` it found nothing and kept quiet; asked for by name it says what.
        insisting = msgspec.structs.replace(settings, enabled=True)
        source = plugin.open(insisting, context)
    except WattspanError as error:
        wanted = getattr(settings, "enabled", None) is True
        return Finding(Severity.FAIL if wanted else Severity.NOTE, "nothing to read", str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and only itself
        cause = f"{type(error).__name__}: {error}"
        return Finding(Severity.FAIL, "does not open", cause, "Report this fault to its authors.")
    if source is not None:
        source.close()
    return Finding(Severity.NOTE, "nothing to read", "it finds nothing here")


def _probe(look: SourceProbe, source: CounterSource, clock: Clock, stretch: int) -> None:
    """Look twice at what ``source`` counts, and close it."""
    try:
        _read_until(look, source, clock, _TIMEOUT, lambda: bool(look.last or look.failures))
        look.first = dict(look.last)
        clock.sleep_until(clock.monotonic() + stretch)
        look.failures.clear()  # what still fails at the end is what counts
        _read_until(look, source, clock, _TIMEOUT, lambda: look.last != look.first or not look.last)
    except Exception as error:  # noqa: BLE001 - a plugin may fail in any way, and only itself
        cause = f"{type(error).__name__}: {error}"
        look.failures[Failure(look.name, "the source", Trouble.MALFORMED, cause)] = None
    finally:
        source.close()


def _read_until(
    look: SourceProbe, source: CounterSource, clock: Clock, patience: int, done: Any
) -> None:
    deadline = clock.monotonic() + patience
    while True:
        batch = source.read()
        look.domains = batch.domains
        look.last |= {reading.domain_id: reading for reading in batch.readings}
        look.failures |= dict.fromkeys(batch.failures)
        look.gpus |= {gpu.domain_id: gpu for gpu in batch.gpus}
        if done() or clock.monotonic() >= deadline:
            return
        clock.sleep_until(clock.monotonic() + _STEP)


def _domains(look: SourceProbe) -> Iterator[Finding]:
    failed = {failure.domain_id for failure in look.failures}
    for domain in look.domains:
        if domain.id in failed and domain.id not in look.last:
            continue  # its failure says more
        name = f"{domain.hw_type} {domain.name}"
        power = look.power(domain)
        figure = "no figure yet" if power is None else f"{formatting.watts(power / 1000)} W"
        stands = power == 0 and domain.in_cover
        if stands:  # some hypervisors show counters that never move
            figure = "it does not move"
        place = "counted" if domain.in_cover else "not summed"
        why = f": {domain.why}" if domain.why else ""
        mark = Severity.WARN if stands or domain.id not in look.last else Severity.OK
        detail = f"{figure}, {domain.provenance}, {place}{why}{_gpu(look.gpus, domain)}"
        yield Finding(mark, name, detail)


def _gpu(gpus: Mapping[str, GpuStatus], domain: Domain) -> str:
    """What a GPU's line has to add."""
    gpu = gpus.get(domain.id)
    if gpu is None:
        return ""
    parts = [gpu.model, f"driver {gpu.driver}" if gpu.driver else ""]
    if gpu.limits.enforced is not None:
        parts.append(f"power limit {gpu.limits.enforced / 1000:.0f} W")
    if gpu.mig:
        parts.append("split into MIG instances: energy is of the whole board")
    told = ", ".join(part for part in parts if part)
    return f"; {told}" if told else ""


def _failure(failure: Failure) -> Finding:
    permanent = failure.trouble in (Trouble.DENIED, Trouble.STUCK, Trouble.MALFORMED)
    mark = Severity.FAIL if permanent else Severity.WARN
    return Finding(mark, failure.thing, f"{failure.cause} ({failure.trouble})", failure.remedy)


# ----------------------------------------------------------------------- both readers of RAPL


def _compare_readers(
    settings: Table, context: SourceContext, look: SourceProbe, stretch: int
) -> Iterator[DiagnosisSection]:
    """pyRAPL against powercap, for the source that can be read by both."""
    if look.name != "rapl" or not look.last:
        return
    from wattspan.sources.rapl.powercap import cross_check

    sysfs = context.sysfs or Path(str(getattr(settings, "sysfs", "/sys")))
    check = cross_check(sysfs, context.clock, duration=stretch, emulated=context.emulated)
    names = {domain.id: f"{domain.hw_type} {domain.name}" for domain in look.domains}
    findings = [
        Finding(
            Severity.OK if each.agrees else Severity.WARN,
            names.get(each.domain_id, each.domain_id),
            f"{formatting.joules(each.powercap)} and {formatting.joules(each.pyrapl)}, "
            f"difference {'-' if each.difference < 0 else '+'}"
            f"{formatting.joules(abs(each.difference))}",
        )
        for each in check.comparisons
        if each.difference is not None
    ]
    if check.agrees is None:
        reasons = [str(failure) for failure in check.failures] or ["nothing in common to compare"]
        findings.append(Finding(Severity.NOTE, "not compared", reasons[0]))
    title = f"Both readers of rapl, powercap and pyRAPL, over {formatting.duration_text(stretch)}"
    yield DiagnosisSection(title, tuple(findings))
