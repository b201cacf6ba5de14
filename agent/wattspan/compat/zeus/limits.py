"""Limits of GPUs that this process holds by a lease of the capper, which alone sets them.

A thread of its own renews the lease. The capper restores the original limits however the process
ends: at once if it ends or is killed, and by the end of the lease if it hangs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from threading import Event, RLock, Thread
from time import monotonic, sleep
from typing import Any

from wattspan.model import CapKey, CapRow, Knob
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import request_json

_log = logging.getLogger("wattspan")

RENEWAL_INTERVAL = 1.0
"""Seconds between two renewals; the shortest lease that can be configured is longer."""

STEP_INTERVAL, PATIENCE = 0.1, 3.0
"""Seconds between two steps down, whose size the capper limits, and after the last of them."""

TIMEOUT = 5.0  # seconds for one answer of the capper


class ZeusBaseError(Exception):
    """The base of all errors of ``zeus``."""


class ZeusBaseGPUError(ZeusBaseError):
    """The base of the errors of GPUs."""


class ZeusGPUNotSupportedError(ZeusBaseGPUError):
    """The GPU, the agent or the capper does not do this, or no capper runs."""


class ZeusGPUNoPermissionError(ZeusBaseGPUError):
    """The capper does not set this limit for this user, or keeps another one in force."""


_REFUSALS: dict[str, type[ZeusBaseGPUError]] = {
    **dict.fromkeys(("not_allowed", "no_permission", "held", "foreign"), ZeusGPUNoPermissionError),
    **dict.fromkeys(("", "unknown_device", "locked", "not_honoured"), ZeusGPUNotSupportedError),
}


class HeldLimits:
    """The limits that this process holds. Thread-safe; a child of a fork holds none.

    A ZeusBaseGPUError has the sentence of the capper.
    """

    def __init__(self, ask: Callable[..., dict[str, Any]] = request_json) -> None:
        self._ask = ask
        self._client: Any = None
        self.forget()

    def forget(self) -> None:
        """In the child of a fork: the limits, and the connection, are its parent's."""
        self._lock, self._ended, self._wanted = RLock(), Event(), dict[CapKey, int]()
        self._thread: Thread | None = None
        self._disconnect()

    def row(self, key: CapKey) -> CapRow:
        """A knob as it is now, for every user."""
        protocol = import_module("wattspan.capper.protocol")  # imports more than a script needs
        state = protocol.msgspec.convert(self._capper()["state"], protocol.StateReply)
        return _of(key, map(protocol.cap_row, state.rows))

    def hold(self, key: CapKey, value: int, *, block: bool = True) -> None:
        """Hold a limit until ``release``; an error if another one stays in force.

        Without ``block`` the steps towards it continue after the return.
        """
        with self._lock:
            wanted = {**self._wanted, key: value}
            row, deadline = self._request(wanted, key), monotonic() + PATIENCE
            while block and (row.state.requested or 0) > value and monotonic() < deadline:
                sleep(STEP_INTERVAL)
                before, row = row, self._request(wanted, key)
                if row.state.requested != before.state.requested:
                    deadline = monotonic() + PATIENCE
            if why := _difference(row, value, block=block):
                self._keep()
                raise ZeusGPUNoPermissionError(why)
            if not (self._wanted and self._thread and self._thread.is_alive()):
                self._ended = Event()
                self._thread = Thread(target=self._renew, args=(self._ended,), daemon=True)
                self._thread.start()
            self._wanted = wanted

    def release(self, key: CapKey) -> None:
        """Let the capper restore a limit, if this process holds it."""
        with self._lock:
            if self._wanted.pop(key, None) is not None:
                self._keep()

    # --------------------------------------------------------------------------- inner workings

    def _keep(self) -> None:
        """Hold the wanted limits only; without any, the end of the connection restores all."""
        if self._wanted:
            self._request(self._wanted)
        else:
            self._ended.set()
            self._disconnect()

    def _renew(self, ended: Event) -> None:
        while not ended.wait(RENEWAL_INTERVAL):
            with self._lock:
                try:
                    if not ended.is_set():
                        self._request(self._wanted)
                except ZeusGPUNoPermissionError as error:
                    _log.warning("This process holds no limits any more: %s", error)
                    self._wanted = {}
                    self._keep()
                except ZeusBaseGPUError:  # the capper may start again
                    continue

    def _request(self, wanted: Mapping[CapKey, int], key: CapKey | None = None) -> Any:
        """Hold exactly ``wanted``; the row of ``key``."""
        protocol = import_module("wattspan.capper.protocol")
        who = f"zeus.device of process {os.getpid()}"
        try:
            if self._client is None:
                clock = import_module("wattspan.clock").SystemClock()
                self._client = protocol.CapperClient(self._address, clock, who=who, timeout=TIMEOUT)
            rows = self._client.hold(who, wanted, "set by the program")
        except protocol.CapsError as error:
            if not self._wanted:
                self._disconnect()
            raise _REFUSALS.get(error.refusal, ZeusBaseGPUError)(str(error)) from None
        return None if key is None else _of(key, rows)

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _address(self) -> list[Any]:
        address = import_module("wattspan.capper.protocol").CapperAddress
        return [address(Path(self._capper()["socket"]))]

    def _capper(self) -> dict[str, Any]:
        """The socket and the state of the capper that serves the agent."""
        try:
            found: dict[str, Any] | None = self._ask("/v1/caps", {})["capper"]
        except MeasurementError as error:
            raise ZeusGPUNotSupportedError(str(error)) from None
        if found is None:
            raise ZeusGPUNotSupportedError(
                "No capper runs here, which alone sets limits: `systemctl start wattspan-capper`."
            )
        return found


def _of(key: CapKey, rows: Any) -> CapRow:
    for row in rows:
        if row.state.key == key:
            found: CapRow = row
            return found
    raise ZeusGPUNotSupportedError(
        f"The capper sets no {key.knob} of {key.device}; `wattspan caps status` lists its knobs."
    )


def _difference(row: CapRow, value: int, *, block: bool) -> str:
    """The reason if another limit than ``value`` is in force, with the remedy; else ""."""
    state, present, knob = row.state, row.state.requested, row.state.key.knob
    rounding = 30 if knob is Knob.GPU_CLOCK else 1000  # a device rounds down
    if present is None or (present > value and not block) or value - rounding < present <= value:
        return ""
    bound = "higher than its original limit and the operator's"
    if present > value:
        bound = "lower than its minimum and the operator's floor"
    return (
        f"The {knob} of {state.name} is {present} {knob.unit} and not {value}: it can be no "
        f"{bound}. Ask for another value, or let the operator change [caps] and [autotune]."
    )


held_limits = HeldLimits()
"""Those of this process."""

os.register_at_fork(after_in_child=held_limits.forget)
