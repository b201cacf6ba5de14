"""The configuration table of a fleet, in which hosts share power budgets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from wattspan.config.footprint import relative_paths
from wattspan.model.settings import Duration, Listen, Table, about, quoted

_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PLACE = re.compile(rf"(?:{_NAME.pattern}(?:/{_NAME.pattern})*)?")


class FleetSettings(Table, frozen=True):
    """A fleet: hosts that share power budgets, coordinated by an etcd cluster.

    Keys:
        endpoints: Members of the etcd cluster, such as `["https://etcd-1:2379"]`; `[]` for no
            fleet. The host then limits its devices to the power that the fleet allots to it.
        name: Name of this host, unique in the fleet; "" is its host name.
        place: Groups of this host, the outermost first, such as "row-1/rack-3"; each has budgets.
        priority: Priority of this host: lower ones are limited first. Counts only if the operator
            has written no terms for the host, and then as far as it is below the default terms.
        prefix: Prefix of the fleet's keys in etcd; fleets with different prefixes are apart.
        lead: Let this host be elected to divide the budgets among all hosts.
        contact: Time without contact to the fleet until this host falls back to its safe allotment.
        fallback: Time that the fallback itself may take, before the fleet allots the released power
            to other hosts. It covers the writes of all limits and the drift of clocks.
        least_change_watts: Smallest change of an allotment for the sake of demand alone.
        timeout: Time limit of one call to etcd, divided among its members; a quarter of `contact`
            at most.
        user: User of etcd's authentication; none by default.
        password_file: File with the password of that user, closed to other users of this host.
        tls_ca: File of certificate authorities (PEM) that sign the members' certificates; by
            default those that the host trusts.
        tls_certificate: File of a client certificate (PEM) for etcd; none by default.
        tls_key: File of the key to it (PEM), unless it is in the same file.
    """

    endpoints: tuple[str, ...] = ()
    name: str = ""
    place: str = ""
    priority: Annotated[int, about(least=0, most=1000)] = 100
    prefix: str = "/wattspan/fleet/"
    lead: bool = True
    contact: Annotated[Duration, about(least="3s", most="5m")] = Duration.parse("10s")
    fallback: Annotated[Duration, about(least="1s", most="5m")] = Duration.parse("5s")
    least_change_watts: Annotated[int, about(least=0, most=10_000)] = 10
    timeout: Annotated[Duration, about(least="1s", most="1m")] = Duration.parse("2s")
    user: str = ""
    password_file: str = ""
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    @property
    def call_timeout(self) -> int:
        """The time limit of one call in nanoseconds, several of which make a beat."""
        return min(self.timeout, self.contact // 4)

    def name_of(self, host: str) -> str:
        """The name in the fleet of this host, whose host name is ``host``."""
        return self.name or host

    @property
    def is_enabled(self) -> bool:
        """True if this host is in a fleet."""
        return bool(self.endpoints)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for number, url in enumerate(self.endpoints):
            try:
                parse_endpoint(url)
            except ValueError as error:
                shown = "the address" if "@" in url else quoted(url)
                yield (
                    f"endpoints[{number}]",
                    f'{shown} is invalid: {error}. Write "https://HOST:2379".',
                )
        if self.name and not _NAME.fullmatch(self.name):
            yield "name", f"{quoted(self.name)} is no name of letters, digits, dots and dashes."
        if not _PLACE.fullmatch(self.place):
            yield "place", f'{quoted(self.place)} is no place such as "row-1/rack-3".'
        if not self.prefix.endswith("/"):
            yield "prefix", f'{quoted(self.prefix)} does not end with "/". Add it.'
        if bool(self.user) != bool(self.password_file):
            yield "user", "user and password_file belong together. Set both or neither."
        if self.tls_key and not self.tls_certificate:
            yield "tls_key", "a key needs its certificate. Set tls_certificate."
        yield from relative_paths(self, "password_file", "tls_ca", "tls_certificate", "tls_key")


class EtcdEndpoint(NamedTuple):
    """One member of an etcd cluster."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"http{'s' * self.tls}://{Listen.written(self.host, self.port)}"


def parse_endpoint(url: str) -> EtcdEndpoint:
    """The member at ``url``; ValueError with the cause, which never contains a secret."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("it holds a user name, and addresses are not secret; set user instead")
    if parts.scheme not in ("http", "https"):
        raise ValueError("it begins with neither http:// nor https://")
    if not parts.hostname or parts.port == 0:
        raise ValueError("it names no host, or port 0")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError("it has a path")
    return EtcdEndpoint(parts.hostname, parts.port or 2379, parts.scheme == "https")
