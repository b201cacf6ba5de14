"""A process is its pid and start time; its name is short and fit to be a label."""

import os
from pathlib import Path

import pytest

from wattspan.model import Consumer, GroupKind, NamePolicy, PayerInfo, ProcessRow, Remainder
from wattspan.processes.metadata import (
    UNNAMED,
    HostProcesses,
    RunningProcesses,
    command_of,
)
from wattspan.processes.principals import (
    MOUNTS_INTERVAL,
    CgroupDirectories,
    PrincipalResolver,
)
from wattspan.processes.procfs import ProcFs, Stat, parse_stat

LINE = (
    b"42 (%s) S 7 42 42 0 -1 4194560 1 0 0 0 5 6 0 0 20 0 3 0 98765 1 1 184 0 0 0 0 0 0 0 0 0 "
    b"0 0 0 17 5 0 0 0 0 0\n"
)


@pytest.mark.parametrize("name", [b"cat", b"tmux: server", b"a) S 9 (b", b"(((", b"new\nline"])
def test_process_name_cannot_corrupt_stat_parsing(name: bytes) -> None:
    stat = parse_stat(LINE % name)
    assert (stat.pid, stat.comm, stat.parent) == (42, name.decode(), 7)
    assert (stat.threads, stat.started, stat.processor) == (3, 98765, 5)
    assert not stat.kernel
    assert not stat.exiting


def test_process_that_is_not_reaped_does_not_run() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays
    procfs = ProcFs()
    every = HostProcesses(procfs)
    running = RunningProcesses(every, procfs)
    assert every.identify(child) is not None
    assert running.identify(child) is None
    ended = every.identify(child)
    assert ended is not None
    assert running.has_ended(ended)
    os.waitpid(child, 0)
    own = running.identify(os.getpid())
    assert own == every.identify(os.getpid())
    assert own is not None
    assert not running.has_ended(own)
    assert running.has_ended(Consumer(own.pid, own.started - 1))
    assert running.describe(own) == every.describe(own)


def test_process_whose_main_thread_has_ended_runs(tmp_path: Path) -> None:
    procfs = host(tmp_path)
    running = RunningProcesses(HostProcesses(procfs), procfs)
    exiting = (LINE % b"cat").replace(b"4194560", b"4194564")
    (tmp_path / "42/stat").write_bytes(exiting)
    assert running.identify(42) == Consumer(42, 98765)
    (tmp_path / "42/stat").write_bytes(exiting.replace(b"20 0 3 0", b"20 0 1 0"))
    assert running.identify(42) is None


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("9:cpuacct:/\n1:name=systemd:/\n", None),
        ("9:cpuacct:/\n0::/system.slice/containerd.service\n", None),
        ("0::/system.slice/a.service (deleted)\n", "0::/system.slice/a.service\n"),
        ("0::/\n", "0::/\n"),
    ],
)
def test_ended_process_has_no_cgroup_that_it_was_not_in(
    tmp_path: Path, text: str, ended: str | None
) -> None:
    procfs = host(tmp_path)
    (tmp_path / "42/cgroup").write_text(text)
    assert procfs.cgroup(42) == text
    (tmp_path / "42/stat").write_bytes((LINE % b"cat").replace(b"4194560", b"4194564"))
    assert procfs.cgroup(42) == ended


@pytest.mark.parametrize("raw", [b"", b"42", b"42 (cat", b"42 (cat) S 1 2", b"x (y) " + b"z " * 30])
def test_invalid_stat_line_is_rejected(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"stat|literal"):
        parse_stat(raw)


def host(
    root: Path, comm: bytes = b"cat", started: bytes = b"98765", cmdline: bytes = b""
) -> ProcFs:
    (root / "42").mkdir(exist_ok=True)
    (root / "42/stat").write_bytes((LINE % comm).replace(b"98765", started))
    (root / "42/cmdline").write_bytes(cmdline)
    (root / "42/cgroup").write_text("0::/system.slice/cat.service\n")
    return ProcFs(root)


def test_process_is_described_again_once_its_hierarchy_is_mounted(tmp_path: Path) -> None:
    times, cgroups = [0.0], tmp_path / "cgroup"
    directories = CgroupDirectories(cgroups, now=lambda: times[-1])
    directory = HostProcesses(host(tmp_path), principals=PrincipalResolver(directories))
    before = directory.describe(Consumer(42, 98765))
    (cgroups / "system.slice/cat.service").mkdir(parents=True)
    (cgroups / "cgroup.controllers").touch()
    assert directory.describe(Consumer(42, 98765)) is before
    times.append(MOUNTS_INTERVAL)
    assert directory.describe(Consumer(42, 98765)) is not before


def test_name_cut_by_the_kernel_is_completed_but_its_arguments_are_not_shown(
    tmp_path: Path,
) -> None:
    procfs = host(tmp_path, b"very-long-proce", cmdline=b"/bin/very-long-process\0--token=hush\0")
    stat = procfs.stat(42)
    assert stat is not None
    assert command_of(stat, procfs) == "very-long-process"


@pytest.mark.parametrize(
    "title",
    [
        b"/opt/very-long-process --token=hush",
        b"very-long-process: worker [hush]",
        b"very-long-process=hush",
        b"very-long-process\thush\0\0\0",
    ],
)
def test_process_title_after_the_name_is_not_shown(tmp_path: Path, title: bytes) -> None:
    procfs = host(tmp_path, b"very-long-proce", cmdline=title)
    stat = procfs.stat(42)
    assert stat is not None
    assert command_of(stat, procfs) == "very-long-process"


def test_control_characters_do_not_reach_a_label(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"a\nb\x1b[1m")
    stat = procfs.stat(42)
    assert stat is not None
    assert command_of(stat, procfs) == "a?b?[1m"


def test_kernel_worker_name_excludes_its_current_work(tmp_path: Path) -> None:
    stat = Stat(9, "kworker/0:1-events", 2, 1, 1, 0, kernel=True)
    assert command_of(stat, ProcFs(tmp_path)) == "[kworker/0:1]"


def test_proc_directory_is_valid_for_the_same_process_only(tmp_path: Path) -> None:
    directory = HostProcesses(host(tmp_path))
    first = directory.identify(42)
    assert first == Consumer(42, 98765)
    info = directory.describe(first)
    assert (info.command, info.group, info.parent) == ("cat", "cat.service", 7)
    host(tmp_path, b"dog", started=b"98766")
    assert directory.describe(first) is None
    assert directory.identify(42) == Consumer(42, 98766)


def test_directory_follows_a_process_that_becomes_another_program(tmp_path: Path) -> None:
    directory = HostProcesses(host(tmp_path))
    host(tmp_path, b"dog")
    info = directory.describe(Consumer(42, 98765))
    assert info.command == "dog"


def test_identify_returns_none_for_a_missing_process() -> None:
    directory = HostProcesses(ProcFs())
    me = directory.identify(os.getpid())
    assert me is not None
    info = directory.describe(me)
    assert info.parent == os.getppid()
    assert directory.identify(2**22 + 1) is None


# ------------------------------------------------------------------------- published names


def called(procfs: ProcFs, names: NamePolicy, known: str | None = None) -> str:
    stat = procfs.stat(42)
    assert stat is not None
    return command_of(stat, procfs, names, known)


def test_interpreter_is_named_by_its_script_only_by_policy(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"python3", cmdline=b"python3\0/srv/train.py\0--token=hush\0")
    assert called(procfs, NamePolicy.COMMAND) == "python3"
    assert called(procfs, NamePolicy.SCRIPT) == "python3 train.py"
    assert called(procfs, NamePolicy.NONE) == "process"


def test_command_line_that_cannot_be_read_leaves_the_kernels_name(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"python3")
    (tmp_path / "42/cmdline").unlink()
    assert called(procfs, NamePolicy.SCRIPT) == "python3"


def test_process_without_a_script_keeps_its_name(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"very-long-proce", cmdline=b"/bin/very-long-process\0--token=hush\0")
    assert called(procfs, NamePolicy.SCRIPT) == "very-long-process"
    worker = Stat(9, "kworker/0:1-events", 2, 1, 1, 0, kernel=True)
    assert command_of(worker, procfs, NamePolicy.SCRIPT) == "[kworker/0:1]"
    assert command_of(worker, procfs, NamePolicy.NONE) == "process"


def test_command_line_of_a_hanging_process_is_not_read(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"python3", cmdline=b"python3\0train.py\0")
    stat = tmp_path / "42/stat"
    stat.write_bytes(stat.read_bytes().replace(b") S ", b") D "))
    assert called(procfs, NamePolicy.SCRIPT) == "python3"
    assert called(procfs, NamePolicy.SCRIPT, "python3 train.py") == "python3 train.py"
    directory = HostProcesses(procfs, NamePolicy.SCRIPT)
    hanging = directory.describe(Consumer(42, 98765))
    host(tmp_path, b"python3", cmdline=b"python3\0train.py\0")
    awake = directory.describe(Consumer(42, 98765))
    assert (hanging.command, awake.command) == ("python3", "python3 train.py")


def test_hanging_hypervisor_keeps_its_guest(tmp_path: Path) -> None:
    procfs = host(tmp_path, b"qemu-system-x86", cmdline=b"qemu-system-x86_64\0-name\0web\0")
    directory, awake = HostProcesses(procfs), procfs.stat(42)
    known = directory.describe_running(awake, "0::/user.slice")
    (guest,) = [one for one in known.groups if one.kind is GroupKind.VM]
    hanging = awake._replace(stuck=True)
    assert directory.describe_running(hanging, "0::/user.slice", known).groups == known.groups
    assert guest not in directory.describe_running(hanging, "0::/user.slice").groups


@pytest.mark.parametrize(
    ("script", "starts"),
    [
        (b"/srv/.vscode-server/cli/servers/Stable-1/server/out/bootstrap-fork", True),
        (b"/srv/bootstrap-fork/server.js", False),
    ],
)
def test_part_of_an_editor_starts_others(tmp_path: Path, script: bytes, *, starts: bool) -> None:
    line = b"node\0--dns-result-order=ipv4first\0" + script + b"\0--type=extensionHost\0"
    procfs = host(tmp_path, b"node", cmdline=line)
    directory, awake = HostProcesses(procfs), procfs.stat(42)
    known = directory.describe_running(awake, "0::/user.slice")
    hanging = directory.describe_running(awake._replace(stuck=True), "0::/user.slice", known)
    assert (known.starts_others, hanging.starts_others) == (starts, starts)


def test_directory_reads_a_command_line_once_until_the_name_changes(tmp_path: Path) -> None:
    directory = HostProcesses(
        host(tmp_path, b"python3", cmdline=b"python3\0a.py\0"), NamePolicy.SCRIPT
    )
    told = []
    for comm, line in ((b"python3", b"python3\0a.py"), (b"python3", b""), (b"sh", b"sh\0b.sh")):
        host(tmp_path, comm, cmdline=line + b"\0")
        info = directory.describe(Consumer(42, 98765))
        told.append(info.command)
    assert told == ["python3 a.py", "python3 a.py", "sh b.sh"]


def test_exited_processes_are_named_by_policy() -> None:
    def dead(names: NamePolicy) -> str:
        directory = HostProcesses(ProcFs(), names)
        return directory.describe_ended(Consumer(42, 7), "make", "", 0, 1).command

    assert [dead(names) for names in NamePolicy] == ["make", "make", "process"]


@pytest.mark.parametrize(
    ("names", "alive", "gone"),
    [
        (NamePolicy.COMMAND, "python3", "python3"),
        (NamePolicy.SCRIPT, "python3 a.py", "python3 train.py"),
        (NamePolicy.NONE, UNNAMED, UNNAMED),
    ],
)
def test_restored_rows_have_the_names_of_the_policy_and_may_have_ended(
    tmp_path: Path, names: NamePolicy, alive: str, gone: str
) -> None:
    procfs = host(tmp_path, b"python3", cmdline=b"python3\0a.py\0")
    rows = [
        ProcessRow(PayerInfo(payer, "python3 train.py"), {}, {})
        for payer in (Consumer(42, 98765), Consumer(42, 5), Remainder("/a"))
    ]
    restored = HostProcesses(procfs, names).restore(rows)
    assert [row.info.command for row in restored] == [alive, gone, "python3 train.py"]
    assert [row.info.payer for row in restored] == [row.info.payer for row in rows]
    # No exit is reported of a process that ended while no agent ran.
    assert [row.alive for row in restored] == [True, False, True]
