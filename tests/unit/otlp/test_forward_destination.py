"""Destinations of spans as configured."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.otlp.destination import (
    METRICS,
    OtlpProtocol,
    check_destination,
    parse_destination,
    parse_headers,
)
from wattspan.ports import ConfigError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
        ("http://collector:4318/otlp/", "http://collector:4318/otlp/v1/traces"),
        ("https://otlp.example", "https://otlp.example:443/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("unix:///run/otel.sock", "unix:///run/otel.sock"),
        ("http+unix:///run/otel.sock", "unix:///run/otel.sock"),
        ("grpc://collector", "grpc://collector:4317"),
        ("grpcs://collector", "grpcs://collector:443"),
        ("grpc+unix:///run/otel.sock", "grpc+unix:///run/otel.sock"),
    ],
)
def test_address_follows_the_otlp_specification(url: str, shown: str):
    assert str(parse_destination(url)) == shown


def test_query_is_sent_and_never_shown():
    destination = parse_destination("https://collector/?key=s3cret")
    assert destination.target == "/v1/traces?key=s3cret"
    assert "s3cret" not in str(destination)


def test_scheme_names_the_protocol():
    assert parse_destination("grpc://c").protocol is OtlpProtocol.GRPC
    assert parse_destination("http://c").protocol is OtlpProtocol.HTTP
    assert parse_destination("grpcs://c").tls
    assert not parse_destination("http://c").tls


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:4318", True),
        ("http://localhost:4318", True),
        ("http://[::1]:4318", True),
        ("unix:///run/otel.sock", True),
        ("http://192.0.2.1:4318", False),
        ("http://collector:4318", False),
    ],
)
def test_local_addresses_are_recognised(url: str, here: bool):
    assert parse_destination(url).is_local is here


@pytest.mark.parametrize(
    "url",
    [
        "collector:4318",
        "ftp://collector",
        "http://",
        "http://collector:99999",
        "http://collector:port",
        "http://collector:0",
        "http://[::1",
        "http://col lector",
        "http://collector/\r\nx: y",
        "http://collector#there",
        "grpc://collector/path",
        "unix://run/otel.sock",
        "unix:",
        "",
    ],
)
def test_invalid_address_is_refused_with_the_valid_forms(url: str):
    with pytest.raises(ConfigError, match=r"forward.*write"):
        parse_destination(url)


@pytest.mark.parametrize("url", ["http://user:s3cret@collector", "http://user:s3cret@[::1"])
def test_password_in_an_address_is_refused_and_not_repeated(url: str):
    with pytest.raises(ConfigError) as refusal:
        parse_destination(url)
    assert "s3cret" not in str(refusal.value)


# ------------------------------------------------------------------------------------ headers


def test_headers_are_written_as_opentelemetry_writes_them():
    assert parse_headers("Authorization=Bearer%20abc%3D, x-tenant = a ,") == {
        "authorization": "Bearer abc=",
        "x-tenant": "a",
    }
    assert parse_headers("") == {}


def test_value_may_hold_an_equals_sign():
    assert parse_headers("authorization=Basic dTpw==") == {"authorization": "Basic dTpw=="}


@pytest.mark.parametrize(
    "text", ["s3cret", "a=ok,=s3cret", "a b=s3cret", "a=s3cret%0d%0ax: y", "content-type=s3cret"]
)
def test_invalid_header_is_refused_without_its_value(text: str):
    with pytest.raises(ConfigError, match="forward_headers, pair") as refusal:
        parse_headers(text)
    assert "s3cret" not in str(refusal.value)


# --------------------------------------------------------------------------------- loop guard

HTTP = "http://127.0.0.1:4318/v1/traces"


@pytest.mark.parametrize(
    ("url", "listener"),
    [
        ("http://127.0.0.1:4318", HTTP),
        ("http://localhost:4318/elsewhere", HTTP),
        ("http://0.0.0.0:4318", HTTP),
        ("http://[::ffff:127.0.0.1]:4318", HTTP),
        ("http://127.0.0.1:4318", "http://0.0.0.0:4318/v1/traces"),
        ("http://127.0.0.1:4318", "http://[::]:4318/v1/traces"),
        ("http://127.0.0.1:4318", "http://:4318/v1/traces"),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces"),
        ("grpc://localhost:4317", "grpc://127.0.0.1:4317"),
        ("grpc://localhost", "grpc://127.0.0.1:4317"),
        ("unix:///run/wattspan/otlp.sock", "http+unix:///run/wattspan/otlp.sock"),
    ],
)
def test_agent_does_not_forward_to_itself(url: str, listener: str):
    with pytest.raises(ConfigError, match="where this agent itself receives"):
        check_destination(parse_destination(url), ["grpc://127.0.0.1:1", listener])


@pytest.mark.parametrize(
    ("url", "listener"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:14318/v1/traces"),
        ("http://127.0.0.2:4318", HTTP),
        ("http://192.0.2.1:4318", "http://0.0.0.0:4318/v1/traces"),
        ("http://no-such-host.invalid:4318", HTTP),
        ("unix:///run/otel.sock", HTTP),
        ("http://127.0.0.1:4318", "http+unix:///run/wattspan/otlp.sock"),
    ],
)
def test_local_collector_is_not_a_loop(url: str, listener: str):
    assert check_destination(parse_destination(url), [listener]) is None


def test_own_unix_socket_is_recognised_under_other_names(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="itself receives"):
        check_destination(
            parse_destination(f"unix://{tmp_path}/link/otlp.sock"),
            [f"http+unix://{tmp_path}/real/otlp.sock"],
        )


def test_metrics_are_not_pushed_to_the_agents_own_receiver():
    with pytest.raises(ConfigError, match=r"^\[exporters.otlp\] endpoint = .*:4318/v1/metrics"):
        check_destination(parse_destination("http://localhost:4318", METRICS), [HTTP])
