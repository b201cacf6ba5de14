"""The document of ``/live.json``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
from testbed.scrapes import full_host
from testbed.snapshots import busy_host, serving_host

from wattspan.api import snapshot_document as api_snapshot
from wattspan.api.snapshot_document import decode_snapshot, snapshot_document
from wattspan.model import AgentStats, Instant, Snapshot
from wattspan_exporters import page as document
from wattspan_exporters.page.history import PageHistory

REFERENCE = Path(__file__).parents[4] / "docs/reference"


def built(snapshot: Snapshot, history: PageHistory | None = None) -> dict[str, Any]:
    encoded = msgspec.json.encode(snapshot_document(snapshot, "1.2.3"))
    body = document.build_document(snapshot, encoded, history or PageHistory())
    msgspec.json.decode(body, type=document.LiveDocument, strict=True)

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no number")

    answer: dict[str, Any] = json.loads(body, parse_constant=refuse)
    return answer


@pytest.mark.parametrize("snapshot", [full_host(), busy_host(), serving_host()])
def test_document_holds_the_snapshot_of_the_api(snapshot: Snapshot) -> None:
    facts = built(snapshot)
    told = decode_snapshot(json.dumps(facts["snapshot"]).encode())
    assert told == snapshot_document(snapshot, "1.2.3")


def test_document_of_a_host_without_counters_has_unknown_values() -> None:
    facts = built(Snapshot(Instant(0, 0), 0, ""))
    empty = {"seconds": 0.0, "joules": 0.0, "watts": None, "nodes": [], "links": []}
    assert facts["now"] == empty | {"least_watts": None, "bounded": False}
    assert facts["hour"] is facts["since"] is facts["agent_cpu"] is None
    assert facts["hour_spans"] == facts["power"]["series"] == facts["snapshot"]["domains"] == []


def test_spans_of_the_hour_have_the_energy_since_its_start() -> None:
    history, host = PageHistory(), serving_host()
    before = replace(host, at=Instant(host.at.mono - 10**9, host.at.wall - 10**9))
    history.record(replace(before, spans=replace(host.spans, rows=())))
    spans = {span["name"]: span for span in built(host, history)["hour_spans"]}
    assert next(iter(spans)) == "train_step"
    chat = spans["chat gpt-oss"]
    assert (chat["joules"], chat["calls"], chat["seconds"]) == (3930, 912, 1333)
    assert chat["output_tokens"] == 118_404
    assert spans["train_step"]["output_tokens"] == 0


def test_cpu_time_of_the_agent_is_in_cores() -> None:
    history, host = PageHistory(), busy_host()
    then = Instant(host.at.mono - 4 * 10**9, host.at.wall - 4 * 10**9)
    history.record(replace(host, at=then, stats=AgentStats(then, cpu_seconds=1.0)))
    host = replace(host, stats=AgentStats(then, cpu_seconds=1.02))
    assert built(host, history)["agent_cpu"] == pytest.approx(0.005)


def structs(module: dict[str, Any]) -> list[type]:
    return [
        struct
        for struct in module.values()
        if isinstance(struct, type) and issubclass(struct, msgspec.Struct)
        and struct is not msgspec.Struct
    ]  # fmt: skip


def test_every_field_is_in_the_reference() -> None:
    pages = {"page.md": vars(document), "api.md": vars(api_snapshot)}
    for page, module in pages.items():
        text = (REFERENCE / page).read_text(encoding="utf-8")
        for struct in structs(module):
            for name in get_type_hints(struct):
                assert f"`{name}`" in text, f"{struct.__name__}.{name}"
