"""Owners of tuning jobs. Units of work of different owners never belong to one job.

Service and span names are claims of the sender. The owner is known from the kernel instead.
"""

from __future__ import annotations

from typing import NamedTuple

from wattspan.model import Consumer, GroupKind, PayerInfo, Principal
from wattspan.model.consumers import SHORT_CONTAINER
from wattspan.ports import ProcessDirectory

_MAX_CACHED = 1024


class JobOwner(NamedTuple):
    """A principal, and one of its batch jobs; ``slurm`` is "" outside of a scheduler."""

    principal: Principal
    slurm: str = ""

    @property
    def label(self) -> str:
        """The owner in names of jobs."""
        user, container, pod = self.principal
        parts = (pod, "" if user is None else str(user), container[:SHORT_CONTAINER], self.slurm)
        return ".".join(filter(None, parts))


def job_owner(info: PayerInfo | None) -> JobOwner | None:
    """The owner of a process's jobs; None if the kernel proves no principal."""
    if info is None or info.principal is None:
        return None
    return JobOwner(info.principal, slurm_job(info))


def slurm_job(info: PayerInfo) -> str:
    """The batch job of a process, of Slurm or another scheduler; "" for none."""
    return next((group.name for group in info.groups if group.kind is GroupKind.JOB), "")


class ProcessOwners:
    """The owners of processes, as first seen; those of ended processes stay. For one thread."""

    def __init__(self, directory: ProcessDirectory) -> None:
        self._directory = directory
        self._known: dict[Consumer, JobOwner] = {}

    def __call__(self, consumer: Consumer) -> JobOwner | None:
        owner = self._known.get(consumer)
        if owner is None:
            owner = job_owner(self._directory.describe(consumer))
            if owner is not None:
                if len(self._known) >= _MAX_CACHED:
                    self._known.clear()
                self._known[consumer] = owner
        return owner
