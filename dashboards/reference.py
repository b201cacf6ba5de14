"""The reference page of the dashboards, made of the JSON that is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "dashboards.md"

OPENING = """\
# Dashboards

Each panel of each dashboard with its content and its provenance, in the words of the description
that Grafana shows at the panel's title. Installation: [see it in
Grafana](../how-to/see-it-in-grafana.md). Data: [metrics](metrics.md) and the recording rules in
[`recording.yml`](../../dashboards/prometheus/recording.yml), which only *Fleet* needs.

On every dashboard: **idle** is grey, **unattributed** (active, but charged to no process) is amber,
and *Provenance* shows whether the figures are measured, derived, estimated or emulated, and
`lower_bound` if a part of the energy is unknown. Groups, processes and devices have distinct
colours within one graph, and possibly others in the next. An unknown figure is absent, never a
zero: its panel then names the cause, if known. Every link keeps the time range and the selected
variables.
"""


def page(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The page on ``documents``, in their order."""
    return "\n".join([OPENING, *(line for one in documents.values() for line in _board(one))])


def _board(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {document['title'].partition(' / ')[2]}\n"
    yield f"{document['description']}\n"
    listed = document["templating"]["list"]
    chosen = ", ".join(f"{one['label']} (`{one['name']}`)" for one in listed)
    yield f"Variables: {chosen}.\n"
    for marks in document["annotations"].get("list", ()):
        yield f"Marks on graphs: {marks['name'].lower()}.\n"
    yield "| panel | what it shows |"
    yield "|---|---|"
    for panel in document["panels"]:
        if panel["type"] == "row":
            yield f"| **{panel['title']}** | |"
        else:
            yield f"| {_title(panel)} | {panel['description']} |"
    yield ""


def _title(panel: Mapping[str, Any]) -> str:
    title = panel["title"]
    return f"{title.partition(':')[0]} (each)" if panel.get("repeat") else str(title)
