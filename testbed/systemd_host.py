"""A real systemd, booted in its own namespaces on this machine.

It is process 1 of its PID namespace, with its own mounts, cgroups, network (a loopback), host name
and semaphores. Writable parts of the machine's root are covered: /etc is a copy, and
/var, /home, /opt, /run, /tmp and /dev/shm are empty and in memory. Another ``root``, a folder with
a system, is booted instead and keeps written data.

Resource limits can be seen as set, not be felt: their controllers may be bound elsewhere.
"""

from __future__ import annotations

import functools
import os
import pty
import shlex
import shutil
import signal
import subprocess
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from testbed.systemd_boot import ENTER_CGROUP, LEAVE_CGROUP, PREFIX, boot_script, own_units, sweep
from testbed.waiting import eventually
from wattspan.emulation.control import Closeable

PRINTED = Path("/run/systemd-host/printed")
"""File with the output of services, inside the host."""

_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}


class HostError(AssertionError):
    """The boot failed, or a command in it failed; the message has the log."""


class SystemdHost(Closeable):
    """A systemd that runs from ``with`` to the end of it. Needs root and the requirements
    listed by ``missing``.

    ``units`` are unit files, or folders whose contents are taken (``NAME.service.d`` as such),
    copied to ``host.units``: a test may change them there, and reload. No other services exist,
    unless ``root`` is given: there they are added to its own. ``binds`` says which path inside
    (the key) shows which file or folder of this machine; a path that does not exist is made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: Path = Path("/"),
        units: Sequence[Path] = (),
        binds: Mapping[Path, Path] | None = None,
        target: str = "systemd-host.target",
    ) -> None:
        """``folder`` is created; it must not be below a covered path, except /tmp."""
        self.folder, self.units = folder, folder / "units"
        self.units.mkdir(parents=True)
        own_units(self.units, alone=root == Path("/"))
        for unit in units:
            if unit.is_dir() and unit.suffix != ".d":
                shutil.copytree(unit, self.units, dirs_exist_ok=True)
            elif unit.is_dir():
                shutil.copytree(unit, self.units / unit.name, dirs_exist_ok=True)
            else:
                shutil.copy(unit, self.units)
        self._boot = (root, dict(binds or {}), target)
        self.name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._said = bytearray()
        self.pid = 0
        """Its process 1, as this machine counts processes."""

    # ------------------------------------------------------------------------------ actions

    def systemctl(self, *words: str, check: bool = True) -> str:
        """Output of ``systemctl``; HostError with the log on failure if ``check``."""
        return self.run("systemctl", "--no-pager", "--no-ask-password", *words, check=check).stdout

    def run(
        self, *command: str | Path, check: bool = True, stdin: str = "", timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside, as root and outside of every unit, to its end."""
        done = subprocess.run(
            self._entering(command),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            env=_ENVIRONMENT,
        )
        if check and done.returncode:
            raise HostError(
                f"{shlex.join(map(str, command))} ended with {done.returncode}:\n"
                f"{done.stdout}{done.stderr}\n{self.journal()}"
            )
        return done

    def popen(self, *command: str | Path) -> subprocess.Popen[str]:
        """Start a program inside that the caller ends; its standard input is a pipe."""
        return subprocess.Popen(
            self._entering(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )

    def _entering(self, command: Sequence[str | Path]) -> list[str]:
        namespaces = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")
        return ["nsenter", f"--target={self.pid}", *namespaces, "--", *map(str, command)]

    def property(self, unit: str, name: str) -> str:
        """One property of a unit, from ``systemctl show``."""
        return self.systemctl("show", f"--property={name}", "--value", "--", unit).rstrip("\n")

    def wait_for(self, unit: str, name: str, wanted: str, within: float = 60.0) -> None:
        """Wait until a property has a value; HostError with the log on timeout."""
        try:
            eventually(lambda: self.property(unit, name) == wanted, f"{unit} {name}", within)
        except AssertionError:
            raise HostError(
                f"{unit}: {name} is {self.property(unit, name)!r}, not {wanted!r}:\n"
                f"{self.systemctl('status', '--', unit, check=False)}\n{self.journal()}"
            ) from None

    def kill(self, unit: str, number: signal.Signals) -> None:
        """Send a signal to a unit's main process only."""
        self.systemctl("kill", "--kill-who=main", f"--signal={number.name}", "--", unit)

    def journal(self) -> str:
        """Log of systemd, followed by the output of its services."""
        said = self._said.decode(errors="replace").replace("\r\n", "\n")
        with suppress(OSError):
            said += self.inside(PRINTED).read_text(errors="replace")
        return said

    def inside(self, path: Path | str) -> Path:
        """Path on this machine of ``path`` inside, while systemd runs. No links in it."""
        return Path(f"/proc/{self.pid}/root", str(path).lstrip("/"))

    # --------------------------------------------------------------------------- its whole life

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        self._slave = slave
        root, binds, target = self._boot
        script = self.folder / "boot"
        script.write_text(boot_script(self.folder, root, binds, target, os.ttyname(slave)))
        self._reader = threading.Thread(target=self._listen, name="systemd-host console")
        self._reader.start()
        # The end of the tests ends systemd in any case: the outer process dies with
        # this one, the inner with it.
        self._process = subprocess.Popen(
            [*("setpriv", "--pdeathsig", "KILL", "--"), *ENTER_CGROUP, self.name, str(script)],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, "container": "systemd-host"},
        )
        try:
            eventually(self._up, "it boots", within=120)
        except BaseException as error:
            said = self.journal()
            self.close()
            if isinstance(error, AssertionError):
                raise HostError(f"systemd does not boot here:\n{said}") from None
            raise
        return self

    def close(self) -> None:
        """End it and everything in it, at once. Closing twice is permitted."""
        if self._process.returncode is None:
            for pid in _children(self._process.pid) or [self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait(30)
            subprocess.run([*LEAVE_CGROUP, self.name], cwd=self.folder, check=True, timeout=30)
            os.close(self._slave)
            self._reader.join()
            os.close(self._master)

    def _up(self) -> bool:
        """True if process 1 has finished booting."""
        if self._process.poll() is not None:
            raise AssertionError
        if self.pid == 0:
            self.pid = next(filter(_is_first, _children(self._process.pid)), 0)
        if self.pid == 0 or not self.inside("/run/systemd/private").exists():
            return False
        state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
        return state in {"running", "degraded"}

    def _listen(self) -> None:
        """Read the console continuously, so that no writer blocks."""
        with suppress(OSError):  # the last holder of the pipe has closed it
            while told := os.read(self._master, 4096):
                self._said += told


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_first(pid: int) -> bool:
    """True if it is process 1 of a PID namespace."""
    with suppress(OSError):
        told = Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2]
        return told.partition("\n")[0].split()[-1:] == ["1"]
    return False


@functools.cache
def missing() -> str | None:
    """Cause that prevents a systemd boot here; None if possible."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/lib/systemd/systemd").exists():
        return "no systemd; install Debian's systemd"
    name = f"{PREFIX}{os.getpid()}-tried"
    tried = subprocess.run(
        [*ENTER_CGROUP, name, "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    subprocess.run([*LEAVE_CGROUP, name], check=False, capture_output=True, cwd="/")
    if tried.returncode:
        return f"no namespaces to boot systemd in: {tried.stderr.strip()}"
    sweep()
    return None
