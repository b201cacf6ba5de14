"""The fleet's keys in the coordination service, and their values in JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec

from wattspan.fleet.allotment import (
    DEFAULT_TERMS,
    Allotment,
    AllotmentBook,
    Count,
    FleetTerms,
    HostReport,
    HostTerms,
    is_host_name,
    terms_problem,
)
from wattspan.fleet.allotment_planner import AllotmentPlan, plan_allotments
from wattspan.fleet.coordination import ABSENT, PrefixState, RevisionCondition, StoredKey
from wattspan.model import SECOND
from wattspan.ports import WattspanError

MAX_LIFETIME: Final = 1200 * SECOND
"""Longest lifetime of a report."""

Record = TypeVar("Record")


class RecordError(WattspanError):
    """A value of the fleet cannot be read: another version, or another program's."""

    exit_code = 8


class Presence(msgspec.Struct, frozen=True, kw_only=True):
    """A host's report as it is stored, and renewed by a write with the next ``beat``.

    From ``lifetime`` nanoseconds after the send of a write that was followed by no other, the host
    enforces its fallback, by its own clock. A leader that has seen no newer write for that long, by
    any clock that runs at the same speed, may end the session by deleting the key.
    """

    report: HostReport
    beat: Count
    lifetime: Annotated[int, msgspec.Meta(gt=0, le=MAX_LIFETIME)]


class FleetKeys:
    """The keys of the fleet with ``prefix``, which ends with a slash."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.book, self.leader = f"{prefix}book", f"{prefix}leader"
        self.default_terms = f"{prefix}default-terms"

    def report(self, host: str) -> str:
        return f"{self.prefix}reports/{host}"

    def allotment(self, host: str) -> str:
        return f"{self.prefix}allotments/{host}"

    def terms(self, host: str) -> str:
        return f"{self.prefix}terms/{host}"

    def host_of(self, key: str) -> str | None:
        """The host of a report's key; None for any other key."""
        start = self.report("")
        return key.removeprefix(start) if key.startswith(start) else None


@dataclass(frozen=True, slots=True)
class FleetState:
    """All records of a fleet at one moment.

    ``reports`` are the valid ones; ``invalid`` has a sentence for each host whose report cannot be
    read, or whose terms cannot. ``written`` are all keys as stored.
    """

    book: AllotmentBook
    reports: Mapping[str, Presence]
    allotments: Mapping[str, Allotment]
    invalid: Mapping[str, str]
    leader: str
    written: Mapping[str, StoredKey]
    terms: FleetTerms

    def plan(
        self, ended: Collection[str] = (), book: AllotmentBook | None = None, least_change: int = 0
    ) -> AllotmentPlan:
        """The next changes, of another ``book`` if given, without the sessions in ``ended``."""
        reports = self.present_reports()
        refused = {
            name: reason
            for name, presence in self.reports.items()
            if (reason := self.terms.violation(name, presence.report))
        }
        return plan_allotments(
            self.book if book is None else book,
            {name: report for name, report in reports.items() if name not in ended},
            refused=refused,
            least_change=least_change,
        )

    def condition(self, key: str) -> RevisionCondition:
        """The condition that a key is as it was."""
        entry = self.written.get(key)
        return RevisionCondition(key, entry.revision if entry else ABSENT)

    def present_reports(self) -> dict[str, HostReport]:
        """The reports of all sessions that may go on, by host, within the terms of the hosts.

        A registered host with an unreadable report is present, with everything that it may have
        adopted.
        """
        reports = {
            name: self.terms.bounded(name, presence.report)
            for name, presence in self.reports.items()
        }
        for name in self.invalid:
            if (entry := self.book.hosts.get(name)) is not None:
                reports[name] = HostReport(
                    session=entry.allotment.session,
                    place=entry.place,
                    floor=entry.floor,
                    ceiling=entry.ceiling,
                    limit=entry.limit_bound,
                    priority=entry.priority,
                )
        return reports


def read_state(keys: FleetKeys, stored: PrefixState) -> FleetState:
    """The records of a fleet; RecordError if the book is invalid."""
    written = {entry.key: entry for entry in stored.entries}
    reports: dict[str, Presence] = {}
    allotments: dict[str, Allotment] = {}
    invalid: dict[str, str] = {}
    terms, unknown = read_terms(keys, stored)
    for entry in stored.entries:
        host = keys.host_of(entry.key)
        try:
            if host is not None and not is_host_name(host):
                invalid[host] = f"{entry.key} names no host. Delete the key."
            elif host is not None and (host in unknown or "" in unknown):
                invalid[host] = unknown.get(host) or unknown[""]
            elif host is not None:
                reports[host] = decode(entry, Presence)
            elif entry.key.startswith(keys.allotment("")):
                name = entry.key.removeprefix(keys.allotment(""))
                allotments[name] = decode(entry, Allotment)
        except RecordError as error:
            if host is not None:
                invalid[host] = str(error)
    held = written.get(keys.leader)
    leader = held.value.decode("utf-8", "replace") if held else ""
    book = decode_book(written.get(keys.book))
    return FleetState(book, reports, allotments, invalid, leader, written, terms)


def read_terms(keys: FleetKeys, stored: PrefixState) -> tuple[FleetTerms, dict[str, str]]:
    """The terms of hosts, and a sentence for each host whose terms cannot be read.

    The name "" is that of the default terms.
    """
    terms: dict[str, HostTerms] = {}
    unknown: dict[str, str] = {}
    for entry in stored.entries:
        start = keys.terms("")
        if entry.key != keys.default_terms and not entry.key.startswith(start):
            continue
        name = "" if entry.key == keys.default_terms else entry.key.removeprefix(start)
        try:
            terms[name] = decode(entry, HostTerms)
        except RecordError as error:
            unknown[name] = str(error)
        else:
            if problem := terms_problem(terms[name]):
                unknown[name] = f"The record {entry.key} of the fleet is invalid. {problem}"
    default = terms.pop("", DEFAULT_TERMS)
    return FleetTerms(terms, default), unknown


def decode_book(entry: StoredKey | None) -> AllotmentBook:
    """The book, an empty one before the first write; RecordError."""
    return AllotmentBook() if entry is None else decode(entry, AllotmentBook)


def encode(record: AllotmentBook | Presence | Allotment | HostTerms) -> bytes:
    return msgspec.json.encode(record)


def decode(entry: StoredKey, kind: type[Record]) -> Record:
    """The record in a key; RecordError."""
    try:
        return msgspec.json.decode(entry.value, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(
            f"The record {entry.key} of the fleet is invalid: {error}. Are all agents of one"
            " version? Correct or delete the key."
        ) from None
