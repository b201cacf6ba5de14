"""What is wrong with the files by which listeners know who may come in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from wattspan.config import Config
from wattspan.config.access import AccessSettings
from wattspan.http.access_policy import token_check
from wattspan.http.tls import AccessError, server_tls


def access_faults(config: Config) -> Iterator[str]:
    """A sentence for each fault that would keep the agent from listening.

    Files that are there, and not for us to read, are the agent's user's affair.
    """
    for name, table in _listening(config):
        if not _ours(table):
            continue
        where = f"in [{name}]"
        try:
            token_check(table, where=where, log=_quietly)
            server_tls(table, what="Cannot listen", where=where, log=_quietly)
        except AccessError as error:
            yield str(error)


def _listening(config: Config) -> Iterator[tuple[str, AccessSettings]]:
    """The tables that listen on TCP."""
    spans = config.spans
    if spans.enabled and (spans.http or spans.grpc):
        yield "spans", spans
    for name, table in config.exporters.items():
        if getattr(table, "listen", None) and hasattr(table, "token_file"):
            yield f"exporters.{name}", cast("AccessSettings", table)


def _ours(table: AccessSettings) -> bool:
    named = (table.token_file, table.tls_certificate, table.tls_key, table.tls_client_ca)
    return all(os.access(path, os.R_OK) for path in map(Path, filter(None, named)) if _there(path))


def _there(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:
        return True  # or not: we may not know
    except OSError:
        return False
    return True


def _quietly(_: str) -> None:
    pass
