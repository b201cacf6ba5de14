"""Selection of a report's format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from testbed.process_rights import without_root

from wattspan.cli import cli
from wattspan.cli.formatting import UNKNOWN
from wattspan.cli.report import choose_format
from wattspan.cli.report.export import csv_bytes, report_facts, report_rows
from wattspan.cli.report.table import report_lines
from wattspan.model import GapReason, HwType, Microjoules, Provenance, StaticBasis, StaticSplit
from wattspan.storage.breakdown import break_down
from wattspan.storage.deltas import MODEL, SPAN, HostPart, SpanName, SpanUsage, UsageRole
from wattspan.storage.query import DomainTotal, HistoryExtract
from wattspan.storage.rates import COST, EnergyWithWeights, Weighting, bucket_rate


def by_name(name: str, form: str | None = None) -> str:
    return choose_format(form, Path(name))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("week.csv", "csv"), ("week.CSV", "csv"), ("week.jsonl", "jsonl"),
        ("week.parquet", "parquet"), ("week.txt", "table"), ("week", "table"),
        ("/dev/stdout", "table"),
    ],
)  # fmt: skip
def test_format_is_chosen_by_the_suffix(name: str, form: str) -> None:
    assert by_name(name) == form


def test_unknown_suffix_is_refused_with_the_formats() -> None:
    with pytest.raises(click.UsageError, match=r"table, json, jsonl, csv, parquet") as refused:
        by_name("week.xlsx")
    assert "week.xlsx: .xlsx is no format" in str(refused.value)


def test_explicit_format_overrides_the_suffix() -> None:
    assert by_name("week.xlsx", "csv") == "csv"


def test_table_names_energy_without_a_baseline() -> None:
    package = DomainTotal(
        "rapl:package-0", HwType.CPU, "package-0", Provenance.MEASURED, "cpu-time", True, True, {},
        100_000_000, 20_000_000, 0, 80_000_000, 75_000_000,
    )  # fmt: skip
    extract = HistoryExtract(0, 60, (60,), (package,), {})
    breakdown = break_down(extract, ("process",), limit=0)
    (line,) = breakdown.unattributed
    assert line.total == 80_000_000
    lines = list(report_lines(Path("store.db"), "domain", extract, breakdown, "J"))
    assert "  rapl:package-0: 75.00" in lines
    assert any("(baseline_unknown)" in line for line in lines)
    (row,) = report_rows("domain", extract, breakdown)
    assert row["baseline_unknown_uj"] == 75_000_000
    known = replace(extract, domains=(replace(package, withheld=0),))
    assert not [
        line
        for line in report_lines(Path("store.db"), "domain", known, breakdown, "J")
        if "baseline" in line
    ]


def test_first_joules_per_step_are_marked_as_a_lower_bound() -> None:
    """Two thirds of the energy were withheld while the idle power was not known."""
    package = DomainTotal(
        "rapl:package-0", HwType.CPU, "package-0", Provenance.MEASURED, "cpu-time", True, True, {},
        90_000_000, 30_000_000, 0, 60_000_000, 60_000_000,
    )  # fmt: skip
    steps = SpanUsage({HwType.CPU: 30_000_000}, 10, 10**10)
    spans = {SpanName(UsageRole.NAMED, "train", "step"): steps}
    extract = HistoryExtract(0, 60, (60,), (package,), {}, spans)

    def row(extract: HistoryExtract) -> str:
        breakdown = break_down(extract, (SPAN,))
        lines = report_lines(Path("s"), SPAN, extract, breakdown, "J")
        return next(line for line in lines if " step " in line)

    assert "≥ 30.00" in row(extract)
    assert "≥ 3.00 J" in row(extract)
    known = replace(extract, domains=(replace(package, withheld=0),))
    assert "≥" not in row(known)
    (step, *_) = report_rows(SPAN, extract, break_down(extract, (SPAN,)))
    assert step["certainty"] == "lower_bound"
    facts = report_facts(Path("s"), SPAN, extract, break_down(extract, (SPAN,)))
    assert facts["lines"][0]["certainty_by_type"] == {"cpu": "lower_bound"}
    assert facts["total"]["certainty"] == "known"
    assert facts["domains"][0]["consumers_certainty"] == "lower_bound"


PACKAGE = DomainTotal(
    "p", HwType.CPU, "p", Provenance.MEASURED, "cpu-time", True, True, {}, 90_000_000,
    90_000_000, 0, 0, 0,
)  # fmt: skip
SILENT_BOARD = DomainTotal(
    "vgpu", HwType.GPU, "vGPU", Provenance.MEASURED, "nvml", True, True,
    {GapReason.ABSENT: 60 * 10**9}, 0, 0, 0, 0, 0,
)  # fmt: skip


def test_domain_without_any_energy_is_a_dash_and_bounds_the_total() -> None:
    extract = HistoryExtract(0, 60, (60,), (PACKAGE, SILENT_BOARD), {})
    breakdown = break_down(extract, ("domain",))
    lines = list(report_lines(Path("s"), "domain", extract, breakdown, "J"))
    cells = next(line.split() for line in lines if line.startswith("vgpu"))
    assert cells[3:7] == ["-", "-", "-", "-"]
    assert "≥ 90.00" in next(line for line in lines if line.startswith("total"))
    (_, row) = report_rows("domain", extract, breakdown)
    assert (row["certainty"], row["consumers_certainty"]) == ("unknown", "unknown")
    by_process = list(report_lines(Path("s"), "process", extract, break_down(extract, ()), "J"))
    total = next(line.split() for line in by_process if line.startswith("total"))
    assert total[1:3] == ["90.00", "-"]


@pytest.mark.parametrize("alone", [False, True])
def test_unknown_energy_is_no_number_in_any_format(alone: bool) -> None:
    """The board never gives a reading; a span ran on it."""
    domains = (SILENT_BOARD,) if alone else (PACKAGE, SILENT_BOARD)
    step = SpanUsage({} if alone else {HwType.CPU: 90_000_000}, 10, 10**10, 5, 5)
    spans = {SpanName(UsageRole.NAMED, "train", "step"): step}
    cost = Weighting(COST, "EUR", lambda _start, _end: iter(()), steady=True)
    extract = HistoryExtract(0, 60, (60,), domains, {}, spans, (cost,))
    breakdown = break_down(extract, (SPAN,))
    table = [line.split() for line in report_lines(Path("s"), SPAN, extract, breakdown, "J")]
    facts = report_facts(Path("s"), SPAN, extract, breakdown)
    row, *_ = report_rows(SPAN, extract, breakdown)
    *_, total = report_rows("process", extract, break_down(extract, ()))
    by_domain = report_rows("domain", extract, breakdown)[-1]
    vgpu = facts["domains"][-1]
    assert (total["hw_type"], total["energy_uj"], total["energy_j"]) == (HwType.GPU, None, None)
    assert (total["certainty"], total["cost_EUR"]) == ("unknown", None)
    assert row["gpu_uj"] is None
    assert by_domain["energy_uj"] is by_domain["idle_uj"] is by_domain["cost_EUR"] is None
    assert vgpu["energy_microjoules"] is vgpu["energy_joules"] is vgpu["cost"]["amount"] is None
    assert vgpu["consumers_microjoules"] is None
    names = ("energy_microjoules", "energy_joules", "share", "joules_per_call", "joules_per_token")
    known = [facts["lines"][0][name] is not None for name in names]
    assert known == [not alone] * 5
    if alone:
        assert row["energy_uj"] is facts["total"]["energy_joules"] is None
        line = next(cells for cells in table if cells[:2] == ["train", "step"])
        assert line == ["train", "step", "10", "-", "-", "-", "-", "10.0", "s", "5", "5", "-"]
    assert csv_bytes([total]).splitlines()[1] == b",total,total,,gpu,measured,,,unknown,,0"


def test_cost_of_a_lower_bound_is_a_lower_bound() -> None:
    """The price is known; of the package there are joules of consumers that nobody knows."""
    rates, kwh = [bucket_rate([(60, 10**9)])], 3_600_000_000_000
    parts = (EnergyWithWeights.of(n, rates) for n in (2 * kwh, kwh, 0, kwh, 60_000_000))
    package = DomainTotal(
        "p", HwType.CPU, "p", Provenance.MEASURED, "cpu-time", True, True, {}, *parts
    )
    spans = {
        SpanName(UsageRole.NAMED, "train", "step"): SpanUsage({HwType.CPU: package.consumers}, 1),
        SpanName(UsageRole.NAMED, "train", "none"): SpanUsage({}, 1),
    }
    extract = HistoryExtract(0, 60, (60,), (package,), {}, spans, (Weighting(COST, "EUR"),))
    lines = report_lines(Path("s"), SPAN, extract, break_down(extract, (SPAN,)), "kWh")
    rows = [f"{line} " for line in lines]
    step, none, total = (row for n in ("step", "none", "total") for row in rows if f" {n} " in row)
    assert "≥ 1.000 " in step
    assert "0.00" not in none, "no joule of it is known, and it has cost something"
    assert " 2.000 " in total
    assert "≥" not in total


def test_small_energy_has_its_own_unit() -> None:
    extract = models("a")
    (name,), (usage,) = extract.spans, extract.spans.values()
    small = replace(extract, spans={name: replace(usage, energy={HwType.GPU: 1_230})})
    lines = [
        line
        for line in report_lines(Path("s"), MODEL, small, break_down(small, (MODEL,)), "kWh")
        if line.startswith("llm")
    ]
    assert "1.23 mJ" in lines[0]


def models(*names: str) -> HistoryExtract:
    board = DomainTotal(
        "GPU-0", HwType.GPU, "H100", Provenance.MEASURED, "nvml", True, True, {},
        100_000_000, 60_000_000, 40_000_000, 0, 0,
    )  # fmt: skip
    divisions = {"model": 3, "tokens": 1}
    use = SpanUsage({HwType.GPU: 8_000_000}, 4, 0, 800, 160, divisions=divisions)
    spans = {SpanName(UsageRole.MODEL, "llm", name): use for name in names}
    return HistoryExtract(0, 60, (60,), (board,), {}, spans)


def by_model(extract: HistoryExtract, limit: int = 0) -> list[list[str]]:
    breakdown = break_down(extract, (MODEL,), limit=limit)
    return [line.split() for line in report_lines(Path("s"), MODEL, extract, breakdown, "J")]


def test_table_of_models_has_joules_per_request_and_token() -> None:
    lines = by_model(models("a", "b"))
    assert lines[3] == [
        *("service", "model", "requests", "gpu", "share", "J/request", "learned"),
        *("tokens", "in", "out", "J/token"),
    ]
    assert lines[5] == [
        *("llm", "a", "4", "8.00", "8.0%", "2.00", "J", "75%", "800", "160", "50.0", "mJ"),
    ]
    assert ["without", "requests", "44.00", "44%"] in lines
    assert ["total", "100.00", "100%"] in lines


def test_models_beyond_the_limit_are_summed() -> None:
    lines = by_model(models("a", "b", "c"), limit=1)
    rest = [
        *("other", "models", "8", "16.00", "16%", "2.00", "J", "75%"),
        "1600",
        "320",
        "50.0",
        "mJ",
    ]
    assert rest in lines


def test_report_without_models_says_so() -> None:
    lines = by_model(models())
    assert lines[-1][:7] == ["No", "request", "to", "a", "language", "model", "settled"]
    named = SpanName(UsageRole.NAMED, "shop", "pay")
    spans_only = replace(models(), spans={named: SpanUsage({HwType.GPU: 1}, 1)})
    assert break_down(spans_only, (MODEL,)).sections == ()


def test_models_are_no_spans() -> None:
    assert break_down(models("a"), (SPAN,)).sections == ()


def test_rows_of_models_have_their_service_and_tokens() -> None:
    extract = models("a")
    first, *_ = report_rows(MODEL, extract, break_down(extract, (MODEL,)))
    assert (first["service"], first["model"], first["requests"]) == ("llm", "a", 4)
    assert (first["tokens_input"], first["tokens_output"], first["gpu_uj"]) == (800, 160, 8_000_000)


def text_by_model(extract: HistoryExtract) -> str:
    return " ".join(word for line in by_model(extract) for word in line)


def test_requests_that_were_divided_by_tokens_are_counted() -> None:
    assert (
        "The energy of 2 requests was divided by numbers of tokens, because the energy of the"
        " model's tokens was not learned yet."
    ) in text_by_model(models("a", "b"))
    extract = models("a")
    breakdown = break_down(extract, (MODEL,))
    facts = report_facts(Path("s"), MODEL, extract, breakdown)
    assert facts["lines"][0]["requests_by_division"] == {"model": 3, "tokens": 1, "unknown": 0}
    assert "requests_by_division" not in facts["total"]
    first, *_, total = report_rows(MODEL, extract, breakdown)
    assert (first["divided_by_model"], first["divided_by_tokens"]) == (3, 1)
    assert (total["divided_by_model"], total["divided_by_tokens"]) == (None, None)


@pytest.mark.parametrize(
    ("divisions", "learned", "unknown"),
    [({}, UNKNOWN, 4), ({"model": 1}, "≥ 25%", 3), ({"model": 4}, "100%", 0)],
)
def test_requests_without_a_recorded_division_are_unknown(
    divisions: dict[str, int], learned: str, unknown: int
) -> None:
    extract = models("a")
    (name,), (usage,) = extract.spans, extract.spans.values()
    found = replace(extract, spans={name: replace(usage, divisions=divisions)})
    assert learned in " ".join(by_model(found)[5])
    sentence = f"The division of {unknown} requests was not recorded by an earlier version."
    assert (sentence in text_by_model(found)) == bool(unknown)
    assert "numbers of tokens" not in text_by_model(found)
    first, *_ = report_rows(MODEL, found, break_down(found, (MODEL,)))
    known = divisions["model"] if divisions else None
    assert (first["divided_by_model"], first["divided_by_tokens"]) == (known, known and 0)


def with_host(extract: HistoryExtract, requests: int = 3, **parts: int) -> HistoryExtract:
    """The models with these microjoules on the whole host in so many requests."""
    host = {part: HostPart(energy, requests, 40 * requests) for part, energy in parts.items()}
    spans = {name: replace(usage, host=host) for name, usage in extract.spans.items()}
    return replace(extract, spans=spans)


def test_models_have_their_energy_on_the_whole_host_by_part() -> None:
    extract = with_host(models("a"), gpu=6_000_000, cpu=600_000, idle=1_200_000)
    lines = by_model(extract)
    parts = "gpu J/request cpu J/request idle J/request host J/request host J/token"
    assert " ".join(lines[3]).endswith(parts)
    assert lines[5][-6:] == ["≥", "2.60", "J", "≥", "65.0", "mJ"]
    assert lines[5][-12:-6] == ["2.00", "J", "200", "mJ", "400", "mJ"]
    assert "is that of 3 requests of which the CPU" in text_by_model(extract)
    assert "and not in the host's energy: memory." in text_by_model(extract)
    breakdown = break_down(extract, (MODEL,))
    facts = report_facts(Path("s"), MODEL, extract, breakdown)
    assert facts["lines"][0]["host"] == {
        "requests_by_part": {"gpu": 3, "cpu": 3, "idle": 3},
        "output_tokens_by_part": {"gpu": 120, "cpu": 120, "idle": 120},
        "microjoules_by_part": {"gpu": 6_000_000, "cpu": 600_000, "idle": 1_200_000},
        "method": "equal_parts",
        "uncertainty_microjoules": None,
    }
    first, *_, total = report_rows(MODEL, extract, breakdown)
    figures = ("uj", "requests", "tokens_output")
    names = [f"host_{part}_{figure}" for part in ("gpu", "memory", "idle") for figure in figures]
    assert [first[name] for name in names] == [
        *(6_000_000, 3, 120), *(None, None, None), *(1_200_000, 3, 120),
    ]  # fmt: skip
    assert [total[name] for name in names] == [None] * 9


def test_sum_of_parts_is_unknown_if_they_are_of_different_requests() -> None:
    """As a counter of the memory that was lost, or idle energy that became separate."""
    whole = with_host(models("a"), gpu=6_000_000, cpu=600_000, memory=60_000, idle=0)
    assert by_model(whole)[5][-6:] == ["0.00", "µJ", "2.22", "J", "55.5", "mJ"]
    (name,), (use,) = whole.spans, whole.spans.values()
    host = dict(use.host) | {"idle": HostPart(0, 1, 40)}
    mixed = replace(whole, spans={name: replace(use, host=host)})
    assert by_model(mixed)[5][-2:] == [UNKNOWN] * 2
    first, *_ = report_rows(MODEL, mixed, break_down(mixed, (MODEL,)))
    assert (first["host_gpu_requests"], first["host_idle_requests"]) == (3, 1)


def test_part_of_one_hardware_type_is_no_sum_of_the_host() -> None:
    extract = with_host(models("a"), cpu=600_000)
    assert " ".join(by_model(extract)[3]).endswith("cpu J/request")
    facts = report_facts(Path("s"), MODEL, extract, break_down(extract, (MODEL,)))
    assert facts["lines"][0]["host"]["requests_by_part"] == {"cpu": 3}


def test_unknown_energy_on_the_whole_host_is_no_zero() -> None:
    unknown = models("a")
    assert "host" not in text_by_model(unknown)
    breakdown = break_down(unknown, (MODEL,))
    assert report_facts(Path("s"), MODEL, unknown, breakdown)["lines"][0]["host"] is None
    first, *_ = report_rows(MODEL, unknown, breakdown)
    assert first["host_gpu_requests"] is first["host_gpu_uj"] is None
    known = with_host(models("b"), gpu=6_000_000, cpu=600_000)
    lines = by_model(replace(known, spans=unknown.spans | known.spans))
    assert lines[5][-4:] == [UNKNOWN] * 4


# --------------------------------------------------------------------- static and dynamic energy


def splits(**parts: tuple[int, int]) -> HistoryExtract:
    board = DomainTotal(
        "GPU-0", HwType.GPU, "H100", Provenance.MEASURED, "nvml", True, True, {},
        100_000_000, 60_000_000, 40_000_000, 0, 0,
    )  # fmt: skip
    known = {StaticBasis(basis): StaticSplit(*map(Microjoules, p)) for basis, p in parts.items()}
    use = SpanUsage({HwType.GPU: 8_000_000}, 4, splits=known)
    return HistoryExtract(0, 60, (60,), (board,), {}, {SpanName(UsageRole.NAMED, "t", "step"): use})


def split_lines(extract: HistoryExtract) -> list[str]:
    breakdown = break_down(extract, (SPAN,))
    return list(report_lines(Path("s"), SPAN, extract, breakdown, "J", split=True))


def test_table_of_spans_has_static_and_dynamic_energy() -> None:
    lines = split_lines(splits(fitted=(2_000_000, 6_000_000)))
    assert lines[3].split()[:7] == ["service", "span", "calls", "gpu", "static", "dynamic", "split"]
    row = next(line.split() for line in lines if " step " in line)
    assert row[:7] == ["t", "step", "4", "8.00", "2.00", "6.00", "fitted"]
    assert not [line for line in lines if "Not split" in line]


def test_bounds_and_unsplit_energy_are_marked() -> None:
    lines = split_lines(splits(fitted=(1_000_000, 2_000_000), lower_bound=(0, 4_000_000)))
    row = next(line.split() for line in lines if " step " in line)
    assert row[4:10] == ["≥", "1.00", "≤", "6.00", "lower", "bound"]
    assert lines[-1] == "Not split, because the static power was not known: 1.00 J of spans."
    unknown = next(line.split() for line in split_lines(splits()) if " step " in line)
    assert unknown[4] == UNKNOWN


def test_rows_and_json_have_the_split() -> None:
    extract = splits(fitted=(2_000_000, 6_000_000), lower_bound=(0, 0))
    breakdown = break_down(extract, (SPAN,))
    first, *_, total = report_rows(SPAN, extract, breakdown, split=True)
    assert (first["gpu_static_uj"], first["gpu_dynamic_uj"]) == (2_000_000, 6_000_000)
    assert (first["static_basis"], total["gpu_static_uj"]) == ("lower_bound", None)
    assert "static_basis" not in report_rows(SPAN, extract, breakdown)[0]
    facts = report_facts(Path("s"), SPAN, extract, breakdown)
    assert facts["lines"][0]["gpu_split"]["fitted"] == {
        "static_microjoules": 2_000_000,
        "dynamic_microjoules": 6_000_000,
    }


def test_closed_store_without_an_agent_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(Path, "exists", os.path.exists)  # as from Python 3.14 on
    with without_root():
        done = CliRunner().invoke(cli, ["report", "--set", f"agent.state_dir={closed}"])
    assert done.exit_code == 5
    assert "for root and the agent's group, and no agent answers" in done.stderr
    assert "`sudo wattspan report`" in done.stderr
