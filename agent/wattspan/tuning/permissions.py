"""The operator's permissions for jobs: the groups whose processes may be tuned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from wattspan.model import Consumer
from wattspan.ports import ProcessDirectory

_MAX_CACHED = 1024


@dataclass(slots=True)
class TuningPermissions:
    """Jobs whose processes are in permitted groups, each named ``name`` or ``kind:name``."""

    directory: ProcessDirectory
    groups: Collection[str]
    _cache: dict[Consumer, bool] = field(default_factory=dict)

    def refusal(self, job: str, ranks: Collection[Consumer]) -> str:
        """A sentence why the job must not be tuned; "" if it may be."""
        if not self.groups:
            return ""
        outside = next((one for one in ranks if not self._is_permitted(one)), None)
        if outside is None:
            return ""
        return (
            f"{job} is not tuned: process {outside.pid} is in none of [autotune] groups "
            f"({', '.join(self.groups)})."
        )

    def _is_permitted(self, consumer: Consumer) -> bool:
        permitted = self._cache.get(consumer)
        if permitted is None:
            info = self.directory.describe(consumer)
            if info is None:
                return False
            permitted = any(
                name in self.groups or f"{kind}:{name}" in self.groups for kind, name in info.groups
            )
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[consumer] = permitted
        return permitted
