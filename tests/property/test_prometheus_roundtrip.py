"""For any process names, a scrape can be parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.scrapes import CATALOGUE_SERIES, full_host, parse

from wattspan.model import (
    Consumer,
    Exemplar,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Knob,
    Microjoules,
    PayerInfo,
    ProcessRow,
    Remainder,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan_exporters.catalogue import tuning
from wattspan_exporters.catalogue.definition import Instrument, Metric, Sample, sanitize
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

pytestmark = pytest.mark.slow

names = st.text(st.characters(), max_size=160)  # surrogates and control characters included
nasty = st.text(st.sampled_from('\\"\n{},= #ab'), max_size=12)
energies = st.integers(0, 2**63)
by_type = st.dictionaries(st.sampled_from(HwType), energies.map(Microjoules))
payers = st.builds(Consumer, st.integers(1, 5), st.integers(1, 3)) | st.builds(Remainder, names)
groups = st.builds(Group, st.sampled_from(GroupKind), names)
infos = st.builds(PayerInfo, payers, names | nasty, st.lists(groups, max_size=1).map(tuple))
rows = st.lists(st.builds(ProcessRow, infos, by_type, st.just({})), max_size=8).map(tuple)
forms = st.sampled_from(ExpositionFormat)
identities = st.binary(min_size=16, max_size=16).map(bytes.hex)
shown = st.builds(Exemplar, identities, identities, energies, st.integers(0, 2**63))
span_rows = st.dictionaries(
    st.tuples(names | nasty, names | nasty),
    st.tuples(by_type, st.dictionaries(st.sampled_from(HwType), shown)),
    max_size=8,
).map(
    lambda found: {
        key: SpanRow(*key, energy, exemplars=exemplars)
        for key, (energy, exemplars) in found.items()
    }
)


def table(samples: list[tuple[str, int]]) -> Metric:
    def draw(snapshot: Snapshot) -> Iterator[Sample]:
        for label, energy in samples:
            yield (label,), energy

    return Metric("x.energy", Instrument.COUNTER, "J", "Help.", ("name",), draw)


@given(st.dictionaries(names | nasty, energies, min_size=1, max_size=20), forms)
def test_labels_and_values_survive_the_parser(
    table_: dict[str, int], form: ExpositionFormat
) -> None:
    document = Renderer([table(list(table_.items()))]).render(full_host(), form)
    scrape = parse(document, form)
    found = {dict(labels).get("name", ""): value for (_, labels), value in scrape.items()}
    assert found == {sanitize(name): energy / 10**6 for name, energy in table_.items()}


@given(st.lists(energies, min_size=1, max_size=5))
def test_every_microjoule_is_written(values: list[int]) -> None:
    samples = [(str(n), value) for n, value in enumerate(values)]
    text = Renderer([table(samples)]).render(full_host(), ExpositionFormat.TEXT).decode()
    written = re.findall(r"^x_energy_joules_total\{.*\} (\S+)$", text, re.MULTILINE)
    assert [Decimal(joules) * 10**6 for joules in written] == values


@given(rows, st.lists(st.builds(GroupRow, groups, by_type, st.just({})), max_size=4), forms)
def test_every_host_makes_a_valid_scrape(
    processes: tuple[ProcessRow, ...], group_rows: list[GroupRow], form: ExpositionFormat
) -> None:
    snapshot = replace(full_host(), processes=processes, groups=tuple(group_rows))
    scrape = parse(Renderer().render(snapshot, form), form)
    assert {name for name, _ in scrape} <= CATALOGUE_SERIES


@given(span_rows, forms)
def test_energy_round_trips_for_any_span_name(
    named: dict[tuple[str, str], SpanRow], form: ExpositionFormat
) -> None:
    snapshot = replace(full_host(), spans=SpanAccounts(tuple(named.values())))
    scrape = parse(Renderer().render(snapshot, form), form)
    found = {
        (labels.get("service_name", ""), labels.get("span_name", ""), labels["hw_type"]): joules
        for (series, pairs), joules in scrape.items()
        if series == "wattspan_span_energy_joules_total" and (labels := dict(pairs))
    }
    assert found == {
        (sanitize(row.service), sanitize(row.name), kind): energy / 10**6
        for row in named.values()
        for kind, energy in row.energy.items()
    }


@given(
    st.lists(st.tuples(names | nasty, st.sampled_from(Knob)), max_size=6, unique=True),
    st.none() | st.floats(),
    energies,
    forms,
)
def test_savings_round_trip_for_any_job_name(
    jobs: list[tuple[str, Knob]], slowdown: float | None, saved: int, form: ExpositionFormat
) -> None:
    held = full_host().tuning.rows[0]
    tuned = tuple(
        replace(held, job=job, knob=knob, slowdown=slowdown, saved_surely=Microjoules(saved))
        for job, knob in jobs
    )
    snapshot = replace(full_host(), tuning=replace(full_host().tuning, rows=tuned))
    scrape = parse(Renderer().render(snapshot, form), form)
    found = {
        (labels.get("job", ""), labels["knob"]): joules
        for (series, pairs), joules in scrape.items()
        if series == "wattspan_autotune_saved_joules_total" and (labels := dict(pairs))
    }
    assert found == {(tuning.name_label(job), str(knob)): saved / 10**6 for job, knob in jobs}


@given(
    st.lists(st.lists(st.integers(0, 10**9), min_size=6, max_size=6), min_size=2, max_size=6),
    forms,
)
def test_counters_rise_while_the_ledger_grows(
    steps: list[list[int]], form: ExpositionFormat
) -> None:
    """One renderer over a host whose accounts only ever grow, as accounts do."""
    renderer, snapshot = Renderer(), full_host()
    before = parse(renderer.render(snapshot, form), form)
    for step in steps:
        snapshot = grown(snapshot, step)
        after = parse(renderer.render(snapshot, form), form)
        counters = {key for key in before if key[0].endswith("_total")}
        assert counters <= after.keys()
        assert not [key for key in counters if after[key] < before[key]]
        before = after


def grown(snapshot: Snapshot, step: list[int]) -> Snapshot:
    idle, charged, other, unlisted, waited, ticks = step

    def more(energy: dict[HwType, Microjoules], amount: int) -> dict[HwType, Microjoules]:
        return {kind: Microjoules(uj + amount) for kind, uj in energy.items()}

    return replace(
        snapshot,
        domains=tuple(
            replace(
                a,
                energy=Microjoules(a.energy + idle + charged),
                idle=Microjoules(a.idle + idle),
                consumers=Microjoules(a.consumers + charged),
                gaps={reason: ns + waited for reason, ns in a.gaps.items()},
            )
            for a in snapshot.domains
        ),
        processes=tuple(
            replace(row, energy=more(dict(row.energy), charged)) for row in snapshot.processes
        ),
        other=more(dict(snapshot.other), other + unlisted),
        stats=replace(snapshot.stats, ticks=snapshot.stats.ticks + ticks),
    )
