"""The embedded store: counters that survive a restart, and a history that needs no server."""

from wattspan.store.kept import Kept
from wattspan.store.store import Store

__all__ = ["Kept", "Store"]
