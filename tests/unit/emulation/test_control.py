"""Messages to a job from an emulated host that ends during the conversation."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from wattspan.emulation.control import SOCKET_NAME, ControlClient
from wattspan.ports import WattspanError


@pytest.fixture
def door() -> Iterator[tuple[Path, socket.socket]]:
    with (
        tempfile.TemporaryDirectory(prefix="wattspan-") as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(str(Path(folder) / SOCKET_NAME))
        listening.listen()
        yield Path(folder), listening


@pytest.mark.parametrize("said", [b"", b'{"units": 1'])
def test_client_reports_the_end_of_the_host(door: tuple[Path, socket.socket], said: bytes) -> None:
    folder, listening = door
    conversation = ControlClient(folder)
    host, _ = listening.accept()
    host.sendall(said)
    host.close()
    with pytest.raises(WattspanError, match=r"^The emulated host has ended\.$"):
        conversation.ask(do="finished")
    conversation.close()
