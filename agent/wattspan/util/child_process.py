"""Command lines of wattspan's own child processes."""

from __future__ import annotations

import site
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs a module of ours with this interpreter; start it with ``cwd="/"``.

    The child imports modules from the installation only, never from the working directory, the
    directories in PYTHONPATH or any other ``PYTHON*`` variable: the child may be privileged, and
    another user may own the directory. The user's own site directory counts only where the
    running package was installed in it (``pip install --user``).
    """
    return (sys.executable, *_flags(), "-m", module, *arguments)


def _flags() -> tuple[str, ...]:
    in_user_site = site.ENABLE_USER_SITE and Path(__file__).is_relative_to(
        site.getusersitepackages()
    )
    return ("-E", "-P") if in_user_site else ("-I",)
