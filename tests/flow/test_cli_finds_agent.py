"""`wattspan top` and `doctor` find the agent of their own host behind every access policy."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from testbed.certificates import Authority
from testbed.exporting import serving
from testbed.receiving import receiving

from wattspan.cli.agent_client import (
    AgentCredentials,
    AgentReadError,
    SnapshotClient,
    credentials_for,
    http_fetch,
    is_local_agent,
)
from wattspan.clock import SystemClock
from wattspan.config import SpansSettings
from wattspan.model.settings import Listen
from wattspan_exporters.prometheus import plugin

TOKEN = "a-token-of-the-tests-0001"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens"
    path.write_text(f"# of the scraper\n{TOKEN}\n")
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    pair = Authority(tmp_path).issue("server")
    return {"tls_certificate": str(pair.certificate), "tls_key": str(pair.key)}


def mutual(tmp_path: Path, keys: dict[str, str]) -> dict[str, str]:
    return keys | {"tls_client_ca": str(tmp_path / "authority.pem")}


@pytest.mark.parametrize("guard", ["nothing", "token", "tls", "both", "mutual"])
def test_agent_is_recognised_behind_every_access_policy(
    guard: str, tokens: str, keys: dict[str, str], tmp_path: Path
) -> None:
    asked = {
        "nothing": {},
        "token": {"token_file": tokens},
        "tls": keys,
        "both": keys | {"token_file": tokens},
        "mutual": mutual(tmp_path, keys),
    }[guard]
    with serving(**asked) as served:
        listen = Listen(f"127.0.0.1:{served.port}")
        assert is_local_agent(listen, plugin.settings(listen=listen, **asked))
    assert not is_local_agent(listen, plugin.settings(listen=listen, **asked))


@pytest.mark.parametrize("guarded", [False, True])
def test_span_receiver_is_recognised(guarded: bool, tokens: str, tmp_path: Path) -> None:
    asked = tokens if guarded else ""
    with receiving(tmp_path, token_file=asked) as agent:
        listen = Listen(Listen.written(*agent.http))
        assert is_local_agent(listen, SpansSettings(http=listen, token_file=asked))


def test_foreign_program_on_the_port_is_not_an_agent(keys: dict[str, str], tmp_path: Path) -> None:
    """A silent listener and a foreign TLS server."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        listen = Listen(f"127.0.0.1:{silent.getsockname()[1]}")
        assert not is_local_agent(listen, plugin.settings(listen=listen))
    (tmp_path / "other").mkdir()
    theirs = Authority(tmp_path / "other").issue("server")
    other = {"tls_certificate": str(theirs.certificate), "tls_key": str(theirs.key)}
    with serving(**other) as served:
        listen = Listen(f"127.0.0.1:{served.port}")
        assert not is_local_agent(listen, plugin.settings(listen=listen, **keys))


def test_top_uses_the_token_and_the_certificate(tokens: str, keys: dict[str, str]) -> None:
    settings = plugin.settings(**keys, token_file=tokens)
    with serving(**keys, token_file=tokens) as served:
        address = f"https://127.0.0.1:{served.port}"
        assert SnapshotClient(
            address, SystemClock(), http_fetch(credentials_for(settings))
        )().domains
        entry = AgentCredentials(context=credentials_for(settings).context)
        with pytest.raises(AgentReadError, match="It requires a token"):
            SnapshotClient(address, SystemClock(), http_fetch(entry))()


def test_top_sends_no_token_to_an_unknown_certificate(
    tokens: str, keys: dict[str, str], tmp_path: Path
) -> None:
    """Not even to one of the same authority, whose name would be right."""
    other = Authority(tmp_path, "second").issue("other")
    theirs = {"tls_certificate": str(other.certificate), "tls_key": str(other.key)}
    entry = credentials_for(plugin.settings(**keys, token_file=tokens))
    with serving(**theirs, token_file=tokens) as served:
        address = f"https://127.0.0.1:{served.port}"
        with pytest.raises(AgentReadError, match="certificate"):
            SnapshotClient(address, SystemClock(), http_fetch(entry))()
