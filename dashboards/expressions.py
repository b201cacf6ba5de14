"""Inputs of a PromQL expression: enough of its grammar for the dashboards' linter.

Every selector here has braces, so that a name before a brace is a series and nothing else is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass

SELECTOR = re.compile(
    r"(?:(?P<function>\w+)\()?"
    r"(?P<name>[A-Za-z_:][\w:]*)\{(?P<matchers>[^}]*)\}"
    r"(?:\[(?P<window>[^\]]+)\])?"
)
MATCHER = re.compile(r'(?P<label>\w+)\s*(?P<operator>=~|!~|!=|=)\s*"(?P<value>(?:[^"\\]|\\.)*)"')
GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<labels>[^)]*)\)")
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
VARIABLE = re.compile(r"\$\{?(\w+)")
AGGREGATED = re.compile(
    r"(?:sum|avg|min|max|count|group)\s*(?:(?P<how>by|without)\s*\((?P<labels>[^)]*)\)\s*)?\("
)
BEFORE = re.compile(r"(?:topk|bottomk)\s*by\s*\([^)]*\)\s*\(|\w*\(|[\d.]+(?:e\d+)?\s*[-+*/,]|\s+")
"""Tokens before the vector whose labels the result has: a function, a number, a space."""

RANKED = re.compile(r"\b(?:topk|bottomk)\s*(?:by\s*\([^)]*\)\s*)?\(")
WORD = re.compile(r"(?<![\w.$:])[A-Za-z_:][\w:]*")

LANGUAGE = {
    "by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless",
    "offset", "bool", "end", "start", "inf", "nan",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector: the series, its matchers, and the function applied directly."""

    name: str
    matchers: dict[str, tuple[str, str]]  # label: operator, value
    function: str  # directly around it, "" for none
    window: str  # "" for an instant selector


def selectors(expr: str) -> list[Selector]:
    """Every selector of ``expr``, from left to right."""
    return [
        Selector(
            name=found["name"],
            matchers={
                one["label"]: (one["operator"], one["value"])
                for one in MATCHER.finditer(found["matchers"])
            },
            function=found["function"] or "",
            window=found["window"] or "",
        )
        for found in SELECTOR.finditer(expr)
    ]


def grouping(expr: str) -> set[str]:
    """The labels by which ``expr`` adds up or matches."""
    return {
        label.strip()
        for found in GROUPED.finditer(expr)
        for label in found["labels"].split(",")
        if label.strip()
    }


def keeps(expr: str, label: str, labels: Callable[[str], Container[str]]) -> bool:
    """True if ``label`` (``labels`` are those of a series) distinguishes the results of ``expr``.

    The first vector decides: of the others only the matching labels come in.
    """
    rest = expr
    while rest:
        if found := AGGREGATED.match(rest):
            named = label in {one.strip() for one in (found["labels"] or "").split(",")}
            if found["how"] != "without" or named:
                return named and found["how"] == "by"
        elif found := SELECTOR.match(rest):
            return label in labels(found["name"])
        elif not (found := BEFORE.match(rest)):
            return False
        rest = rest[found.end() :]
    return False


def ranked(expr: str) -> set[str]:
    """Every ``topk`` and ``bottomk`` of ``expr``, as it is written."""
    return {expr[found.start() : _closed(expr, found.end())] for found in RANKED.finditer(expr)}


def _closed(expr: str, start: int) -> int:
    """The place after the parenthesis that closes the one before ``start``."""
    depth = 1
    for place in range(start, len(expr)):
        depth += {"(": 1, ")": -1}.get(expr[place], 0)
        if depth == 0:
            return place + 1
    return len(expr)


def bare(expr: str) -> set[str]:
    """Names in ``expr`` that can only be series without any matcher."""
    rest = GROUPED.sub(" ", SELECTOR.sub(lambda found: f"{found['function'] or ''}( ", expr))
    rest = re.sub(r"\[[^\]]*\]", " ", rest)
    called = set(re.findall(r"([A-Za-z_]\w*)\s*\(", rest))
    aggregated = set(re.findall(r"\b(sum|avg|min|max|count|group|topk|bottomk)\b", rest))
    return set(WORD.findall(rest)) - called - aggregated - LANGUAGE


def legend_labels(legend: str) -> set[str]:
    """The labels that a legend or a title names."""
    return set(LEGEND.findall(legend))
