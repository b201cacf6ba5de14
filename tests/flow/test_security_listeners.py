"""Every TCP listener of a real agent: TLS, client certificates, tokens, and rejected clients."""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.http2 import framed, http2
from testbed.otlp import request, span
from testbed.program import Running, wattspan
from testbed.receiving import receiving
from testbed.waiting import eventually

from wattspan.model.settings import Listen
from wattspan_exporters.prometheus import PrometheusSettings

TOKEN, NEW = "a-token-of-the-tests-0001", "a-token-of-the-tests-0002"
BODY = request(span()).SerializeToString()
BEARER = {"Authorization": f"Bearer {TOKEN}"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def spoken_to(plain: http.client.HTTPConnection) -> None:
    plain.request("GET", "/")
    plain.getresponse()


class Guarded:
    """An agent whose listeners all ask for TLS and a token."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.pair = self.authority.issue("server")
        self.tokens = folder / "tokens"
        self.write_tokens(TOKEN)
        keys = {
            "tls_certificate": self.pair.certificate,
            "tls_key": self.pair.key,
            "token_file": self.tokens,
        }
        self.running = Running(
            folder,
            spans__grpc="127.0.0.1:0",
            agent__log_level="debug",
            **{f"spans__{key}": value for key, value in keys.items()},
            **{f"exporters__prometheus__{key}": value for key, value in keys.items()},
        )

    def write_tokens(self, *tokens: str) -> None:
        self.tokens.write_text("\n".join(tokens))
        self.tokens.chmod(0o600)

    def port(self, scheme: str, path: str) -> int:
        self.running.address()
        found = re.search(rf"Serving {scheme}://127.0.0.1:(\d+){path}\n", self.running.said)
        assert found is not None, self.running.said
        return int(found[1])

    def ask(
        self, path: str, headers: Mapping[str, str], body: bytes | None = None, port: int = 0
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        chosen = port or self.port("https", "/metrics")
        with closing(
            http.client.HTTPSConnection("127.0.0.1", chosen, context=self.authority.client())
        ) as one:
            one.request("GET" if body is None else "POST", path, body, dict(headers))
            answer = one.getresponse()
            return answer.status, answer.headers, answer.read()

    def refusals(self) -> dict[tuple[str, str], float]:
        text = self.ask("/metrics", BEARER)[2].decode()
        found = re.findall(
            r'^wattspan_agent_refusals_total\{listener="(\w+)",reason="(\w+)"\} (\S+)$',
            text, re.MULTILINE,
        )  # fmt: skip
        return {(listener, reason): float(value) for listener, reason, value in found}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    with made.running:
        yield made
        made.running.end()


@pytest.mark.parametrize("path", ["/", "/metrics", "/live.json", "/nowhere", "//metrics", "/%2e/"])
def test_missing_token_permits_only_health(guarded: Guarded, path: str) -> None:
    status, headers, body = guarded.ask(path, {})
    assert status == 401
    assert headers["WWW-Authenticate"].startswith("Bearer realm=")
    assert b"energy" not in body
    assert guarded.ask(path, {"Authorization": f"Bearer {NEW}"})[0] == 401


def test_health_is_open_and_minimal(guarded: Guarded) -> None:
    status, _, body = guarded.ask("/healthz", {})
    assert status == 200
    assert body == b"ok\n" or body.startswith(b"degraded: ")  # a busy test machine misses ticks


def test_token_is_accepted_as_bearer_and_basic_password(guarded: Guarded) -> None:
    password = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    for headers in (BEARER, {"Authorization": f"Basic {password}"}):
        assert guarded.ask("/metrics", headers)[0] == 200
        assert guarded.ask("/", headers)[0] == 200


def test_spans_over_http_need_the_token_before_their_body_is_read(guarded: Guarded) -> None:
    port = guarded.port("https", "/v1/traces")
    assert guarded.ask("/v1/traces", PROTOBUF, BODY, port)[0] == 401
    assert guarded.ask("/v1/traces", {**PROTOBUF, "Content-Length": "9999999"}, b"", port)[0] == 401
    assert guarded.ask("/v1/traces", {**PROTOBUF, **BEARER}, BODY, port)[0] == 200


def test_spans_over_grpc_need_the_token(guarded: Guarded) -> None:
    context = guarded.authority.client()
    context.set_alpn_protocols(["h2"])
    port = guarded.port("grpcs", "")
    import socket

    raw = socket.create_connection(("127.0.0.1", port), timeout=20)
    with http2(context.wrap_socket(raw, server_hostname="127.0.0.1")) as client:
        refused = client.call(framed(BODY))
        assert (refused.status, "token" in refused.message) == (16, True)
        assert client.call(framed(BODY), authorization=f"Bearer {TOKEN}").status == 0


def test_rejections_are_counted(guarded: Guarded) -> None:
    before = guarded.refusals()
    guarded.ask("/metrics", {})
    guarded.ask("/v1/traces", PROTOBUF, BODY, guarded.port("https", "/v1/traces"))
    for port in (guarded.port("https", "/metrics"), guarded.port("https", "/v1/traces")):
        with (
            closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as plain,
            pytest.raises((OSError, http.client.HTTPException)),
        ):
            spoken_to(plain)

    def counted() -> bool:
        after = guarded.refusals()
        expected = [(one, why) for one in ("prometheus", "http") for why in ("token", "tls")]
        return all(after[key] > before.get(key, 0) for key in expected)

    eventually(counted, "all four are counted")


def test_tokens_and_certificates_are_rotated_without_a_restart(guarded: Guarded) -> None:
    fresh = {"Authorization": f"Bearer {NEW}"}
    guarded.write_tokens(TOKEN, NEW)
    assert guarded.ask("/metrics", fresh)[0] == 200
    guarded.write_tokens(TOKEN)
    assert guarded.ask("/metrics", fresh)[0] == 401
    assert (
        guarded.ask("/v1/traces", fresh | PROTOBUF, BODY, guarded.port("https", "/v1/traces"))[0]
        == 401
    )

    def serials() -> list[object]:
        found = []
        for port in (guarded.port("https", "/metrics"), guarded.port("https", "/v1/traces")):
            with closing(
                http.client.HTTPSConnection("127.0.0.1", port, context=guarded.authority.client())
            ) as one:
                one.connect()
                assert isinstance(one.sock, ssl.SSLSocket)
                told = one.sock.getpeercert()
                assert told is not None
                found.append(told["serialNumber"])
        return found

    before = serials()
    new = guarded.authority.issue("next")
    new.certificate.replace(guarded.pair.certificate)
    new.key.replace(guarded.pair.key)
    assert all(old != now for old, now in zip(before, serials(), strict=True))


def test_log_holds_no_token(guarded: Guarded) -> None:
    guarded.ask(f"/{TOKEN}?{TOKEN}", {"Authorization": f"Bearer {TOKEN}x"})
    assert TOKEN not in guarded.running.said


def test_page_in_a_browser_cannot_send_spans(tmp_path: Path) -> None:
    with (
        receiving(tmp_path) as running,
        closing(http.client.HTTPConnection(*running.http, timeout=20)) as client,
    ):
        headers = {**PROTOBUF, "Origin": "http://evil.example"}
        client.request("POST", "/v1/traces", BODY, headers)
        assert client.getresponse().status == 403
        assert running.sink.count == 0


@pytest.mark.parametrize(("table", "key"), [("spans", "http"), ("exporters.prometheus", "listen")])
def test_doctor_reports_a_listener_exposed_to_the_network(
    tmp_path: Path, table: str, key: str
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[{table}]\n{key} = ":0"\n[agent]\nrun_dir = "{tmp_path}"\n')
    told = wattspan("doctor", "--json", "--config", str(config))
    (section,) = [one for one in json.loads(told.stdout)["sections"] if one["title"] == "Security"]
    (found,) = [one for one in section["findings"] if one["what"] == table]
    assert found["mark"] == "warn"
    assert "without TLS and for everybody" in found["detail"] + (found["remedy"] or "")


def test_listeners_are_on_loopback_by_default(tmp_path: Path) -> None:
    from wattspan.config.settings import SpansSettings

    assert PrometheusSettings().listen.loopback
    assert SpansSettings().http.loopback
    assert SpansSettings().grpc == Listen("")
    assert sys.version_info >= (3, 11)
