"""Settings of [exporters.otlp], and errors of invalid ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from testbed.pushing import opened
from testbed.scrapes import full_host
from testbed.snapshots import busy_host

from wattspan.cli import cli as wattspan
from wattspan.model import Provenance
from wattspan.model.settings import REDACTED, SettingError, convert, redacted
from wattspan.otlp.destination import METRICS, SPANS
from wattspan.ports import ConfigError, ExporterContext, WattspanError
from wattspan.testing import ManualClock
from wattspan_exporters.catalogue import CATALOGUE, select_metrics
from wattspan_exporters.otlp import OtlpSettings, plugin
from wattspan_exporters.otlp.encoder import MetricsEncoder
from wattspan_exporters.otlp.exporter import ResourceAttributes, machine_id, parse_attributes

SECRET = "s3cr3t"


def table(**written: object) -> OtlpSettings:
    return convert(written, OtlpSettings, "exporters.otlp")


def test_exporter_is_absent_without_an_endpoint() -> None:
    context = ExporterContext(ManualClock(), "1", print)
    assert plugin.open(table(), context) is None


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"interval": "10ms"}, "out of bounds, at least"),
        ({"compresion": "gzip"}, "did you mean 'compression'"),
        ({"protocol": "http/json"}, '"http/protobuf" or "grpc"'),
        ({"tls_key": "x"}, "tls_key needs tls_certificate"),
        ({"compression": "zstd"}, '"auto", "gzip" or "none"'),
        ({"endpoint": "http://c", "tls_ca": "x"}, "of no use at an endpoint without TLS"),
        ({"endpoint": "grpc://c", "tls_certificate": "x"}, "write https:// or grpcs://"),
    ],
)
def test_invalid_settings_are_refused(written: dict[str, object], said: str) -> None:
    with pytest.raises(SettingError, match=re.escape(said)):
        table(**written)


@pytest.mark.parametrize(
    ("endpoint", "settings", "said"),
    [
        ("collector:4318", {}, "[exporters.otlp] endpoint"),
        ("http://me:pw@collector", {}, "put them into headers"),
        ("grpc://collector/v1/metrics", {}, "OTLP/gRPC has no path"),
        ("http://c", {"headers": f"authorization {SECRET}"}, "[exporters.otlp] headers, pair 1"),
        ("http://c", {"headers": f"content-type={SECRET}"}, "a header of the protocol itself"),
        ("http://c", {"headers_file": "/nowhere"}, "Cannot read /nowhere: no such file"),
        ("http://c", {"resource": "team"}, "[exporters.otlp] resource, pair 1"),
        ("http://c", {"metrics": ("hw.enrgy",)}, 'No metric is called "hw.enrgy"'),
        ("http://c", {"metrics": ("hw.energy", "!hw.*")}, "leaves none"),
    ],
)
def test_invalid_files_are_an_error_at_the_start(
    endpoint: str, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(WattspanError, match=re.escape(said)) as raised:
        opened(endpoint, log=[], **settings)
    assert str(raised.value).endswith(".")
    assert SECRET not in str(raised.value)


def test_invalid_line_of_the_headers_file_is_named_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text(f"x-tenant: a\n{SECRET}\n")
    with pytest.raises(WattspanError, match="line 2") as raised:
        opened("http://c", log=[], headers_file=str(file))
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (f"host: {SECRET}", '"host" is a header of the protocol itself'),
        (f"x-tenant: {SECRET}\u00e9", 'the value of "x-tenant" holds characters'),
        (f"two words: {SECRET}", 'it is not of the form "name: value"'),
    ],
)
def test_invalid_header_of_the_file_names_file_and_line(
    tmp_path: Path, line: str, fault: str
) -> None:
    file = tmp_path / "headers"
    file.write_text(f"# who we are\n{line}\n", encoding="utf-8")
    with pytest.raises(WattspanError, match=re.escape(fault)) as raised:
        opened("http://c", log=[], headers_file=str(file))
    assert str(raised.value).startswith(f"{file}, line 2: ")
    assert "pair" not in str(raised.value)
    assert SECRET not in str(raised.value)


def test_missing_grpc_extra_error_names_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "h2.connection", None)
    with pytest.raises(ConfigError, match=" install h2`") as raised:
        opened("http://collector:4317", protocol="grpc", log=[])
    assert str(raised.value).startswith('[exporters.otlp] endpoint = "grpc://collector:4317"')


# ------------------------------------------------------------------------------------- secrets


def test_headers_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        f'[exporters.otlp]\nheaders = "authorization={SECRET}"\n'
        f'[spans]\nforward_headers = "authorization={SECRET}"\n'
    )
    for options in ([], ["--json"], ["--origin"], ["--origin", "--json"]):
        shown = CliRunner().invoke(
            wattspan, ["config", "show", "--config", str(file), *options], prog_name="wattspan"
        )
        assert shown.exit_code == 0, shown.output
        assert SECRET not in shown.output
        assert shown.output.count(f'"{REDACTED}"') == 2
    assert json.loads(shown.stdout)


@pytest.mark.parametrize(
    ("endpoint", "warned"),
    [
        ("http://collector.example:4318", True),
        ("https://collector.example", False),
        ("http://127.0.0.1:4318", False),
        ("unix:///run/collector", False),
    ],
)
def test_headers_without_tls_are_warned_about(endpoint: str, warned: bool) -> None:
    log: list[str] = []
    opened(endpoint, log=log, headers=f"authorization={SECRET}")
    assert [("without TLS" in line, SECRET in line) for line in log] == [(True, False)] * warned
    opened(endpoint, log=log)
    assert len(log) == warned


def test_secret_that_is_not_set_is_not_hidden() -> None:
    assert redacted(table()) == table()
    assert redacted(table(headers="a=b")).headers == REDACTED


# ------------------------------------------------------------------------------------ resource


def resource(machine: str = "abc", **environ: str) -> ResourceAttributes:
    return ResourceAttributes("1.2.3", configured={}, environ=environ, machine_id=machine)


def test_host_is_the_same_over_restarts_and_another_is_another() -> None:
    here, again = resource()(full_host()), resource()(full_host())
    assert here == again
    assert here["host.id"] == "abc"
    assert resource("other")(full_host())["service.instance.id"] != here["service.instance.id"]


def test_emulated_host_has_its_own_host_id() -> None:
    found = resource()(busy_host(Provenance.EMULATED))
    assert found["wattspan.emulated"] is True
    assert "host.id" not in found
    assert "wattspan.emulated" not in resource()(busy_host())


def test_invalid_unicode_from_the_environment_is_replaced() -> None:
    said = resource(OTEL_SERVICE_NAME="caf\udce9")
    (request,) = MetricsEncoder(said, "1.2.3").encode(full_host())
    (sent,) = ExportMetricsServiceRequest.FromString(request.body).resource_metrics
    values = {pair.key: pair.value.string_value for pair in sent.resource.attributes}
    assert values["service.name"] == "caf?"


def test_machine_without_an_id_has_no_host_id(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("uninitialized!\n")
    binary.write_bytes(b"\xff\xfe")
    assert machine_id((tmp_path / "none", empty, binary)) == ""
    assert "host.id" not in resource("")(full_host())


def test_configuration_wins_over_the_environment_and_that_over_the_agent() -> None:
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "service.name=a,host.name=b,team=c,site=d"}
    told = ResourceAttributes(
        "1", configured={"site": "e"}, environ=environ | {"OTEL_SERVICE_NAME": "f"}, machine_id=""
    )(full_host())
    assert [told[key] for key in ("service.name", "host.name", "team", "site")] == list("fbce")


def test_pairs_may_contain_percent_encoded_separators() -> None:
    assert parse_attributes(" a = b%2Cc ,, d=e%3Df,", "here") == {"a": "b,c", "d": "e=f"}


# ------------------------------------------------------------------------------------- metrics


def test_patterns_include_and_exclude_in_order() -> None:
    patterns = ("hw.*", "wattspan.gap.time", "!hw.gpu.*", "hw.gpu.memory.*")
    names = [metric.name for metric in select_metrics(patterns, "exporters.otlp")]
    assert "hw.energy" in names
    assert "hw.gpu.utilization" not in names
    assert "hw.gpu.memory.usage" in names
    assert len(names) == len(set(names))
    order = [metric.name for metric in CATALOGUE]
    assert names == sorted(names, key=order.index)


def test_remedies_name_the_settings_of_the_signal() -> None:
    assert (METRICS.away, SPANS.away) == (
        "Is the collector running, and is `endpoint` its address?",
        "Is the collector running, and is `forward` its address?",
    )
