"""TLS and mutual TLS, with certificates made here."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from testbed.certificates import Authority, Pair, key_pem
from testbed.exporting import Served, serving
from testbed.scrapes import parse, value

from wattspan.http.access_policy import AccessError
from wattspan_exporters.prometheus.renderer import ExpositionFormat


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def server(authority: Authority) -> Pair:
    return authority.issue("server")


def settings(pair: Pair, client_ca: Path | None = None) -> dict[str, str]:
    mutual = {"tls_client_ca": str(client_ca)} if client_ca else {}
    return {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key), **mutual}


def test_scrape_over_tls(authority: Authority, server: Pair) -> None:
    with serving(**settings(server)) as served:
        assert served.exporter.address
        assert served.exporter.address.startswith("https://")
        scrape = parse(served.ask(tls=authority.client()).body, ExpositionFormat.TEXT)
        assert value(scrape, "wattspan_build_info", version="1.2.3") == 1


def test_key_may_be_in_the_certificates_file(authority: Authority, server: Pair) -> None:
    both = server.certificate.with_name("both.pem")
    both.write_bytes(server.certificate.read_bytes() + server.key.read_bytes())
    with serving(tls_certificate=str(both)) as served:
        assert served.ask(tls=authority.client()).status == 200


def test_plain_http_to_a_tls_port_fails(authority: Authority, server: Pair) -> None:
    with serving(**settings(server)) as served:
        with pytest.raises((ConnectionError, OSError)):
            served.ask()
        assert served.ask(tls=authority.client()).status == 200
        assert served.log == []


def test_old_tls_is_not_spoken(authority: Authority, server: Pair) -> None:
    with serving(**settings(server)) as served:
        old = authority.client()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            served.ask(tls=old)


def test_mutual_tls_serves_known_clients(authority: Authority, server: Pair) -> None:
    with serving(**settings(server, authority.certificate)) as served:
        known = authority.client(authority.issue("prometheus"))
        assert served.ask(tls=known).status == 200


def test_mutual_tls_refuses_strangers(authority: Authority, server: Pair, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").issue("prometheus")
    with serving(**settings(server, authority.certificate)) as served:
        for client in (authority.client(), authority.client(stranger)):
            with pytest.raises(OSError, match=r"(?i)alert|closed|reset|eof"):
                served.ask(tls=client)
        assert served.log == []


def test_stalled_handshake_does_not_block_others(authority: Authority, server: Pair) -> None:
    with serving(**settings(server)) as served:
        stalled = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(5)]
        assert served.ask(tls=authority.client()).status == 200
        for connection in stalled:
            connection.close()


def start(**wrong: str) -> Served:
    with serving(**wrong) as served:
        return served


def test_missing_certificate_gets_one_sentence(server: Pair) -> None:
    with pytest.raises(AccessError) as caught:
        start(tls_certificate="/nowhere/cert.pem", tls_key=str(server.key))
    assert str(caught.value) == (
        "Cannot read /nowhere/cert.pem: no such file or directory; correct tls_certificate in "
        "[exporters.prometheus] or let the agent's user read the file."
    )


def test_key_of_another_certificate_gets_one_sentence(authority: Authority, server: Pair) -> None:
    with pytest.raises(AccessError, match="does not belong to the certificate in"):
        start(**settings(Pair(server.certificate, authority.issue("other").key)))


@pytest.mark.parametrize("content", [b"", b"not PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_invalid_certificate_file_is_a_one_line_error(server: Pair, content: bytes) -> None:
    server.certificate.write_bytes(content)
    with pytest.raises(AccessError, match="do not hold a certificate and a key in PEM form"):
        start(**settings(server))


def test_invalid_client_authority_is_a_one_line_error(server: Pair, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(b"nothing")
    with pytest.raises(AccessError, match="holds no certificate in PEM form"):
        start(**settings(server, tmp_path / "ca.pem"))


def test_encrypted_key_is_rejected_without_a_prompt(server: Pair) -> None:
    server.key.write_bytes(key_pem(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    with pytest.raises(AccessError, match="the key is encrypted; give tls_key"):
        start(**settings(server))
