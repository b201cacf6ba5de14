"""Whether one could listen at an address, by trying it for a moment.

What the agent itself needs: its configuration, its directories, its ports.

Who can reach what listens, as it is configured.

What a kilowatt-hour would be said to cost and to emit: read, or asked for, once.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from wattspan.attribution.cost import BILLION
from wattspan.cli.doctor.findings import DiagnosisSection, Finding, Severity
from wattspan.config import CarbonSettings, Config, CostSettings
from wattspan.config.access import AccessSettings
from wattspan.config.footprint import rate_keys
from wattspan.config.loading import DEFAULT_PATH
from wattspan.http.access_policy import exposure_warning, token_check
from wattspan.http.sockets import directory_fault
from wattspan.http.tls import AccessError, server_tls
from wattspan.model.settings import Listen, Size, Table
from wattspan.plugins import Plugins
from wattspan.ports import Clock, ConfigError
from wattspan.service.configuration import run_directory
from wattspan.service.footprint import GRAM, open_rate


def listen_error(listen: Listen) -> str | None:
    """What stands against listening there, in lower case; None if nothing does."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            listen.host or None, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


_REMEDY = (
    "Correct it: no agent and no capper starts with it. `wattspan config check` checks it again. "
    "The default stands for it below."
)


def examine_configuration(
    config: Config,
    plugins: Plugins,
    owners: Collection[int] | None = None,
    faults: Iterable[str] = (),
) -> DiagnosisSection:
    """Where the settings come from, who else may change them, and what is odd about them.

    ``faults`` keep the agent from starting; the default stands for each value at fault.
    ``owners`` are the users who may own the file, ``rightful_owners`` unless said otherwise.
    """
    if owners is None:
        owners = allowed_owners(config.path, os.geteuid())
    findings = [Finding(Severity.FAIL, "broken", fault, _REMEDY) for fault in faults]
    if config.path is not None or not findings:
        findings += _check_file(config.path, owners)
    findings += (Finding(Severity.WARN, "environment", sentence) for sentence in config.warnings)
    findings += (
        Finding(Severity.FAIL, f"[{broken.table}]", broken.cause, broken.remedy)
        for broken in plugins.broken
        if not broken.table.startswith("sources.")
    )
    return DiagnosisSection("Configuration", tuple(findings))


def allowed_owners(path: Path | None, euid: int) -> frozenset[int]:
    """Root and who calls this; of the system's file root alone, for root's capper obeys it."""
    return frozenset({0} if path == DEFAULT_PATH else {0, euid})


def _check_file(path: Path | None, owners: Collection[int]) -> Iterator[Finding]:
    if path is None:
        yield Finding(Severity.OK, "file", "no file, the defaults apply")
        return
    # Whoever may write a folder may put another file into it by that name; a link has one as well.
    places = dict.fromkeys((path.resolve(), path.resolve().parent, path.parent.resolve()))
    doubts = [doubt for place in places for doubt in _writable_by_others(place, owners)]
    yield from doubts or [Finding(Severity.OK, "file", f"{path}")]


def _writable_by_others(path: Path, owners: Collection[int]) -> Iterator[Finding]:
    try:
        found, read_only = path.stat(), bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return
    obeyed = "and a capper of root's obeys what stands there"
    if who := other_writers(found.st_mode, read_only=read_only):
        told = f"{path} can be changed by {who}, {obeyed}"
        yield Finding(Severity.WARN, "file", told, f"Run `chmod go-w {path}`.")
    if found.st_uid not in owners:
        told = f"{path} belongs to user {found.st_uid}, who can change it, {obeyed}"
        yield Finding(Severity.WARN, "file", told, f"Run `chown root {path}`.")


def other_writers(mode: int, *, read_only: bool) -> str:
    """Who beside its owner may change the file, or replace a file of the folder, of that mode.

    ``read_only`` is whether what it is on is mounted so: Kubernetes shows a ConfigMap as a folder
    that is everybody's and that nobody can write.
    """
    # In a sticky folder, such as /tmp, only its owner and the file's may replace the file.
    if read_only or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    others = {stat.S_IWGRP: "its group", stat.S_IWOTH: "everybody"}
    return " and ".join(name for bit, name in others.items() if mode & bit)


def examine_directories(config: Config) -> DiagnosisSection:
    """Whether the agent could keep what it is asked to keep. Creates nothing."""
    findings = list(_check_directory("state_dir", Path(config.agent.state_dir), config))
    findings += _check_directory("run_dir", run_directory(config), config)
    return DiagnosisSection("Directories", tuple(findings))


def _check_directory(key: str, path: Path, config: Config) -> Iterator[Finding]:
    needed = key == "state_dir"
    mark = Severity.WARN if needed else Severity.NOTE
    remedy = f"Create it for the user that runs wattspan, or set agent.{key} to another."
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            yield Finding(mark, key, f"{path} cannot be written by this user", remedy)
            return
        found = path.stat()
        fault = None if needed else directory_fault(path, found, {found.st_uid})
        if fault is not None:
            yield Finding(
                Severity.FAIL, key, fault.cause, f"{fault.remedy[0].upper()}{fault.remedy[1:]}."
            )
            return
        yield Finding(Severity.OK, key, f"{path} can be written")
    elif path.exists():
        yield Finding(Severity.FAIL, key, f"{path} is not a directory", remedy)
        return
    else:
        above = next((p for p in path.parents if p.exists()), Path("/"))
        if not os.access(above, os.W_OK | os.X_OK):
            missing = f"{path} is missing and cannot be created by this user"
            yield Finding(mark, key, missing, remedy)
            return
        yield Finding(Severity.OK, key, f"{path} will be created")
        path = above
    free = shutil.disk_usage(path).free
    if needed and config.store.enabled is not False and free < config.store.max_size:
        left = Size(free // 2**20 * 2**20)
        yield Finding(
            Severity.WARN,
            "disk space",
            f"{left} left at {path}, less than store.max_size, {config.store.max_size}",
            "Free some, or set store.max_size lower.",
        )


def examine_ports(config: Config, answers: Callable[[Table, Listen], bool]) -> DiagnosisSection:
    """Whether each exporter could listen. ``answers``: if an agent with that table has the port."""
    findings = [
        _check_port(f"exporters.{name}", str(listen), partial(answers, table))
        for name, table in config.exporters.items()
        if (listen := getattr(table, "listen", None))
    ]
    return DiagnosisSection("Ports", tuple(findings))


def _check_port(where: str, address: str, answers: Callable[[Listen], bool]) -> Finding:
    try:
        listen = Listen.parse(address)
    except ValueError as error:
        return Finding(Severity.FAIL, where, str(error), f"Correct {where}.listen.")
    cause = listen_error(listen)
    if cause is not None:
        if answers(listen):
            return Finding(Severity.OK, where, f"a running agent answers at {listen}")
        return Finding(
            Severity.FAIL,
            where,
            f"cannot listen at {listen}: {cause}",
            f"Set {where}.listen to a free address of this host.",
        )
    return Finding(Severity.OK, where, f"{listen} is free")


_SPANS = "whoever reaches it may send spans and be believed"
_FIGURES = "whoever reaches it sees every process and what it spends"


def examine_security(config: Config) -> DiagnosisSection:
    """Each TCP listener: whether others than this machine reach it, and by what it is guarded."""
    found: list[Finding] = []
    if config.spans.enabled:
        listens = (config.spans.http, config.spans.grpc)
        found += _listeners("spans", config.spans, listens, _SPANS, local=False)
    for name, table in config.exporters.items():
        listen = getattr(table, "listen", "")
        if isinstance(listen, Listen) and hasattr(table, "token_file"):
            found += _listeners(f"exporters.{name}", table, (listen,), _FIGURES, local=True)  # type: ignore[arg-type]
    return DiagnosisSection("Security", tuple(found))


def _listeners(
    what: str, settings: AccessSettings, listens: tuple[Listen, ...], risk: str, *, local: bool
) -> Iterator[Finding]:
    where = f"in [{what}]"
    try:
        server_tls(settings, what="Cannot serve", where=where, log=lambda _: None)
        token_check(settings, where=where, log=lambda _: None)
    except AccessError as error:
        yield Finding(Severity.FAIL, what, str(error))
    for listen in filter(None, listens):
        told = exposure_warning(listen, settings, where=f"[{what}]", risk=risk)
        if told:
            yield Finding(Severity.WARN, what, told)
        elif not listen.loopback:
            yield Finding(
                Severity.OK, what, f"{listen} is open to the network, with TLS and by proof"
            )
        elif local and not settings.token_file:
            yield Finding(
                Severity.NOTE,
                what,
                f"{listen} serves this machine only, and every user of it",
                f"If its users should not see each other's processes, set token_file {where}.",
            )
        else:
            yield Finding(Severity.OK, what, f"{listen} serves this machine only")


def examine_footprint(config: Config, clock: Clock) -> DiagnosisSection:
    """Asks a server only if the configuration names one."""
    findings = [
        *_check_rate("cost", config.cost, config.cost.currency, clock),
        *_check_rate("carbon", config.carbon, GRAM, clock),
    ]
    return DiagnosisSection("Cost and carbon", tuple(findings))


def _check_rate(
    name: str, table: CostSettings | CarbonSettings, unit: str, clock: Clock
) -> Iterator[Finding]:
    from wattspan.footprint.rates import PolledRate

    keys = rate_keys(table)
    if not keys:
        yield Finding(Severity.NOTE, name, f"not configured: [{name}] says nothing")
        return
    if faults := schedule_faults(table):
        yield from (Finding(Severity.FAIL, name, fault.rstrip(".")) for fault in faults)
        return
    rate = open_rate(name, table, clock)
    assert rate is not None  # noqa: S101 - somebody says it
    if isinstance(rate, PolledRate):
        rate.look()
        for failure in rate.health().failures:
            told = f"cannot {failure.verb} {failure.thing}: {failure.cause}"
            yield Finding(Severity.WARN, name, told, failure.remedy)
    now = rate.at(clock.now())
    means = f"by {name}.{keys[0]}"
    if now is not None:
        yield Finding(Severity.OK, name, f"{now / BILLION:.10g} {unit}/kWh now, {means}")
    elif table.schedule:
        yield Finding(Severity.NOTE, name, f"unknown now, {means}: no period holds at this time")


def schedule_faults(table: CostSettings | CarbonSettings) -> list[str]:
    """What is wrong with the tariff file that the table names, if it names one."""
    from wattspan.footprint.tariff_file import read_schedule

    try:
        if table.schedule:
            read_schedule(Path(table.schedule))
    except ConfigError as error:
        return str(error).splitlines()
    return []
