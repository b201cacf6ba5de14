"""Network namespaces behind a router, whose links and paths are cut. Needs root and `ip`.

All namespaces end with the context.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Self

from wattspan.emulation.control import Closeable

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NUMBERS = count()
_FOLDER = Path("/run/netns")


def missing() -> str | None:
    """The reason why a network cannot be made here; None if it can."""
    if os.geteuid():
        return "not root"
    try:
        with Network(1):
            return None
    except FileNotFoundError:
        return "no ip; install Debian's iproute2"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"


class Network(Closeable):
    """Some places, each with an address of its own, and a router between them."""

    def __init__(self, places: int) -> None:
        number = next(_NUMBERS)
        self._router = f"wattspan-test-{os.getpid()}-{number}"
        self._places = [f"{self._router}-{place}" for place in range(places)]
        self._stack = ExitStack()

    def address(self, place: int) -> str:
        return f"{_subnet(place)}.2"

    def command(self, place: int) -> tuple[str, ...]:
        """The beginning of a command that runs at a place."""
        return ("ip", "netns", "exec", self._places[place])

    def enter(self, place: int) -> None:
        """Bring this thread, and those that it starts, to a place for good."""
        enter_network(_FOLDER / self._places[place])

    @contextmanager
    def at_router(self) -> Iterator[None]:
        """Bring this thread, and those that it starts, to the router, which reaches all places."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter_network(_FOLDER / self._router)
            yield
        finally:
            _set(before)
            os.close(before)

    def cut(self, place: int) -> None:
        """Take the link of a place down; the router answers that the place is unreachable."""
        _ip("-n", self._router, "link", "set", f"to-{place}", "down")

    def join(self, place: int) -> None:
        _ip("-n", self._router, "link", "set", f"to-{place}", "up")

    def cut_path(self, start: int, end: int) -> None:
        """Drop every packet from one place to another one without an answer; those back arrive."""
        _ip("-n", self._router, "rule", "add", *_path(start, end))

    def join_path(self, start: int, end: int) -> None:
        _ip("-n", self._router, "rule", "del", *_path(start, end))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for name in (self._router, *self._places):
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
                _ip("-n", name, "link", "set", "lo", "up")
            for place, name in enumerate(self._places):
                link, subnet = f"to-{place}", _subnet(place)
                _ip(
                    *("-n", self._router, "link", "add", link, "type", "veth"),
                    *("peer", "name", "eth0", "netns", name),
                )
                _ip("-n", self._router, "addr", "add", f"{subnet}.1/24", "dev", link)
                _ip("-n", self._router, "link", "set", link, "up")
                _ip("-n", name, "addr", "add", f"{subnet}.2/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                _ip("-n", name, "route", "add", "default", "via", f"{subnet}.1")
            with self.at_router():
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """Remove all namespaces."""
        self._stack.close()


def _subnet(place: int) -> str:
    return f"10.214.{place}"


def _path(start: int, end: int) -> tuple[str, ...]:
    return ("from", f"{_subnet(start)}.0/24", "to", f"{_subnet(end)}.0/24", "blackhole")


def enter_network(namespace: Path) -> None:
    """Bring this thread, and those that it starts, into a network namespace."""
    descriptor = os.open(namespace, os.O_RDONLY)
    try:
        _set(descriptor)
    finally:
        os.close(descriptor)


def _set(descriptor: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)
