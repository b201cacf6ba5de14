"""Queries to the agent of this host by HTTP on a Unix socket: energies of windows and devices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from socket import MSG_PEEK, socket
from time import monotonic, sleep
from typing import Any, NamedTuple
from urllib.parse import urlencode

from wattspan.sdk import (
    API_SOCKET,
    AgentBusyError,
    AgentUnavailableError,
    MeasurementError,
    NotMeasuredError,
    RefusedError,
    run_directories,
)
from wattspan.util.unix_sockets import ACKNOWLEDGEMENTS, unix_request


class Energy(dict[str, float]):
    """Joules by kind of device: ``"cpu"``, ``"memory"``, ``"gpu"``, ...

    Kinds without a known energy are in ``unknown`` instead. The values of the kinds in
    ``lower_bound`` are lower bounds: an idle power was not known yet, or a device gave no readings
    for a part of the time. ``uncertainty`` is in joules, by kind; ``coverage``, 0 to 1, is the
    fraction of the time that was measured in every kind.
    """

    def __init__(
        self,
        joules: Mapping[str, float],
        uncertainty: Mapping[str, float],
        coverage: float,
        unknown: Iterable[str] = (),
        lower_bound: Iterable[str] = (),
    ) -> None:
        super().__init__(joules)
        self.uncertainty: Mapping[str, float] = dict(uncertainty)
        self.coverage = coverage
        self.unknown = tuple(unknown)
        self.lower_bound = tuple(lower_bound)

    @property
    def certainty(self) -> str:
        """The certainty of ``total``: ``"known"``, ``"lower_bound"`` or ``"unknown"``."""
        if not self:
            return "unknown"
        return "lower_bound" if self.unknown or self.lower_bound else "known"

    @property
    def total(self) -> float:
        """The joules of all kinds, of ``certainty``; NotMeasuredError if a kind is unknown."""
        if self.unknown or not self:
            raise NotMeasuredError(
                f"The total is unknown: {', '.join(self.unknown) or 'this window'} was not "
                "measured. The window is older than the agent or its history, or a counter did "
                "not respond."
            )
        return sum(self.values())

    @property
    def total_uncertainty(self) -> float:
        """The uncertainty of the total, in joules."""
        return sum(self.uncertainty.values())

    def __missing__(self, kind: str) -> float:
        known = ", ".join(self) or "none"
        raise KeyError(f"{kind!r} has no known energy here; known: {known}")

    def __repr__(self) -> str:
        figures = ", ".join(
            f"{kind}{'≥' if kind in self.lower_bound else '='}{joules:.6g} J"
            for kind, joules in self.items()
        )
        return f"<Energy {figures or 'unknown'}, coverage {self.coverage:.0%}>"


class Device(NamedTuple):
    """The energy of one device, of all processes; ``joules`` is None if it is unknown.

    ``idle`` is the idle energy in it, charged to no process; None if the baseline was not learned
    yet, so that processes were charged with it. The fields after it are those of ``read_devices``:

    ``number`` is the index by the driver of a GPU, and the package of a CPU and of memory.
    ``complete``: the device has a reading after the period, so the values are final. ``silent``: it
    is gone, or gives no readings. ``timeline`` has begin, end and joules between readings,
    ``temperatures`` time and degrees Celsius; both only on request. Times are monotonic
    nanoseconds.

    ``parent`` is the id of the device of which this is a part, such as a MIG instance of its board;
    its energy is contained in that of the device. ``partition_mode`` is that of an AMD board.
    """

    id: str
    kind: str
    name: str
    joules: float | None
    uncertainty: float | None
    coverage: float
    provenance: str
    idle: float | None = None
    number: int | None = None
    uuid: str | None = None
    model: str = ""
    complete: bool = True
    silent: bool = False
    timeline: tuple[tuple[int, int, float | None], ...] = ()
    temperatures: tuple[tuple[int, int], ...] = ()
    parent: str | None = None
    partition_mode: str | None = None

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Device:
        """From an element of ``devices`` in a response."""
        return cls(
            id=response["hw_id"],
            kind=response["hw_type"],
            name=response["hw_name"],
            joules=response["joules"],
            uncertainty=response["uncertainty_joules"],
            coverage=response["coverage"],
            provenance=response["provenance"],
            idle=response.get("idle_joules"),
            number=response.get("index"),
            uuid=response.get("uuid"),
            model=response.get("model", ""),
            complete=response.get("complete", True),
            silent=response.get("silent", False),
            timeline=tuple(map(tuple, response.get("timeline") or ())),
            temperatures=tuple(map(tuple, response.get("temperatures") or ())),
            parent=response.get("parent"),
            partition_mode=response.get("partition_mode"),
        )


class Measurement(NamedTuple):
    """The energy of a window, from one response of the agent.

    ``joules`` is the energy of the process and its descendants, ``process`` that of the process
    alone, ``host`` that of all devices of the host. ``complete``: the values are final.

    ``static`` and ``dynamic`` are the two parts of the GPU energy in ``joules``, and
    ``static_basis`` is the origin of the static power: configured, fitted or lower_bound. They are
    None if it is unknown.
    """

    seconds: float
    joules: Energy
    process: Energy
    host: Energy
    devices: tuple[Device, ...]
    provenance: Mapping[str, str]
    emulated: bool
    complete: bool
    host_name: str
    static: float | None = None
    dynamic: float | None = None
    static_basis: str | None = None

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> Measurement:
        """From a response of ``/v1/energy`` to a query with ``pid`` and ``family``."""
        kinds, family = response["provenance"], response["family"]
        return cls(
            seconds=response["seconds"],
            joules=_energy(family, kinds),
            process=_energy(response["process"], kinds),
            host=_energy(response["host"], kinds),
            devices=tuple(map(Device.of, response["devices"])),
            provenance=dict(kinds),
            emulated=response["emulated"],
            complete=response["complete"],
            host_name=response["host_name"],
            static=family.get("static_joules"),
            dynamic=family.get("dynamic_joules"),
            static_basis=family.get("static_basis"),
        )


class NotSettledError(MeasurementError, TimeoutError):
    """The energy of the window is not complete yet; ``partial`` are the values so far."""

    def __init__(self, message: str, partial: Measurement) -> None:
        super().__init__(message)
        self.partial = partial

    def __reduce__(self) -> tuple[type[NotSettledError], tuple[str, Measurement]]:
        return type(self), (str(self), self.partial)


def _energy(response: Mapping[str, Any], kinds: Iterable[str]) -> Energy:
    """A table of joules by kind, for a host with devices of ``kinds``."""
    joules = {kind: value for kind, value in response["joules"].items() if value is not None}
    uncertainty = {kind: response["uncertainty_joules"].get(kind, 0.0) for kind in joules}
    unknown = [kind for kind in kinds if kind not in joules]
    bounded = (k for k, one in response.get("certainty", {}).items() if one == "lower_bound")
    return Energy(joules, uncertainty, response["coverage"], unknown, bounded)


_TIMEOUT_MARGIN = 2.0  # seconds for a response beyond the requested wait
HUNG_FOR = 60.0  # seconds for which an agent counts as hung without another attempt


class HungAgents:
    """Agents that have not answered in time, by the path of their socket. Thread-safe.

    The connection without an answer stays open: an agent hangs until it sends a byte or ends, and
    no other query waits to find that out.
    """

    def __init__(self) -> None:
        self._of: dict[str, tuple[socket, float, object]] = {}

    def add(self, path: str, identity: object, connection: socket) -> None:
        """Take the connection of a query to the agent, whose socket has an identity."""
        connection.setblocking(False)
        if self._of.setdefault(path, (connection, monotonic(), identity))[0] is not connection:
            connection.close()  # another thread has asked at the same time

    def check(self, path: str, identity: object) -> None:
        """TimeoutError if the agent hangs."""
        if (known := self._of.get(path)) is None:
            return
        connection, since, of = known
        elapsed = monotonic() - since
        if of == identity and elapsed < HUNG_FOR and _is_silent(connection):
            raise TimeoutError(f"timed out {elapsed:.0f} s ago, and has sent nothing since")
        self._of.pop(path, known)[0].close()

    def forget(self) -> None:
        """Close all connections, as in the child of a fork."""
        while self._of:
            self._of.popitem()[1][0].close()


def _is_silent(connection: socket) -> bool:
    try:
        connection.recv(1, MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:  # it has ended, or another thread has closed the connection
        return False
    return False


_hung = HungAgents()
os.register_at_fork(after_in_child=_hung.forget)


def request_json(
    path: str,
    parameters: Mapping[str, str],
    *,
    method: str = "GET",
    body: object = None,
    patience: float = 0.0,
    margin: float = _TIMEOUT_MARGIN,
    silence: float = inf,
    directories: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The response of the agent, within ``patience`` seconds plus a margin; ``body`` as JSON.

    The time limits the whole query of a directory, also if the agent responds byte by byte. An
    agent without a byte for ``silence`` seconds, or for two, hangs. While one hangs, further
    queries of this process fail at once.
    AgentUnavailableError if no agent responds, RefusedError with the sentence of the agent if it
    rejects the query.
    """
    target = f"{path}?{urlencode(parameters)}"
    failures: list[str] = []
    for directory in directories or run_directories():
        socket_path = f"{directory}/{API_SOCKET}"
        try:
            return _request(socket_path, target, method, body, patience + margin, silence)
        except OSError as error:
            cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
            failures.append(f"{socket_path} ({cause.lower()})")
    raise AgentUnavailableError(
        f"No wattspan agent answers at {' or '.join(failures)}. Start one with `wattspan run`, "
        "or set WATTSPAN_RUN_DIR to the agent's run directory."
    )


def _request(
    socket_path: str, target: str, method: str, sent: object, patience: float, silence: float
) -> dict[str, Any]:
    found = Path(socket_path).stat()  # without one, the same error as by connecting, but at once
    identity = found.st_dev, found.st_ino, found.st_ctime_ns
    _hung.check(socket_path, identity)
    encoded = None if sent is None else json.dumps(sent)

    def keep(connection: socket, silent: float) -> None:
        if silent >= min(silence, LONGEST_SILENCE):
            _hung.add(socket_path, identity, connection)
        else:  # the query was impatient: a slow agent does not hang
            connection.close()

    status, body = unix_request(
        socket_path,
        method,
        target,
        encoded,
        {ACKNOWLEDGEMENTS: "any"},
        patience=patience,
        silence=silence,
        keep=keep,
    )
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if content is None and status in _OVERLOADED:
        sentence = body.decode("utf-8", "replace").strip()
        raise AgentBusyError(f"The agent at {socket_path} refuses: {sentence}")
    if not isinstance(content, dict):
        raise MeasurementError(
            f"The server at {socket_path} is no wattspan agent: status {status}, no JSON. "
            "Set WATTSPAN_RUN_DIR to the agent's run directory."
        )
    if status != _OK:
        raise RefusedError(f"The agent at {socket_path} refuses: {content.get('detail', content)}")
    return content


_OK, _OVERLOADED = 200, (429, 503)


POLL_PAUSE = 0.05  # seconds between queries to an agent that responds at once
LONGEST_WAIT = 0.5  # seconds that one query waits at the agent; an older one is silent meanwhile
LONGEST_SILENCE = 2.0  # seconds; an agent sends an acknowledgement or the answer twice a second
LONGEST_ANSWER = 30.0  # seconds in which an agent that acknowledges a query answers it


def _read_energy(
    query: Mapping[str, str],
    timeout: float,
    directories: tuple[str, ...],
    is_final: Callable[[Mapping[str, Any]], bool],
    periods: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """The response once it ``is_final``, or the last one after ``timeout`` seconds.

    It is that for several ``periods`` if they are given. A busy agent is asked again for as long.
    """
    deadline = monotonic() + max(0.0, timeout)
    while True:
        asked = monotonic()
        left = max(0.0, deadline - asked)
        wait = min(LONGEST_WAIT, left)
        try:
            response = request_json(
                "/v1/energy",
                {**query, "wait": f"{wait * 1e3:.0f}ms"},
                method="GET" if periods is None else "POST",
                body=periods,
                patience=min(LONGEST_ANSWER, left),
                silence=LONGEST_SILENCE,
                directories=directories,
            )
        except AgentBusyError:
            if monotonic() >= deadline:
                raise
        else:
            if is_final(response) or monotonic() >= deadline:
                return response
        if monotonic() - asked < wait:  # the agent was too busy to wait
            sleep(min(POLL_PAUSE, wait))


def read_measurement(
    parameters: Mapping[str, str], timeout: float, directories: tuple[str, ...] = ()
) -> Measurement:
    """The measurement once it is complete, or the partial one after ``timeout`` seconds."""
    answer = _read_energy(parameters, timeout, directories, lambda one: bool(one["complete"]))
    return Measurement.of(answer)


def read_measurements(
    parameters: Mapping[str, str], periods: Sequence[tuple[int, int]], timeout: float
) -> list[Measurement]:
    """The measurements of the first of up to 1024 periods, some of which may be partial."""
    answer = _read_energy(
        parameters, timeout, (), lambda one: bool(one["windows"][0]["complete"]), periods
    )
    return [Measurement.of({**one, "host_name": answer["host_name"]}) for one in answer["windows"]]


DeviceReader = Callable[..., Sequence[Device]]
"""Called as ``read_devices``."""


def read_devices(
    start: int,
    end: int,
    ids: Sequence[str] | None = None,
    *,
    timeout: float = 0.0,
    timeline: bool = False,
    parts: bool = False,
    directories: tuple[str, ...] = (),
) -> tuple[Device, ...]:
    """The energy of the devices with ``ids``, or of all, between two monotonic times.

    With ``parts``, also of the MIG instances of the devices; parts can be named in any case.

    Waits at most ``timeout`` seconds until each device has a reading after ``end`` or is silent.
    Raises a MeasurementError if no agent responds, or if it refuses the query.
    """
    if ids is not None and not ids:
        return ()
    query = {"of": "devices", "start": f"mono:{start}", "end": f"mono:{end}"}
    if ids is not None:
        query["hw_id"] = ",".join(ids)
    flags = {"timeline": timeline, "parts": parts}
    query |= {name: "1" for name, wanted in flags.items() if wanted}
    answer = _read_energy(query, timeout, directories, _is_known)
    return tuple(map(Device.of, answer["devices"]))


def _is_known(answer: Mapping[str, Any]) -> bool:
    return all(one.complete or one.silent for one in map(Device.of, answer["devices"]))


def read_device_windows(
    periods: Sequence[tuple[int, int]], ids: Sequence[str], timeout: float
) -> list[tuple[Device, ...]]:
    """As ``read_devices``, of the first of up to 1024 periods: those that one request answers."""
    query = {"of": "devices", "hw_id": ",".join(ids)}
    answer = _read_energy(query, timeout, (), _is_known, periods)
    devices = list(map(Device.of, answer["devices"]))
    return [
        tuple(
            one._replace(joules=joules, uncertainty=error, coverage=coverage, complete=complete)
            for one, (joules, error, coverage, complete) in zip(devices, figures, strict=True)
        )
        for figures in answer["windows"]
    ]
