"""Finished spans as the tables of a case file: names, kinds, links, times and attributes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST = 100
"""Characters of a text value: what models were asked and what they answered is cut."""


def case_text(head: dict[str, str], spans: Sequence[Any]) -> str:
    """A case file with the words of ``head`` and these ReadableSpans, without expected figures."""
    lines = [f"{key} = {_value(text)}" for key, text in head.items()]
    first = min(span.start_time for span in spans)
    traces: dict[int, int] = {}
    idents: dict[int, int] = {}
    for span in sorted(spans, key=lambda one: one.end_time):
        context, parent = span.context, span.parent
        lines += [
            "",
            "[[span]]",
            f"name = {_value(span.name)}",
            f'kind = "{span.kind.name}"',
            f"trace = {traces.setdefault(context.trace_id, len(traces) + 1)}",
            f"id = {idents.setdefault(context.span_id, len(idents) + 1)}",
        ]
        if parent is not None:
            lines.append(f"parent = {idents.setdefault(parent.span_id, len(idents) + 1)}")
        lines += [
            f"start = {(span.start_time - first) / 1e9:.3f}",
            f"end = {(span.end_time - first) / 1e9 + 0.001:.3f}",
            "[span.attributes]",
            *_attributes(span.attributes.items()),
        ]
    return "\n".join(lines) + "\n"


def _attributes(pairs: Iterable[tuple[str, Any]]) -> Iterable[str]:
    for name, value in pairs:
        if isinstance(value, str | int | float):
            yield f"{json.dumps(name)} = {_value(value)}"


def _value(value: str | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value[:LONGEST], ensure_ascii=True)
    return repr(value)
