"""Which process this is, said on the resource of its spans in OpenTelemetry's words."""

from __future__ import annotations

import contextlib
import os
import time  # noqa: TID251 - there is no Clock in applications
import weakref
from typing import Any

from opentelemetry.sdk.resources import Resource

PID = "process.pid"
CREATED = "process.creation.time"


def created() -> str:
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


def introduce(provider: Any) -> None:
    """Put pid and start time on the resource of ``provider``, in this process and its forks.

    Whoever set another pid there knows better, and is left alone.
    """
    _say(provider, os.getpid())
    pids = [os.getpid()]
    reference = weakref.ref(provider)

    def in_child() -> None:
        if (provider := reference()) is not None:
            with contextlib.suppress(Exception):
                _say(provider, *pids)
        pids[:] = [os.getpid()]

    os.register_at_fork(after_in_child=in_child)


def _say(provider: Any, *ours: int) -> None:
    """The resource says who we are, if it said nothing or what we were (``ours``)."""
    pid = os.getpid()
    said = provider.resource.attributes.get(PID)
    if said not in (None, pid, *ours):
        return
    resource = provider.resource.merge(Resource({PID: pid, CREATED: created()}))
    # By hand and without the provider's lock: in the child of a fork nobody would release it.
    provider._resource = resource  # noqa: SLF001
    for tracer in list(getattr(provider, "_tracers", {}).values()):
        tracer.resource = resource
