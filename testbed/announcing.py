"""Applications that tell of their spans, and somebody to listen: both ends of the side channel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from wattspan.ingest.side_channel import MAX_RECORDS, ProcessRecords, SideChannelServer
from wattspan.ports import PeerPrincipals
from wattspan.sdk.span_processor import SpanProcessor
from wattspan.spans.values import SpanEnd, SpanStart

PREAMBLE = """
import os, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
import wattspan.otel
provider = TracerProvider()
trace.set_tracer_provider(provider)
assert wattspan.otel.instrument()
tracer = trace.get_tracer("application")
"""


@contextmanager
def listening(
    run_dir: Path, principals: PeerPrincipals | None = None, **bounds: int
) -> Iterator[SideChannelServer]:
    """A server that reads all records of one user in one turn, unless ``bounds`` say otherwise."""
    everything = {"max_owner_records": MAX_RECORDS, **bounds}
    feed = SideChannelServer(run_dir / "feed.sock", principals, **everything)
    feed.start()
    try:
        yield feed
    finally:
        feed.stop()


@contextmanager
def telling(run_dir: Path) -> Iterator[TracerProvider]:
    """A provider whose spans this process announces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTSPAN_RUN_DIR", str(run_dir))
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SpanProcessor())
        try:
            yield provider
        finally:
            provider.shutdown()


def processor_of(provider: TracerProvider) -> SpanProcessor:
    processors = provider._active_span_processor._span_processors
    return next(each for each in processors if isinstance(each, SpanProcessor))


def start(run_dir: Path, code: str, **environ: str) -> subprocess.Popen[str]:
    """A Python program that announces every span; ``code`` follows the preamble."""
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", PREAMBLE + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"WATTSPAN_RUN_DIR": str(run_dir)} | environ,
    )


def finish(program: subprocess.Popen[str], within: float = 60.0) -> str:
    """Its output after a successful exit; the caller checks descriptors and children."""
    try:
        output, errors = program.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        program.kill()
        program.communicate()
        raise
    assert (program.returncode, errors) == (0, "")
    return output


def run(run_dir: Path, code: str, **environ: str) -> str:
    """Complete output of such a program."""
    return finish(start(run_dir, code, **environ))


def starts(reports: list[ProcessRecords]) -> list[SpanStart]:
    return [each for report in reports for each in report.records if isinstance(each, SpanStart)]


def ends(reports: list[ProcessRecords]) -> list[SpanEnd]:
    return [each for report in reports for each in report.records if isinstance(each, SpanEnd)]


def by_process(reports: list[ProcessRecords]) -> dict[int, list[SpanStart | SpanEnd]]:
    found: dict[int, list[SpanStart | SpanEnd]] = {}
    for report in reports:
        found.setdefault(report.pid, []).extend(report.records)
    return found
