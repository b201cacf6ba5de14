"""TLS of a listener: protocol versions, and file rotation without a restart."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest
from testbed.certificates import Authority, Pair

from wattspan.config.settings import SpansSettings
from wattspan.http.access_policy import (
    AccessError,
    TlsContexts,
    client_tls,
    exposure_warning,
    server_tls,
)
from wattspan.model.settings import Listen, SettingError, convert
from wattspan_exporters.prometheus import plugin


def contexts(pair: Pair, ca: Path | None = None, log: list[str] | None = None) -> TlsContexts:
    settings = SpansSettings(
        tls_certificate=str(pair.certificate), tls_key=str(pair.key), tls_client_ca=str(ca or "")
    )
    told = log if log is not None else []
    found = server_tls(
        settings, what="Cannot receive spans", where="in [spans]", log=told.append, protocol="h2"
    )
    assert found is not None
    return found


def shaken(server: TlsContexts, client: ssl.SSLContext) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Both ends after a handshake in memory; SSLError if either refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server().wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for _ in range(6):
        for one in (theirs, ours):
            try:
                one.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ours, theirs


def serial(theirs: ssl.SSLObject) -> object:
    told = theirs.getpeercert()
    assert told is not None
    return told["serialNumber"]


def test_only_tls_of_today_is_spoken_and_the_protocol_is_agreed_on(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = contexts(authority.issue("server"))
    client = authority.client()
    client.set_alpn_protocols(["http/1.1", "h2"])
    _, theirs = shaken(server, client)
    assert theirs.version() == "TLSv1.3"
    assert theirs.selected_alpn_protocol() == "h2"
    old = authority.client()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shaken(server, old)


def test_client_accepts_certificates_without_key_identifiers(tmp_path: Path) -> None:
    """Python 3.13 and newer refuse them unless told otherwise; names and authorities count."""
    authority = Authority(tmp_path)
    trusted = str(authority.certificate)
    client = client_tls(trusted, "", "", what="Cannot push metrics", where="in [exporters.otlp]")
    assert serial(shaken(contexts(authority.issue("server")), client)[1])
    assert client.check_hostname
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "other").issue("server")
    with pytest.raises(ssl.SSLCertVerificationError):
        shaken(contexts(stranger), client)


def test_new_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, new = authority.issue("server"), authority.issue("new")
    server, client = contexts(pair), authority.client()
    before = serial(shaken(server, client)[1])
    new.certificate.replace(pair.certificate)
    new.key.replace(pair.key)
    assert serial(shaken(server, client)[1]) != before


def test_partial_rotation_keeps_the_old_certificate(tmp_path: Path) -> None:
    authority, log = Authority(tmp_path), list[str]()
    pair, new = authority.issue("server"), authority.issue("new")
    server, client = contexts(pair, log=log), authority.client()
    before = serial(shaken(server, client)[1])
    new.certificate.replace(pair.certificate)
    assert [serial(shaken(server, client)[1]) for _ in range(2)] == [before] * 2
    assert len(log) == 1
    assert "does not belong to the certificate" in log[0]
    new.key.replace(pair.key)
    assert serial(shaken(server, client)[1]) != before


def test_removed_authority_rejects_clients(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    authority, other = Authority(tmp_path), Authority(tmp_path / "other", "other")
    ca = tmp_path / "clients.pem"
    shutil.copy(authority.certificate, ca)
    server = contexts(authority.issue("server"), ca)
    client = authority.client(authority.issue("prometheus"))
    assert shaken(server, client)[0].getpeercert()
    shutil.copy(other.certificate, ca)
    with pytest.raises(ssl.SSLError):
        shaken(server, client)


def test_certificate_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "none.pem", tmp_path / "none.key")
    with pytest.raises(AccessError, match=r"correct tls_certificate in \[spans\] or let the agent"):
        contexts(pair)


@pytest.mark.parametrize(
    ("listen", "keys", "told"),
    [
        ("", "", ""),
        ("127.0.0.1:4318", "", ""),
        ("[::1]:4318", "", ""),
        (":4318", "", "without TLS and for everybody"),
        ("0.0.0.0:4318", "token_file", "eavesdroppers learn the token"),
        (":4318", "tls_certificate", "open to the network for everybody"),
        (":4318", "tls_certificate token_file", ""),
        (":4318", "tls_certificate tls_client_ca", ""),
    ],
)
def test_exposed_listener_is_logged(listen: str, keys: str, told: str) -> None:
    settings = SpansSettings(**dict.fromkeys(keys.split(), "/some/file"))
    sentence = exposure_warning(
        Listen.parse(listen), settings, where="[spans]", risk="spans are believed"
    )
    assert (told in sentence) if told else sentence == ""


@pytest.mark.parametrize("table", [SpansSettings, plugin.settings])
def test_client_authority_without_a_certificate_is_an_error(table: type) -> None:
    with pytest.raises(SettingError, match="need tls_certificate"):
        convert({"tls_client_ca": "/ca.pem"}, table, "somewhere")


def test_readable_key_is_used_and_logged(tmp_path: Path) -> None:
    pair, log = Authority(tmp_path).issue("server"), list[str]()
    contexts(pair, log=log)
    assert log == []
    pair.key.chmod(0o644)
    contexts(pair, log=log)
    assert log == [
        f"Other users can read or change the key in {pair.key}: run `chmod 0640 {pair.key}`."
    ]
