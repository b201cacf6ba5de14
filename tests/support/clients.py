"""The third-party NVML clients, unmodified, in an environment of their own.

``python -m support.clients`` creates it (``make test`` does). It is kept between runs and made
anew when what it should hold changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from support.requirements import CLIENTS

PACKAGES = (
    "zeus==0.16.0",
    "codecarbon==3.3.2",
    "nvitop==1.7.2",
    "gpustat==1.1.1",
    "nvidia-ml-py==13.615.71",
)

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
    subprocess.run([*pip, *PACKAGES], check=True)
    stamp.write_text(wanted)
    return CLIENTS


def fake_nvidia_smi(directory: Path) -> Path:
    """A directory for PATH with an ``nvidia-smi`` that says little and succeeds."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    return directory


def run_client(
    code: str, environment: dict[str, str], path: Path | None = None, timeout: float = 120
) -> str:
    """What a Python program prints in the clients' environment; it must succeed."""
    search = os.environ.get("PATH", os.defpath)
    result = subprocess.run(
        [str(CLIENTS), "-c", code],
        env={
            "PATH": search if path is None else f"{path}:{search}",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONWARNINGS": "ignore",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


if __name__ == "__main__":
    try:
        install()
    except subprocess.CalledProcessError as error:
        sys.exit(f"cannot install the third-party NVML clients: {error}")
