"""The committed dashboards keep the rules of dashboards/lint.py, and the rules bite."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboards import lint
from dashboards.__main__ import drift, made
from dashboards.known import RULES, Known, everything, exported, recorded
from dashboards.queries import documents, panels, queries

from wattspan.util.files import PUBLIC_ADDRESS

BOARDS = {document["uid"]: document for document in documents().values()}
KNOWN = everything(yaml.safe_load(RULES.read_text(encoding="utf-8")))

HOST = "wattspan-host"
SPANS = "wattspan-spans"
FLEET = "wattspan-fleet"


@pytest.mark.parametrize("uid", BOARDS)
def test_dashboard_keeps_every_rule(uid: str) -> None:
    assert lint.problems(BOARDS[uid], BOARDS, KNOWN) == []


def test_dashboard_count_is_six() -> None:
    assert sorted(BOARDS) == [
        "wattspan-autotuner",
        "wattspan-fleet",
        "wattspan-gpus",
        "wattspan-host",
        "wattspan-processes",
        "wattspan-spans",
    ]


def test_committed_json_and_page_match_the_generator() -> None:
    assert drift() == {}


def test_edited_or_unknown_dashboard_file_is_drift(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    wanted = made(tmp_path, page, ())
    assert drift(tmp_path, page, ()) == wanted
    for path, text in wanted.items():
        path.write_text(text)
    assert drift(tmp_path, page, ()) == {}
    edited, missing, strange = (tmp_path / f"{name}.json" for name in ("host", "fleet", "mine"))
    edited.write_text("{}\n")
    missing.unlink()
    strange.write_text("{}\n")
    assert drift(tmp_path, page, ()) == {
        edited: wanted[edited],
        missing: wanted[missing],
        strange: None,
    }


def test_alert_has_the_public_address_of_its_runbook(tmp_path: Path) -> None:
    alerts = tmp_path / "alerts.yml"
    for before in ("docs", "'https://old.example/docs"):
        alerts.write_text(f"runbook_url: {before}/how-to/alerts.md#up")
        text = made(tmp_path, tmp_path / "page.md", [alerts])[alerts]
        assert text.replace("'", "") == f"runbook_url: {PUBLIC_ADDRESS}docs/how-to/alerts.md#up"


def test_fleet_energy_is_correct_for_any_rule_interval() -> None:
    from dashboards.fleet import SEEN_EVERY

    found = [q for q in queries() if q.dashboard == FLEET and q.panel.endswith(" in range")]
    assert [q.panel for q in found] == ["Energy in range", "Cost in range", "Carbon in range"]
    for query in found:
        assert f"[$__range:{SEEN_EVERY}s]) * {SEEN_EVERY} / 3600" in query.expr
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    assert all(int(group["interval"].removesuffix("s")) <= SEEN_EVERY for group in groups)


# ------------------------------------------------------------------------------ known names


def test_tuned_job_is_an_exported_job_in_prometheus() -> None:
    slowdown = exported()["wattspan_autotune_slowdown_ratio"]
    assert slowdown.labels == {"exported_job", "knob", "job", "instance"}
    assert not slowdown.counter


def test_recorded_sum_has_the_labels_that_it_keeps() -> None:
    found = recorded(
        {
            "groups": [
                {
                    "rules": [
                        {"record": "a:x:sum", "expr": "sum by (job, instance) (x)"},
                        {"record": "a:y:sum", "expr": "a:x:sum * 2"},
                        {"record": "all:x:sum", "expr": "sum by (job) (a:x:sum)"},
                    ]
                }
            ]
        }
    )
    assert found == {
        "a:x:sum": Known(frozenset({"job", "instance"}), counter=False),
        "a:y:sum": Known(frozenset({"job", "instance"}), counter=False),
        "all:x:sum": Known(frozenset({"job"}), counter=False),
    }


# ----------------------------------------------------------------------------- the rules bite


def broken(uid: str, change: Callable[[dict[str, Any]], None]) -> list[str]:
    document = copy.deepcopy(dict(BOARDS[uid]))
    change(document)
    return lint.problems(document, BOARDS, KNOWN)


def ask(expr: str, uid: str = HOST, legend: str = "") -> list[str]:
    """Lint results of a dashboard whose first panel queries ``expr``."""

    def change(document: dict[str, Any]) -> None:
        target = first(document)["targets"][0]
        target["expr"] = expr
        target["legendFormat"] = legend

    return broken(uid, change)


def first(document: dict[str, Any], kind: str = "") -> dict[str, Any]:
    return next(panel for panel in panels(document) if panel["type"] == kind or not kind)


def variable(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for one in document["templating"]["list"] if one["name"] == name
    )
    return found


def without_unit(document: dict[str, Any]) -> None:
    del first(document)["fieldConfig"]["defaults"]["unit"]


def without_a_columns_unit(document: dict[str, Any]) -> None:
    first(document, "table")["fieldConfig"]["overrides"] = []


def with_a_dead_data_link(document: dict[str, Any]) -> None:
    text = json.dumps(first(document, "table")).replace("/d/wattspan-processes", "/d/gone")
    first(document, "table").update(json.loads(text))


def with_a_strange_choice(document: dict[str, Any]) -> None:
    text = json.dumps(first(document, "table")).replace("var-group=", "var-team=")
    first(document, "table").update(json.loads(text))


def with_a_link_that_forgets_time(document: dict[str, Any]) -> None:
    text = json.dumps(first(document, "table")).replace("&${__url_time_range}", "")
    first(document, "table").update(json.loads(text))


BREAKS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "editable": (lambda one: one.update(editable=True), "editable"),
    "strange uid": (lambda one: one.update(uid="mine"), "uid"),
    "no tags": (lambda one: one.update(tags=[]), "tag"),
    "no title": (lambda one: first(one).update(title=""), "no title"),
    "one title twice": (lambda one: first(one).update(title="Idle"), "several panels"),
    "no description": (lambda one: first(one).update(description="Power."), "no description"),
    "no dashboard description": (lambda one: one.update(description=""), "no description"),
    "no unit": (without_unit, "'Power' has no unit"),
    "no unit in a column": (without_a_columns_unit, "column 'Energy' has no unit"),
    "no id": (lambda one: first(one).update(id=None), "ids"),
    "ids twice": (lambda one: first(one).update(id=2), "ids"),
    "too wide": (lambda one: first(one)["gridPos"].update(w=25), "wider than the grid"),
    "overlap": (lambda one: first(one)["gridPos"].update(w=5), "overlap"),
    "fixed data source": (lambda one: first(one)["datasource"].update(uid="abc"), "data source"),
    "a query's fixed data source": (
        lambda one: first(one)["targets"][0]["datasource"].update(uid="abc"),
        "data source",
    ),
    "no queries": (lambda one: first(one).update(targets=[]), "no queries"),
    "no job": (
        lambda one: one["templating"]["list"].remove(variable(one, "job")),
        "no variable job",
    ),
    "never refreshed": (lambda one: variable(one, "instance").update(refresh=1), "not refreshed"),
    "no label": (lambda one: variable(one, "instance").update(label=""), "no label"),
    "variables out of order": (
        lambda one: one["templating"]["list"].reverse(),
        "does not stand before it",
    ),
    "no link": (lambda one: one["links"].pop(), "no link leads to"),
    "dead link": (lambda one: one["links"][0].update(url="/d/gone"), "nowhere"),
    "forgetful link": (lambda one: one["links"][0].update(includeVars=False), "forgets"),
    "dead data link": (with_a_dead_data_link, "nowhere"),
    "data link with a strange choice": (with_a_strange_choice, "chooses team"),
    "forgetful data link": (with_a_link_that_forgets_time, "forgets the time"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_dashboard_is_caught(name: str) -> None:
    change, said = BREAKS[name]
    assert any(said in problem for problem in broken(HOST, change))


ALL = 'job=~"$job", instance="$instance"'


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ('sum(hw_host_power_watts{instance="$instance"})', "not narrowed by job"),
        ('sum(hw_host_power_watts{job=~"$job"})', "not narrowed by instance"),
        ('sum(hw_host_power_watts{job="mine", instance="$instance"})', "fixed job"),
        ("sum(hw_host_power_watts)", "not narrowed at all"),
        (f"sum(hw_host_energy_joules_total{{{ALL}}})", "not under rate or increase"),
        (f"delta(hw_host_energy_joules_total{{{ALL}}}[$__range])", "not under rate or increase"),
        (f"rate(hw_host_power_watts{{{ALL}}}[$__rate_interval])", "is no counter"),
        (f"rate(hw_host_energy_joules_total{{{ALL}}}[5m])", "over 5m"),
        (f"rate(hw_host_energy_joules_total{{{ALL}}}[$__interval])", "over $__interval"),
        (f"rate(hw_host_energy_joules_total{{{ALL}}}[$__range])", "over $__range"),
        (f"sum(wattspan_host_joules{{{ALL}}})", "there is no series wattspan_host_joules"),
        (f'sum(hw_host_power_watts{{{ALL}, hw_id="x"}})', "has no label hw_id"),
        (f"sum by (hw_id) (hw_host_power_watts{{{ALL}}})", "a label hw_id"),
        (f"sum(hw_power_watts{{{ALL}}})", "twice without hw_parent="),
        (
            f"sum(rate(wattspan_group_energy_joules_total{{{ALL}}}[$__rate_interval]))",
            "groups of different kinds",
        ),
        (
            f"sum(rate(wattspan_host_cost_total{{{ALL}}}[$__rate_interval]))",
            "adds different currencies",
        ),
        (f"sum(hw_host_power_watts{{{ALL}}}) / $nobody", "$nobody is used"),
    ],
)
def test_query_that_cannot_be_right_is_caught(expr: str, said: str) -> None:
    assert any(said in problem for problem in ask(expr))


def test_legend_that_names_a_label_that_is_not_there_is_caught() -> None:
    assert any(
        "names no label hw_name" in problem
        for problem in ask(f"hw_host_power_watts{{{ALL}}}", legend="{{hw_name}}")
    )


def test_sum_over_the_fleet_needs_no_instance_and_one_over_hosts_does() -> None:
    fleet = 'sum(fleet:wattspan_power_watts:rate5m{job=~"$job"})'
    assert ask(fleet, FLEET) == []
    hosts = 'sum(instance:wattspan_power_watts:rate5m{job=~"$job"})'
    assert any("not narrowed by instance" in problem for problem in ask(hosts, FLEET))


SEVERAL = 'job=~"$job", instance=~"$instance"'
GPUS, POWER = "wattspan-gpus", f"hw_host_power_watts{{{SEVERAL}}}"


@pytest.mark.parametrize(
    "expr",
    [
        POWER,
        f"sum by (instance) ({POWER})",
        f"topk(3, 2 * sum by (instance) ({POWER}))",
        f"clamp_min(sum by (instance) ({POWER}) / sum({POWER}), 0)",
    ],
)
def test_legend_without_host_is_rejected_for_several_hosts(expr: str) -> None:
    said = "Power, A: nothing of it tells the host"
    assert ask(expr, GPUS, legend="power") == [f"{GPUS}: {said}"]
    assert ask(expr, GPUS, legend="power, {{instance}}") == []


def test_legend_without_host_is_valid_for_one_host_or_a_sum() -> None:
    assert ask(f"sum by (instance) (hw_host_power_watts{{{ALL}}})", HOST, legend="power") == []
    assert ask(f"sum({POWER})", GPUS, legend="power") == []
    assert ask(f"sum({POWER}) + on () sum by (instance) ({POWER})", GPUS, legend="power") == []


def test_table_of_several_hosts_without_a_column_for_the_host_is_caught() -> None:
    def change(document: dict[str, Any]) -> None:
        (_, moves) = first(document, "table")["transformations"]
        del moves["options"]["includeByName"]["instance"]

    assert "wattspan-gpus: GPUs, A: nothing of it tells the host" in broken(GPUS, change)


@pytest.mark.parametrize("title", ["Spans with most energy", "Energy against latency"])
def test_columns_or_axes_of_different_rows_are_caught(title: str) -> None:
    def change(document: dict[str, Any]) -> None:
        (panel,) = (one for one in panels(document) if one["title"] == title)
        target = panel["targets"][1]
        target["expr"] = target["expr"].replace("topk(50, ", "topk(49, ")

    assert broken(SPANS, change) == [f"{SPANS}: {title}, B: it is of other rows than the first"]


def test_annotation_is_held_to_the_same_rules() -> None:
    def change(document: dict[str, Any]) -> None:
        document["annotations"]["list"][0]["target"]["expr"] = "sum(wattspan_autotune_decisions)"

    assert any(
        "Decisions, Marks: wattspan_autotune_decisions is not narrowed" in problem
        for problem in broken("wattspan-autotuner", change)
    )
