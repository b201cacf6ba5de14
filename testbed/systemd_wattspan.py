"""The shipped units on an emulated host that looks like hardware, under a real systemd.

Below /sys are emulated counters and limits, and the driver's library is an emulated one, found as
any other would be. The program is unaware of the namespace: it runs as it would on hardware. The
program itself is this checkout's, in an environment of its own at /opt/wattspan, where the units'
/usr/bin/wattspan would lead; that path is the only thing in them that is another.
"""

from __future__ import annotations

import shutil
import site
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.capper_process import HOLDER, Gpu
from testbed.nvml_library import build, environment
from testbed.requirements import ROOT
from testbed.systemd_host import SystemdHost
from testbed.waiting import eventually
from wattspan.emulation.host import EmulatedHost, profile_named

SHIPPED = ROOT / "systemd"
UNITS = (
    *("wattspan.service", "wattspan-capper.service", "wattspan-capper.socket"),
    *("wattspan-counters@.service", "wattspan-counters.socket"),
)
AGENT, CAPPER, SOCKET, COUNTERS, COUNTERS_SOCKET = UNITS
PROGRAM = Path("/opt/wattspan/bin/wattspan")
PYTHON = Path("/opt/wattspan/bin/python")
BASE = Path("/opt/python")
DEVICES = Path("/dev/shm/gpus")
CAPPER_SOCKET = Path("/run/wattspan-capper/capper.sock")
SHIPPED_PROGRAM = "/usr/bin/wattspan"

_GET = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 9) as to:
    to.sendall(b"GET /metrics HTTP/1.0\\r\\nHost: 127.0.0.1\\r\\n\\r\\n")
    told = b"".join(iter(lambda: to.recv(65536), b"")).decode()
head, _, body = told.partition("\\r\\n\\r\\n")
sys.exit(head) if " 200 " not in head else sys.stdout.write(body)
"""


@dataclass(frozen=True)
class Installed:
    """A booted host on which wattspan is installed and not started yet."""

    host: SystemdHost
    emulated: EmulatedHost

    def page(self, port: int = 9949) -> str:
        """Current text of /metrics; empty without a response."""
        program = (PYTHON, "-I", "-S", "-c", _GET, str(port))
        return self.host.run(*program, check=False).stdout

    def metrics(self, port: int = 9949) -> str:
        """Text of the agent's /metrics, once it responds."""
        return eventually(lambda: self.page(port), f"it answers: {self.host.journal()[-3000:]}")

    def running(self, unit: str) -> None:
        """Restore the shipped unit and start it."""
        if (
            self.host.property(unit, "ActiveState") != "active"
            or (self.host.units / f"{unit}.d").exists()
        ):
            self.fresh()
            self.host.systemctl("start", unit)

    def metric(self, name: str) -> dict[str, float]:
        """The samples of one metric, by their labels as they are written."""
        lines = (line for line in self.metrics().splitlines() if line.startswith(f"{name}{{"))
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def configure(self, text: str) -> None:
        self.host.inside("/etc/wattspan").mkdir(exist_ok=True)
        self.host.inside("/etc/wattspan/config.toml").write_text(text)

    def drop_in(self, unit: str, text: str) -> None:
        """Add to a unit as an administrator would."""
        folder = self.host.units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)
        self.host.systemctl("daemon-reload")

    def fresh(self) -> None:
        """No unit runs or has failed, and no configuration exists."""
        # stop clients first, because they would activate the capper again
        self.host.systemctl("stop", AGENT)
        self.host.systemctl("stop", CAPPER, SOCKET, COUNTERS_SOCKET)
        self.host.systemctl("reset-failed")
        for unit in UNITS:
            shutil.rmtree(self.host.units / f"{unit}.d", ignore_errors=True)
        self.configure("")
        self.host.systemctl("daemon-reload")

    def zone(self, name: str = "intel-rapl:0") -> Path:
        """Path of a package's limit on this machine."""
        return self.emulated.sysfs / "class" / "powercap" / name / "constraint_0_power_limit_uw"

    def limit(self, name: str = "intel-rapl:0") -> int:
        """Current limit in watts. A file, unlike the kernel's, may be empty for a moment."""
        return int(eventually(self.zone(name).read_text, "a limit")) // 1_000_000

    def gpu_limit(self) -> int:
        """Limit of the first GPU in milliwatts."""
        with closing(Gpu(self.emulated)) as gpu:
            return gpu.limit

    @contextmanager
    def held(self, device: str, milliwatts: int, *, knob: str = "cpu_power") -> Iterator[None]:
        """Holds a cap for the term of its lease, until ended."""
        words = [str(CAPPER_SOCKET), knob, device, str(milliwatts)]
        holder = self.host.popen(
            "setpriv",
            "--reuid=wattspan",
            "--regid=wattspan",
            "--clear-groups",
            PYTHON,
            "-c",
            HOLDER,
            *words,
        )
        with holder:
            assert holder.stdout is not None
            try:
                assert holder.stdout.readline() == "held\n", self.host.journal()
                yield
            finally:
                holder.kill()

    def main_pid(self, unit: str) -> int:
        return int(self.host.property(unit, "MainPID"))

    def truth(self) -> dict[str, Any]:
        return self.emulated.ask(do="truth")


@contextmanager
def installed(
    folder: Path, profile: str = "two-socket-h100", binds: Mapping[Path, Path] | None = None
) -> Iterator[Installed]:
    """Boot, and put everything where the package puts it."""
    with ExitStack() as stack:
        emulated = stack.enter_context(EmulatedHost(profile_named(profile)))
        emulated.directory.chmod(0o755)
        assert emulated.sysfs is not None
        sysfs = emulated.sysfs
        (sysfs / "fs" / "cgroup").mkdir(parents=True)
        # A shared interpreter library has another location here.
        libraries = [str(BASE / "lib")]
        variables = dict[str, str]()
        shown = {Path("/sys"): sysfs, **_program(folder / "program"), **(binds or {})}
        if emulated.profile.gpus:
            library = build(folder / "driver")
            shown[Path("/opt/driver/lib")] = library.parent
            # like a driver's devices: root may set limits that others may read
            (emulated.directory / "gpus").chmod(0o644)
            shown[DEVICES] = emulated.directory / "gpus"
            variables |= environment(library, DEVICES)
            libraries.append("/opt/driver/lib")
        variables["LD_LIBRARY_PATH"] = ":".join(libraries)
        host = stack.enter_context(SystemdHost(folder / "host", units=units(folder), binds=shown))
        told = "".join(f"{name}={value}\n" for name, value in variables.items())
        host.inside("/etc/default/wattspan").write_text(told)
        for kind in ("sysusers", "tmpfiles"):
            host.inside(f"/etc/{kind}.d").mkdir(exist_ok=True)
            shutil.copy(SHIPPED / f"{kind}.d" / "wattspan.conf", host.inside(f"/etc/{kind}.d"))
        host.run("systemd-sysusers", "/etc/sysusers.d/wattspan.conf")
        host.run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/wattspan.conf")
        yield Installed(host, emulated)


def units(folder: Path) -> list[Path]:
    """Copies of the shipped units, with the path of the program for this checkout's."""
    made = folder / "units"
    made.mkdir(parents=True)
    for name in UNITS:
        text = (SHIPPED / name).read_text()
        (made / name).write_text(text.replace(SHIPPED_PROGRAM, str(PROGRAM)))
    return [made / name for name in UNITS]


def _program(folder: Path) -> dict[Path, Path]:
    """An environment that has this checkout's program and packages, wherever they are now.

    Those of the machine may be in somebody's home, which the units cannot see.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {BASE}/bin\n")
    (folder / "bin" / "python").symlink_to(BASE / "bin" / version)
    binds = {
        Path("/opt/wattspan"): folder,
        BASE: Path(sys.base_prefix),
        Path("/opt/checkout/agent"): ROOT / "agent",
        Path("/opt/checkout/exporters"): ROOT / "exporters",
        Path("/opt/checkout/packages"): Path(site.getsitepackages()[0]),
    }
    shown = [str(path) for path in binds if path.parent.name == "checkout"]
    (packages / "checkout.pth").write_text("\n".join(shown) + "\n")
    program = folder / "bin" / "wattspan"
    program.write_text(f"#!{PYTHON}\nfrom wattspan.cli import main\nmain()\n")
    program.chmod(0o755)
    return binds
