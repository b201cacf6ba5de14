"""Files with headers for a collector, which may hold credentials."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan.http.access_policy import AccessError, unreadable_error
from wattspan.otlp.destination import header_error, parse_headers
from wattspan.util.files import read_regular

if TYPE_CHECKING:
    from wattspan.config import SpansSettings


def read_headers(path: str, setting: str, where: str) -> dict[str, str]:
    """The headers of a file with lines ``name: value``, empty lines and # comments; {} for no path.

    ``setting`` names the file ``where``, for errors. AccessError, which shows no value.
    """
    if not path:
        return {}
    try:
        lines = read_regular(path).content.decode("utf-8").splitlines()
    except OSError as error:
        raise unreadable_error(path, error, setting, where) from None
    except UnicodeDecodeError:
        raise AccessError(
            f"Cannot read {path}: it is not text; correct {setting} {where}."
        ) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = (part.strip() for part in line.partition(":"))
        name = name.lower() if colon else ""
        if fault := header_error(name, value, "name: value"):
            raise AccessError(
                f"{path}, line {number}: {fault}; correct the file, which {setting} {where} names."
            )
        found[name] = value
    return found


def forward_headers(settings: SpansSettings) -> dict[str, str]:
    """The headers of [spans] for the collector; ConfigError or AccessError."""
    path = settings.forward_headers_file
    found = read_headers(path, "forward_headers_file", "in [spans]")
    return parse_headers(settings.forward_headers) | found


def can_examine(path: str) -> bool:
    """True if this user can determine the errors of a file, including its absence."""
    try:
        Path(path).stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path, os.R_OK)
