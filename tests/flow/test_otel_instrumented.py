"""Unmodified applications under opentelemetry-instrument: nothing but the environment is ours."""

from __future__ import annotations

import datetime
import http.client
import json
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.announcing import listening
from testbed.apps import app_environment
from testbed.fixtures import entered_in
from testbed.requirements import APPS
from testbed.waiting import eventually

from wattspan.ingest.side_channel import ProcessRecords, SideChannelServer
from wattspan.spans.values import SpanEnd, SpanStart

pytestmark = pytest.mark.needs_apps

SHOP = """
from flask import Flask
app = Flask(__name__)

@app.get("/hello")
def hello():
    return "hello"

if __name__ == "__main__":
    import sys
    app.run(port=int(sys.argv[1]))
"""

COMMANDS = {
    "flask": ["python", "shop.py", "{port}"],
    "gunicorn": ["gunicorn", "-w", "2", "-b", "127.0.0.1:{port}", "shop:app"],
    "gunicorn, preloaded": [
        "gunicorn", "-w", "2", "--preload", "-b", "127.0.0.1:{port}", "shop:app",
    ],
    "gunicorn, threads": [
        "gunicorn", "-w", "2", "--threads", "4", "-b", "127.0.0.1:{port}", "shop:app",
    ],
}  # fmt: skip

Shop = Callable[[str], tuple[subprocess.Popen[str], str]]


feed = entered_in(listening)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Shop]:
    started = []

    def start(server: str) -> tuple[subprocess.Popen[str], str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        (tmp_path / "shop.py").write_text(SHOP)
        command = [word.format(port=port) for word in COMMANDS[server]]
        program = subprocess.Popen(
            [APPS.parent / "opentelemetry-instrument", *command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=app_environment(
                WATTSPAN_RUN_DIR=str(tmp_path),
                OTEL_SERVICE_NAME="shop",
                OTEL_TRACES_EXPORTER="console",
                OTEL_METRICS_EXPORTER="none",
            ),
        )
        started.append(program)
        return program, f"http://127.0.0.1:{port}/hello"

    yield start
    for program in started:
        if program.poll() is None:
            program.kill()
        program.communicate()


def fetched(url: str) -> bytes:
    with (
        suppress(OSError, http.client.HTTPException),
        urllib.request.urlopen(url, timeout=20) as answer,
    ):
        return bytes(answer.read())
    return b""


def exported(output: str) -> list[dict[str, object]]:
    """Spans written by the console exporter, within other output."""
    decoder, spans = json.JSONDecoder(), []
    place = output.find("{\n")
    while place >= 0:
        span, place = decoder.raw_decode(output, place)
        spans.append(span)
        place = output.find("{\n", place)
    return spans


@pytest.mark.parametrize("server", list(COMMANDS))
def test_exported_spans_were_announced_by_their_process(
    server: str, feed: SideChannelServer, serve: Shop
) -> None:
    program, url = serve(server)
    eventually(lambda: fetched(url), f"{server} answers", within=60)
    for _ in range(5):
        assert fetched(url) == b"hello"
    reports: list[ProcessRecords] = []

    def ended() -> bool:
        reports.extend(feed.drain())
        return sum(isinstance(e, SpanEnd) for report in reports for e in report.records) >= 6

    eventually(ended, "six requests are told of")
    # the development server ignores SIGTERM, and would not export pending spans
    program.send_signal(signal.SIGINT if server == "flask" else signal.SIGTERM)
    output, _ = program.communicate(timeout=60)
    reports.extend(feed.drain())  # including a request that failed at first
    told = {
        each.id.hex(): report.pid
        for report in reports
        for each in report.records
        if isinstance(each, SpanStart)
    }
    spans = exported(output)
    assert len(spans) >= 6
    for span in spans:
        attributes = span["resource"]["attributes"]  # type: ignore[index]
        assert attributes["service.name"] == "shop"
        assert attributes["process.pid"] == told[span["context"]["span_id"][2:]]  # type: ignore[index]
        datetime.datetime.fromisoformat(attributes["process.creation.time"])
