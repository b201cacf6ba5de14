"""Settings of an operator, and request headers of a client."""

from __future__ import annotations

import pytest

from wattspan.model.settings import Listen, SettingError, convert
from wattspan_exporters.prometheus import PrometheusSettings
from wattspan_exporters.prometheus.exporter import accepts_gzip, choose_format
from wattspan_exporters.prometheus.renderer import ExpositionFormat

TEXT, OPENMETRICS = ExpositionFormat.TEXT, ExpositionFormat.OPENMETRICS

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_PROTOBUF_FIRST = (
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;"
    "q=0.6,application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
)
FIREFOX = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
        (PROMETHEUS_3_PROTOBUF_FIRST, OPENMETRICS),
        (FIREFOX, TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text; Version=1.0.0", OPENMETRICS),
        ('application/openmetrics-text; version="1.0.0"', OPENMETRICS),
        ("application/openmetrics-text;version=0.0.1", TEXT),
        ("application/openmetrics-text;q=0.1, text/plain;q=0.9", TEXT),
        ("text/plain;q=0.1, application/openmetrics-text;q=0.9", OPENMETRICS),
        ("application/openmetrics-text;q=0, text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/json", TEXT),
        ("text/plain, application/openmetrics-text", TEXT),
        ("application/openmetrics-text;q=high", OPENMETRICS),
        (",;=,q=,;;", TEXT),
    ],
)
def test_content_negotiation_uses_client_preference(accept: str, form: ExpositionFormat) -> None:
    assert choose_format(accept) is form


@pytest.mark.parametrize(
    ("accept_encoding", "zipped"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("*", True),
        ("*;q=0.1, gzip;q=0", False),
        ("identity", False),
        ("zgzip", False),
    ],
)
def test_gzip_is_used_if_accepted(accept_encoding: str, zipped: bool) -> None:
    assert accepts_gzip(accept_encoding) is zipped


@pytest.mark.parametrize(
    ("text", "address", "loopback"),
    [
        ("127.0.0.1:9949", ("127.0.0.1", 9949), True),
        ("[::1]:80", ("::1", 80), True),
        ("localhost:0", ("localhost", 0), True),
        (":9949", ("", 9949), False),
        ("0.0.0.0:9949", ("0.0.0.0", 9949), False),
        ("node7.example:443", ("node7.example", 443), False),
    ],
)
def test_address_is_read_and_written(text: str, address: tuple[str, int], loopback: bool) -> None:
    parsed = Listen.parse(text)
    assert (parsed.host, parsed.port) == address
    assert parsed.loopback is loopback
    assert Listen.written(*address) == text


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"listen": "9949"}, '"9949" names no port'),
        ({"listen": "::1:9949"}, "an IPv6 address stands in brackets"),
        ({"listen": "localhost:http"}, 'the port "http" is not a number'),
        ({"listen": "localhost:65536"}, 'the port "65536" is not a number'),
        ({"listen": 9949}, "expected a listen address"),
        ({"listne": ""}, "did you mean 'listen'?"),
        ({"tls_key": "k.pem"}, "need tls_certificate"),
        ({"max_connections": 0}, "0 is out of bounds, at least 1"),
        ({"idle_timeout": "0s"}, "out of bounds, at least"),
        ({"request_timeout": 10}, "expected a duration"),
    ],
)
def test_wrong_setting_gets_one_sentence(raw: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingError) as caught:
        convert(raw, PrometheusSettings, "exporters.prometheus")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_default_is_loopback_only() -> None:
    assert PrometheusSettings().listen.loopback
