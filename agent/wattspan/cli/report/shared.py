"""The report of a user who may not read the store, from the running agent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from wattspan.api.shared_state import REPORT_PATH
from wattspan.config import Config
from wattspan.ports import StoreError
from wattspan.sdk import AgentUnavailableError
from wattspan.sdk.client import request_json
from wattspan.service.configuration import agent_directories
from wattspan.storage.database import store_path
from wattspan.storage.query import HistoryExtract, NoHistory
from wattspan.storage.shared_extract import extract_from_json

LEFT_OUT = (
    "Left out: rows of other users, of programs and of spans, cost and carbon; the rows are your"
    " user's and the rest. `sudo wattspan report` shows everything."
)
_READ_TIMEOUT = 30.0  # seconds; a long history takes a while


def shared_history(
    config: Config, start: int, end: int, kinds: Iterable[str]
) -> tuple[Path, HistoryExtract | NoHistory] | None:
    """The store's path and its extract for this user; None if this user can read the store.

    StoreError if neither the store nor an agent can be read.
    """
    state_dir = Path(config.agent.state_dir)
    if not _is_closed(state_dir):
        return None
    parameters = {"start": str(start), "end": str(end), "kinds": ",".join(kinds)}
    directories = agent_directories(config)
    try:
        facts = request_json(
            REPORT_PATH, parameters, patience=_READ_TIMEOUT, directories=directories
        )
        return Path(facts["store"]), extract_from_json(facts["found"])
    except AgentUnavailableError as error:
        cause = f"no agent answers that would read it for this user. {error}"
    except (KeyError, ValueError):
        cause = "the agent has another version. Use the `wattspan` that was installed with it"
    raise StoreError(
        f"Cannot read the store in {state_dir}: it is for root and the agent's group, and {cause}"
        " Or run `sudo wattspan report`."
    )


def _is_closed(state_dir: Path) -> bool:
    """True if this user may not read the store in a directory that exists."""
    try:
        paths = [store_path(state_dir, emulated=emulated) for emulated in (False, True)]
        found = [path for path in paths if path.exists()]
    except PermissionError:
        return True
    return bool(found) and not any(os.access(path, os.R_OK, effective_ids=True) for path in found)
