"""A span processor that writes the start and end of every span to the agent's ring.

It runs inside applications, twice a span: without threads, queues, or locks except to connect, and
writes a record of 48 bytes each time. An exception disables it permanently. It also puts the
identity of the process on the resource of spans, as OpenTelemetry's ``process.*`` attributes.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from threading import Lock
from time import monotonic_ns, thread_time_ns
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource

from wattspan.sdk import run_directories
from wattspan.sdk.ring import (
    CPU_TIME_VALID_FOR,
    ENDED,
    RECORD_SIZE,
    RECORDS,
    SIDE_CHANNEL_SOCKET,
    STARTED,
    WRITE_FORMAT,
    RingChannel,
    RingWriter,
)

PID_ATTRIBUTE = "process.pid"
CREATION_TIME_ATTRIBUTE = "process.creation.time"


def process_creation_time() -> str:
    """The start time of this process: ISO 8601, UTC, with the kernel's resolution of 10 ms."""
    with open("/proc/self/stat", "rb") as stat:  # noqa: PTH123 - pathlib would be a further import
        ticks = int(stat.read().rpartition(b")")[2].split()[19])  # field 22
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    seconds, milliseconds = divmod(round((boot + since_boot) * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z"


def set_process_resource(provider: Any) -> None:
    """Put pid and start time on the resource of ``provider``, in this process and its forks.

    A resource with another pid stays unchanged.
    """
    _update_resource(provider, os.getpid())
    pids = [os.getpid()]
    reference = weakref.ref(provider)

    def in_child() -> None:
        if (provider := reference()) is not None:
            with contextlib.suppress(Exception):
                _update_resource(provider, *pids)
        pids[:] = [os.getpid()]

    os.register_at_fork(after_in_child=in_child)


def _update_resource(provider: Any, *ours: int) -> None:
    """Update the resource if it has no pid or one of ``ours``."""
    pid = os.getpid()
    present = provider.resource.attributes.get(PID_ATTRIBUTE)
    if present not in (None, pid, *ours):
        return
    resource = provider.resource.merge(
        Resource({PID_ATTRIBUTE: pid, CREATION_TIME_ATTRIBUTE: process_creation_time()})
    )
    # Without the lock of the provider, which in the child of a fork may never be released.
    provider._resource = resource  # noqa: SLF001
    for tracer in list(getattr(provider, "_tracers", {}).values()):
        tracer.resource = resource


_CHECK_INTERVAL = 1_000_000_000  # nanoseconds between checks of the connection
_LONGEST_RETRY = 10_000_000_000  # nanoseconds between attempts to connect
_NEVER = 1 << 63

_write = WRITE_FORMAT.pack_into


class SpanProcessor(sdk.SpanProcessor):
    """Reports the start and end of every span to the agent; add it to a provider once.

    Without an agent it tries to connect now and then.
    """

    def __init__(self) -> None:
        self._connecting = Lock()
        self._wait = _CHECK_INTERVAL
        self._due = 0  # monotonic time of the next check of the channel
        self._channel: RingChannel | None = None
        self._pen: RingWriter | None = None
        self._begin()
        this = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := this()) and method())

    def _begin(self) -> None:
        """Create a ring before the first span: several threads may start spans at once."""
        with contextlib.suppress(OSError):
            self._channel = RingChannel()
            self._pen = self._channel.pen

    # The two methods below repeat each other: a shared function would add a sixth to their cost.

    def on_start(self, span: sdk.Span, parent_context: context_api.Context | None = None) -> None:
        try:
            at = monotonic_ns()
            if at >= self._due:
                self._check_channel(at)
            pen = self._pen
            if pen is None:
                return
            me = pen.here.me
            if pen.threads[0] == 1:
                cpu = 0  # of a single thread, the CPU time is not needed
            elif (since := at - me.asked) < CPU_TIME_VALID_FOR:
                cpu = me.cpu + since  # extrapolated
            else:
                me.asked, me.cpu = at, (cpu := thread_time_ns())
            parent = span.parent
            take = pen.take
            number = take()
            _write(
                pen.memory,
                number % RECORDS * RECORD_SIZE,
                span.context[1],  # its id
                0 if parent is None or parent[2] else parent[1],  # [2]: it is remote
                at,
                cpu,
                me.id,
                STARTED,
                number,
            )
        except Exception:  # noqa: BLE001 - see above
            self.shutdown()

    def record_end(self, span: sdk.ReadableSpan) -> None:
        pen = self._pen
        if pen is None:
            return
        try:
            at = monotonic_ns()
            me = pen.here.me
            if pen.threads[0] == 1:
                cpu = 0
            elif (since := at - me.asked) < CPU_TIME_VALID_FOR:
                cpu = me.cpu + since
            else:
                me.asked, me.cpu = at, (cpu := thread_time_ns())
            take = pen.take
            number = take()
            _write(
                pen.memory,
                number % RECORDS * RECORD_SIZE,
                span.context[1],
                0,
                at,
                cpu,
                me.id,
                ENDED,
                number,
            )
        except Exception:  # noqa: BLE001 - see above
            self.shutdown()

    # Recent SDKs report the end of a span before any processor exports it.
    if hasattr(sdk.SpanProcessor, "_on_ending"):
        _on_ending = record_end
    else:
        on_end = record_end

    def shutdown(self) -> None:
        """Stop permanently."""
        self._due = _NEVER
        self._drop()

    def _check_channel(self, at: int) -> None:
        """Check the connection to the agent, and connect if there is none."""
        if not self._connecting.acquire(blocking=False):
            return  # another thread connects
        try:
            channel = self._channel
            if channel is not None and channel.is_open:
                self._due, self._wait = at + _CHECK_INTERVAL, _CHECK_INTERVAL
                return
            refused = channel is not None and channel.is_used and self._wait > _CHECK_INTERVAL
            if channel is None or channel.is_used:
                self._drop()
                if not refused:  # a full agent disconnects at once
                    self._begin()
            channel = self._channel
            if channel is not None and channel.connect(
                f"{directory}/{SIDE_CHANNEL_SOCKET}" for directory in run_directories()
            ):
                self._due = at + _CHECK_INTERVAL
            else:
                self._drop()
                self._due = at + self._wait
            self._wait = min(2 * self._wait, _LONGEST_RETRY)
        finally:
            self._connecting.release()

    def _drop(self) -> None:
        channel, self._channel, self._pen = self._channel, None, None
        if channel is not None:
            channel.close()

    def _forked(self) -> None:
        """In the child of a fork: the ring and the connection belong to the parent."""
        self._connecting = Lock()
        if self._due == _NEVER:
            return
        self._due, self._wait = 0, _CHECK_INTERVAL
        if self._channel is not None:
            self._drop()
            self._begin()


def attach(provider: Any) -> str:
    """Add a processor to ``provider`` unless it has one; returns the obstacle, or ""."""
    active = getattr(provider, "_active_span_processor", None)
    if isinstance(active, sdk.ConcurrentMultiSpanProcessor):
        return "its provider runs processors in threads of their own"
    present = getattr(active, "_span_processors", ())
    if not any(isinstance(each, SpanProcessor) for each in present):
        set_process_resource(provider)
        provider.add_span_processor(SpanProcessor())
    return ""
