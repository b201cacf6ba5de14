"""Names of others' choosing, wherever names are shown: none is more than a name there."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import logging
import re
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from testbed.file_writer import desk
from testbed.program import in_process, wattspan
from testbed.scrapes import Series, full_host, parse
from testbed.top_view import document

from wattspan.api.requests import sanitized
from wattspan.capper.protocol import KnobRow, StateReply
from wattspan.cli.run import one_line
from wattspan.cli.top.controls import ViewOptions
from wattspan.cli.top.view import render_snapshot
from wattspan.http.messages import HttpRequest
from wattspan.http.sockets import Peer
from wattspan.ingest.span_attributes import printable
from wattspan.model import Failure, Knob, Snapshot
from wattspan.service.daemon import FailureReporter
from wattspan.testing import ManualClock
from wattspan.util.text import clean_label as group_name
from wattspan_exporters.page import LivePage
from wattspan_exporters.prometheus.exporter import MetricsPages, SelfMetrics
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

NAMES = {
    "newline": "a\nwattspan_forged_total 1\n# EOF\n",
    "carriage return": "a\rwattspan: forged",
    "quote": 'a"} 1\nforged{b="',
    "backslash": 'a\\',
    "escape": "\x1b[2J\x1b]0;owned\x07\x9b31m",
    "script": "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "formula": "=cmd|' /C calc'!A0",
    "formula at": "@SUM(1+1)*cmd",
    "NUL": "a\0b",
    "surrogate": "a\udcffb",
    "direction": "a\u202etxt.exe\u2066",
    "line separator": "a\u2028b\u0085c",
    "long": "x" * (1 << 17),
    "format": "%s %n {0} ${jndi:ldap://x}",
    "markup": "[red]owned[/red][link=http://evil]",
}  # fmt: skip
names = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 64 * 1024
"""Characters beyond which somebody's name would be most of what is shown."""


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """A capper's socket that gives the same answer to every line of every client."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline():
                self.wfile.write(answer)

    with socketserver.ThreadingUnixStreamServer(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def _with(one: Any, **changes: Any) -> Any:
    return one._replace(**changes) if hasattr(one, "_replace") else replace(one, **changes)


def called(name: str) -> Snapshot:
    """A host on which everything that others name has this name."""
    host = full_host()
    failure = Failure("rapl", name, host.health[0].failures[0].trouble, name, name)
    made: Snapshot = _with(
        host,
        host=name,
        domains=tuple(
            _with(one, domain=_with(one.domain, name=name)) for one in host.domains
        ),
        processes=tuple(
            _with(one, info=_with(one.info, command=name)) for one in host.processes
        ),
        groups=tuple(
            _with(one, group=_with(one.group, name=name)) for one in host.groups[:1]
        ),
        health=(_with(host.health[0], failures=(failure,)),),
        gpus=tuple(_with(one, throttling=(name,)) for one in host.gpus),
        spans=_with(
            host.spans, rows=tuple(
                _with(one, service=name, name=f"{number}{name}" if number else name)
                for number, one in enumerate(host.spans.rows)
            ),
        ),
    )  # fmt: skip
    return made


def pages(snapshot: Snapshot, *, page: bool = True) -> Callable[[str], bytes]:
    clock = ManualClock()
    site = LivePage(lambda: snapshot) if page else None
    made = MetricsPages(lambda: snapshot, clock, "1", SelfMetrics("1"), site)
    return lambda path: asyncio.run(made(HttpRequest("GET", path, {}, {}, b"", Peer()))).body


@cache
def ordinary(form: ExpositionFormat) -> tuple[Mapping[Series, float], int]:
    """The scrape of a host without any such name, and its size."""
    written = Renderer().render(called("benign"), form)
    return parse(written, form), len(written)


@names
@pytest.mark.parametrize("form", list(ExpositionFormat), ids=lambda form: form.name.lower())
def test_names_cannot_inject_into_a_scrape(name: str, form: ExpositionFormat) -> None:
    written = Renderer().render(called(name), form)
    told = parse(written, form)
    benign, size = ordinary(form)
    assert {series for series, _ in told} == {series for series, _ in benign}
    assert len(told) == len(benign)
    assert "wattspan_forged_total" not in {series for series, _ in told}
    assert not CONTROL.search(written.decode())
    assert len(written) < size + LONGEST


@names
def test_names_are_only_text_on_the_page(name: str) -> None:
    snapshot = called(name)
    for path in ("/live.json", "/v1/snapshot"):
        body = pages(snapshot)(path)
        assert isinstance(json.loads(body), dict)
        assert not CONTROL.search(body.decode())
        assert len(body) < len(pages(called("benign"))(path)) + LONGEST
    landing = pages(snapshot, page=False)("/").decode("utf-8", "strict")
    assert "<script" not in landing
    assert "<img" not in landing


@names
def test_names_are_sanitised_in_terminal_and_log(name: str) -> None:
    snapshot = called(name)
    console = Console(width=200, height=60, color_system=None)
    with console.capture() as captured:
        console.print(
            render_snapshot(document(snapshot), ViewOptions(width=200, height=60, notice=name))
        )
    assert "held down" in captured.get()
    assert not CONTROL.search(captured.get())
    assert len(captured.get()) < LONGEST
    told: list[str] = []
    FailureReporter(told.append).report(snapshot.health, 0)
    handler, heard = logging.StreamHandler(stream := io.StringIO()), logging.getLogger("a test")
    handler.addFilter(one_line)
    heard.addHandler(handler)
    heard.propagate = False
    try:
        for sentence in told:
            heard.warning("%s", sentence)
    finally:
        heard.removeHandler(handler)
    assert stream.getvalue().count("\n") == len(told) == 1
    assert not CONTROL.search(stream.getvalue())


@names
def test_names_are_sanitised_in_caps_status(name: str, tmp_path: Path) -> None:
    name = name.replace("\udcff", "")[:200]  # JSON in UTF-8 carries no lone surrogate
    row = KnobRow(
        knob=Knob.GPU_POWER, device=name, name=name, requested=300_000, enforced=200_000,
        original=400_000, wanted=300_000, holder=name, why=name, trouble=name,
    )  # fmt: skip
    path = tmp_path / "run" / "capper.sock"
    path.parent.mkdir()
    with answering(path, msgspec.json.encode(StateReply(rows=[row], lease=1)) + b"\n"):
        done = in_process("caps", "status", WATTSPAN_AGENT_RUN_DIR=str(path.parent))
        plain = in_process("caps", "status", "--json", WATTSPAN_AGENT_RUN_DIR=str(path.parent))
    assert "because: " in done.stdout, done.stderr
    assert not CONTROL.search(done.stdout)
    assert not CONTROL.search(plain.stdout)
    assert json.loads(plain.stdout)["rows"][0]["why"] == name


def test_error_names_a_hostile_path_in_printable_characters(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2J\u202e"
    done = wattspan("report", "--state-dir", str(folder))
    assert done.returncode
    assert "?[2J?" in done.stderr
    assert not CONTROL.search(done.stderr)


@names
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_names_cannot_inject_into_files(tmp_path: Path, name: str, form: str) -> None:
    with desk(tmp_path, format=form, compression="none") as writing:
        writing.snapshot = called(name)
        writing.turn()
    (path,) = writing.closed
    text = path.read_bytes().decode("utf-8", "strict")
    assert path.parent == tmp_path
    if form == "jsonl":
        assert all(isinstance(json.loads(line), dict) for line in text.split("\n")[:-1])
        return
    rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    assert {len(row) for row in rows} == {len(rows[0])}
    cells = {cell for row in rows for cell in row}
    numbers = re.compile(r"-?[0-9.e+-]+")
    assert all(cell[:1] not in tuple("=+-@\t\r") for cell in cells if not numbers.fullmatch(cell))


@names
def test_json_output_is_valid_for_any_name(name: str) -> None:
    assert json.loads(msgspec.json.encode(document(called(name))))


@names
def test_names_are_cleaned_where_they_come_in(name: str) -> None:
    raw = name.encode("utf-8", "surrogateescape")
    for cleaned in (printable(raw, 200), group_name(name, 200), sanitized(name)):
        assert not CONTROL.search(cleaned)
        assert "\n" not in cleaned
        assert len(cleaned) <= 200
