"""Tries permitted and forbidden actions of a service and reports the results.

Run inside a unit's sandbox, and outside. Its argument is the name of the service's directories; it
prints one line of JSON: the error of each action, "" for success.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = sys.argv[1] if len(sys.argv) > 1 else ""
STATE, RUN = Path("/var/lib", NAME), Path("/run", NAME)
PLACES = Path("/opt/probed")  # files created by `prepare`: see tests/flow/test_systemd_sandbox.py
CAPPERS = Path("/var/lib/wattspan-capper")
ZONE = Path("/sys/class/powercap/intel-rapl:0")
PORT = 7777
MARK = "probed:"

_LIBC = ctypes.CDLL(None, use_errno=True)
_ATTACH, _DETACH, _WALL, _NEW_USER = 16, 17, 0x40000000, 0x10000000
_FINIT_MODULE = {"x86_64": 313, "aarch64": 273}
_NO_MODULE = (8, 22)  # ENOEXEC, EINVAL: the kernel has read the file to load


def _call(name: str, *arguments: object) -> None:
    if getattr(_LIBC, name)(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _read(path: Path) -> None:
    with path.open("rb") as file:
        file.read(64)


def _write(path: Path) -> None:
    path.write_text("probed")
    path.unlink()


def _rewrite(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.write(descriptor, os.pread(descriptor, 100, 0))
    finally:
        os.close(descriptor)


def _open_socket(family: int, kind: int, protocol: int = 0) -> None:
    socket.socket(family, kind, protocol).close()


def _trace() -> None:
    pid = int((PLACES / "victim").read_text())
    _call("ptrace", _ATTACH, pid, None, None)
    os.waitpid(pid, _WALL)
    _call("ptrace", _DETACH, pid, None, None)


def _load_module() -> None:
    """No module is ever loaded: the file is not a module, which only a process with the
    permission to load one can detect."""
    descriptor = os.memfd_create("no module")
    os.write(descriptor, b"no module")
    try:
        _call("syscall", _FINIT_MODULE[platform.machine()], descriptor, b"", 0)
    except OSError as error:
        if error.errno not in _NO_MODULE:
            raise


def _make_cgroup() -> None:
    path = Path("/sys/fs/cgroup/probed")
    path.mkdir()
    path.rmdir()


def _become_root() -> None:
    done = subprocess.run([PLACES / "id", "-u"], capture_output=True, text=True, check=True)
    if done.stdout.strip() != "0":
        raise PermissionError(f"it runs as user {done.stdout.strip()}")


def _run_written() -> None:
    program = RUN / "probed"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    try:
        subprocess.run([program], check=True)
    finally:
        program.unlink()


def _lock(path: Path) -> None:
    """A process with this permission can prevent the capper from restarting. Reading is enough."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _connect() -> None:
    socket.create_connection(("127.0.0.1", PORT), 2).close()


def _pass_memory() -> None:
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [os.memfd_create("ring", os.MFD_ALLOW_SEALING)])
        _, (descriptor,), _, _ = socket.recv_fds(other, 1, 1)
        mmap.mmap(descriptor, 0) if os.fstat(descriptor).st_size else None
        os.close(descriptor)


def _set_gpu_limit() -> None:
    import pynvml

    pynvml.nvmlInit()
    board = pynvml.nvmlDeviceGetHandleByIndex(0)
    limit = pynvml.nvmlDeviceGetPowerManagementLimit(board)
    pynvml.nvmlDeviceSetPowerManagementLimit(board, limit)


ACTS: dict[str, Callable[[], object]] = {
    "write a package's limit": lambda: _rewrite(ZONE / "constraint_0_power_limit_uw"),
    "set a GPU's limit": _set_gpu_limit,
    "take the capper's lock": lambda: _lock(CAPPERS / "lock"),
    "write where the capper keeps its journal": lambda: _write(CAPPERS / "probed"),
    "read another user's file": lambda: _read(PLACES / "secret"),
    "read /etc/shadow": lambda: _read(Path("/etc/shadow")),
    "read a file in a home": lambda: _read(Path("/home/open")),
    "open a raw socket": lambda: _open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    "open a packet socket": lambda: _open_socket(socket.AF_PACKET, socket.SOCK_RAW),
    "open a netlink socket": lambda: _open_socket(socket.AF_NETLINK, socket.SOCK_RAW, 4),
    "open an internet socket": lambda: _open_socket(socket.AF_INET, socket.SOCK_STREAM),
    "reach the host's loopback": _connect,
    "become root by a setuid program": _become_root,
    "trace another user's process": _trace,
    "mount": lambda: _call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
    "make a user namespace": lambda: _call("unshare", _NEW_USER),
    "load a module": _load_module,
    "set the host's name": lambda: socket.sethostname(socket.gethostname()),
    "write where everybody may": lambda: _write(PLACES / "open" / "probed"),
    "write /var/tmp of everybody": lambda: _rewrite(Path("/var/tmp/probed")),
    "write a kernel setting": lambda: _rewrite(Path("/proc/sys/kernel/hostname")),
    "make a cgroup": _make_cgroup,
    "open a device that everybody may": lambda: os.close(os.open("/dev/fuse", os.O_RDWR)),
    "run what it has written": _run_written,
    "map memory that can be written and run": lambda: mmap.mmap(-1, 4096, prot=7).close(),
    "raise its own priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
    "read a counter": lambda: _read(ZONE / "energy_uj"),
    "see another's process": lambda: _read(Path("/proc/1/stat")),
    "read another's CPU clock": lambda: time.clock_gettime_ns((~1 << 3) | 2),
    "hold another's process by a descriptor": lambda: os.close(os.pidfd_open(1)),
    "pass memory on": _pass_memory,
    "write its own state": lambda: _write(STATE / "probed"),
    "write its own run directory": lambda: _write(RUN / "probed"),
    "read the configuration": lambda: _read(Path("/etc/wattspan/config.toml")),
}


def main() -> None:
    told = {}
    for name, act in ACTS.items():
        try:
            act()
            told[name] = ""
        except Exception as error:  # noqa: BLE001 - whatever stops it
            told[name] = f"{type(error).__name__}: {error}"
    print(MARK + json.dumps(told), flush=True)
    with suppress(KeyError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])


if __name__ == "__main__":
    main()
