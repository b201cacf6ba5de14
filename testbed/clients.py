"""The third-party NVML clients, unmodified, in an environment of their own.

``python -m testbed.clients`` creates it (``make test-all`` does). The environment is cached between
runs and rebuilt when its contents change. Beside it are Zeus's own tests and examples, of its
source distribution.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Mapping
from pathlib import Path

from testbed.requirements import CLIENTS

ZEUS = "0.16.0"
PACKAGES = (
    f"zeus=={ZEUS}",
    "codecarbon==3.3.2",
    "nvitop==1.7.2",
    "gpustat==1.1.1",
    "nvidia-ml-py==13.615.71",
    "pytest==9.2.0",  # for the tests of Zeus
    "pytest-mock==3.17.0",
)
ZEUS_SOURCE = CLIENTS.parents[1] / f"zeus-{ZEUS}"
"""The unpacked source distribution of Zeus."""

NVIDIA_SMI = """#!/bin/sh
# CodeCarbon believes in GPUs only if this exists; it reads none of what it prints.
echo "NVIDIA-SMI 580.95.05 (emulated)"
"""


def install() -> Path:
    """The interpreter of the environment, which is created if it is not there yet."""
    home = CLIENTS.parents[1]
    stamp = home / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if stamp.exists() and stamp.read_text() == wanted:
        return CLIENTS
    venv.create(home, clear=True, with_pip=True)
    pip = [str(CLIENTS), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, *PACKAGES], check=True)
        _unpack_zeus()
    except BaseException:
        shutil.rmtree(home)  # half an environment would make tests fail rather than skip
        raise
    stamp.write_text(wanted)
    return CLIENTS


def _unpack_zeus() -> None:
    """Download the source distribution of Zeus into the environment's directory."""
    home = ZEUS_SOURCE.parent
    pip = [str(CLIENTS), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--no-binary=:all:", f"--dest={home}", f"zeus=={ZEUS}"]
    subprocess.run(command, check=True)
    with tarfile.open(home / f"zeus-{ZEUS}.tar.gz") as archive:
        archive.extractall(home, filter="data")


def fake_nvidia_smi(directory: Path) -> Path:
    """Directory for PATH with an ``nvidia-smi`` that prints little and succeeds."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    return directory


def client_environment(emulated: Mapping[str, str], path: Path) -> dict[str, str]:
    """The environment of a client that sees the emulated GPUs and ``path`` before all programs."""
    return {
        "PATH": os.pathsep.join([str(path), os.environ.get("PATH", os.defpath)]),
        "HOME": os.environ.get("HOME", "/"),
        "PYTHONWARNINGS": "ignore",
        **emulated,
    }


if __name__ == "__main__":
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"cannot install the third-party NVML clients: {error}")
