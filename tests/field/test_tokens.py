"""Spans of clients, agents, gateways and engines: each token counts once, and none has 0 J."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import pytest
from testbed.field import FieldCase, field_cases
from testbed.token_host import TokenHost

APP = ({"name": "app"},)
ONE_CLIENT = [
    one
    for one in field_cases("tokens")
    if "process" not in one.values[0].tables and "unmetered" in one.values[0]["expected"]
]


def _process(span: Mapping[str, Any]) -> str:
    return str(span.get("process", "app"))


def _batches(spans: Sequence[Mapping[str, Any]], order: str) -> list[list[Mapping[str, Any]]]:
    """Requests of single processes, in the order of their receipt."""
    ended = sorted(spans, key=lambda each: (each["end"], -each["start"]))
    if order == "single spans":
        return [[each] for each in ended]
    if order == "outer spans first":
        return [[each] for each in reversed(ended)]
    by_process = sorted(ended, key=_process, reverse=order == "processes reversed")
    return [list(own) for _, own in groupby(by_process, key=_process)]


def _played(case: FieldCase, order: str, *, json: bool) -> TokenHost:
    host = TokenHost(case.get("process", APP), case.get("settings"))
    host.run(1)
    spans = case["span"]
    end = max(each["end"] for each in spans)
    host.run(end)
    for batch in _batches(spans, order):
        host.send(batch, case.get("resource", {}), json=json, end=end)
    host.run(3)
    return host


ORDERS = ("json", "processes", "processes reversed", "single spans", "outer spans first")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", field_cases("tokens"))
def test_tokens_count_once(case: FieldCase, order: str) -> None:
    host = _played(case, order, json=order == "json")
    accounts = host.accounts()
    expected = case["expected"]
    models = {
        (row.service, row.model): (
            sum(row.requests.values()), row.tokens["input"], row.tokens["output"],
        )
        for row in accounts.inference
    }  # fmt: skip
    assert models == {(one[0], one[1]): tuple(one[2:]) for one in expected.get("models", ())}
    unmetered = {
        (row.service, row.model, row.role): (
            row.requests, row.tokens["input"], row.tokens["output"],
        )
        for row in accounts.unmetered
    }  # fmt: skip
    assert unmetered == {
        (one[0], one[1], one[2]): tuple(one[3:]) for one in expected.get("unmetered", ())
    }
    names: dict[str, list[int]] = {}
    for span in accounts.rows:
        if span.tokens:
            before = names.get(span.name, [0, 0])
            names[span.name] = [
                before[0] + span.tokens.get("input", 0),
                before[1] + span.tokens.get("output", 0),
            ]
    assert names == expected.get("names", {})
    for row in accounts.inference:
        assert sum(row.energy.values()) > 0, "an engine's request has no energy"
    if not models:
        assert accounts.inference_idle == 0


@pytest.mark.parametrize("case", ONE_CLIENT)
def test_model_in_the_process_of_its_client_has_the_same_tokens(case: FieldCase) -> None:
    """The same spans of an application that computes the model itself, on a GPU."""
    host = TokenHost(({"name": "app", "gpu": "gpu0"},), case.get("settings"))
    host.run(1)
    end = max(each["end"] for each in case["span"])
    host.run(end)
    host.send(case["span"], {}, json=False, end=end)
    host.run(3)
    accounts = host.accounts()
    found: Counter[tuple[str, str]] = Counter()
    for row in accounts.inference:
        found[row.model, "requests"] += sum(row.requests.values())
        found.update({(row.model, way): count for way, count in row.tokens.items()})
    for call in accounts.unmetered:  # of a provider whose models run nowhere else
        found[call.model, "requests"] += call.requests
        found.update({(call.model, way): count for way, count in call.tokens.items()})
    ways = ("requests", "input", "output")
    assert found == {
        (one[1], way): count
        for one in case["expected"]["unmetered"]
        for way, count in zip(ways, one[3:], strict=True)
    }
    divided = sum(sum(row.energy.values()) for row in accounts.inference)
    assert bool(accounts.inference) <= (0 < divided + accounts.inference_idle <= host.spent)
    for way in ("input", "output"):
        of_spans = sum(row.tokens.get(way, 0) for row in accounts.rows)
        assert of_spans == sum(row.tokens[way] for row in accounts.inference)
