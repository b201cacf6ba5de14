"""Spans in the terminal view, from the agent's own snapshot and from a scrape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.snapshots import busy_host, serving_host
from testbed.top_view import document, drawn, line_with

from wattspan.cli.formatting import count, duration_each, energy_each
from wattspan.cli.top.controls import SortKey, ViewOptions, ViewSection
from wattspan.cli.top.tables import select_rows
from wattspan.model import InferenceRow, Microjoules, Provenance, Snapshot, UnmeteredRow


def test_span_row_shows_calls_joules_and_joules_per_call_and_token() -> None:
    lines = drawn(serving_host(), by=ViewSection.SPAN)
    assert line_with("SPAN ", lines).split() == [
        "SPAN", "service", "calls", "joules", "J/call", "time/call", "J/token",
    ]  # fmt: skip
    assert line_with("train_step", lines).split() == [
        "train_step", "trainer", "41.2k", "88.0", "kJ", "2.13", "J", "6.09", "ms",
    ]  # fmt: skip
    assert line_with("chat", lines).split() == [
        *("chat", "gpt-oss", "llm", "912", "3.93", "kJ", "4.31", "J", "1.5", "s", "33.2", "mJ"),
    ]


def test_wide_terminal_shows_hardware_types_and_tokens() -> None:
    lines = drawn(serving_host(), width=140, by=ViewSection.SPAN)
    heading = line_with("SPAN ", lines).split()
    assert heading[3:9] == ["cpu", "J", "gpu", "J", "mem", "J"]
    assert line_with("chat", lines).split()[4:] == [
        *("620", "J", "3.31", "kJ", "3.93", "kJ", "4.31", "J", "1.5", "s", "118k", "33.2", "mJ"),
    ]


def test_energy_outside_spans_is_summed_below_the_rows() -> None:
    assert line_with("outside spans", drawn(serving_host(), width=120, by=ViewSection.SPAN)) == (
        "outside spans: trainer ≥ 930 J, llm ≥ 12.0 J; 7 unknown process; 2 refused (invalid id)"
    )


@pytest.mark.parametrize("by", [ViewSection.SPAN, ViewSection.ALL])
@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("height", [16, 24, 40, 60])
def test_view_of_spans_fits_the_terminal(width: int, height: int, by: ViewSection) -> None:
    snapshot = serving_host(Provenance.EMULATED)
    crowd = replace(snapshot.spans, rows=snapshot.spans.rows * 40)
    lines = drawn(replace(snapshot, spans=crowd), width, height, by=by, keys=True)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("q quit")


def test_spans_are_shown_among_all_sections_if_there_is_room() -> None:
    def shown(**chosen: object) -> bool:
        return any("train_step" in line for line in drawn(serving_host(), **chosen))  # type: ignore[arg-type]

    assert shown()
    assert shown(brief=True)
    assert shown(height=50)
    assert not shown(height=24)
    assert not any("SPAN" in line for line in drawn(busy_host()))


def test_empty_span_section_has_a_message() -> None:
    assert any("none yet" in line for line in drawn(busy_host(), by=ViewSection.SPAN))
    assert any(
        "none with 'zzz'" in x for x in drawn(serving_host(), by=ViewSection.SPAN, filter="zzz")
    )


def test_spans_are_sorted_by_joules_or_name_and_filtered_by_name_or_service() -> None:
    def names(**chosen: object) -> list[str]:
        options = ViewOptions(**chosen)  # type: ignore[arg-type]
        return [row.name[:5] for row in select_rows(document(serving_host()), options).spans.names]

    assert names() == names(sort=SortKey.JOULES) == ["train", "chat ", "other", "POST ", "evil?"]
    assert names(sort=SortKey.NAME) == ["chat ", "evil?", "other", "POST ", "train"]
    assert names(filter="SHOP") == ["POST ", "evil?"]
    assert names(filter="checkout") == ["POST "]


def test_scrolling_shows_the_last_span() -> None:
    spans = serving_host().spans
    rows = tuple(replace(row, name=f"{row.name} {n}") for n in range(40) for row in spans.rows)
    snapshot = replace(serving_host(), spans=replace(spans, rows=rows))
    assert not any(
        "evil?[31m?name 39" in line for line in drawn(snapshot, height=24, by=ViewSection.SPAN)
    )
    end = drawn(snapshot, height=24, by=ViewSection.SPAN, offset=10**6)
    assert any("evil?[31m?name 39" in line for line in end)


@pytest.mark.parametrize(
    "name", ["日本語" * 60, "e\u0301\u200b" * 90, "\u202eevil", "", "👩‍👩‍👧" * 30]
)
def test_unusual_names_keep_lines_intact(name: str) -> None:
    spans = serving_host().spans
    rows = (replace(spans.rows[0], name=name, service=name),)
    snapshot = replace(serving_host(), spans=replace(spans, rows=rows))
    lines = drawn(snapshot, height=24, by=ViewSection.SPAN)
    assert len(lines) <= 24
    assert any("88.0 kJ" in line for line in lines)


def test_span_name_cannot_command_the_terminal() -> None:
    assert "\x1b" not in "\n".join(drawn(serving_host(), by=ViewSection.SPAN))


@pytest.mark.parametrize(
    ("microjoules", "parts", "text"),
    [
        (0, 0, "-"), (0, 1, "0.00 µJ"), (1, 3, "0.33 µJ"), (999, 1, "999 µJ"),
        (999_400, 1000, "999 µJ"), (999_600, 1000, "1.00 mJ"), (999_600, 1, "1.00 J"),
        (12_340_000, 1, "12.3 J"), (5 * 10**12, 2, "2.50 MJ"),
    ],
)  # fmt: skip
def test_energy_each_has_three_digits(microjoules: int, parts: int, text: str) -> None:
    assert energy_each(microjoules, parts) == text


@pytest.mark.parametrize(
    ("nanoseconds", "parts", "text"),
    [(5, 0, "-"), (1500, 1, "1.50 µs"), (25_000_000, 2, "12.5 ms"), (10**9, 1, "1.0 s")],
)
def test_duration_each_has_a_fitting_unit(nanoseconds: int, parts: int, text: str) -> None:
    assert duration_each(nanoseconds, parts) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9999, "9999"), (10_000, "10.0k"), (118_404, "118k"), (2**62, "4612P")],
)
def test_count_has_a_prefix_from_five_digits(number: int, text: str) -> None:
    assert count(number) == text


# ------------------------------------------------------------------------------ language models


def model_host(models: int = 1) -> Snapshot:
    rows = tuple(
        InferenceRow(
            "llm",
            f"model-{i}",
            {"input": Microjoules(9_500_000 - i), "output": Microjoules(30_000_000)},
            {"input": 81_200, "output": 0 if i else 61_400},
            {"model": 391, "tokens": 9},
            (),
        )
        for i in range(models)
    )
    host = serving_host()
    return replace(host, spans=replace(host.spans, inference=rows))


def test_model_row_shows_joules_per_request_and_token() -> None:
    lines = drawn(model_host(), by=ViewSection.SPAN)
    assert line_with("MODEL ", lines).split() == [
        *("MODEL", "service", "requests", "gpu", "J", "J/request"),
        *("J/token", "in", "J/token", "out", "learned"),
    ]
    assert line_with("model-0", lines).split() == [
        *("model-0", "llm", "400", "≥", "39.5", "J", "≥", "98.8", "mJ"),
        *("≥", "117", "µJ", "≥", "489", "µJ", "98%"),
    ], "a GPU gave no readings for a time"
    known = drawn(replace(model_host(), domains=()), by=ViewSection.SPAN)
    assert "≥" not in line_with("model-0", known)


def test_model_without_tokens_has_no_energy_per_token() -> None:
    assert line_with("model-1", drawn(model_host(2), by=ViewSection.SPAN)).split()[-3:] == [
        *("117", "µJ", "98%"),
    ]


def test_models_are_shown_only_if_there_are_any_and_room() -> None:
    def shown(host: Snapshot, **chosen: object) -> int:
        return sum("model-" in line for line in drawn(host, **chosen))  # type: ignore[arg-type]

    assert shown(model_host(5)) == 5
    assert shown(model_host(5), height=60) == 2
    assert shown(model_host(5), height=24) == 0
    assert not any("MODEL" in line for line in drawn(serving_host()))


def test_models_are_filtered_and_sorted() -> None:
    def names(**chosen: object) -> list[str]:
        found = select_rows(document(model_host(3)), ViewOptions(**chosen))  # type: ignore[arg-type]
        return [row.model for row in found.spans.inference]

    assert names(sort=SortKey.NAME) == ["model-0", "model-1", "model-2"]
    assert names(sort=SortKey.JOULES, filter="LLM") == ["model-0", "model-1", "model-2"]
    assert names(filter="-2") == ["model-2"]


def test_requests_without_known_energy_have_rows_without_figures() -> None:
    rows = (
        UnmeteredRow("shop", "llama", "client", 357, {"input": 10, "output": 20}),
        UnmeteredRow("vllm", "llama", "engine", 3, {"input": 1, "output": 0}),
    )
    host = model_host()
    host = replace(host, spans=replace(host.spans, unmetered=rows))
    lines = drawn(host, by=ViewSection.SPAN)
    assert line_with("client", lines).split() == ["llama", "shop", "357", "-", "-", "client"]
    assert line_with("engine", lines).split() == ["llama", "vllm", "3", "-", "-", "engine"]
    assert line_with("model-0", lines).endswith("98%")
    alone = replace(host, spans=replace(host.spans, inference=()))
    assert any("client" in line for line in drawn(alone))
    found = select_rows(document(host), ViewOptions(filter="shop")).spans
    assert [(row.service, row.requests) for row in found.unmetered] == [("shop", 357)]
    assert not found.inference


@pytest.mark.parametrize("width", [72, 80, 100, 140])
def test_role_of_requests_without_known_energy_is_shown_at_any_width(width: int) -> None:
    name = "meta-llama/Llama-3.1-70B-Instruct"
    row = UnmeteredRow("vllm", name, "engine", 3, {"input": 1, "output": 0})
    host = model_host()
    (known,) = host.spans.inference
    spans = replace(host.spans, inference=(replace(known, model=name),), unmetered=(row,))
    lines = drawn(replace(host, spans=spans), width=width, by=ViewSection.SPAN)
    learned, role = [line.split()[-1] for line in lines if line.startswith("meta")]
    assert (learned, role) == ("98%", "engine")


@pytest.mark.parametrize("by", [ViewSection.SPAN, ViewSection.ALL])
@pytest.mark.parametrize("height", [16, 24, 40, 60])
def test_view_of_models_fits_the_terminal(height: int, by: ViewSection) -> None:
    lines = drawn(model_host(40), 80, height, by=by, keys=True)
    assert len(lines) <= height
    assert max(map(len, lines)) <= 80
