"""The Prometheus rules and the files installed with them, without a server."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import dashboards
import pytest
import yaml
from dashboards.__main__ import documents as generated
from dashboards.promql import rest, series
from dashboards.queries import queries_of
from testbed.recorded_labels import labels_of
from testbed.requirements import ROOT, find_program
from testbed.scrapes import CATALOGUE_SERIES

from wattspan.util.files import PUBLIC_ADDRESS
from wattspan_exporters.catalogue import CATALOGUE

DASHBOARDS = ROOT / "dashboards"
PROMETHEUS = DASHBOARDS / "prometheus"
RECORDING, ALERTS = PROMETHEUS / "recording.yml", PROMETHEUS / "alerts.yml"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOK = ROOT / "docs" / "how-to" / "alerts.md"
REFERENCE = ROOT / "docs" / "reference" / "rules.md"
CHOSEN = {"job": "wattspan", "instance": "a"}  # of the series of assert_samples


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(path: Path, kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a file by name; ``kind`` is ``record`` or ``alert``."""
    found = [rule for group in loaded(path)["groups"] for rule in group["rules"]]
    named = {rule[kind]: rule for rule in found}
    assert len(named) == len(found), "every name once"
    return named


RECORDED, ALERTED = rules(RECORDING, "record"), rules(ALERTS, "alert")
EXPRESSIONS = {name: rule["expr"] for name, rule in {**RECORDED, **ALERTED}.items()}


def promtool(*words: str | Path) -> str:
    """Output of promtool; it must succeed."""
    program = find_program("promtool")
    assert program
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------- promtool


@pytest.mark.needs_prometheus
def test_promtool_accepts_rules_and_example_configuration() -> None:
    said = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(RECORDED)} rules found" in said
    assert f"{len(ALERTED)} rules found" in said


@pytest.mark.needs_prometheus
@pytest.mark.slow
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_rules_pass_promtool_tests(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_every_rule_has_a_test_of_its_values() -> None:
    asked = [
        asking["expr"]
        for path in TESTS
        for test in loaded(path)["tests"]
        for asking in test.get("promql_expr_test", ())
        if asking["exp_samples"]
    ]
    untested = [name for name in RECORDED if not any(name in expr.split("(")[-1] for expr in asked)]
    assert untested == []


def test_alerts_have_positive_and_negative_tests() -> None:
    seen: dict[str, set[bool]] = {name: set() for name in ALERTED}
    for path in TESTS:
        for test in loaded(path)["tests"]:
            for asking in test.get("alert_rule_test", ()):
                seen[asking["alertname"]].add(bool(asking["exp_alerts"]))
    assert {name: fires for name, fires in seen.items() if fires != {True, False}} == {}


# --------------------------------------------------------------------- metrics in the rules


def metrics(expr: str) -> set[str]:
    """The names of the metrics in an expression."""
    bare = re.sub(r'"[^"]*"', "", expr)
    bare = re.sub(r"\b(?:by|on|without|ignoring|group_left|group_right) *\([^)]*\)", "", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
    names = set(re.findall(r"[a-z_]+(?::[a-z0-9_]+)+|[a-z_0-9]+_[a-z_0-9]+(?! *\()", bare))
    return {name for name in names if not re.fullmatch(r"group_(?:left|right)|.*_over_time", name)}


def test_rules_use_existing_metrics() -> None:
    known = CATALOGUE_SERIES | set(RECORDED)
    for name, expr in EXPRESSIONS.items():
        spoken = metrics(expr) | ({"up"} if "up{" in expr else set())
        assert spoken, name
        assert spoken - known - {"up"} == set(), name


def test_rules_use_existing_labels() -> None:
    known = {label for metric in CATALOGUE for label in metric.labels}
    for name, expr in EXPRESSIONS.items():
        grouped = re.findall(r"\b(?:by|on|group_left) *\(([^)]*)\)", expr)
        matched = re.findall(r"(\w+)=~?\"|(\w+)!~?=?\"", expr)
        used = {label.strip() for group in grouped for label in group.split(",")}
        used |= {label for pair in matched for label in pair if label}
        assert used - known - {"", "job", "instance", "exported_job"} == set(), name


def test_counters_are_used_in_rate_functions_only() -> None:
    for name, rule in RECORDED.items():
        counters = re.findall(r"\b(\w+_total)\b(?:\{[^}]*\})?(\[5m\])?", rule["expr"])
        assert [counter for counter, window in counters if not window] == [], name


def test_rules_follow_their_dependencies() -> None:
    """Rules of a group are evaluated in turn: later rules would be half a minute old."""
    groups = [[rule["record"] for rule in group["rules"]] for group in loaded(RECORDING)["groups"]]
    for names in groups:
        for place, name in enumerate(names):
            rests_on = metrics(EXPRESSIONS[name]) & set(RECORDED)
            assert rests_on <= set(names[:place])


# ------------------------------------------------------------------- another price than ours


@pytest.mark.needs_prometheus
def test_price_and_carbon_can_come_from_metrics_of_the_operator(tmp_path: Path) -> None:
    """According to the comments in the file: the expression below takes the place of the one
    above."""
    text, switched = re.subn(
        r"^( +)expr: .*\n( +# .*\n)\1# expr: (.*)$",
        r"\1expr: \3",
        RECORDING.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert switched == 2
    (tmp_path / "recording.yml").write_text(text, encoding="utf-8")
    series = {
        'hw_host_energy_joules_total{job="wattspan", instance="a"}': "0+3000x30",
        'hw_host_energy_joules_total{job="wattspan", instance="b"}': "0+6000x30",
        'electricity_price_per_kwh{currency="EUR", job="market"}': "0.25x30",
        'grid_carbon_grams_per_kwh{job="market"}': "400x30",
    }
    expected: dict[str, dict[str, float]] = {
        "instance:wattspan_cost_per_hour:rate5m": {
            '{job="wattspan", instance="a", currency="EUR"}': 0.025,
            '{job="wattspan", instance="b", currency="EUR"}': 0.05,
        },
        "fleet:wattspan_carbon_grams_per_hour:rate5m": {'{job="wattspan"}': 120},
    }
    test = {
        "rule_files": ["recording.yml"],
        "evaluation_interval": "30s",
        "tests": [
            {
                "interval": "30s",
                "input_series": [{"series": s, "values": v} for s, v in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"round({name}, 0.0001)",
                        "eval_time": "10m",
                        "exp_samples": [{"labels": at, "value": v} for at, v in samples.items()],
                    }
                    for name, samples in expected.items()
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test), encoding="utf-8")
    promtool("test", "rules", tmp_path / "test.yml")


# -------------------------------------------------------------------------------------- panels


@pytest.mark.needs_prometheus
@pytest.mark.parametrize(
    ("panel", "series"),
    [
        ("Without complete energy", 'wattspan_span_outcomes_total{reason="unknown_process"}'),
        ("Outside spans", 'wattspan_span_outside_energy_joules_total{hw_type="gpu"}'),
    ],
)
def test_share_of_one_is_shown_as_full(tmp_path: Path, panel: str, series: str) -> None:
    """The other part has no series yet: that is when somebody should look."""
    assert_shown(tmp_path, panel, {series: 10}, 1)


@pytest.mark.needs_prometheus
def test_duplicate_span_is_not_shown_as_loss(tmp_path: Path) -> None:
    spans = {"joined": 6, "partial": 2, "duplicate": 80}
    outcomes = {
        f'wattspan_span_outcomes_total{{reason="{reason}"}}': each for reason, each in spans.items()
    }
    assert_shown(tmp_path, "Without complete energy", outcomes, 0.25)


@pytest.mark.slow
@pytest.mark.needs_prometheus
@pytest.mark.parametrize("panel", ["Spans with most energy", "Energy against latency"])
def test_truncated_span_list_has_complete_rows(tmp_path: Path, panel: str) -> None:
    """The longest calls here are those that spend least: each figure alone would choose others."""
    series = {}
    for n in range(60):
        labels = f'{{service_name="service{n % 2}", span_name="span{n // 2}"}}'
        series[f"wattspan_span_energy_joules_total{labels}"] = 100 + n
        series[f"wattspan_span_static_energy_joules_total{labels}"] = 30
        series[f"wattspan_span_dynamic_energy_joules_total{labels}"] = 60
        series[f"wattspan_span_seconds_total{labels}"] = 100 - n
        series[f"wattspan_spans_total{labels}"] = 1
        series[f"wattspan_span_tokens_total{labels}".replace("}", ', direction="output"}')] = 200
    first, *others = of_spans(panel)
    for number, other in enumerate(others):
        both, either = (
            f"count({other} {how} on (service_name, span_name) {first})" for how in ("and", "or")
        )
        assert_answered(tmp_path / f"{number}.yml", f"{both} + {either}", series, 50 + 50)


ENGINE = 'engine="chat", model="llama", owner="vllm"'


@pytest.mark.needs_prometheus
def test_engine_panels_have_the_figures_of_every_engine(tmp_path: Path) -> None:
    """One engine has figures of all types; the page of another cannot be read."""
    prefix = "wattspan_gen_ai_engine"
    typed = {way: f'{ENGINE}, token_type="{way}", method="engine_metrics"' for way in TOKEN_ENERGY}
    given = {f'wattspan_source_up{{source="engine:{name}"}}': up for name, up in PAGES.items()}
    for way, (joules, wide) in TOKEN_ENERGY.items():
        given[f"{prefix}_token_energy_joules{{{typed[way]}}}"] = f"{joules}x30"
        given[f"{prefix}_token_energy_uncertainty_joules{{{typed[way]}}}"] = f"{wide}x30"
    given[f"{prefix}_request_energy_joules{{{ENGINE}}}"] = "114x30"
    given[f"{prefix}_request_energy_uncertainty_joules{{{ENGINE}}}"] = "5x30"
    given[f"{prefix}_idle_ratio{{{ENGINE}}}"] = "0.25x30"
    given[f"{prefix}_energy_joules_total{{{ENGINE}}}"] = "0+18000x30"
    given[f'{prefix}_tokens_total{{{ENGINE}, token_type="output"}}'] = "0+6000x30"

    chat = '{instance="a", engine="chat", model="llama"}'
    found = [200, 600, 0.25, 0.0825, 0.0009, 0.03, 0.009, 0.7, 0.06, 114, 5]
    table = of_spans("Engines")
    assert len(table) == len(found)
    for number, (asked, value) in enumerate(zip(table, found, strict=True)):
        assert_samples(tmp_path / f"{number}.yml", asked, given, {chat: value})
    (asked,) = of_spans("Unreadable engine pages")
    unreadable = {'{instance="a", source="engine:code"}': 0}
    assert_samples(tmp_path / "pages.yml", asked, given, unreadable)
    (asked,) = of_spans("Joules per token of engines")
    lines = {
        f'{{instance="a", engine="chat", model="llama", token_type="{way}"}}': joules
        for way, (joules, _) in TOKEN_ENERGY.items()
    }
    assert_samples(tmp_path / "tokens.yml", asked, given, lines)


PAGES = {"chat": "1x30", "code": "0x30"}
TOKEN_ENERGY = {"all": (0.0825, 0.0009), "input": (0.03, 0.009), "output": (0.7, 0.06)}


@pytest.mark.needs_prometheus
@pytest.mark.parametrize(
    ("panel", "series", "value"),
    [
        ("host/Power by use", "hw_energy_joules_total", 1),
        ("fleet/Power of the fleet", "fleet_type:wattspan_power_watts:rate5m", 600),
    ],
)
def test_power_without_attribution_is_in_the_stack(
    tmp_path: Path, panel: str, series: str, value: float
) -> None:
    """Of an Intel board there is neither idle nor unattributed energy."""
    board, title = panel.split("/")
    *_, remainder = (
        query.expr
        for query in queries_of(generated()[f"{board}.json"])
        if query.panel == title and "round(" in query.expr and "topk(" not in query.expr
    )
    asked = f"sum({dashboards.fill(remainder, {**CHOSEN, 'group_kind': 'user'})})"
    assert_answered(tmp_path / "test.yml", asked, {f'{series}{{hw_type="gpu"}}': 30}, value)


@pytest.mark.needs_prometheus
def test_rest_is_shown_while_the_chosen_series_have_ended(tmp_path: Path) -> None:
    """The job with most energy of the range is over; another goes on with 1 W."""
    energy = "wattspan_group_energy_joules_total"
    asked = dashboards.fill(rest(1, "group", series(energy)), CHOSEN, span="10m")
    jobs = {"ended": "0+900x10 stale", "steady": "0+30x30"}
    given = {f'{energy}{{group="{name}"}}': values for name, values in jobs.items()}
    assert_samples(tmp_path / "test.yml", asked, given, {"{}": 1})


@pytest.mark.needs_prometheus
@pytest.mark.parametrize("board", ["autotuner", "fleet", "gpus", "host", "processes", "spans"])
@pytest.mark.parametrize(("gap", "shown"), [("0x30", 0), ("0x15 30x15", 1)])
def test_dashboards_show_a_lower_bound_in_the_range(
    tmp_path: Path, board: str, gap: str, shown: int
) -> None:
    """The counter has been a lower bound for days; the range has a gap or has none."""
    given = {
        'wattspan_host_certainty_info{figure="energy", certainty="lower_bound"}': "1x30",
        'wattspan_host_certainty_info{figure="power", certainty="known"}': "1x30",
        'wattspan_gap_seconds_total{hw_id="p", reason="absent"}': gap,
        'instance:wattspan_gap_seconds:rate5m{reason="absent"}': gap,
    }
    _, asked = (q for q in queries_of(generated()[f"{board}.json"]) if q.panel == "Provenance")
    samples = {'{certainty="lower_bound"}': 1} if shown else {}
    assert_samples(tmp_path / "test.yml", dashboards.fill(asked.expr, CHOSEN), given, samples)


def of_spans(panel: str) -> list[str]:
    """Queries of ``panel`` of *Spans* with every variable at All."""
    asked = [q for q in dashboards.queries() if (q.dashboard, q.panel) == ("wattspan-spans", panel)]
    return [dashboards.fill(q.expr, {one.name: ".*" for one in q.variables}) for q in asked]


def assert_shown(tmp_path: Path, panel: str, series: dict[str, int], value: float) -> None:
    """``panel`` of *Spans* shows ``value`` where each of ``series`` grows by so much at a time."""
    (asked,) = of_spans(panel)
    assert_answered(tmp_path / "test.yml", asked, series, value)


def assert_answered(path: Path, expr: str, series: dict[str, int], value: float) -> None:
    """promtool finds ``value`` where each of ``series`` grows by so much at a time."""
    given = {name: f"0+{n}x30" for name, n in series.items()}
    assert_samples(path, expr, given, {"{}": value})


def assert_samples(path: Path, expr: str, given: dict[str, str], found: dict[str, float]) -> None:
    """promtool finds the samples, by their labels, where each series has the values of `given`."""
    named = {name.replace("{", '{job="wattspan", instance="a", '): v for name, v in given.items()}
    samples = [{"labels": labels, "value": value} for labels, value in found.items()]
    test = {
        "interval": "30s",
        "input_series": [{"series": s, "values": values} for s, values in named.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "10m", "exp_samples": samples}],
    }
    path.write_text(yaml.safe_dump({"tests": [test]}), encoding="utf-8")
    promtool("test", "rules", path)


# -------------------------------------------------------------------------------------- alerts


def test_alerts_have_severity_and_runbook_link() -> None:
    for name, alert in ALERTED.items():
        assert alert["labels"].keys() == {"severity"}, name
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert alert["for"], name
        notes = alert["annotations"]
        assert notes.keys() == {"summary", "description", "runbook_url"}, name
        assert not notes["summary"].endswith("."), f"{name}: a headline"
        assert notes["description"].endswith("."), f"{name}: sentences"
        page = f"{PUBLIC_ADDRESS}{RUNBOOK.relative_to(ROOT)}"
        assert notes["runbook_url"] == f"{page}#{name.lower()}"


def test_runbook_has_a_chapter_for_every_alert_and_no_other() -> None:
    chapters = re.findall(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert chapters == list(ALERTED)


def test_runbook_chapters_have_meaning_diagnosis_and_remedy() -> None:
    for chapter in RUNBOOK.read_text(encoding="utf-8").split("\n### ")[1:]:
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in chapter, chapter.split("\n")[0]


def test_reference_names_every_recording_rule() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*RECORDED]


def labels_told() -> dict[str, set[str]]:
    """The labels that the reference promises of every recording rule."""
    rows = re.findall(
        r"^\| `([^`]+:[^`]+)` \| ([^|]*)\|", REFERENCE.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {name: {"job", *re.findall(r"`(\w+)`", labels)} for name, labels in rows}


def test_reference_labels_match_promtool_output() -> None:
    seen: dict[str, set[str]] = {}
    for path in TESTS:
        for test in loaded(path)["tests"]:
            for asking in test.get("promql_expr_test", ()):
                if rounded := re.fullmatch(r"round\(([^,{]+)(?:\{.*\})?, 0.0001\)", asking["expr"]):
                    for sample in asking["exp_samples"]:
                        labels = set(re.findall(r"(\w+)=", sample["labels"]))
                        seen.setdefault(rounded[1], labels)
                        assert seen[rounded[1]] == labels
    assert seen == labels_told()


def test_bench_of_dashboards_has_series_with_the_labels_of_the_rules() -> None:
    for name, told in labels_told().items():
        made = list(labels_of(name, hosts=2))
        assert {frozenset(labels) for labels in made} == {frozenset(told)}, name
        assert len({tuple(labels.items()) for labels in made}) == len(made), "each series once"


# ---------------------------------------------------------------------- start of the stack

COMPOSE = loaded(DASHBOARDS / "compose.yaml")


def test_every_file_that_is_mounted_exists_and_every_volume_is_declared() -> None:
    named = set()
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (DASHBOARDS / source).exists(), source
                assert mount.endswith(":ro"), mount
            else:
                named.add(source)
    assert named == set(COMPOSE["volumes"])


def test_compose_images_are_pinned_and_bound_to_loopback() -> None:
    for name, service in COMPOSE["services"].items():
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        if service.get("network_mode") == "host":
            said = f"{service.get('command')} {service.get('environment')}"
            assert "127.0.0.1" in said, name


def test_grafana_finds_its_dashboards_where_they_are_mounted() -> None:
    (provider,) = loaded(DASHBOARDS / "provisioning" / "dashboards" / "wattspan.yml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts["./grafana"].startswith(provider["options"]["path"] + "/")
    assert mounts["./provisioning"] == "/etc/grafana/provisioning"
    assert provider["allowUiUpdates"] is False
    assert provider["options"]["foldersFromFilesStructure"] is True


def test_exemplar_leads_to_a_data_source_that_is_provisioned() -> None:
    found = loaded(DASHBOARDS / "provisioning" / "datasources" / "wattspan.yml")["datasources"]
    sources = {source["uid"]: source for source in found}
    prometheus = next(one for one in sources.values() if one["type"] == "prometheus")
    (destination,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert destination["name"] == "trace_id"
    assert sources[destination["datasourceUid"]]["type"] == "tempo"
    assert [one["name"] for one in found if one.get("isDefault")] == [prometheus["name"]]


def test_configured_rule_files_are_mounted() -> None:
    mounts = dict(mount.split(":")[:2] for mount in COMPOSE["services"]["prometheus"]["volumes"])
    inside = {Path(target).name for target in mounts.values()}
    assert set(loaded(PROMETHEUS / "prometheus.yml")["rule_files"]) <= inside
    features = " ".join(COMPOSE["services"]["prometheus"]["command"])
    assert "--enable-feature=exemplar-storage" in features
