"""A bound on the memory of a process and its children: a control group, or a watch on its size."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

MEMORY_MAX = 384 << 20  # as in systemd/wattspan.service
_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")
_LOOK = 0.02  # seconds


def resident(pid: int, key: str = "VmRSS") -> int:
    """Bytes of a line of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def reset_peak(pid: int) -> None:
    """Reset VmHWM of a process to its current size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class MemoryLimit:
    """A control group of version 2 or 1 with a memory limit; without a writable one, none.

    ``within`` is the command that runs a program in the group, empty where there is none.
    """

    def __init__(self, name: str, most: int = MEMORY_MAX) -> None:
        self._group: Path | None = None
        self.kind, self.most = "none", most
        choices = (("cgroup v2", _V2, "memory.max"), ("cgroup v1", _V1, "memory.limit_in_bytes"))
        for kind, root, limit in choices:
            group = root / f"{name}-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                if (group / limit).exists():  # or the memory controller is not here
                    (group / limit).write_text(str(most))
                    self._group, self.kind = group, kind
                    break
            with contextlib.suppress(OSError):
                group.rmdir()

    @property
    def within(self) -> Sequence[str]:
        if self._group is None:
            return []
        enter = 'echo $$ >"$1" && shift && exec "$@"'
        return ["sh", "-c", enter, "sh", str(self._group / "cgroup.procs")]

    def peak(self) -> int | None:
        """The most bytes that the group has used; None without a group."""
        name = {"cgroup v2": "memory.peak", "cgroup v1": "memory.max_usage_in_bytes"}
        if self._group is None:
            return None
        return int((self._group / name[self.kind]).read_text())

    def kills(self) -> int:
        """Number of processes of the group killed for memory."""
        name = {"cgroup v2": "memory.events", "cgroup v1": "memory.oom_control"}
        if self._group is None:
            return 0
        found = re.search(
            r"^oom_kill (\d+)$", (self._group / name[self.kind]).read_text(), re.MULTILINE
        )
        return int(found[1]) if found else 0

    def close(self) -> None:
        if self._group is not None:
            with contextlib.suppress(OSError):
                self._group.rmdir()


class SizeWatch:
    """Kills a process that is larger than a limit, for hosts without a writable control group."""

    def __init__(self, most: int) -> None:
        self.kills = 0
        self._most, self._pid = most, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def follow(self, pid: int) -> None:
        """Watch this process from now on."""
        self._pid = pid

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK):
            pid = self._pid
            with contextlib.suppress(OSError, KeyError):
                if pid and resident(pid) > self._most:
                    os.kill(pid, 9)
                    self.kills += 1
                    self._pid = 0
