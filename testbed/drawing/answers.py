"""Responses of a Prometheus to all queries of a dashboard: all that drawing it needs.

Grafana's server does this for Grafana; steps without effect on a picture are omitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dashboards.queries import Variable, fill, panels, variables

WIDTH = 1440  # pixels of a picture
POINTS = 600  # about the number of horizontal pixels of a panel
_TEXT_IN_REGEX = re.compile(r'(?P<label>\w+)="\(\?<text>')
_COLUMNS = 24  # of Grafana's grid
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


class Asked(Protocol):
    """A Prometheus's API: the ``data`` of an answer; ValueError for a query it refuses."""

    def __call__(self, path: str, **parameters: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Displayed time range in Unix seconds, and the scrape interval."""

    start: float
    end: float
    scrape: float = 15.0

    @property
    def span(self) -> str:
        return f"{round(self.end - self.start)}s"

    def step(self, least: float = 0.0) -> int:
        """Seconds between the points of a panel, never closer than the scrapes are."""
        return math.ceil(max(least, self.scrape, (self.end - self.start) / POINTS))

    def rate_interval(self, step: float) -> str:
        """Grafana's ``$__rate_interval``: four scrapes, or a step and a scrape."""
        return f"{math.ceil(max(4 * self.scrape, step + self.scrape))}s"


def answered(document: Mapping[str, Any], ask: Asked, window: Window) -> dict[str, Any]:
    """``document`` and the answers to its queries, as the page that draws it reads them."""
    values = dict(_values(document, ask, window))
    plain = {name: one["value"] for name, one in values.items()}
    document = {**document, "panels": list(_repeated(document["panels"], values))}
    return {
        "dashboard": document,
        "width": WIDTH,
        "timeZone": "utc",
        "from": round(window.start * 1000),
        "to": round(window.end * 1000),
        "variables": values,
        "results": {
            str(panel["id"]): [
                _answer(panel, target, plain | panel.get("scopedValues", {}), ask, window)
                for target in panel.get("targets", ())
                if target.get("expr")
            ]
            for panel in panels(document)
        },
        "annotations": [
            event
            for annotation in document.get("annotations", {}).get("list", ())
            for event in _events(annotation, plain, ask, window)
        ],
    }


# ---------------------------------------------------------------------------------- variables


def _values(
    document: Mapping[str, Any], ask: Asked, window: Window
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The value of each variable: All where that is offered, or the first."""
    asked = {variable.name: variable for variable in variables(document)}
    so_far: dict[str, str] = {}
    for one in document.get("templating", {}).get("list", ()):
        name, every = one["name"], list[tuple[str, str]]()
        if one["type"] == "datasource":
            text = value = "Prometheus"
        elif name in asked:
            every = _options(one, asked[name], so_far, ask, window)
            text, value = next(iter(every), ("", ""))
            if asked[name].all:
                text, value = "All", ".*"
        else:
            current = one.get("current") or {}
            text, value = current.get("text", ""), current.get("value", one.get("query", ""))
        so_far[name] = str(value)
        label = one.get("label") or name
        hidden = one.get("hide") == 2 or one["type"] == "datasource"
        yield (
            name,
            {
                "label": label,
                "text": str(text),
                "value": str(value),
                "every": every or [(str(text), str(value))],
                "hidden": hidden,
            },
        )


def _repeated(
    given: Sequence[Mapping[str, Any]], values: Mapping[str, Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Each panel, and one that repeats as often as its variable has values, side by side."""
    for panel in given:
        if panel.get("panels"):
            panel = {**panel, "panels": list(_repeated(panel["panels"], values))}
        name = panel.get("repeat")
        if not name:
            yield panel
            continue
        variable = values[name]
        one = (variable["text"], variable["value"])
        every = variable["every"] if variable["value"] == ".*" else [one]
        columns = min(len(every), panel.get("maxPerRow") or 4)
        place = panel["gridPos"]
        for index, (text, value) in enumerate(every):
            row, column = divmod(index, columns)
            width = _COLUMNS // columns
            spot = {"x": column * width, "y": place["y"] + row * place["h"], "w": width}
            yield {
                **panel,
                "id": panel["id"] + 1000 * index,
                "gridPos": {**place, **spot},
                "scopedVars": {name: {"text": text, "value": value}},
                "scopedValues": {name: value},
            }


def _options(
    one: Mapping[str, Any],
    variable: Variable,
    values: Mapping[str, str],
    ask: Asked,
    window: Window,
) -> list[tuple[str, str]]:
    """Possible values of a variable, each with its text and its value."""
    parameters = {"start": str(window.start), "end": str(window.end)}
    parameters["match[]"] = fill(variable.selector, values)
    shown = _TEXT_IN_REGEX.search(one.get("regex") or "")
    label = shown["label"] if shown else variable.label
    found = {
        (series.get(label, ""), series[variable.label])
        for series in ask("series", **parameters)
        if series.get(variable.label)
    }
    return sorted(found)


# -------------------------------------------------------------------------------------- panels


def _answer(
    panel: Mapping[str, Any],
    target: Mapping[str, Any],
    values: Mapping[str, str],
    ask: Asked,
    window: Window,
) -> dict[str, Any]:
    step = window.step(seconds(target.get("interval") or panel.get("interval") or "0s"))
    query = fill(target["expr"], values, window.rate_interval(step), window.span)
    answer = {"refId": target["refId"], "target": target, "step": step, "result": []}
    try:
        if target.get("instant"):
            answer["result"] = ask("query", query=query, time=str(window.end))["result"]
        else:
            answer["result"] = _ranged(query, step, ask, window)
        if target.get("exemplar"):
            answer["exemplars"] = _exemplars(query, ask, window)
    except ValueError as refused:
        answer["error"] = str(refused)
    return answer


def _ranged(query: str, step: int, ask: Asked, window: Window) -> Any:
    start, end = (math.floor(edge / step) * step for edge in (window.start, window.end))
    asked = {"query": query, "start": str(start), "end": str(end), "step": str(step)}
    return ask("query_range", **asked)["result"]


def _exemplars(query: str, ask: Asked, window: Window) -> list[dict[str, float]]:
    found = ask("query_exemplars", query=query, start=str(window.start), end=str(window.end))
    return [
        {"time": one["timestamp"] * 1000, "value": float(one["value"])}
        for series in found
        for one in series["exemplars"]
    ]


def _events(
    annotation: Mapping[str, Any], values: Mapping[str, str], ask: Asked, window: Window
) -> Iterator[dict[str, Any]]:
    """Times at which the annotation's query becomes nonzero, for each series."""
    target = annotation.get("target") or {}
    expr = annotation.get("expr") or target.get("expr")
    if not expr or not annotation.get("enable", True):
        return
    step = window.step(seconds(annotation.get("step") or target.get("interval") or "0s"))
    query = fill(expr, values, window.rate_interval(step), window.span)
    for series in _ranged(query, step, ask, window):
        last = -math.inf
        for time, value in series["values"]:
            if float(value) == 0:
                continue
            if time - last > step:
                color = annotation.get("iconColor", "blue")
                yield {"time": time * 1000, "color": color, "labels": series["metric"]}
            last = time


def seconds(duration: str) -> float:
    """A duration as Grafana writes it (``30s``, ``>1m``), in seconds; 0 for one that varies."""
    found = re.fullmatch(r">?(\d+)(ms|s|m|h|d)", duration)
    return int(found[1]) * _SECONDS[found[2]] if found else 0.0
