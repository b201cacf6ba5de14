"""Whether one could listen at an address, by trying it for a moment."""

from __future__ import annotations

import socket

from wattspan.model.settings import Listen


def why_not_listen(listen: Listen) -> str | None:
    """What stands against listening there, in lower case; None if nothing does."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None
