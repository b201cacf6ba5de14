"""What the agent itself needs: its configuration, its directories, its ports."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.cli.run_directory import run_directory
from wattspan.cli.try_port import why_not_listen
from wattspan.config import Config
from wattspan.config.loading import DEFAULT_PATH
from wattspan.http.sockets import directory_fault
from wattspan.model.settings import Listen, Size, Table
from wattspan.plugins import Plugins

_MEND = (
    "Correct it: no agent and no capper starts with it. `wattspan config check` checks it again. "
    "The default stands for it below."
)


def examine_configuration(
    config: Config,
    plugins: Plugins,
    owners: Collection[int] | None = None,
    faults: Iterable[str] = (),
) -> Section:
    """Where the settings come from, who else may change them, and what is odd about them.

    ``faults`` keep the agent from starting; the default stands for each value at fault.
    ``owners`` are the users who may own the file, ``rightful_owners`` unless said otherwise.
    """
    if owners is None:
        owners = rightful_owners(config.path, os.geteuid())
    findings = [Finding(Mark.FAIL, "broken", fault, _MEND) for fault in faults]
    if config.path is not None or not findings:
        findings += _file(config.path, owners)
    findings += (Finding(Mark.WARN, "environment", sentence) for sentence in config.warnings)
    findings += (
        Finding(Mark.FAIL, f"[{broken.table}]", broken.cause, broken.remedy)
        for broken in plugins.broken
        if not broken.table.startswith("sources.")
    )
    return Section("Configuration", tuple(findings))


def rightful_owners(path: Path | None, euid: int) -> frozenset[int]:
    """Root and who calls this; of the system's file root alone, for root's capper obeys it."""
    return frozenset({0} if path == DEFAULT_PATH else {0, euid})


def _file(path: Path | None, owners: Collection[int]) -> Iterator[Finding]:
    if path is None:
        yield Finding(Mark.OK, "file", "no file, the defaults apply")
        return
    # Whoever may write a folder may put another file into it by that name; a link has one as well.
    places = dict.fromkeys((path.resolve(), path.resolve().parent, path.parent.resolve()))
    doubts = [doubt for place in places for doubt in _changed_by_others(place, owners)]
    yield from doubts or [Finding(Mark.OK, "file", f"{path}")]


def _changed_by_others(path: Path, owners: Collection[int]) -> Iterator[Finding]:
    try:
        found, read_only = path.stat(), bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return
    obeyed = "and a capper of root's obeys what stands there"
    if who := who_else_writes(found.st_mode, read_only=read_only):
        told = f"{path} can be changed by {who}, {obeyed}"
        yield Finding(Mark.WARN, "file", told, f"Run `chmod go-w {path}`.")
    if found.st_uid not in owners:
        told = f"{path} belongs to user {found.st_uid}, who can change it, {obeyed}"
        yield Finding(Mark.WARN, "file", told, f"Run `chown root {path}`.")


def who_else_writes(mode: int, *, read_only: bool) -> str:
    """Who beside its owner may change the file, or replace a file of the folder, of that mode.

    ``read_only`` is whether what it is on is mounted so: Kubernetes shows a ConfigMap as a folder
    that is everybody's and that nobody can write.
    """
    # In a sticky folder, such as /tmp, only its owner and the file's may replace the file.
    if read_only or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
        return ""
    others = {stat.S_IWGRP: "its group", stat.S_IWOTH: "everybody"}
    return " and ".join(name for bit, name in others.items() if mode & bit)


def examine_directories(config: Config) -> Section:
    """Whether the agent could keep what it is asked to keep. Creates nothing."""
    findings = list(_directory("state_dir", Path(config.agent.state_dir), config))
    findings += _directory("run_dir", run_directory(config), config)
    return Section("Directories", tuple(findings))


def _directory(key: str, path: Path, config: Config) -> Iterator[Finding]:
    needed = key == "state_dir"
    mark = Mark.WARN if needed else Mark.NOTE
    remedy = f"Create it for the user that runs wattspan, or set agent.{key} to another."
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            yield Finding(mark, key, f"{path} cannot be written by this user", remedy)
            return
        found = path.stat()
        fault = None if needed else directory_fault(path, found, {found.st_uid})
        if fault is not None:
            yield Finding(
                Mark.FAIL, key, fault.cause, f"{fault.remedy[0].upper()}{fault.remedy[1:]}."
            )
            return
        yield Finding(Mark.OK, key, f"{path} can be written")
    elif path.exists():
        yield Finding(Mark.FAIL, key, f"{path} is not a directory", remedy)
        return
    else:
        above = next((p for p in path.parents if p.exists()), Path("/"))
        if not os.access(above, os.W_OK | os.X_OK):
            missing = f"{path} is missing and cannot be created by this user"
            yield Finding(mark, key, missing, remedy)
            return
        yield Finding(Mark.OK, key, f"{path} will be created")
        path = above
    free = shutil.disk_usage(path).free
    if needed and config.store.enabled is not False and free < config.store.max_size:
        left = Size(free // 2**20 * 2**20)
        yield Finding(
            Mark.WARN,
            "disk space",
            f"{left} left at {path}, less than store.max_size, {config.store.max_size}",
            "Free some, or set store.max_size lower.",
        )


def examine_ports(config: Config, answers: Callable[[Table, Listen], bool]) -> Section:
    """Whether each exporter could listen. ``answers``: if an agent with that table has the port."""
    findings = [
        _port(f"exporters.{name}", str(listen), partial(answers, table))
        for name, table in config.exporters.items()
        if (listen := getattr(table, "listen", None))
    ]
    return Section("Ports", tuple(findings))


def _port(where: str, address: str, answers: Callable[[Listen], bool]) -> Finding:
    try:
        listen = Listen.parse(address)
    except ValueError as error:
        return Finding(Mark.FAIL, where, str(error), f"Correct {where}.listen.")
    cause = why_not_listen(listen)
    if cause is not None:
        if answers(listen):
            return Finding(Mark.OK, where, f"a running agent answers at {listen}")
        return Finding(
            Mark.FAIL,
            where,
            f"cannot listen at {listen}: {cause}",
            f"Set {where}.listen to a free address of this host.",
        )
    return Finding(Mark.OK, where, f"{listen} is free")
