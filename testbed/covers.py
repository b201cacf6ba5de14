"""The cover of the domains that sources list, as the agent decides it."""

from __future__ import annotations

from collections.abc import Iterable

from wattspan.attribution.cover import decide
from wattspan.model import Domain
from wattspan.ports import Batch


def decided(domains: Iterable[Domain], present: Iterable[str] | None = None) -> dict[str, Domain]:
    """The domains by id, in the order of the list; all of them have readings by default."""
    listed = list(domains)
    ids = [domain.id for domain in listed] if present is None else present
    return decide(listed, frozenset(ids))


def cover_of(domains: Iterable[Domain], present: Iterable[str] | None = None) -> set[str]:
    return {key for key, domain in decided(domains, present).items() if domain.in_cover}


def cover_of_batch(batch: Batch) -> set[str]:
    """The cover while only the domains with a reading in ``batch`` can be read."""
    return cover_of(batch.domains, [reading.domain_id for reading in batch.readings])
