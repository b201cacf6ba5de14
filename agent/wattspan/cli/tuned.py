"""A scraped view with what metrics do not tell: how tuning stands, and its sentences.

The agent tells that on its own host only, on its Unix socket.
"""

from __future__ import annotations

from dataclasses import replace

from wattspan.cli.scraping import Scraper
from wattspan.client.agent import ask
from wattspan.client.errors import MeasurementError
from wattspan.model import Snapshot, TuningAccounts
from wattspan.tuning.serialization import accounts_from_json


class Tuned:
    """The scraper's view, and the tuning of the same agent if it is on this host."""

    def __init__(self, scraper: Scraper, directories: tuple[str, ...]) -> None:
        self._scraper, self._directories = scraper, directories

    @property
    def notice(self) -> str:
        return self._scraper.notice

    def __call__(self) -> Snapshot:
        snapshot = self._scraper()
        accounts = self._ask(snapshot.host)
        return snapshot if accounts is None else replace(snapshot, tuning=accounts)

    def _ask(self, host: str) -> TuningAccounts | None:
        """None if nobody says: it may be elsewhere, or older, and another host's is not meant."""
        try:
            told = ask("/v1/tuning", {}, directories=self._directories)
            return accounts_from_json(told) if told.get("host_name") == host else None
        except (MeasurementError, LookupError, TypeError, ValueError, AttributeError):
            return None
