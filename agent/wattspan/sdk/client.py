"""Queries to the agent of this host: HTTP on a Unix socket in its run directory."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlencode

from wattspan.sdk.agent import (
    API_SOCKET,
    AgentUnavailableError,
    MeasurementError,
    RefusedError,
    run_directories,
)
from wattspan.sdk.measurement import Measurement
from wattspan.util.unix_http import UnixHttpConnection

_TIMEOUT_MARGIN = 2.0  # seconds for a response beyond the requested wait


def request_json(
    path: str,
    parameters: Mapping[str, str],
    *,
    method: str = "GET",
    patience: float = 0.0,
    directories: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The response of the agent, within ``patience`` seconds plus a margin.

    AgentUnavailableError if no agent responds, RefusedError with the sentence of the agent if it
    rejects the query.
    """
    target = f"{path}?{urlencode(parameters)}"
    failures: list[str] = []
    for directory in directories or run_directories():
        socket_path = f"{directory}/{API_SOCKET}"
        try:
            return _request(socket_path, target, method, patience + _TIMEOUT_MARGIN)
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            failures.append(f"{socket_path} ({cause.lower()})")
    raise AgentUnavailableError(
        f"No wattspan agent answers at {' or '.join(failures)}. Start one with `wattspan run`, "
        "or set WATTSPAN_RUN_DIR to the agent's run directory."
    )


def _request(socket_path: str, target: str, method: str, patience: float) -> dict[str, Any]:
    connection = UnixHttpConnection(socket_path, patience)
    try:
        connection.request(method, target, headers={"connection": "close"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    try:
        content = json.loads(body)
    except ValueError:
        content = None
    if content is None and response.status in _OVERLOADED:
        sentence = body.decode("utf-8", "replace").strip()
        raise RefusedError(f"The agent at {socket_path} refuses: {sentence}")
    if not isinstance(content, dict):
        raise MeasurementError(
            f"The server at {socket_path} is no wattspan agent: status {response.status}, no JSON. "
            "Set WATTSPAN_RUN_DIR to the agent's run directory."
        )
    if response.status != http.client.OK:
        raise RefusedError(f"The agent at {socket_path} refuses: {content.get('detail', content)}")
    return content


_OVERLOADED = (429, 503)
"""The user exceeds the rate of queries, or too many clients are connected."""


_POLL_PAUSE = 0.05  # seconds between queries to an agent that responds at once
_LONGEST_WAIT = 30.0  # seconds that one query waits at the agent, whose limit is a minute


def read_measurement(
    parameters: Mapping[str, str], timeout: float, directories: tuple[str, ...] = ()
) -> Measurement:
    """The measurement once it is complete, or the partial one after ``timeout`` seconds."""
    deadline = monotonic() + max(0.0, timeout)
    while True:
        asked = monotonic()
        wait = min(_LONGEST_WAIT, max(0.0, deadline - asked))
        response = request_json(
            "/v1/energy",
            {**parameters, "wait": f"{wait * 1e3:.0f}ms"},
            patience=wait,
            directories=directories,
        )
        if response["complete"] or monotonic() >= deadline:
            return Measurement.of(response)
        if monotonic() - asked < wait:  # the agent was too busy to wait
            sleep(min(_POLL_PAUSE, wait))
