"""Attachment to an application's provider, and process attributes of its spans."""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import psutil
import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, TracerProvider
from testbed.announcing import ends, listening, starts

import wattspan.otel
from wattspan.sdk import span_processor
from wattspan.sdk.span_processor import SpanProcessor


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider
    provider.shutdown()


def processors(provider: TracerProvider) -> list[SpanProcessor]:
    added = provider._active_span_processor._span_processors
    return [each for each in added if isinstance(each, SpanProcessor)]


def test_instrumenting_twice_adds_one_processor(provider: TracerProvider) -> None:
    assert wattspan.otel.instrument(provider)
    assert wattspan.otel.instrument(provider)
    assert len(processors(provider)) == 1


def test_manually_added_processor_is_sufficient(provider: TracerProvider) -> None:
    provider.add_span_processor(wattspan.otel.SpanProcessor())
    assert wattspan.otel.instrument(provider)
    assert len(processors(provider)) == 1


def test_entry_point_is_the_hook_of_opentelemetry_instrument() -> None:
    (found,) = entry_points(group="opentelemetry_post_instrument", name="wattspan")
    assert found.load() is wattspan.otel.instrument


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "yes", "on"])
def test_instrumentation_can_be_disabled(
    word: str, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_DISABLED", word)
    assert not wattspan.otel.instrument(provider)
    assert processors(provider) == []
    assert "process.pid" not in provider.resource.attributes


def test_missing_provider_is_logged_at_debug_level_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WATTSPAN_DEBUG", raising=False)
    with caplog.at_level(logging.DEBUG):
        assert not wattspan.otel.instrument(trace.NoOpTracerProvider())  # type: ignore[arg-type]
        assert caplog.messages == []
        monkeypatch.setenv("WATTSPAN_DEBUG", "1")
        assert not wattspan.otel.instrument(trace.NoOpTracerProvider())  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert "NoOpTracerProvider is no TracerProvider of the SDK" in message


def test_failing_provider_does_not_break_the_application() -> None:
    class Broken:
        def __bool__(self) -> bool:
            raise RuntimeError("broken")

    assert not wattspan.otel.instrument(Broken())  # type: ignore[arg-type]


def test_concurrent_processors_are_not_announced() -> None:
    active = ConcurrentMultiSpanProcessor()
    provider = TracerProvider(active_span_processor=active, shutdown_on_exit=False)
    assert not wattspan.otel.instrument(provider)
    assert processors(provider) == []
    active._executor.shutdown()


def test_spans_of_the_provider_are_announced(run_dir: Path, provider: TracerProvider) -> None:
    with listening(run_dir) as feed:
        wattspan.otel.instrument(provider)
        provider.get_tracer("application").start_span("work").end()
        reports = feed.drain()
        assert (len(starts(reports)), len(ends(reports))) == (1, 1)


# ------------------------------------------------------------------------- which process this is


def test_resource_has_pid_and_start_time(provider: TracerProvider) -> None:
    wattspan.otel.instrument(provider)
    said = provider.resource.attributes
    assert said["process.pid"] == os.getpid()
    created = datetime.datetime.fromisoformat(str(said["process.creation.time"]))
    assert abs(created.timestamp() - psutil.Process().create_time()) < 1


def test_earlier_tracers_have_the_resource_attributes(provider: TracerProvider) -> None:
    tracer = provider.get_tracer("early")
    wattspan.otel.instrument(provider)
    span = tracer.start_span("work")
    assert span.resource.attributes["process.pid"] == os.getpid()  # type: ignore[attr-defined]
    span.end()


def test_preset_pid_attribute_is_kept() -> None:
    provider = TracerProvider(resource=Resource({"process.pid": 4711}), shutdown_on_exit=False)
    wattspan.otel.instrument(provider)
    assert dict(provider.resource.attributes) == {"process.pid": 4711}
    provider.shutdown()


def test_start_time_has_the_form_of_the_semantic_conventions() -> None:
    text = span_processor.process_creation_time()
    assert text.endswith("Z")
    parsed = datetime.datetime.fromisoformat(text)
    assert parsed.isoformat(timespec="milliseconds").replace("+00:00", "Z") == text


# ---------------------------------------------------------------------------------- being light


def loaded(statement: str) -> set[str]:
    """Modules loaded by a fresh interpreter after ``statement``."""
    code = f"import sys\nbefore = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_neither_sdk_nor_agent() -> None:
    own = {name for name in loaded("import wattspan.otel") if name.startswith("wattspan")}
    assert own == {"wattspan", "wattspan.otel"}
    assert not any(name.startswith("opentelemetry") for name in loaded("import wattspan.otel"))


def test_instrumentation_loads_only_itself_and_the_sdk() -> None:
    sdk = "import opentelemetry.sdk.trace as sdk; provider = sdk.TracerProvider()"
    more = loaded(f"{sdk}\nimport wattspan.otel\nassert wattspan.otel.instrument(provider)")
    ours = {name for name in more - loaded(sdk) if not name.startswith("_")}
    assert {name for name in ours if not name.startswith("wattspan")} <= {"array", "fcntl", "mmap"}
    assert {name for name in ours if name.startswith("wattspan")} == {
        "wattspan",
        "wattspan.otel",
        "wattspan.sdk",
        "wattspan.sdk.ring",
        "wattspan.sdk.span_processor",
    }
