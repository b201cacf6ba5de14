"""The capper's state and the stored energy, for users who may read neither themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattspan.util.text import MAX_COMMAND, clean_label
from wattspan.util.unix_sockets import user_name

if TYPE_CHECKING:
    from wattspan.config import Config
    from wattspan.ports import Clock

CAPPER_TIMEOUT = 5.0  # seconds


class CapperState:
    """Asks a capper that runs. It never starts one: a capper wakes the drivers of all devices."""

    def __init__(self, config: Config, clock: Clock, *, emulated: bool) -> None:
        self._config, self._clock, self._emulated = config, clock, emulated

    def __call__(self) -> Mapping[str, Any]:
        """The fields of the capper's state, and its socket; CapsError if it does not answer."""
        import msgspec

        # Only a request needs these modules, which take memory.
        from wattspan.capper.host_directory import HostDirectory
        from wattspan.service.configuration import capper_client

        host = None if self._emulated else HostDirectory(Path(self._config.caps.host_dir))
        if host is not None and host.address() is None:
            return {}
        client = capper_client(
            self._config,
            self._clock,
            "wattspan caps status, through the agent",
            timeout=CAPPER_TIMEOUT,
            emulated=self._emulated,
        )
        if self._emulated and not client.address.path.exists():
            return {}
        try:
            client.rows()
            facts: dict[str, Any] = msgspec.to_builtins(client.state)
        finally:
            client.close()
        return {"socket": str(client.address.path), "state": facts}


class StoredEnergyReader:
    """Reads the agent's store as other processes do: nothing of it blocks the writer."""

    def __init__(self, config: Config, *, emulated: bool) -> None:
        self._state_dir, self._emulated = Path(config.agent.state_dir), emulated

    def __call__(
        self, start: int, end: int, kinds: frozenset[str], user: int | None
    ) -> Mapping[str, Any]:
        """The store's path and the extract, without spans and rates. StoreError."""
        from wattspan.storage.database import store_path
        from wattspan.storage.query import (
            HistoryExtract,
            extract_history,
            extract_to_json,
            own_extract,
        )

        path = store_path(self._state_dir, emulated=self._emulated)
        found = extract_history(path, start, end, kinds)
        if user is not None and isinstance(found, HistoryExtract):
            found = own_extract(found, clean_label(user_name(user), MAX_COMMAND))
        return {"store": str(path), "found": extract_to_json(found)}
