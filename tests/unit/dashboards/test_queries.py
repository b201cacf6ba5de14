"""The dashboards' queries can be run without Grafana."""

from __future__ import annotations

import dashboards
import pytest
from dashboards.expressions import bare, grouping, keeps, ranked, selectors
from dashboards.queries import Query, Variable, documents, panels, queries_of, variables


def of(uid: str, panel: str) -> list[Query]:
    return [one for one in dashboards.queries() if (one.dashboard, one.panel) == (uid, panel)]


def test_every_panel_and_every_annotation_is_among_the_queries() -> None:
    asked = {(one.dashboard, one.panel) for one in dashboards.queries()}
    for document in documents().values():
        for panel in panels(document):
            assert (document["uid"], panel["title"]) in asked
    assert ("wattspan-autotuner", "Decisions") in asked


def test_query_lists_its_variable_sources_in_order() -> None:
    (power,) = of("wattspan-host", "Power")
    assert [one.name for one in power.variables] == ["job", "instance", "group_kind"]
    assert power.variables[1] == Variable(
        "instance", 'wattspan_host_info{job=~"$job"}', "instance", multi=False, all=False
    )


def test_tables_use_instant_and_graphs_range_queries() -> None:
    assert not any(one.instant for one in of("wattspan-host", "Power by use"))
    assert all(one.instant for one in of("wattspan-host", "Devices"))


def test_graph_that_leads_to_traces_asks_for_exemplars() -> None:
    (graph,) = of("wattspan-spans", "Joules per call, by span")
    assert graph.exemplar
    assert "wattspan_span_energy_joules_total" in graph.expr


def test_gpu_variable_shows_name_and_selects_uuid() -> None:
    (known,) = (one for one in documents().values() if one["uid"] == "wattspan-gpus")
    gpu = variables(known)[-1]
    assert (gpu.name, gpu.label, gpu.all) == ("gpu", "hw_id", True)
    assert gpu.selector.startswith("wattspan_gpu_info{")


def test_query_has_the_no_value_text_of_its_panel() -> None:
    (cost,) = of("wattspan-host", "Cost in this range")
    assert cost.empty == "no price set"


def test_variable_that_asks_for_the_values_of_no_label_is_an_error() -> None:
    broken = {
        "templating": {"list": [{"type": "query", "name": "x", "query": {"query": "metrics(x)"}}]}
    }
    with pytest.raises(ValueError, match=r"\$x asks for the values of no label"):
        variables(broken)


def test_panels_in_a_folded_row_count() -> None:
    target = {"refId": "A", "expr": "up"}
    folded = {
        "type": "row",
        "panels": [
            {
                "type": "stat",
                "title": "x",
                "id": 2,
                "targets": [target],
                "fieldConfig": {"defaults": {}},
            }
        ],
    }
    document = {
        "uid": "x", "panels": [folded], "templating": {"list": []}, "annotations": {"list": []}
    }  # fmt: skip
    assert [one.panel for one in queries_of(document)] == ["x"]


def test_filling_replaces_every_variable_as_grafana_would() -> None:
    filled = dashboards.fill(
        'rate(x{job=~"$job", instance="${instance}"}[$__rate_interval]) / increase(y[$__range])',
        {"job": "a|b", "instance": "c:1"},
        rate_interval="20s",
        span="1h",
    )
    assert filled == 'rate(x{job=~"a|b", instance="c:1"}[20s]) / increase(y[1h])'


def test_variable_without_a_value_is_never_sent() -> None:
    with pytest.raises(KeyError, match=r"\$job has no value"):
        dashboards.fill('x{job="$job"}', {})


def test_every_query_can_be_filled() -> None:
    for query in dashboards.queries():
        values = {one.name: ".*" for one in query.variables}
        assert "$" not in dashboards.fill(query.expr, values)


def test_selectors_are_parsed_with_their_functions() -> None:
    rate, plain = selectors('sum(rate(a_total{x="1", y=~"$z"}[5m])) / b{}')
    assert (rate.name, rate.function, rate.window) == ("a_total", "rate", "5m")
    assert rate.matchers == {"x": ("=", "1"), "y": ("=~", "$z")}
    assert (plain.name, plain.function, plain.window) == ("b", "", "")


def test_grouping_labels_are_found_wherever_they_stand() -> None:
    assert grouping("sum by (a, b) (x{}) * on (a) group_left (c) y{}") == {"a", "b", "c"}


def test_promql_keywords_are_not_series() -> None:
    assert bare("topk(3, sum by (a) (x{})) and on (a) y{} / 3.6e6 or vector(0)") == set()
    assert bare("sum(x{}) / loose") == {"loose"}


@pytest.mark.parametrize(
    ("expr", "kept"),
    [
        ("x{}", True),
        ("rate(x{}[5m])", True),
        ("1 - (sum by (a, host) (x{}))", True),
        ("topk by (a) (3, x{})", True),
        ("sum without (a) (x{})", True),
        ("sum without (host) (x{})", False),
        ("sum by (a) (x{} * on (host) y{})", False),
        ("topk(3, count(x{}))", False),
        ("vector(0)", False),
    ],
)
def test_first_vector_gives_the_result_labels(expr: str, kept: bool) -> None:
    assert keeps(expr, "host", {"x": {"host", "a"}, "y": {"host"}}.__getitem__) is kept


def test_ranking_function_is_parsed_with_its_operands() -> None:
    expr = "x{} and on (a) topk(3, sum by (a) (y{})) or bottomk by (a) (2, z{}"
    assert ranked(expr) == {"topk(3, sum by (a) (y{}))", "bottomk by (a) (2, z{}"}


@pytest.mark.parametrize("uid", sorted(documents()))
def test_differences_of_powers_are_whole_milliwatts_and_never_negative(uid: str) -> None:
    """A difference of equal sums of floats was "-38.9 fW"."""
    for panel in panels(documents()[uid]):
        unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit")
        for target in panel.get("targets", ()):
            expr = target.get("expr", "")
            if unit == "watt" and ") - " in expr:
                assert expr.startswith("clamp_min(round("), panel["title"]


@pytest.mark.parametrize("uid", sorted(documents()))
def test_first_group_kind_is_one_that_every_process_has(uid: str) -> None:
    chosen = documents()[uid]["templating"]["list"]
    assert {one["current"]["value"] for one in chosen if one["name"] == "group_kind"} <= {"user"}
