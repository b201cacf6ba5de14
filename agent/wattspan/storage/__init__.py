"""The embedded store: counters that survive a restart, and a history that needs no server."""

from wattspan.storage.checkpoint_store import CheckpointStore, DeferredCheckpointStore
from wattspan.storage.checkpoints import latest_checkpoint
from wattspan.storage.store import Store

__all__ = ["CheckpointStore", "DeferredCheckpointStore", "Store", "latest_checkpoint"]
