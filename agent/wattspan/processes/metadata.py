"""Metadata of a process: name, user and groups, read once and kept."""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from threading import Lock

from wattspan.model import (
    Consumer,
    Group,
    GroupKind,
    NamePolicy,
    PayerInfo,
    Principal,
    ProcessRow,
)
from wattspan.ports import ProcessDirectory
from wattspan.processes.principals import PrincipalResolver, owner_label
from wattspan.processes.procfs import ProcFs, Stat
from wattspan.processes.scripts import interpreter_of, script_of
from wattspan.util.text import MAX_COMMAND, MAX_LABEL, clean_label
from wattspan.util.unix_sockets import user_name

UNNAMED = "process"
"""Name of every process with `NamePolicy.NONE`."""

_COMM = 15  # the kernel cuts names here
_TITLE = re.compile(r"[\s:=]")
_MAX_REMEMBERED = 4096


@functools.lru_cache(maxsize=1024)
def _label(comm: str) -> str:
    return clean_label(comm, MAX_COMMAND)


def command_of(
    stat: Stat,
    procfs: ProcFs,
    names: NamePolicy = NamePolicy.COMMAND,
    known: str | None = None,
) -> str:
    """A short name: never the command line, which may hold secrets.

    Names of kernel threads are in brackets, those of workers without their present work. A name
    that the kernel has cut is completed from the first argument if that begins with it. ``known``
    is the name from an earlier read; it is used while the process hangs in the kernel, because a
    read of the command line would hang too.
    """
    if names is NamePolicy.NONE:
        return UNNAMED
    if stat.kernel:
        comm = stat.comm.partition("-")[0] if stat.comm.startswith("kworker/") else stat.comm
        return clean_label(f"[{comm}]", MAX_COMMAND)
    is_cut = len(stat.comm.encode()) >= _COMM
    if stat.stuck:
        return known if known is not None else clean_label(stat.comm, MAX_COMMAND)
    line = procfs.command_line(stat.pid) or b"" if is_cut or names is NamePolicy.SCRIPT else b""
    script = script_of(stat.comm, line, MAX_COMMAND) if names is NamePolicy.SCRIPT else None
    return script or clean_label(
        _untruncated(stat.comm, line) if is_cut else stat.comm, MAX_COMMAND
    )


def _untruncated(comm: str, line: bytes) -> str:
    """A name cut by the kernel, completed if the first argument is the path of its program.

    Some programs write a title with arguments into one word: only its part before the first space,
    colon or equals sign counts.
    """
    first = line.partition(b"\0")[0].decode("utf-8", "replace")
    base = _TITLE.split(first, maxsplit=1)[0].rpartition("/")[2]
    return base if base.startswith(comm) else comm


_HYPERVISORS = (
    # QEMU, also as the device model of Xen, and Firecracker
    (
        re.compile(r"qemu-system-.+|qemu-kvm|kvm|firecracker"),
        re.compile(rb"\0(?:--?name\0(?:guest=)?|--id[\0=])(?P<name>[^\0,=]+)(?:[,\0]|$)"),
    ),
    # VirtualBox, whose VBoxManage passes the name before the UUID
    (
        re.compile(r"VBoxHeadless|VBoxSDL|VirtualBoxVM"),
        re.compile(rb"\0--?(?:comment|startvm)\0(?P<name>[^\0]+)(?:\0|$)"),
    ),
    # VMware Workstation, by the file of the guest
    (
        re.compile(r"vmware-vmx(?:-debug|-stats)?"),
        re.compile(rb"\0(?:[^\0]*/)?(?P<name>[^\0/]+)\.vmx(?:\0|$)"),
    ),
)
"""Names of hypervisors' processes, and the option with the name of their guest."""

_NODE = frozenset(("node", "MainThread", "node-MainThread"))  # names by version
_EDITOR = re.compile(rb"/bootstrap-fork(?:\.js)?\0")
"""The script of VS Code and its forks that runs extensions, with notebooks, or terminals."""


class HostProcesses:
    """The process directory of a host. Thread-safe.

    Results are cached for a bounded number of processes and are read anew when a process has
    changed its name, as it does on ``exec``, or when hierarchies of cgroups have been mounted or
    unmounted.
    """

    def __init__(
        self,
        procfs: ProcFs,
        names: NamePolicy = NamePolicy.COMMAND,
        principals: PrincipalResolver | None = None,
    ) -> None:
        self._procfs, self._names = procfs, names
        self.principals = principals or PrincipalResolver()
        self._lock = Lock()
        self._known: OrderedDict[Consumer, tuple[str, object, PayerInfo]] = OrderedDict()

    def identify(self, pid: int) -> Consumer | None:
        return self._procfs.identify(pid)

    def has_ended(self, consumer: Consumer) -> bool:
        return self._procfs.has_ended(consumer)

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        before, stat = self._procfs.shortage, self._procfs.stat(consumer.pid)
        if stat is None or stat.started != consumer.started:
            return None
        mounts = self.principals.mounts
        with self._lock:
            known = self._known.get(consumer)
            if known is not None and known[0] == stat.comm and known[1] is mounts:
                return known[2]
        text = self._procfs.cgroup(consumer.pid) or ""
        info = self.describe_running(stat, text)
        if stat.stuck or self._procfs.shortage is not before:
            return info  # it may be incomplete
        with self._lock:
            self._known[consumer] = (stat.comm, mounts, info)
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
        return info

    def describe_running(
        self, stat: Stat, cgroup_text: str, known: PayerInfo | None = None
    ) -> PayerInfo:
        """Describe a running process; ``known`` is its earlier description as the same program."""
        user_id = self._procfs.user_id(stat.pid)
        groups, principal = self.principals.describe(cgroup_text, user_id)
        return PayerInfo(
            Consumer(stat.pid, stat.started),
            command_of(stat, self._procfs, self._names, known.command if known else None),
            self._with_guest(groups, stat, principal, known),
            "" if user_id is None else user_name(user_id),
            stat.parent or None,
            principal,
            self._starts_others(stat, known),
        )

    def _starts_others(self, stat: Stat, known: PayerInfo | None) -> bool:
        """True for a program that starts unrelated ones, by its name or as a part of an editor.

        The server of VS Code on a remote host is programs of Node.js.
        """
        if stat.comm not in _NODE or stat.stuck:
            return starts_others(stat.comm) or (known is not None and known.starts_others)
        return _EDITOR.search(self._procfs.command_line(stat.pid) or b"") is not None

    def describe_ended(
        self, consumer: Consumer, comm: str, cgroup_text: str, user_id: int | None, parent: int
    ) -> PayerInfo:
        """Describe an ended process, whose command line is not readable any more."""
        groups, principal = self.principals.describe(cgroup_text, user_id)
        return PayerInfo(
            consumer,
            UNNAMED if self._names is NamePolicy.NONE else _label(comm),
            groups,
            "" if user_id is None else user_name(user_id),
            parent or None,
            principal,
        )

    def _with_guest(
        self,
        groups: tuple[Group, ...],
        stat: Stat,
        principal: Principal | None,
        known: PayerInfo | None,
    ) -> tuple[Group, ...]:
        """The groups of a process, with its virtual machine if a hypervisor runs one.

        A cgroup may name it already; LXD, Incus and scripts start machines in a cgroup of several.
        The name is an option of the process, which is its claim: it begins with the owner unless
        that is root of the host. A process that hangs in the kernel keeps its ``known`` machine.
        """
        is_named = any(one.kind is GroupKind.VM for one in groups)
        if is_named or self._names is NamePolicy.NONE or principal is None:
            return groups
        if stat.stuck:
            before = () if known is None else known.groups
            return (*(one for one in before if one.kind is GroupKind.VM), *groups)
        option = next((own for comm, own in _HYPERVISORS if comm.fullmatch(stat.comm)), None)
        match = option and option.search(self._procfs.command_line(stat.pid) or b"")
        if match is None:
            return groups
        owner = "" if principal.is_host_root else f"{owner_label(principal)}/"
        name = clean_label(owner + match["name"].decode("utf-8", "replace"), MAX_LABEL)
        return (Group(GroupKind.VM, name), *groups)

    def restore(self, rows: Iterable[ProcessRow]) -> tuple[ProcessRow, ...]:
        """Rows of a checkpoint with the names of this policy; processes may have ended since."""
        return tuple(map(self._restored, rows))

    def _restored(self, row: ProcessRow) -> ProcessRow:
        info = row.info
        if not isinstance(info.payer, Consumer):
            return row
        now = self.describe(info.payer)
        if now is not None:
            return replace(row, info=replace(info, command=now.command))
        command = info.command
        if self._names is NamePolicy.NONE:
            command = UNNAMED
        elif self._names is NamePolicy.COMMAND:
            command = interpreter_of(command)
        alive = row.alive and not self.has_ended(info.payer)
        return replace(row, info=replace(info, command=command), alive=alive)


class RunningProcesses:
    """A process directory without the ended processes for which their parents have not waited."""

    def __init__(self, directory: ProcessDirectory, procfs: ProcFs) -> None:
        self._directory, self._procfs = directory, procfs

    def identify(self, pid: int) -> Consumer | None:
        stat = self._procfs.stat(pid)
        # A process whose main thread alone has ended has further threads.
        if stat is None or (stat.exiting and stat.threads <= 1):
            return None
        return Consumer(pid, stat.started)

    def has_ended(self, consumer: Consumer) -> bool:
        before, present = self._procfs.shortage, self.identify(consumer.pid)
        return present != consumer and self._procfs.shortage is before

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return self._directory.describe(consumer)


# ------------------------------------------------------------ programs that start unrelated ones

_STARTERS = frozenset(
    (
        # shells
        "sh", "ash", "bash", "busybox", "csh", "dash", "elvish", "fish", "ksh", "ksh93", "mksh",
        "nu", "pwsh", "rbash", "tcsh", "xonsh", "yash", "zsh",
        # sessions and terminals
        "screen", "SCREEN", "dtach", "abduco", "zellij", "byobu", "mosh-server", "sshd",
        "sshd-session", "login", "su", "sudo", "doas", "runuser", "script", "xterm", "konsole",
        "gnome-terminal-", "alacritty", "kitty", "wezterm-gui", "foot",
        # editors, with their terminals and notebooks
        "code", "code-server", "code-insiders", "codium", "cursor", "windsurf", "positron",
        "pycharm", "rsession", "emacs", "vim", "nvim", "gnome-shell", "plasmashell", "Xorg",
        # managers of services and containers
        "systemd", "init", "(sd-pam)", "openrc-run", "supervisord", "s6-svscan", "s6-supervise",
        "runsv", "runsvdir", "tini", "dumb-init", "catatonit", "docker-init", "containerd-shim",
        "conmon", "crun", "runc", "lxc-start", "circusd", "honcho", "foreman", "overmind",
        "hivemind", "goreman", "monit", "cron", "crond", "atd", "anacron",
        # schedulers, and runners of jobs
        "slurmstepd", "slurmd", "srun", "salloc", "pbs_mom", "sge_shepherd", "condor_starter",
        "oarexec", "res", "sbatchd", "xargs", "parallel", "make", "gmake", "ninja", "just", "task",
        "Runner.Worker", "gitlab-runner", "buildkite-agent", "java",
        # notebooks
        "jupyter", "jupyter-lab", "jupyter-noteboo", "jupyter-notebook", "jupyter-server",
        "jupyterhub", "jupyterhub-sing", "jupyterhub-singleuser", "jupyter-labhub",
    )
)  # fmt: skip
_STARTER_PREFIXES = "tmux", "containerd-shim", "PM2 ", "sshd", "jupyter-", "slurmstepd"


def starts_others(command: str) -> bool:
    """True if a program of this name starts unrelated ones, as a shell does.

    The tasks of two of their children have nothing in common. ``command`` is the kernel's name or a
    longer one.
    """
    return command in _STARTERS or command.startswith(_STARTER_PREFIXES)
