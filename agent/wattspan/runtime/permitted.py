"""Whose jobs may be tuned: those of the groups that the configuration names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from wattspan.model import Consumer
from wattspan.ports import ProcessDirectory

_MOST = 1024


@dataclass(slots=True)
class Permitted:
    """Belongs to the tuner's thread. A group is meant by its name, or as ``kind:name``."""

    directory: ProcessDirectory
    names: Collection[str]
    _known: dict[Consumer, bool] = field(default_factory=dict)

    def refusal(self, job: str, ranks: Collection[Consumer]) -> str:
        """Why a job of these processes may not be tuned, in a sentence; "" if it may."""
        if not self.names:
            return ""
        outside = next((one for one in ranks if not self._allowed(one)), None)
        if outside is None:
            return ""
        return (
            f"{job} is left alone: process {outside.pid} is in none of the groups that [autotune] "
            f"groups names ({', '.join(self.names)})."
        )

    def _allowed(self, consumer: Consumer) -> bool:
        """Whether it is in one of the groups; what is not known is not allowed, and asked again."""
        known = self._known.get(consumer)
        if known is None:
            info = self.directory.describe(consumer)
            if info is None:
                return False
            known = any(
                name in self.names or f"{kind}:{name}" in self.names for kind, name in info.groups
            )
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[consumer] = known
        return known
