"""Prometheus queries of the committed dashboards, in a form that runs without Grafana.

Read from the JSON, not from the generator: the test covers the installed files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRAFANA = Path(__file__).parent / "grafana"

LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)$")
QUERY_RESULT = re.compile(r"query_result\((?P<selector>.+)\)$")
VALUE_IN_REGEX = re.compile(r'(?P<label>\w+)="\(\?<value>')


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable whose values are asked of Prometheus: the values of ``label`` in ``selector``."""

    name: str
    selector: str  # may hold variables that stand before this one
    label: str
    multi: bool
    all: bool  # whether "All" can be selected, which Grafana writes as ".*"


@dataclass(frozen=True, slots=True)
class Query:
    """One query of one panel, as Grafana would send it but for its variables."""

    dashboard: str  # the dashboard's uid
    panel: str  # the panel's title, or the annotation's name
    panel_id: int  # 0 for an annotation
    ref: str
    expr: str
    instant: bool
    exemplar: bool
    empty: str  # the panel's text without data: its cause
    variables: tuple[Variable, ...]  # in the order of their dependencies


def documents(folder: Path = GRAFANA) -> dict[str, dict[str, Any]]:
    """Every committed dashboard, by file name."""
    paths = sorted(folder.glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def panels(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that is drawn, those of folded rows included; rows themselves are not."""
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", ())
        else:
            yield panel


def variables(document: Mapping[str, Any]) -> tuple[Variable, ...]:
    """The variables whose values Prometheus is asked for."""
    found = []
    for one in document["templating"]["list"]:
        if one["type"] != "query":
            continue
        selector, label = _asked(one)
        found.append(
            Variable(one["name"], selector, label, bool(one["multi"]), bool(one["includeAll"]))
        )
    return tuple(found)


def _asked(variable: Mapping[str, Any]) -> tuple[str, str]:
    """The selector and the label that ``variable`` takes its values from."""
    text = variable["query"]["query"]
    if asked := LABEL_VALUES.match(text):
        return asked["selector"], asked["label"]
    asked, label = QUERY_RESULT.match(text), VALUE_IN_REGEX.search(variable.get("regex", ""))
    if asked and label:
        return asked["selector"], label["label"]
    raise ValueError(f"${variable['name']} asks for the values of no label: {text}")


def queries(folder: Path = GRAFANA) -> tuple[Query, ...]:
    """Every query of every panel and annotation of every committed dashboard."""
    return tuple(query for document in documents(folder).values() for query in queries_of(document))


def queries_of(document: Mapping[str, Any]) -> Iterator[Query]:
    known = variables(document)
    for panel in panels(document):
        for target in panel.get("targets", ()):
            empty = panel["fieldConfig"]["defaults"].get("noValue", "")
            yield _query(document, panel["title"], panel["id"], target, known, empty)
    for annotation in document["annotations"]["list"]:
        if target := annotation.get("target"):
            yield _query(document, annotation["name"], 0, target, known, "none in this range")


def _query(
    document: Mapping[str, Any],
    panel: str,
    panel_id: int,
    target: Mapping[str, Any],
    known: tuple[Variable, ...],
    empty: str,
) -> Query:
    return Query(
        dashboard=document["uid"],
        panel=panel,
        panel_id=panel_id,
        ref=target["refId"],
        expr=target["expr"],
        instant=bool(target.get("instant")),
        exemplar=bool(target.get("exemplar")),
        empty=empty,
        variables=known,
    )


def fill(expr: str, values: Mapping[str, str], rate_interval: str = "1m", span: str = "5m") -> str:
    """``expr`` with its variables replaced, as Grafana would for a window of length ``span``.

    ``values`` is by variable name; give several as ``a|b`` and all as ``.*``. A variable that has
    no value is an error: a query with a remaining ``$`` would never be sent.
    """
    built_in = {"__rate_interval": rate_interval, "__interval": rate_interval, "__range": span}

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"]
        if name in built_in:
            return built_in[name]
        if name not in values:
            raise KeyError(f"${name} has no value, in: {expr}")
        return values[name]

    return re.sub(r"\$(?:\{(?P<braced>\w+)\}|(?P<plain>\w+))", value, expr)
