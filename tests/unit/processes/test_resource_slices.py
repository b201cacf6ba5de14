"""The API server is asked for ResourceSlices of one node, with the pod's token, and seldom."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testbed.certificates import Authority

from wattspan.processes.claimed_gpus import (
    DeviceKey,
    ResourceSlices,
    SlicesError,
    decode_slices,
    fetch_slices,
)

KEY = DeviceKey("gpu.nvidia.com", "node-1", "gpu-0")
DEVICE = {"name": "gpu-0", "attributes": {"uuid": {"string": "GPU-a"}}}
SLICE = {
    "spec": {
        "driver": KEY.driver,
        "pool": {"name": KEY.pool, "generation": 1},
        "devices": [DEVICE],
    }
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "items",
                    "spec",
                    "driver",
                    "pool",
                    "name",
                    "devices",
                    "attributes",
                    "uuid",
                    "generation",
                    "string",
                    "type",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=30,
)


@given(JSON)
def test_no_answer_breaks_the_decoder_or_its_neighbour(item: Any) -> None:
    found = decode_slices(json.dumps({"items": [item, SLICE]}).encode())
    assert found[KEY] == "GPU-a" or item != SLICE


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_other_answers_are_refused(body: bytes) -> None:
    with pytest.raises(SlicesError, match="no list"):
        decode_slices(body)


class _Server(HTTPServer):
    """An API server of one version of resource.k8s.io, with the requests that it got."""

    version, status = "v1", 200
    body = json.dumps({"items": [SLICE]}).encode()

    def __init__(self, context: ssl.SSLContext) -> None:
        self.requests: list[tuple[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Authorization"]))
        wrong = f"/{self.server.version}/" not in self.path
        self.send_response(404 if wrong else self.server.status)
        self.end_headers()
        if not wrong:
            self.wfile.write(self.server.body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


@pytest.fixture
def server(account: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    authority = Authority(account, "ca")
    pair = authority.issue("server")
    authority.certificate.rename(account / "ca.crt")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    server = _Server(context)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_devices_of_one_node_are_asked_with_the_token(
    server: _Server, account: Path, version: str
) -> None:
    server.version = version
    assert fetch_slices("node-1/ü", account) == {KEY: "GPU-a"}
    path, authorization = server.requests[-1]
    assert path == (
        f"/apis/resource.k8s.io/{version}/resourceslices"
        "?fieldSelector=spec.nodeName%3Dnode-1%2F%C3%BC"
    )
    assert authorization == "Bearer secret"


def test_refusal_names_the_status(server: _Server, account: Path) -> None:
    server.status = 403
    with pytest.raises(SlicesError, match="HTTP 403"):
        fetch_slices("n", account)
    assert len(server.requests) == 1
    server.version = "v2"
    with pytest.raises(SlicesError, match="HTTP 404"):
        fetch_slices("n", account)


def test_server_of_another_authority_gets_no_token(server: _Server, account: Path) -> None:
    (account / "ca.crt").write_bytes(Authority(account, "other").certificate.read_bytes())
    with pytest.raises(SlicesError, match="certificate"):
        fetch_slices("n", account)
    assert server.requests == []


def test_missing_cluster_and_token_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SlicesError, match="outside of a cluster"):
        fetch_slices("n", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "::1")
    with pytest.raises(SlicesError, match="no token of a service account: no such file"):
        fetch_slices("n", tmp_path / "none")


def test_server_is_asked_for_missing_devices_and_after_five_minutes() -> None:
    now, asked = [0.0], []
    answers: list[Any] = [{}, SlicesError("down"), {KEY: "GPU-a"}, {KEY: "GPU-b"}]

    def fetch(node: str) -> dict[DeviceKey, str]:
        asked.append(node)
        answer = answers.pop(0)
        if isinstance(answer, SlicesError):
            raise answer
        return dict(answer)

    slices = ResourceSlices("node-1", fetch, lambda: now[0])
    found = []
    for now[0] in (0, 10, 30, 60, 70, 300, 359, 360):
        found.append(slices.identities({KEY}).get(KEY))
        assert (slices.trouble == "down") == (now[0] == 30)
    assert found == [None, None, None, "GPU-a", "GPU-a", "GPU-a", "GPU-a", "GPU-b"]
    assert asked == ["node-1"] * 4
