"""Datagrams as `DatagramReader` returns them, and filters run by the kernel."""

import socket
import struct
from collections.abc import Sequence

from wattspan.processes.netlink import ADDRESS, DatagramBatch, Rule, assemble, attach_filter


def batch_of(*datagrams: bytes, longest: int = 176, sender: int = 0) -> DatagramBatch:
    """Datagrams from the netlink port ``sender`` in slots for at most ``longest`` bytes."""
    address = struct.pack("=HHII4x", socket.AF_NETLINK, 0, sender, 1)
    cut = [datagram[:longest] for datagram in datagrams]
    memory = b"".join(address + one.ljust(longest, b"\xff") for one in cut)
    return DatagramBatch(memoryview(memory), ADDRESS + longest, [len(one) for one in cut])


def passed(rules: Sequence[Rule], datagram: bytes) -> bool:
    """True if the kernel queues ``datagram`` at a socket with the filter."""
    sender, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sender, link:
        assert attach_filter(link, assemble(rules))
        link.setblocking(False)
        sender.send(datagram)
        try:
            return link.recv(65536) == datagram
        except BlockingIOError:
            return False
