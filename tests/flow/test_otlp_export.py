"""Pushes to real receivers: both protocols, TLS, receivers that are away, slow, or say no."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.certificates import Authority, Pair
from testbed.collector import (
    Break,
    EarlyRefusal,
    Garbage,
    GrpcCollector,
    GrpcStatus,
    HttpCollector,
    Reply,
    Silence,
    rejecting,
)
from testbed.otlp_sink import by_series, points, resource_of, total_seen
from testbed.pushing import opened, pushing
from testbed.reserved_port import reserved_port
from testbed.scrapes import parse
from testbed.waiting import eventually

from wattspan.clock import SystemClock
from wattspan.model import Microjoules
from wattspan.model.settings import Duration
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

Collector = HttpCollector | GrpcCollector


@pytest.fixture(params=[HttpCollector, GrpcCollector], ids=["http", "grpc"])
def collector(request: pytest.FixtureRequest) -> Iterator[Collector]:
    with request.param() as found:
        yield found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def pushed(collector: Collector, count: int = 1) -> None:
    eventually(lambda: len(collector.metrics) >= count, f"{count} pushes")


# ----------------------------------------------------------------------------------- sent data


def test_sink_receives_the_values_of_a_scrape(collector: Collector) -> None:
    with pushing(collector.url) as pusher:
        pusher.stands_still = True
        pushed(collector)
    *_, request = collector.metrics  # there may be one before it stood still
    scraped = parse(Renderer().render(pusher.world, ExpositionFormat.TEXT), ExpositionFormat.TEXT)
    assert by_series(points(request)) == scraped
    assert pusher.log == []


def test_resource_has_host_and_agent_attributes(collector: Collector) -> None:
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "team=ml,site=a%2Cb", "OTEL_SERVICE_NAME": "watts"}
    settings = {"resource": "deployment.environment.name=prod,site=here"}
    with pushing(collector.url, environ=environ, **settings):
        pushed(collector)
    found = resource_of(collector.metrics[0])
    assert found.pop("service.instance.id")
    found.pop("host.id", None)  # a container may have none
    assert found == {
        "service.name": "watts",
        "service.version": "1.2.3",
        "host.name": "node7",
        "team": "ml",
        "site": "here",
        "deployment.environment.name": "prod",
    }


def test_headers_of_the_table_and_of_a_file_are_sent(collector: Collector, tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("# from the vault\n\nAuthorization: Bearer s3=cr,et\n")
    with pushing(collector.url, headers="x-tenant=a%20b", headers_file=str(file)):
        pushed(collector)
    headers = collector.seen[0].headers
    assert headers["x-tenant"] == "a b"
    assert headers["authorization"] == "Bearer s3=cr,et"


@pytest.mark.parametrize(
    ("compression", "sent"), [("gzip", "gzip"), ("none", None), ("auto", None)]
)
def test_push_compression_follows_the_configuration(compression: str, sent: str | None) -> None:
    with HttpCollector() as collector:
        with pushing(collector.url, compression=compression):
            pushed(collector)
        (seen, *_) = collector.seen
        assert seen.headers.get("content-encoding") == sent
        assert (seen.size < seen.message.ByteSize() / 4) is (sent == "gzip")


def test_metrics_use_the_configured_path() -> None:
    with HttpCollector() as collector:
        with pushing(f"{collector.url}/api/otlp"):
            pushed(collector)
        assert collector.seen[0].path == "/api/otlp/v1/metrics"


def test_http_address_with_the_protocol_grpc_is_a_grpc_address() -> None:
    with (
        GrpcCollector() as collector,
        pushing(collector.url.replace("grpc", "http"), protocol="grpc"),
    ):
        pushed(collector)


def test_unix_socket_is_a_receiver_too(tmp_path: Path) -> None:
    with HttpCollector(path=tmp_path / "otlp.sock") as collector, pushing(collector.url):
        pushed(collector)


def test_only_the_chosen_metrics_are_pushed(collector: Collector) -> None:
    with pushing(collector.url, metrics=("hw.*", "wattspan.gap.time", "!hw.gpu.*")):
        pushed(collector)
    names = {point.name for point in points(collector.metrics[0])}
    assert {"hw.energy", "hw.power", "wattspan.gap.time"} <= names
    assert not {name for name in names if name.startswith(("hw.gpu", "wattspan.p"))}


# ------------------------------------------------------------------------------------------- TLS


@pytest.mark.parametrize("kind", [HttpCollector, GrpcCollector], ids=["http", "grpc"])
def test_receiver_is_trusted_by_the_authority_that_is_named(
    kind: type[Collector], authority: Authority
) -> None:
    with (
        kind(certificate=authority.issue("server")) as collector,
        pushing(collector.url, tls_ca=str(authority.certificate)),
    ):
        pushed(collector)


@pytest.mark.parametrize("kind", [HttpCollector, GrpcCollector], ids=["http", "grpc"])
def test_receiver_of_an_unknown_authority_receives_no_data(
    kind: type[Collector], authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other", "other")
    with kind(certificate=other.issue("server")) as collector:
        with pushing(collector.url, tls_ca=str(authority.certificate)) as pusher:
            (said,) = eventually(lambda: pusher.log, "a complaint")
        assert "its certificate is not trusted" in said
        assert collector.metrics == []


@pytest.mark.parametrize("kind", [HttpCollector, GrpcCollector], ids=["http", "grpc"])
def test_receiver_that_asks_for_a_certificate_gets_the_agents(
    kind: type[Collector], authority: Authority
) -> None:
    mine = authority.issue("agent")
    server = authority.issue("server")
    with kind(certificate=server, clients=authority.certificate) as collector:
        settings = {"tls_ca": str(authority.certificate), "tls_certificate": str(mine.certificate)}
        with pushing(collector.url, tls_key=str(mine.key), **settings):
            pushed(collector)


def test_certificate_that_was_renewed_is_read_after_the_old_one_has_failed(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    old, new = Authority(tmp_path / "other", "other").issue("agent"), authority.issue("agent")
    server = authority.issue("server")
    with (
        HttpCollector(certificate=server, clients=authority.certificate) as collector,
        pushing(
            collector.url,
            tls_ca=str(authority.certificate),
            tls_certificate=str(old.certificate),
            tls_key=str(old.key),
        ) as pusher,
    ):
        eventually(lambda: pusher.log, "the old one is refused")
        assert collector.metrics == []
        new.key.replace(old.key)
        new.certificate.replace(old.certificate)
        pushed(collector)


# ---------------------------------------------------------------------------- when it does not go


def test_receiver_that_was_away_misses_no_joule() -> None:
    with reserved_port() as port, pushing(f"http://127.0.0.1:{port}") as pusher:
        eventually(lambda: pusher.log, "it is said that nobody is there")
        first, *others = pusher.world.domains
        more = replace(first, energy=Microjoules(first.energy + 77_000_000))
        pusher.change(domains=(more, *others))
        with HttpCollector(port=port) as collector:
            pushed(collector, 3)
            eventually(lambda: len(pusher.log) == 2, "it is said that it goes again")
            assert pusher.running.health.up
    assert "connection refused" in pusher.log[0]
    assert "takes metrics again" in pusher.log[1]
    of_one = [
        point
        for point in points(*collector.metrics)
        if point.name == "hw.energy" and point.attributes["hw.id"] == first.domain.id
    ]
    assert total_seen(of_one) == more.energy / 10**6
    assert len({point.start for point in of_one}) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Reply(401), "Give the collector's credentials in `headers`."),
        (Reply(404), "Is `endpoint` the address of an OTLP endpoint?"),
        (Reply(503), "it answered 503"),
        (Reply(302, headers={"location": "http://elsewhere/"}), "as `endpoint`"),
        (EarlyRefusal(413), "Raise the collector's limit"),
        (Break("request"), "Cannot push metrics"),
        (Break("in answer"), "its answer broke off"),
        (Garbage(), "write grpc:// in `endpoint`"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_receiver_failure_is_logged_and_the_next_push_is_sent(fault: Reply, said: str) -> None:
    with HttpCollector() as collector:
        collector.script(fault)
        with pushing(collector.url) as pusher:
            pushed(collector, 2)
            eventually(lambda: len(pusher.log) == 2, "both lines")
        assert said in pusher.log[0]
        assert pusher.log[0].endswith("no total is lost.")
        assert "takes metrics again" in pusher.log[1]


def test_grpc_failure_is_logged_and_the_next_push_is_sent() -> None:
    with GrpcCollector() as collector:
        collector.script(GrpcStatus(16, "who are you?"))
        with pushing(collector.url) as pusher:
            pushed(collector)
        assert "UNAUTHENTICATED (who are you?). Give the collector's credentials" in pusher.log[0]


def test_receiver_delay_request_is_honoured() -> None:
    with HttpCollector() as collector:
        collector.script(Reply(429, headers={"retry-after": "2"}))
        with pushing(collector.url):
            pushed(collector)
        first, second = collector.seen[:2]
        assert second.arrived - first.arrived > 1.9


def test_points_that_are_rejected_are_counted(collector: Collector) -> None:
    collector.script(rejecting(5, "too old"))
    with pushing(collector.url) as pusher:
        pushed(collector, 2)
        eventually(lambda: pusher.running.drops == 5, "five drops")
    assert "it rejected 5 metrics (too old)" in pusher.log[0]


def test_silent_receiver_does_not_block(collector: Collector) -> None:
    collector.script(Silence())
    with pushing(collector.url, timeout=Duration.parse("100ms")) as pusher:
        pushed(collector)
    assert "it did not answer within 0.1 s" in pusher.log[0]


def test_agent_that_ends_pushes_once_more(collector: Collector) -> None:
    with pushing(collector.url, interval=Duration.parse("1h")) as pusher:
        pushed(collector)
        last = pusher.world.at.wall
    assert len(collector.metrics) == 2
    assert {point.time for point in points(collector.metrics[1])} == {pusher.world.at.wall}
    assert pusher.world.at.wall > last


def test_shutdown_does_not_wait_for_a_dead_receiver(collector: Collector) -> None:
    collector.script(*[Silence()] * 5)
    clock = SystemClock()
    with pushing(collector.url, timeout=Duration.parse("10m")):
        eventually(lambda: collector.seen, "a push under way")
        began = clock.monotonic()
    assert clock.monotonic() - began < 60e9  # and not ten minutes
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "wattspan-otlp"], "its end"
    )


# ------------------------------------------------------------------------------- settings that err


def test_mismatched_certificates_are_a_startup_error(authority: Authority, tmp_path: Path) -> None:
    mine, other = authority.issue("agent"), authority.issue("other")
    mixed = Pair(mine.certificate, other.key)
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for settings, said in (
        ({"tls_ca": str(garbage)}, "holds no certificate in PEM form"),
        ({"tls_ca": "/nowhere"}, "Cannot read /nowhere: no such file"),
        (
            {"tls_certificate": str(mixed.certificate), "tls_key": str(mixed.key)},
            "the key in .* does not belong to the certificate in",
        ),
    ):
        with pytest.raises(Exception, match=said) as raised:
            opened("https://collector", log=[], **settings)
        assert "[exporters.otlp]" in str(raised.value)
        assert not isinstance(raised.value, ssl.SSLError)
