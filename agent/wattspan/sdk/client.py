"""Asking the agent of this host: HTTP on a Unix socket in its run directory.

Reading a window: asking the agent until its energy is known.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from time import (
    monotonic,
    sleep,
)
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

_TIMEOUT_MARGIN = 2.0  # seconds an answer may take beyond what it was asked to wait


def request_json(
    path: str,
    parameters: Mapping[str, str],
    *,
    method: str = "GET",
    patience: float = 0.0,
    directories: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The agent's answer. ``patience`` seconds are what the question itself may take.

    AgentUnavailableError if nobody answers, RefusedError with the agent's own sentence if it
    does not say.
    """
    looked_for: list[str] = []
    for directory in directories or run_directories():
        place = f"{directory}/{API_SOCKET}"
        try:
            return _request(
                place, f"{path}?{urlencode(parameters)}", method, patience + _TIMEOUT_MARGIN
            )
        except (OSError, http.client.HTTPException) as error:
            looked_for.append(f"{place} ({_cause(error)})")
    raise AgentUnavailableError(
        f"No wattspan agent answers at {' or '.join(looked_for)}. Start one with `wattspan run`, "
        "or set WATTSPAN_RUN_DIR to the agent's run directory."
    )


def _request(place: str, target: str, method: str, patience: float) -> dict[str, Any]:
    connection = _AgentConnection(place, patience)
    try:
        connection.request(method, target, headers={"connection": "close"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    try:
        told = json.loads(body)
    except ValueError:
        told = None
    if told is None and response.status in _OVERLOADED:
        sentence = body.decode("utf-8", "replace").strip()
        raise RefusedError(f"The agent at {place} does not answer: {sentence}")
    if not isinstance(told, dict):
        raise MeasurementError(
            f"What answers at {place} is no wattspan agent: status {response.status}, no JSON. "
            "Set WATTSPAN_RUN_DIR to the agent's run directory."
        )
    if response.status != http.client.OK:
        raise RefusedError(f"The agent at {place} does not answer: {told.get('detail', told)}")
    return told


_OVERLOADED = (429, 503)
"""Before it looks at a question at all: this user asks too often, or too many are connected."""


class _AgentConnection(http.client.HTTPConnection):
    def __init__(self, place: str, patience: float) -> None:
        super().__init__("wattspan", timeout=patience)
        self._place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._place)
        except BaseException:
            self.sock.close()
            raise


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__


_POLL_PAUSE = 0.05  # seconds between questions to an agent that answers at once
_LONGEST_WAIT = 30.0  # seconds one question waits at the agent; it allows a minute


def read_measurement(
    parameters: Mapping[str, str], timeout: float, directories: tuple[str, ...] = ()
) -> Measurement:
    """The measurement as soon as it is complete, or as it stands after ``timeout`` seconds."""
    deadline = monotonic() + max(0.0, timeout)
    while True:
        asked = monotonic()
        wait = min(_LONGEST_WAIT, max(0.0, deadline - asked))
        told = request_json(
            "/v1/energy",
            {**parameters, "wait": f"{wait * 1e3:.0f}ms"},
            patience=wait,
            directories=directories,
        )
        if told["complete"] or monotonic() >= deadline:
            return Measurement.of(told)
        if monotonic() - asked < wait:  # the agent was too busy to wait
            sleep(min(_POLL_PAUSE, wait))
