"""Which process this is, said on the resource of its spans in OpenTelemetry's words.

A span processor that notes the start and the end of every span in the agent's ring.

This runs inside other people's programs, twice a span: no thread, no queue, no lock but to connect;
a record of 48 bytes each time. An exception in it turns it off for good.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from threading import Lock, get_native_id
from time import (
    monotonic_ns,
    thread_time_ns,
)
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.sdk import trace as sdk
from opentelemetry.sdk.resources import Resource

from wattspan.sdk.ring import (
    CPU_TIME_VALID_FOR,
    ENDED,
    RECORD_SIZE,
    RECORDS,
    STARTED,
    WRITE_FORMAT,
    RingChannel,
    RingWriter,
    socket_candidates,
)

PID_ATTRIBUTE = "process.pid"
CREATION_TIME_ATTRIBUTE = "process.creation.time"


def process_creation_time() -> str:
    """When this process was started: ISO 8601, UTC, to the kernel's hundredth of a second."""
    ticks = int(_stat().rpartition(b")")[2].split()[19])  # field 22
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    seconds, milliseconds = divmod(round((boot + since_boot) * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03}Z"


def _stat() -> bytes:
    # pathlib would be one more thing for the application to load
    file = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def set_process_resource(provider: Any) -> None:
    """Put pid and start time on the resource of ``provider``, in this process and its forks.

    Whoever set another pid there knows better, and is left alone.
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
    """The resource says who we are, if it said nothing or what we were (``ours``)."""
    pid = os.getpid()
    said = provider.resource.attributes.get(PID_ATTRIBUTE)
    if said not in (None, pid, *ours):
        return
    resource = provider.resource.merge(
        Resource({PID_ATTRIBUTE: pid, CREATION_TIME_ATTRIBUTE: process_creation_time()})
    )
    # By hand and without the provider's lock: in the child of a fork nobody would release it.
    provider._resource = resource  # noqa: SLF001
    for tracer in list(getattr(provider, "_tracers", {}).values()):
        tracer.resource = resource


_CHECK_INTERVAL = 1_000_000_000  # whether the agent is still there
_LONGEST_RETRY = 10_000_000_000  # before it is looked for again
_NEVER = 1 << 63

_write = WRITE_FORMAT.pack_into


class SpanProcessor(sdk.SpanProcessor):
    """Tells the agent of every span as it starts and ends; add it to a provider once.

    Where no agent listens it marks spans with ``thread.id`` instead, and looks for one again
    every now and then.
    """

    def __init__(self) -> None:
        self._looking = Lock()
        self._wait = _CHECK_INTERVAL
        self._due = 0  # when to look after the channel, on the monotonic clock
        self._marking = True
        self._channel: RingChannel | None = None
        self._pen: RingWriter | None = None
        self._begin()
        this = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: (method := this()) and method())

    def _begin(self) -> None:
        """Have a ring before the first span: several threads may start theirs at once."""
        with contextlib.suppress(OSError):
            self._channel = RingChannel()
            self._pen = self._channel.pen

    # The two methods below repeat each other: a function for what they share would cost a sixth
    # of all that is added to a span.

    def on_start(self, span: sdk.Span, parent_context: context_api.Context | None = None) -> None:
        try:
            at = monotonic_ns()
            if at >= self._due:
                self._look(at)
            pen = self._pen
            if pen is None:
                if self._marking:
                    _set_thread_id(span)
                return
            me = pen.here.me
            if pen.threads[0] == 1:
                cpu = 0  # there is no other thread to be told apart from
            elif (since := at - me.asked) < CPU_TIME_VALID_FOR:
                cpu = me.cpu + since  # as if it had run ever since
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

    def _ended(self, span: sdk.ReadableSpan) -> None:
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

    # A span's end is noted before any processor exports it, where the SDK tells us in time.
    if hasattr(sdk.SpanProcessor, "_on_ending"):
        _on_ending = _ended
    else:
        on_end = _ended

    def shutdown(self) -> None:
        """Tell no more."""
        self._due, self._marking = _NEVER, False
        self._drop()

    def _look(self, at: int) -> None:
        """See whether the agent is still there, and find it again if it is not."""
        if not self._looking.acquire(blocking=False):
            return  # somebody is at it
        try:
            channel = self._channel
            if channel is not None and channel.is_open:
                self._due, self._wait = at + _CHECK_INTERVAL, _CHECK_INTERVAL
                return
            refused = channel is not None and channel.is_used and self._wait > _CHECK_INTERVAL
            if channel is None or channel.is_used:
                self._drop()
                if not refused:  # else it hung up at once, having no room
                    self._begin()
            channel = self._channel
            if channel is not None and channel.connect(socket_candidates(os.environ)):
                self._due = at + _CHECK_INTERVAL
            else:
                self._drop()
                self._due = at + self._wait
            self._wait = min(2 * self._wait, _LONGEST_RETRY)
        finally:
            self._looking.release()

    def _drop(self) -> None:
        channel, self._channel, self._pen = self._channel, None, None
        if channel is not None:
            channel.close()

    def _forked(self) -> None:
        """In the child of a fork: the ring and the connection are the parent's."""
        self._looking = Lock()
        if self._due == _NEVER:
            return
        self._due, self._wait = 0, _CHECK_INTERVAL
        if self._channel is not None:
            self._drop()
            self._begin()


def _set_thread_id(span: sdk.Span) -> None:
    if "thread.id" not in (span.attributes or ()):
        span.set_attribute("thread.id", get_native_id())


def attach(provider: Any) -> str:
    """Add a processor to ``provider``, unless it has one; returns why that cannot be, or ""."""
    active = getattr(provider, "_active_span_processor", None)
    if isinstance(active, sdk.ConcurrentMultiSpanProcessor):
        return "its provider runs processors in threads of their own"
    present = getattr(active, "_span_processors", ())
    if not any(isinstance(each, SpanProcessor) for each in present):
        set_process_resource(provider)
        provider.add_span_processor(SpanProcessor())
    return ""
