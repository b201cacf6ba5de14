"""Tells systemd how the service is doing; nothing where there is no systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress


class Notify:
    """One datagram a message to ``$NOTIFY_SOCKET``."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + where[1:] if where.startswith("@") else where

    def __call__(self, message: str) -> None:
        """Send ``READY=1``, ``WATCHDOG=1``, ``STOPPING=1`` or the like."""
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.setblocking(False)
            out.sendto(message.encode(), self._address)
