"""Jobs that share all of their GPUs, and are tuned by one search.

Every process that uses the GPUs must belong to one of the jobs, each of which sends units of its
work and may be tuned. Otherwise they are declined as shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from wattspan.model import HwType, Knob
from wattspan.tuning.host_view import HostView
from wattspan.tuning.job import TuningJob


def share_devices(jobs: Iterable[TuningJob], host: HostView) -> None:
    """Group ``jobs``, which may be tuned, by their GPUs; the others must have no tenants."""
    groups: dict[tuple[tuple[Knob, ...], tuple[str, ...]], list[TuningJob]] = {}
    for job in jobs:
        if gpus := _gpus(job, host):
            groups.setdefault((job.knobs, gpus), []).append(job)
        else:
            job.share(None, ())
    for (_, shared), group in groups.items():
        if len(group) > 1 and _are_all(group, shared, host):
            leader = min(group, key=lambda job: (job.budget, job.name))
            others = tuple(job for job in group if job is not leader)
            leader.share(None, others)
            for job in others:
                job.share(leader, ())
        else:
            for job in group:
                job.share(None, ())


def _gpus(job: TuningJob, host: HostView) -> tuple[str, ...]:
    """The GPUs of a job; those of its last use if it uses none at the moment."""
    used = host.users.used_by(job.members, host.now.mono)
    found = (one.id for one in host.domains.values() if one.hw_type is HwType.GPU)
    present = tuple(sorted(one for one in found if host.domains[one].resource in used))
    kept = (one for one in job.devices if one in host.domains)
    return present or tuple(one for one in kept if host.domains[one].hw_type is HwType.GPU)


def _are_all(group: Sequence[TuningJob], gpus: Collection[str], host: HostView) -> bool:
    """True if nothing else uses the GPUs."""
    known = {member for job in group for member in job.members}
    resources = (host.domains[gpu].resource for gpu in gpus)
    return all(
        host.users.of(resource, host.now.mono) <= known for resource in resources if resource
    )
