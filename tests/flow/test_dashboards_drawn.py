"""The dashboards, drawn by Grafana's own components from the responses of a real Prometheus.

Defects that Grafana ignores silently (an unknown unit, an empty table) are reported here.
"""

from __future__ import annotations

import copy
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from dashboards.queries import documents
from playwright.sync_api import Browser
from testbed.drawing.answers import WIDTH, Window, answered
from testbed.drawing.browser import Drawing, browser, draw
from testbed.fixtures import entered
from testbed.grafana import PAGE
from testbed.prometheus_server import Prometheus, scraping
from testbed.spans.agent import free_port
from testbed.waiting import eventually
from testbed.watched_host import watched_host

pytestmark = [pytest.mark.needs_browser, pytest.mark.needs_grafana, pytest.mark.needs_prometheus]

SPAN, SCRAPE = 20, 1.0  # seconds
BOARDS = documents()
HOST = BOARDS["host.json"]
ONE_EACH = {  # one panel of each kind from every other dashboard, without recording rules
    "autotuner.json": "States",
    "fleet.json": "Provenance",
    "gpus.json": "GPUs",
    "processes.json": "Power by process",
    "spans.json": "Energy against latency",
}
SEEN = (  # minimum number of scrapes before the drawing
    ("wattspan_host_info", SPAN / 2),
    ("wattspan_spans_total", 4),
    ("wattspan_autotune_state", 4),
)
EMPTY_AT_FIRST = {"Gaps"}  # a healthy host has every series


drawn_by = entered(browser, "module")


@pytest.fixture(scope="module")
def given(answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The host's dashboard with the responses of a Prometheus."""
    return answers["host.json"]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Responses of a Prometheus to each dashboard, some time into the host's work."""
    folder = tmp_path_factory.mktemp("drawn")
    with ExitStack() as stack:
        instance = stack.enter_context(watched_host(folder)).address()
        job = {"job_name": "wattspan", "static_configs": [{"targets": [instance]}]}
        prometheus = stack.enter_context(scraping(folder, free_port(), [job], "1s"))
        for series, scrapes in SEEN:
            eventually(lambda: shown(prometheus, series) >= scrapes, f"{series} is there", 180)  # noqa: B023
        end = time.time()
        window = Window(end - SPAN, end, SCRAPE)
        return {name: answered(only_one(name), prometheus.get, window) for name in BOARDS}


def only_one(name: str) -> dict[str, Any]:
    """The host's board, or another one with one panel."""
    board = BOARDS[name]
    if name not in ONE_EACH:
        return board
    return board | {"panels": [p for p in all_of(board) if p.get("title") == ONE_EACH[name]]}


def all_of(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel, also those in rows that are folded."""
    for panel in board["panels"]:
        yield from panel.get("panels", ()) if panel["type"] == "row" else (panel,)


def shown(prometheus: Prometheus, series: str) -> int:
    """Number of scrapes with ``series``."""
    found = prometheus.get("query", query=f"count_over_time({series}[1m])")["result"]
    return max((int(one["value"][1]) for one in found), default=0)


@pytest.fixture(scope="module")
def drawing(given: dict[str, Any], drawn_by: Browser) -> Drawing:
    return draw(drawn_by, PAGE, given)


# modification of a panel and its responses, and the name for its result
SPOILED: dict[str, tuple[str, Callable[[dict[str, Any], list[dict[str, Any]]], object]]] = {
    "unit": ("Power by device", lambda panel, _: default(panel).update(unit="joulez")),
    "move": ("Devices", lambda panel, _: panel["transformations"].append({"id": "mergge"})),
    "parts": ("Devices", lambda panel, _: panel["transformations"].clear()),
    "nothing": ("Power by device", lambda _, answers: [a.update(result=[]) for a in answers]),
    "refused": ("Power by device", lambda _, answers: answers[0].update(error="parse error")),
}


def default(panel: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = panel["fieldConfig"]["defaults"]
    return options


@pytest.fixture(scope="module")
def spoiled(given: dict[str, Any], drawn_by: Browser) -> dict[str, tuple[str, ...]]:
    """State and problems of panels that something was done to, drawn in one go."""
    page = given | {"dashboard": given["dashboard"] | {"panels": []}, "results": {}}
    for number, (name, (title, spoil)) in enumerate(SPOILED.items(), 1):
        found = next(p for p in HOST["panels"] if p.get("title") == title and p["type"] != "row")
        answers = copy.deepcopy(given["results"][str(found["id"])])
        panel = copy.deepcopy(found) | {"id": number, "title": name}
        spoil(panel, answers)
        page["dashboard"]["panels"].append(panel)
        page["results"][str(number)] = answers
    drawing = draw(drawn_by, PAGE, page)
    return {panel.title: (panel.state, *panel.problems) for panel in drawing.panels}


# ------------------------------------------------------------------------------------ the tests


def test_every_panel_shows_its_title_and_data(drawing: Drawing) -> None:
    assert len(drawing.panels) >= 15
    bad = {p.title: (p.state, *p.problems) for p in drawing.panels if p.state == "error"}
    assert bad == {}
    assert {p.title for p in drawing.panels if p.state == "empty"} <= EMPTY_AT_FIRST
    assert [p.title for p in drawing.panels if p.title not in drawing.text] == []
    assert "No data" not in drawing.text


def test_panel_of_every_other_board_is_drawn_with_its_data(
    answers: dict[str, dict[str, Any]], drawn_by: Browser
) -> None:
    assert ONE_EACH.keys() == BOARDS.keys() - {"host.json"}
    panels, results = [], {}
    for number, name in enumerate(ONE_EACH, 1):
        (panel,) = answers[name]["dashboard"]["panels"]
        panels.append(panel | {"id": number})
        results[str(number)] = answers[name]["results"][str(panel["id"])]
    page = answers["host.json"] | {"results": results, "annotations": []}
    drawing = draw(drawn_by, PAGE, page | {"dashboard": page["dashboard"] | {"panels": panels}})
    fared = {panel.title: (panel.state, *panel.problems) for panel in drawing.panels}
    assert fared == dict.fromkeys(ONE_EACH.values(), ("data",))
    assert "trainer/train_step" in drawing.text, "a point is called by its service and its span"
    assert drawing.console == ()


def test_dashboards_render_without_errors_or_external_requests(drawing: Drawing) -> None:
    assert drawing.console == ()
    assert drawing.strangers == ()


def test_units_and_names_are_those_of_the_dashboard(drawing: Drawing) -> None:
    assert "emulated" in drawing.text
    assert "Wh" in drawing.text
    assert "package-0" in drawing.text
    assert "EUR" in drawing.text, "a sum says in which currency it is"


def test_every_plot_has_been_painted(drawing: Drawing) -> None:
    assert len(drawing.plots) >= 5
    assert [title for title, colors in drawing.plots.items() if colors < 3] == []


def test_picture_has_the_requested_width(drawing: Drawing) -> None:
    width, height = struct.unpack(">II", drawing.image[16:24])
    assert width == WIDTH
    assert height > 1000


Fared = dict[str, tuple[str, ...]]


def test_unknown_grafana_unit_is_detected(spoiled: Fared) -> None:
    assert spoiled["unit"] == ("error", "Grafana knows no unit joulez")


def test_transformation_that_does_not_exist_is_noticed(spoiled: Fared) -> None:
    state, problem = spoiled["move"]
    assert state == "error"
    assert "mergge" in problem


def test_table_of_which_only_a_part_would_show_is_noticed(spoiled: Fared) -> None:
    state, problem = spoiled["parts"]
    assert state == "error"
    assert "frames" in problem


def test_answers_without_series_are_noticed(spoiled: Fared) -> None:
    assert spoiled["nothing"] == ("empty",)


def test_query_that_prometheus_refuses_is_noticed(spoiled: Fared) -> None:
    assert spoiled["refused"] == ("error", "A: parse error")
