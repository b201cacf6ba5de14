"""Findings of doctor on metric destinations."""

from __future__ import annotations

import socket

from wattspan.cli.doctor import Finding, Severity
from wattspan.cli.doctor.network import examine_exporters
from wattspan.config import Config
from wattspan_exporters.otlp import OtlpSettings


def told(**settings: object) -> Finding:
    table = OtlpSettings(**settings)  # type: ignore[arg-type]
    (finding,) = examine_exporters(Config(exporters={"otlp": table}))
    return finding


def test_metrics_without_endpoint_are_a_note() -> None:
    assert told().mark is Severity.NOTE
    (without,) = examine_exporters(Config())
    assert without.mark is Severity.NOTE


def test_receiver_of_metrics_is_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as receiver:
        url = f"http://127.0.0.1:{receiver.getsockname()[1]}"
        assert told(endpoint=url).mark is Severity.OK
        assert told(endpoint=url, protocol="grpc").detail.startswith("grpc://")
    finding = told(endpoint=url)
    assert finding.mark is Severity.WARN
    assert "connection refused; the newest metrics will be pushed" in finding.detail
    assert finding.remedy == "Start the collector, or correct [exporters.otlp] endpoint."


def test_invalid_endpoint_is_a_failure() -> None:
    finding = told(endpoint="collector:4318")
    assert finding.mark is Severity.FAIL
    assert "[exporters.otlp] endpoint" in finding.detail
