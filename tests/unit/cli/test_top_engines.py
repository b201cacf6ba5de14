"""Serving engines in the terminal view."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.snapshots import busy_host, engine_host
from testbed.top_view import document, drawn, line_with

from wattspan.cli.formatting import estimate
from wattspan.cli.top.controls import ViewOptions, ViewSection
from wattspan.cli.top.tables import select_rows
from wattspan.model import HostRequests, InferenceRow, Microjoules, Snapshot


def test_engine_row_shows_joules_with_their_uncertainty() -> None:
    lines = drawn(engine_host(), by=ViewSection.SPAN)
    assert line_with("ENGINE ", lines).split() == [
        *("ENGINE", "J/token", "J/token", "in", "J/token", "out", "J/request", "idle", "page"),
    ]
    assert line_with("chat llama", lines).split() == [
        *("chat", "llama", "82.5", "±0.9", "mJ", "30.0", "±9.0", "mJ", "700", "±60", "mJ"),
        *("114", "±5", "J", "25%", "read"),
    ]


def test_engine_without_figures_shows_the_state_of_its_page() -> None:
    lines = drawn(engine_host(), by=ViewSection.SPAN)
    assert line_with("embed", lines).split() == ["embed", *"-----", "read"]
    (code,) = (line for line in lines if line.startswith("code"))
    assert code.split() == ["code", *"-----", "not", "read"]
    reason = line_with("! Cannot read the page of the engine 'code'", drawn(engine_host(), 200))
    assert reason.endswith("Start the engine with its metrics, or correct `url`.")


def test_wide_terminal_shows_the_reason_beside_the_engine() -> None:
    wide = drawn(engine_host(), width=180, by=ViewSection.SPAN)
    assert any("not read: connection refused. Start the engine" in line for line in wide)


def test_engines_are_shown_only_if_there_are_any_and_room() -> None:
    def shown(host: Snapshot, **chosen: object) -> int:
        lines = drawn(host, **chosen)  # type: ignore[arg-type]
        return sum(line.startswith(("chat", "code", "embed")) for line in lines)

    assert shown(engine_host()) == 3
    assert shown(engine_host(), height=60) == 3
    assert shown(engine_host(), height=24) == 0
    assert shown(engine_host(), height=24, by=ViewSection.SPAN) == 3
    assert not any("ENGINE" in line for line in drawn(busy_host()))


def test_engines_are_filtered_by_name_or_model() -> None:
    def names(text: str) -> list[str]:
        found = select_rows(document(engine_host()), ViewOptions(filter=text))
        return [row.engine for row in found.engines]

    assert names("LLAMA") == names("cha") == ["chat"]
    assert names("") == ["chat", "code", "embed"]


@pytest.mark.parametrize("by", [ViewSection.SPAN, ViewSection.ALL])
@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("height", [16, 24, 60])
def test_view_of_engines_fits_the_terminal(height: int, width: int, by: ViewSection) -> None:
    host = engine_host()
    (row,) = host.spans.engines
    many = tuple(replace(row, model=f"model {number} {'x' * 60}") for number in range(40))
    lines = drawn(
        replace(host, spans=replace(host.spans, engines=many)), width, height, by=by, keys=True
    )
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("joules", "half_width", "text"),
    [
        (None, None, "-"), (0.0, 0.0, "0.00 ±0.00 J"), (0.0825, 0.0009, "82.5 ±0.9 mJ"),
        (0.0825, 0.00091, "82.5 ±1.0 mJ"), (1.0, 0.000_001, "1.00 ±0.01 J"),
        (0.9996, 0.1, "1.00 ±0.10 J"), (114.3, 5.0, "114 ±5 J"),
        (4_567.0, 2_000.0, "4.57 ±2.00 kJ"),
        (0.000_004, 0.000_001, "4.00 ±1.00 µJ"),
    ],
)  # fmt: skip
def test_estimate_has_its_half_width_in_the_same_unit(
    joules: float | None, half_width: float | None, text: str
) -> None:
    assert estimate(joules, half_width) == text


# -------------------------------------------------------------------------- the whole host


def host_with_parts(**parts: int) -> Snapshot:
    """The host whose first engine has these joules on the whole host in 60 requests."""
    host = engine_host()
    (row,) = host.spans.engines
    energy = {part: Microjoules(joules * 10**6) for part, joules in parts.items()}
    counts = dict.fromkeys(parts, (60, 6_000))
    known = HostRequests(energy, {"input": 54_000, "output": 6_000}, 60, counts=counts)
    model = InferenceRow("api", "tiny", {}, {}, {"model": 1}, ())
    engines = (replace(row, host=known),)
    return replace(host, spans=replace(host.spans, engines=engines, inference=(model,)))


def test_energy_of_a_request_on_the_whole_host_is_by_part_with_its_method() -> None:
    lines = drawn(host_with_parts(gpu=6_000, cpu=300, memory=60), by=ViewSection.SPAN)
    title = next(number for number, line in enumerate(lines) if line.startswith("HOST J/request"))
    assert lines[title].split() == [
        *("HOST", "J/request", "gpu", "cpu", "mem", "idle", "sum", "J/token", "out", "method"),
    ]
    model, engine = (line.split() for line in lines[title + 1 : title + 3])
    assert model == ["tiny", "api", *"------"]
    assert engine == [
        *("chat", "llama", "100", "J", "5.00", "J", "1.00", "J", "-", "106", "J", "1.06", "J"),
        "engine_metrics",
    ]


def test_sum_without_the_memory_is_a_lower_bound() -> None:
    lines = drawn(host_with_parts(gpu=6_000, cpu=300), by=ViewSection.SPAN)
    engine = [line.split() for line in lines if line.startswith("chat llama")][-1]
    assert engine[-9:] == ["-", "-", "≥", "105", "J", "≥", "1.05", "J", "engine_metrics"]


def test_parts_of_different_requests_have_no_sum() -> None:
    host = host_with_parts(gpu=6_000, cpu=300, memory=60)
    (row,) = host.spans.engines
    counts = {**row.host.counts, "memory": (20, 2_000)}
    row = replace(row, host=replace(row.host, counts=counts))
    lines = drawn(replace(host, spans=replace(host.spans, engines=(row,))), by=ViewSection.SPAN)
    engine = [line.split() for line in lines if line.startswith("chat llama")][-1]
    assert engine[-6:] == ["3.00", "J", "-", "-", "-", "engine_metrics"]


def test_host_without_known_energy_of_an_engine_has_no_table_of_parts() -> None:
    lines = drawn(engine_host(), by=ViewSection.SPAN)
    assert not any("HOST J/request" in line for line in lines)


@pytest.mark.parametrize(("height", "shown"), [(24, False), (60, True)])
def test_parts_are_in_the_view_of_all_sections_if_there_is_room(height: int, shown: bool) -> None:
    lines = drawn(host_with_parts(gpu=6_000, cpu=300), height=height, keys=True)
    assert any("HOST J/request" in line for line in lines) == shown
    assert len(lines) <= height


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("height", [16, 24, 60])
def test_view_with_parts_fits_the_terminal(height: int, width: int) -> None:
    lines = drawn(
        host_with_parts(gpu=6_000, cpu=300), width, height, by=ViewSection.SPAN, keys=True
    )
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("HO") for line in lines) == (height >= 60)
