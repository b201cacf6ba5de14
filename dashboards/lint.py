"""Rules for every dashboard that name their violations.

Each rule takes a dashboard as Grafana stores it and yields one sentence for each breach.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from dashboards.expressions import (
    VARIABLE,
    Selector,
    bare,
    grouping,
    keeps,
    legend_labels,
    ranked,
    selectors,
)
from dashboards.known import SCRAPE, Known
from dashboards.queries import panels, queries_of, variables

Document = Mapping[str, Any]
Boards = Mapping[str, Document]  # by uid
Series = Mapping[str, Known]

BUILT_IN = {"__rate_interval", "__range", "__url_time_range", "__data", "__field"}
RATES = {"rate": {"$__rate_interval"}, "increase": {"$__range", "$__rate_interval"}}
WINDOWS = {**RATES, "changes": {"$__rate_interval"}, "present_over_time": {"10m"}}
"""Allowed windows of functions, except the displayed range."""

DESCRIBED = 20
"""Least length of a description of content and provenance, in characters."""


def problems(document: Document, boards: Boards, known: Series) -> list[str]:
    """Every breach of every rule."""
    found = [f"{document['uid']}: {text}" for rule in RULES for text in rule(document)]
    found += [f"{document['uid']}: {text}" for rule in QUERIES for text in rule(document, known)]
    return found + [f"{document['uid']}: {text}" for text in links(document, boards)]


# ------------------------------------------------------------------------ the dashboard itself


def fixed(document: Document) -> Iterator[str]:
    """The dashboard is not editable in Grafana and has a known uid."""
    if document.get("editable") is not False:
        yield "it is editable"
    if not document.get("uid", "").startswith("wattspan-"):
        yield "its uid does not begin with wattspan-"
    if not document.get("title") or not document.get("description"):
        yield "it has no title or no description"
    if "wattspan" not in document.get("tags", ()):
        yield "it has no tag wattspan"


def chosen(document: Document) -> Iterator[str]:
    """Data source, job and instance are variables, refreshed on a change of the time range."""
    listed = document["templating"]["list"]
    names = [one["name"] for one in listed]
    for wanted in ("datasource", "job", "instance"):
        if wanted not in names:
            yield f"there is no variable {wanted}"
    for one in listed:
        if one["type"] == "query" and one.get("refresh") != 2:
            yield f"variable {one['name']} is not refreshed when the time range changes"
        if not one.get("label"):
            yield f"variable {one['name']} has no label"
    before = {"datasource"}
    for variable in variables(document):
        for name in sorted(set(VARIABLE.findall(variable.selector)) - before):
            yield f"variable {variable.name} needs ${name}, which does not stand before it"
        before.add(variable.name)
    used = set(VARIABLE.findall(" ".join(query.expr for query in queries_of(document))))
    for name in sorted(used - set(names) - BUILT_IN):
        yield f"${name} is used and cannot be chosen"


def placed(document: Document) -> Iterator[str]:
    """Panels have unique ids and do not overlap."""
    everything = [*document["panels"], *panels(document)]
    ids = [one.get("id") for one in {id(one): one for one in everything}.values()]
    if len(set(ids)) != len(ids) or not all(ids):
        yield f"panel ids are missing or not unique: {ids}"
    for one in document["panels"]:
        place = one["gridPos"]
        if place["x"] + place["w"] > 24:
            yield f"panel {one['title']!r} is wider than the grid"
    for one, other in combinations(document["panels"], 2):
        if _overlap(one["gridPos"], other["gridPos"]):
            yield f"panels {one['title']!r} and {other['title']!r} overlap"


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    across = one["x"] < other["x"] + other["w"] and other["x"] < one["x"] + one["w"]
    return across and one["y"] < other["y"] + other["h"] and other["y"] < one["y"] + one["h"]


def told(document: Document) -> Iterator[str]:
    """Every panel has a description and a unique title."""
    titles = [panel.get("title") for panel in panels(document)]
    for twice in sorted({str(one) for one in titles if titles.count(one) > 1}):
        yield f"several panels have the title {twice!r}"
    for panel in panels(document):
        title = panel.get("title")
        if not title:
            yield f"panel {panel.get('id')} has no title"
        if len(panel.get("description") or "") < DESCRIBED:
            yield f"panel {title!r} has no description"
        if panel.get("datasource", {}).get("uid") != "${datasource}":
            yield f"panel {title!r} does not ask the chosen data source"
        for target in panel.get("targets", ()):
            if target.get("datasource", {}).get("uid") != "${datasource}":
                yield f"panel {title!r}, {target.get('refId')} does not ask the chosen data source"
        refs = [target.get("refId") for target in panel.get("targets", ())]
        if not refs or len(set(refs)) != len(refs):
            yield f"panel {title!r} has no queries, or several of one letter"


def measured(document: Document) -> Iterator[str]:
    """Every figure has a unit, or names for its values."""
    for panel in panels(document):
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if defaults.get("unit") or defaults.get("mappings"):
            continue
        if panel["type"] not in ("table", "xychart"):
            yield f"panel {panel['title']!r} has no unit"
            continue
        for column in _figures(panel):
            if not _says_unit(panel, column):
                yield f"panel {panel['title']!r}: column {column!r} has no unit"


def _figures(panel: Mapping[str, Any]) -> Iterator[str]:
    """The columns of a table that are values rather than labels, by their shown names."""
    for transformation in panel.get("transformations", ()):
        renamed = transformation.get("options", {}).get("renameByName", {})
        yield from (name for field, name in renamed.items() if field.startswith("Value"))


def _says_unit(panel: Mapping[str, Any], column: str) -> bool:
    return any(
        override["matcher"]["options"] == column
        and any(one["id"] in ("unit", "mappings") for one in override["properties"])
        for override in panel["fieldConfig"].get("overrides", ())
    )


# -------------------------------------------------------------------------------- the queries


def narrowed(document: Document, known: Series) -> Iterator[str]:
    """Every selector names job and instance; sums over all hosts have no instance to name."""
    for where, selector in _selectors(document):
        wanted = SCRAPE if selector.name in known and not _fleet(selector.name) else {"job"}
        for label in sorted(wanted - selector.matchers.keys()):
            yield f"{where}: {selector.name} is not narrowed by {label}"
        for label in sorted(SCRAPE & selector.matchers.keys()):
            if f"${label}" not in selector.matchers[label][1]:
                yield f"{where}: {selector.name} has a fixed {label}"


def _fleet(name: str) -> bool:
    return name.startswith(("fleet:", "fleet_")) or name == "up"


def existing(document: Document, known: Series) -> Iterator[str]:
    """Every queried series exists and has the queried labels."""
    for where, selector in _selectors(document):
        if selector.name not in known:
            yield f"{where}: there is no series {selector.name}"
            continue
        strange = selector.matchers.keys() - known[selector.name].labels
        for label in sorted(strange):
            yield f"{where}: {selector.name} has no label {label}"
    for query in queries_of(document):
        have = {label for one in selectors(query.expr) for label in _labels(one, known)}
        for label in sorted(grouping(query.expr) - have):
            yield f"{query.panel}, {query.ref}: no series of it has a label {label}"
        for name in sorted(bare(query.expr)):
            yield f"{query.panel}, {query.ref}: {name} is not narrowed at all"
    for panel in panels(document):
        for target in panel.get("targets", ()):
            have = {label for one in selectors(target["expr"]) for label in _labels(one, known)}
            for label in sorted(legend_labels(target.get("legendFormat") or "") - have):
                yield f"{panel['title']}, {target['refId']}: its legend names no label {label}"


def _labels(selector: Selector, known: Series) -> frozenset[str]:
    return known[selector.name].labels if selector.name in known else frozenset()


def counted(document: Document, known: Series) -> Iterator[str]:
    """Counters are read as rates only, and nothing else is; over windows that Grafana chooses."""
    for where, selector in _selectors(document):
        if selector.name not in known:
            continue
        if known[selector.name].counter and selector.function not in RATES:
            yield f"{where}: the counter {selector.name} is not under rate or increase"
        if not known[selector.name].counter and selector.function in RATES:
            yield f"{where}: {selector.name} is no counter and is under {selector.function}"
        window = selector.window.partition(":")[0]  # without the resolution of a subquery
        if window and window not in WINDOWS.get(selector.function, {"$__range"}):
            yield f"{where}: {selector.function} of {selector.name} over {selector.window}"


def summed(document: Document, known: Series) -> Iterator[str]:
    """No sum mixes domains with their subdomains, kinds of groups, or currencies."""
    for where, selector in _selectors(document):
        labels = known[selector.name].labels if selector.name in known else frozenset()
        whole = selector.name.endswith("_info") or selector.matchers.get("hw_parent") == ("=", "")
        if "hw_parent" in labels and not whole:
            yield f"{where}: {selector.name} counts joules twice without hw_parent="
        if "group_kind" in labels and selector.matchers.get("group_kind", ("",))[0] != "=":
            yield f"{where}: {selector.name} adds groups of different kinds"
    for query in queries_of(document):
        for selector in selectors(query.expr):
            if "currency" in _labels(selector, known) - grouping(query.expr):
                yield f"{query.panel}, {query.ref}: {selector.name} adds different currencies"


def told_apart(document: Document, known: Series) -> Iterator[str]:
    """Series of several hosts have the host in their legend, for uniqueness."""
    if not any(one.name == "instance" and one.multi for one in variables(document)):
        return

    def labels(name: str) -> frozenset[str]:
        return known[name].labels if name in known else frozenset()

    for panel in panels(document):
        for target in panel.get("targets", ()):
            if keeps(target["expr"], "instance", labels) and "instance" not in _names(
                panel, target
            ):
                yield f"{panel['title']}, {target['refId']}: nothing of it tells the host"


def _names(panel: Mapping[str, Any], target: Mapping[str, Any]) -> set[str]:
    """Displayed labels of a result: the columns of a table, or the labels in a legend."""
    if target.get("format") != "table":
        return legend_labels(target.get("legendFormat") or "")
    moves = panel.get("transformations", ())
    return {name for one in moves for name in one.get("options", {}).get("includeByName", ())}


def same_rows(document: Document) -> Iterator[str]:
    """The columns of a table, and both axes of points, are of the same few."""
    for panel in panels(document):
        tables = [one for one in panel.get("targets", ()) if one.get("format") == "table"]
        chosen = [ranked(target["expr"]) for target in tables]
        for target, few in zip(tables, chosen, strict=True):
            if few != chosen[0]:
                yield f"{panel['title']}, {target['refId']}: it is of other rows than the first"


def _selectors(document: Document) -> Iterator[tuple[str, Selector]]:
    for query in queries_of(document):
        for selector in selectors(query.expr):
            yield f"{query.panel}, {query.ref}", selector


# ---------------------------------------------------------------------------------- the links


def links(document: Document, boards: Boards) -> Iterator[str]:
    """Every link leads to an existing dashboard, and keeps the time and the variables."""
    others = {link["url"].removeprefix("/d/") for link in document["links"]}
    for uid in sorted(boards.keys() - others - {document["uid"]}):
        yield f"no link leads to {uid}"
    for link in document["links"]:
        if not (link.get("includeVars") and link.get("keepTime")):
            yield f"the link to {link['url']} forgets the time or what was chosen"
    for url in [*(link["url"] for link in document["links"]), *_data_links(document)]:
        uid, _, asked = url.removeprefix("/d/").partition("?")
        if uid not in boards:
            yield f"a link leads to {url}, which is nowhere"
            continue
        there = {one["name"] for one in boards[uid]["templating"]["list"]}
        for name in re.findall(r"var-(\w+)=", asked):
            if name not in there:
                yield f"a link to {uid} chooses {name}, which cannot be chosen there"
        if asked and "${__url_time_range}" not in asked:
            yield f"a link to {uid} forgets the time"


def _data_links(document: Document) -> Iterator[str]:
    for panel in panels(document):
        config = panel.get("fieldConfig", {})
        found = list(config.get("defaults", {}).get("links") or ())
        for override in config.get("overrides", ()):
            for one in override["properties"]:
                if one["id"] == "links":
                    found += one["value"]
        yield from (link["url"] for link in found)


Rule = Callable[[Document], Iterator[str]]
QueryRule = Callable[[Document, Series], Iterator[str]]

RULES: tuple[Rule, ...] = (fixed, chosen, placed, told, measured, same_rows)
QUERIES: tuple[QueryRule, ...] = (narrowed, existing, counted, summed, told_apart)
