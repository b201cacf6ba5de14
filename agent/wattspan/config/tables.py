"""Configuration tables: [cost], [carbon], [caps], [fleet], [serving].

The agent sends no network request for a rate unless ``url`` is set.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple
from urllib.parse import urlsplit

from wattspan.model import MAX_RATE, Knob
from wattspan.model.settings import Duration, Listen, Size, Table, about, quoted

MAX_ENGINES = 16
_MAX_LABEL = 256  # as long as the name of a systemd unit
_CURRENCY = re.compile(r"[A-Za-z]{1,12}")


class RateSettings(Table, frozen=True):
    """Source of a rate per kilowatt-hour: at most one of a constant, `schedule`, `url`, `file`.

    Keys:
        schedule: Absolute path of a tariff file with rates by time of day. The agent reads a
            changed file again within half a minute.
        url: Prometheus server, or a compatible one, with the rate: "http://127.0.0.1:9090".
        query: PromQL query to that server with one number as its result.
        file: File with the rate as one number, which another program updates.
        factor: Factor from the number of `url` or `file` to the rate per kilowatt-hour: 0.001 for a
            price per megawatt-hour, 1 for kilograms per megawatt-hour as grams.
        refresh: Interval of queries or of file reads.
        max_age: Age above which the answer, or the file, is ignored.
        timeout: Timeout of a query to the server.
    """

    constant_key: ClassVar[str]
    """The key of a constant rate."""

    schedule: str = ""
    url: str = ""
    query: str = ""
    file: str = ""
    factor: Annotated[float, about(least=1e-9, most=1e9)] = 1.0
    refresh: Annotated[Duration, about(least="1s", most="1d")] = Duration.parse("1m")
    max_age: Annotated[Duration, about(least="1s", most="30d")] = Duration.parse("15m")
    timeout: Annotated[Duration, about(least="100ms", most="1m")] = Duration.parse("10s")

    @property
    def unit(self) -> str:
        """The unit of the numerator."""
        raise NotImplementedError

    @property
    def constant(self) -> float | None:
        """The constant rate; None if the table configures none."""
        rate: float | None = getattr(self, self.constant_key)
        return rate

    @property
    def rate_keys(self) -> list[str]:
        """The keys that set a rate; a valid table has at most one."""
        keys = [key for key in ("schedule", "url", "file") if getattr(self, key)]
        return keys if self.constant is None else [self.constant_key, *keys]

    def contradictions(self) -> Iterator[tuple[str, str]]:
        first, *others = self.rate_keys or [""]
        for key in others:
            yield key, f"{first} also sets the rate of a kilowatt-hour. Remove one of them."
        for key, other in (("url", "query"), ("query", "url")):
            if getattr(self, key) and not getattr(self, other):
                yield key, f"{other} is empty. Set {other}."
        if (self.url or self.file) and self.refresh > self.max_age:
            yield (
                "refresh",
                f"the interval {self.refresh} is longer than the validity of an answer,"
                f" {self.max_age}. Set max_age to more than the interval.",
            )
        if self.url and (cause := _url_fault(self.url)):
            yield "url", cause
        yield from relative_paths(self, "schedule", "file")


class CostSettings(RateSettings, frozen=True):
    """Cost of energy. At most one of `price`, `schedule`, `url` and `file` may be set.

    The agent treats a price below zero as unknown, because totals must not fall.

    Keys:
        currency: Currency of all amounts, such as "EUR": 1 to 12 letters.
        price: Constant price of a kilowatt-hour.
    """

    constant_key = "price"

    currency: str = "EUR"
    price: Annotated[float | None, about(least=0, most=MAX_RATE)] = None

    @property
    def unit(self) -> str:
        return self.currency

    def contradictions(self) -> Iterator[tuple[str, str]]:
        yield from super().contradictions()
        if not _CURRENCY.fullmatch(self.currency):
            yield (
                "currency",
                f'{quoted(self.currency)} is not a currency; write 1 to 12 letters, such as "EUR".',
            )


class CarbonSettings(RateSettings, frozen=True):
    """Carbon emissions of energy, in g/kWh of carbon dioxide equivalent.

    At most one of `intensity`, `schedule`, `url` and `file` may be set.

    Keys:
        intensity: Constant carbon intensity in grams per kilowatt-hour.
    """

    constant_key = "intensity"

    intensity: Annotated[float | None, about(least=0, most=MAX_RATE)] = None

    @property
    def unit(self) -> str:
        return "g"


def relative_paths(table: Table, *keys: str) -> Iterator[tuple[str, str]]:
    """The ``keys`` whose path is relative, each with cause and remedy."""
    for key in keys:
        path = getattr(table, key)
        if path and not path.startswith("/"):
            yield key, f"{quoted(path)} is a relative path. Write an absolute path."


def _url_fault(url: str, query: str = "; write the query into `query`") -> str:
    """Return the fault of the server address ``url``; "" if it is valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"{quoted(url)} is not an address: {error}"
    if "@" in parts.netloc:  # the message omits the address, which may hold a password
        return "it contains a user name; wattspan sends no user names and passwords"
    plain = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        return f'{quoted(url)} is not an address such as "http://127.0.0.1:9090"'
    if parts.query or parts.fragment:
        return f"{quoted(url)} has a query or a fragment{query}"
    return ""


# ------------------------------------------------------------------------------------- power limits


BoolOrAuto = bool | Literal["auto"]


class FixedCapSettings(Table, frozen=True):
    """One cap that applies with and without tuning.

    Keys:
        device: UUID or index of a GPU, a zone such as "intel-rapl:0", or "*".
        watts: Power limit in watts.
        knob: `gpu_power` or `cpu_power`.
    """

    device: str
    watts: Annotated[int, about(least=1, most=100_000)]
    knob: Knob = Knob.GPU_POWER


class PrioritySettings(Table, frozen=True):
    """Priority of a device when the host's budget is smaller than the sum of demands.

    Keys:
        device: UUID or index of a GPU, or a zone.
        priority: Priority; the capper reduces devices with lower numbers first.
    """

    device: str
    priority: Annotated[int, about(least=0, most=1000)] = 100


class CapsSettings(Table, frozen=True):
    """Power limits, and the process that writes them: `wattspan capper`.

    Keys:
        capper: Let `wattspan run` start a capper if caps need one; `auto`: if it may write limits.
        users: Users whose processes may use the capper, besides root of this host and the capper's
            own user. `root` adds root of containers that have the socket.
        ceiling_users: Users that may use the capper and set a power ceiling for the host, on its
            socket or as owners of `budget_file`, besides root. `users` does not grant ceilings.
        actuators: Installed plugins of the entry points `wattspan.actuators` whose devices the
            capper limits besides its own. The capper imports them, with its rights, and no other
            one.
        lease: Time until the limits of a silent tuner are restored.
        largest_step: Largest step down of a cap, as a fraction of the default limit.
        floor_watts: Lower bound of every cap in watts, besides the hardware's minimum.
        ramp_watts_per_second: Largest change of the host's power limits together, up and down; 0
            for any. It delays no restore after the end of a cap, a tuner or the capper.
        fixed: Caps without tuning, `[[caps.fixed]]`.
        budget_watts: Power budget of all devices with a knob; 0 for none.
        reserve_watts: Watts of that budget for devices that cannot be capped.
        budget_file: File in which another program writes a power ceiling: `watts = 1200`, `ttl =
            "1h"`; "" for none. Its owner must be root, the user of the capper or one of
            `ceiling_users`; no other user may write it. Without further writes the last ceiling
            stays until its ttl has passed.
        priority: Priorities of devices, `[[caps.priority]]`.
        log_size: Half of the disk limit of all audit log files together.
        host_dir: Directory of the lock by which a host has one capper, and of the link to its
            socket; the same for every agent of the host.
    """

    capper: BoolOrAuto = "auto"
    users: tuple[str, ...] = ("wattspan",)
    ceiling_users: tuple[str, ...] = ()
    actuators: tuple[str, ...] = ()
    lease: Annotated[Duration, about(least="1s", most="10m")] = Duration.parse("10s")
    largest_step: Annotated[float, about(least=0.01, most=1)] = 0.25
    floor_watts: Annotated[int, about(least=0)] = 0
    ramp_watts_per_second: Annotated[int, about(least=0, most=1_000_000)] = 0
    fixed: tuple[FixedCapSettings, ...] = ()
    budget_watts: Annotated[int, about(least=0, most=1_000_000)] = 0
    reserve_watts: Annotated[int, about(least=0, most=1_000_000)] = 0
    budget_file: str = ""
    priority: tuple[PrioritySettings, ...] = ()
    log_size: Annotated[Size, about(least="64KiB")] = Size.parse("4MiB")
    host_dir: str = "/run/wattspan-capper"

    @property
    def imposes(self) -> bool:
        """True if limits are to be in force without a tuner: fixed caps or a power budget."""
        return bool(self.fixed or self.budget_watts or self.budget_file)

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for number, cap in enumerate(self.fixed):
            if cap.knob is Knob.GPU_CLOCK:
                yield (
                    f"fixed[{number}].knob",
                    'a clock limit is not in watts. Name "gpu_power" or "cpu_power".',
                )
            if not cap.device:
                yield f"fixed[{number}].device", '"" names no device.'
        for number in duplicate_positions([(cap.device, cap.knob) for cap in self.fixed]):
            device = quoted(self.fixed[number].device)
            yield f"fixed[{number}]", f"{device} already has a cap of this knob. Remove one."
        if self.budget_watts and self.budget_watts <= self.reserve_watts:
            yield (
                "budget_watts",
                f"reserve_watts = {self.reserve_watts} leaves nothing of "
                f"{self.budget_watts} W for devices. Raise the budget or lower the reserve.",
            )
        yield from relative_paths(self, "budget_file", "host_dir")
        if not self.host_dir:
            yield "host_dir", 'it is "". Write an absolute path.'
        for number in duplicate_positions([priority.device for priority in self.priority]):
            device = quoted(self.priority[number].device)
            yield f"priority[{number}]", f"{device} already has a priority. Remove one."

    def warnings(self) -> Iterator[str]:
        """Sentences about settings without effect."""
        if not self.budget_watts and not self.budget_file:
            idle = "reserve_watts" if self.reserve_watts else "[[caps.priority]]"
            if self.reserve_watts or self.priority:
                yield (
                    f"{idle} has no effect without a power budget. Set [caps] budget_watts or "
                    "budget_file."
                )
        for number, cap in enumerate(self.fixed):
            if cap.watts < self.floor_watts:
                yield (
                    f"caps.fixed[{number}] asks for {cap.watts} W, below [caps] floor_watts = "
                    f"{self.floor_watts}, which applies."
                )


def duplicate_positions(values: Sequence[Hashable]) -> Iterator[int]:
    """Yield the positions of values that also occur earlier."""
    return (position for position, value in enumerate(values) if value in values[:position])


# -------------------------------------------------------------------------------------------- fleet


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


# ---------------------------------------------------------------------------------------- serving

EngineKind = Literal[
    "auto", "vllm", "sglang", "tgi", "tensorrt-llm", "dynamo", "llama.cpp", "ollama"
]


class ServingEngineSettings(Table, frozen=True):
    """A serving engine on this host whose Prometheus page the agent reads.

    Keys:
        url: Address of its server, such as "http://127.0.0.1:8000", perhaps with the page's path.
        kind: Engine; `auto` recognises it by the names on the page.
        name: Label `engine`; "" is the host and port of `url`.
        process: Its pid, systemd unit, container id or pod uid, where `url` does not show it.
        token_file: File with a bearer token, closed to other users. It needs `process`.
        interval: Time between two readings.
    """

    url: str
    kind: EngineKind = "auto"
    name: str = ""
    process: str = ""
    token_file: str = ""
    interval: Annotated[Duration, about(least="1s", most="1m")] = Duration.parse("5s")

    @property
    def label(self) -> str:
        """The label ``engine``."""
        return self.name or urlsplit(self.url).netloc

    def faults(self) -> Iterator[tuple[str, str]]:
        if cause := _url_fault(self.url, ", which no engine's page needs"):
            yield "url", cause + "."
        elif urlsplit(self.url).scheme == "https":
            yield "url", "the agent reads pages of this host, without TLS. Write http://."
        if self.kind == "ollama":
            yield "kind", "ollama has no counters of tokens. Have its requests sent as spans."
        for key, text in (("name", self.name), ("process", self.process)):
            if len(text) > _MAX_LABEL:
                yield key, f"it has {len(text)} characters. Write at most {_MAX_LABEL}."
        if self.token_file and not self.process:
            cause = "process is empty, and any user of a GPU could receive the token."
            yield "token_file", f"{cause} Name the engine's unit, container, pod or pid."
        yield from relative_paths(self, "token_file")


class ServingSettings(Table, frozen=True):
    """Serving engines: the energy of their requests, and their counters of tokens.

    Keys:
        engine: Engines, `[[serving.engine]]`.
        idle: Account of idle energy of devices: its own, or a part `idle` of the energy of requests
            and engines, in proportion to the energy of their processes.
    """

    idle: Literal["separate", "proportional"] = "separate"
    engine: tuple[ServingEngineSettings, ...] = ()

    def contradictions(self) -> Iterator[tuple[str, str]]:
        for number, one in enumerate(self.engine):
            for key, cause in one.faults():
                yield f"engine[{number}].{key}", cause
        if len(self.engine) > MAX_ENGINES:
            yield "engine", f"it names {len(self.engine)} engines. Name at most {MAX_ENGINES}."
        for number in duplicate_positions([one.label for one in self.engine]):
            label = quoted(self.engine[number].label)
            yield f"engine[{number}]", f"{label} names an engine above. Set another name."
        # No process is a name of its own.
        for number in duplicate_positions([one.process or n for n, one in enumerate(self.engine)]):
            cause = "is the process of an engine above, whose energy would count twice"
            process = quoted(self.engine[number].process)
            yield f"engine[{number}]", f"{process} {cause}. Name its own."
