"""Decisions of `wattspan service` from the state of the system, and its actions in a temporary
tree."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.fixtures import entered_in
from testbed.process_rights import new_root
from testbed.requirements import ROOT

from wattspan.installation.files import (
    FileState,
    InstallationState,
    NonRegularFile,
    ServiceFile,
    file_state,
    inspect_host,
    install_place,
    service_files,
    service_files_directory,
    with_digest,
    with_program_path,
)
from wattspan.installation.plan import (
    OLDEST_SYSTEMD,
    InstallationError,
    Keep,
    LimitNotRestoredError,
    Note,
    Plan,
    Remove,
    RemoveFolder,
    Run,
    Write,
    action_facts,
    apply_plan,
    install,
    refusals,
    uninstall,
)

PROGRAM = "/usr/local/lib/wattspan/bin/wattspan"
UNITS = "/usr/local/lib/systemd/system"
FILES = {
    "wattspan.service": "[Service]\nExecStart=/usr/bin/wattspan run\n",
    "wattspan-capper.service": "[Service]\nExecStart=/usr/bin/wattspan capper\n"
    "ExecStopPost=/usr/bin/wattspan caps restore --tuned\n",
    "wattspan-capper.socket": "[Socket]\nListenStream=/run/wattspan-capper/capper.sock\n",
    "wattspan-counters@.service": "[Service]\nExecStart=/usr/bin/wattspan counters\n",
    "wattspan-counters.socket": "[Socket]\nListenStream=/run/wattspan-counters/counters.sock\n",
    "sysusers.d/wattspan.conf": "u wattspan -\n",
    "tmpfiles.d/wattspan.conf": "d /etc/wattspan 0755\n",
    "udev/60-wattspan.rules": 'SUBSYSTEM=="powercap"\n',
    "README.md": "Not installed.\n",
}
AGENT_UNIT = f"{UNITS}/wattspan.service"


@pytest.fixture
def files(tmp_path: Path) -> tuple[ServiceFile, ...]:
    folder = tmp_path / "shipped"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return service_files(folder, PROGRAM)


def installed(files: Sequence[ServiceFile]) -> InstallationState:
    return InstallationState(files={file.path: file.text.encode() for file in files})


def done_to(plan: Plan) -> dict[str, str]:
    """Action for each path."""
    return {
        action.path: type(action).__name__
        for action in plan
        if isinstance(action, Write | Keep | Remove)
    }


def commands(plan: Plan) -> list[str]:
    return [" ".join(action.command) for action in plan if isinstance(action, Run)]


def notes(plan: Plan) -> str:
    return "\n".join(action.text for action in plan if isinstance(action, Note))


# ------------------------------------------------------------------------------------ the files


def test_installed_files_go_to_standard_locations(files: tuple[ServiceFile, ...]) -> None:
    assert {file.path for file in files} == {
        f"{UNITS}/wattspan.service",
        f"{UNITS}/wattspan-capper.service",
        f"{UNITS}/wattspan-capper.socket",
        f"{UNITS}/wattspan-counters@.service",
        f"{UNITS}/wattspan-counters.socket",
        "/usr/local/lib/sysusers.d/wattspan.conf",
        "/usr/local/lib/tmpfiles.d/wattspan.conf",
        "/usr/local/lib/udev/rules.d/60-wattspan.rules",
    }


def test_installation_writes_no_file_to_etc() -> None:
    assert not [
        f.path
        for f in service_files(service_files_directory(), PROGRAM)
        if f.path.startswith("/etc")
    ]


def test_unit_runs_the_program_that_is_installed_and_is_the_same_otherwise() -> None:
    unit = "ExecStart=/usr/bin/wattspan run\n# /usr/bin/wattspan-extra\nX=/usr/bin/wattspan.toml\n"
    assert with_program_path(unit, "/x/wattspan") == unit.replace(
        "=/usr/bin/wattspan run", "=/x/wattspan run"
    )


def test_rewritten_units_run_existing_programs_only() -> None:
    for file in service_files(service_files_directory(), PROGRAM):
        assert "/usr/bin/wattspan" not in file.text, file.path


@pytest.mark.parametrize("name", ["README.md", "wattspan.env", "sysusers.d/notes.txt"])
def test_unread_files_are_not_installed(name: str) -> None:
    assert install_place(name) == ""


# -------------------------------------------------------------------------------------- marks


def test_marked_file_is_ours_until_modified() -> None:
    text = with_digest("[Service]\nExecStart=/x\n")
    assert file_state(text.encode(), text) is FileState.CURRENT
    assert file_state(text.encode(), with_digest("other")) is FileState.OUTDATED
    for changed in (text + "\n", text.replace("/x", "/y"), "# a note\n" + text):
        assert file_state(changed.encode(), text) is FileState.EDITED


def test_unmarked_file_is_foreign_even_with_equal_text() -> None:
    assert file_state(b"[Service]\n", with_digest("[Service]\n")) is FileState.FOREIGN
    assert file_state(NonRegularFile("a link to /dev/null")) is FileState.FOREIGN
    assert file_state(b"\xff\xfe") is FileState.FOREIGN


def test_missing_file_has_no_owner() -> None:
    assert file_state(None) is FileState.ABSENT


# --------------------------------------------------------------------------------- installing


def test_first_installation_writes_every_file(files: tuple[ServiceFile, ...]) -> None:
    plan = install(files, InstallationState())
    assert done_to(plan) == {file.path: "Write" for file in files}


def test_second_installation_changes_no_file(files: tuple[ServiceFile, ...]) -> None:
    assert set(done_to(install(files, installed(files))).values()) == {"Keep"}


def test_files_of_an_earlier_installation_are_updated(
    files: tuple[ServiceFile, ...],
) -> None:
    before = installed(files)
    old = {**before.files, AGENT_UNIT: with_digest("[Service]\nExecStart=/old\n").encode()}
    plan = install(files, replace(before, files=old))
    assert done_to(plan)[AGENT_UNIT] == "Write"
    assert list(done_to(plan).values()).count("Write") == 1


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (b"[Service]\n", "wattspan did not write it"),
        (with_digest("[Service]\n").encode() + b"Nice=3\n", "it was edited"),
        (NonRegularFile("a link to /dev/null"), "a link to /dev/null"),
    ],
)
def test_administrators_file_is_left_alone_and_named(
    files: tuple[ServiceFile, ...], theirs: bytes | NonRegularFile, why: str
) -> None:
    found = InstallationState(files={AGENT_UNIT: theirs})
    for plan in (install(files, found), uninstall(files, found, PROGRAM)):
        (left,) = [a for a in plan if isinstance(a, Keep) and a.path == AGENT_UNIT]
        assert why in left.sentence(done=False)
        assert done_to(plan)[AGENT_UNIT] == "Keep"


def test_override_in_etc_is_reported(files: tuple[ServiceFile, ...]) -> None:
    found = InstallationState(overriding=("/etc/systemd/system/wattspan.service",))
    assert "/etc/systemd/system/wattspan.service takes precedence" in notes(install(files, found))


def test_user_is_created_before_systemd_reloads(files: tuple[ServiceFile, ...]) -> None:
    ran = commands(install(files, InstallationState()))
    assert ran[0] == "systemd-sysusers /usr/local/lib/sysusers.d/wattspan.conf"
    assert ran[1].startswith("systemd-tmpfiles --create /usr/local/lib/tmpfiles.d/")
    assert ran[-1] == "systemctl daemon-reload"


def test_installation_starts_no_service_and_names_the_command(
    files: tuple[ServiceFile, ...],
) -> None:
    plan = install(files, InstallationState())
    assert not [ran for ran in commands(plan) if "start" in ran or "enable" in ran]
    assert "systemctl enable --now wattspan.service" in notes(plan)


def test_installation_into_another_root_runs_no_command(files: tuple[ServiceFile, ...]) -> None:
    elsewhere = replace(installed(files), live=False, journal=True)
    assert commands(install(files, elsewhere)) == []
    assert commands(uninstall(files, elsewhere, PROGRAM)) == []


def test_systemctl_is_not_called_without_systemd(files: tuple[ServiceFile, ...]) -> None:
    plan = install(files, InstallationState(booted=False, udev=False))
    assert not [ran for ran in commands(plan) if ran.startswith(("systemctl", "udevadm"))]
    assert "does not run this host" in notes(plan)


@pytest.mark.parametrize(("version", "warned"), [(247, True), (248, False), (None, False)])
def test_old_systemd_warning_names_ignored_settings(
    files: tuple[ServiceFile, ...], version: int | None, warned: bool
) -> None:
    said = notes(install(files, InstallationState(systemd=version)))
    assert ("ignores directives such as NoExecPaths=" in said) is warned
    assert said.startswith("systemd 247 is older than 248") is warned


@pytest.mark.parametrize(
    ("told", "version"), [("systemd 239 (239-82.el8)\n+PAM +AUDIT\n", 239), ("", None)]
)
def test_version_is_that_of_the_running_host_and_of_no_other_root(
    tmp_path: Path, told: str, version: int | None
) -> None:
    assert inspect_host(Path("/"), (), lambda _: told).systemd == version
    assert inspect_host(tmp_path, (), lambda _: told).systemd is None


@pytest.mark.parametrize(
    "page", ["reference/units.md", "how-to/install-as-a-service.md", "how-to/install.md"]
)
def test_pages_name_the_oldest_supported_systemd(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"systemd (\d+) or newer", text)) == {str(OLDEST_SYSTEMD)}


def test_configuration_file_is_explained_not_created(files: tuple[ServiceFile, ...]) -> None:
    assert "wattspan config show" in notes(install(files, InstallationState()))
    assert "config.toml" not in notes(install(files, InstallationState(configured=True)))


def test_installation_over_a_package_is_refused() -> None:
    (sentence,) = refusals(
        InstallationState(packaged=("/lib/systemd/system/wattspan.service",)), ["x"]
    )
    assert "as a system package" in sentence
    assert "/lib/systemd/system/wattspan.service" in sentence


# ----------------------------------------------------------------------------------- removing


def test_uninstall_stops_agent_then_capper_before_removing_files(
    files: tuple[ServiceFile, ...],
) -> None:
    plan = uninstall(files, replace(installed(files), journal=True), PROGRAM)
    assert commands(plan)[:4] == [
        "systemctl disable --now wattspan.service",
        "systemctl disable --now wattspan-counters.socket",
        "systemctl disable --now wattspan-capper.socket wattspan-capper.service",
        f"{PROGRAM} caps restore",
    ]
    kinds = [type(action) for action in plan]
    assert kinds.index(Remove) == 4
    assert all(isinstance(a, Run) and a.required for a in plan[:4])


def test_uninstall_removes_only_installed_files(files: tuple[ServiceFile, ...]) -> None:
    found = installed(files)
    theirs = {**found.files, AGENT_UNIT: b"mine"}
    plan = uninstall(files, replace(found, files=theirs), PROGRAM)
    assert done_to(plan) == {f.path: "Remove" for f in files} | {AGENT_UNIT: "Keep"}
    assert "systemctl disable --now wattspan.service" not in commands(plan)


def test_measurements_remain_without_purge(files: tuple[ServiceFile, ...]) -> None:
    found = replace(installed(files), state=("/var/lib/wattspan",))
    assert "/var/lib/wattspan with the measured data is kept" in notes(
        uninstall(files, found, PROGRAM)
    )
    purged = uninstall(files, found, PROGRAM, purge=True)
    assert RemoveFolder("/var/lib/wattspan", recursive=True) in purged
    assert purged.index(RemoveFolder("/var/lib/wattspan", recursive=True)) > 6


def test_measurements_of_a_package_are_not_purged(files: tuple[ServiceFile, ...]) -> None:
    found = InstallationState(
        packaged=("/usr/lib/systemd/system/wattspan.service",), state=("/var/lib/wattspan",)
    )
    plan = uninstall(files, found, PROGRAM, purge=True)
    assert [type(action) for action in plan] == [Note]
    assert "left to its package manager" in notes(plan)


def test_removal_before_a_package_names_the_restart_command(
    files: tuple[ServiceFile, ...],
) -> None:
    found = replace(installed(files), packaged=("/usr/lib/systemd/system/wattspan.service",))
    assert "The services of the package are stopped and disabled now. " in notes(
        uninstall(files, found, PROGRAM)
    )
    (again,) = re.findall(r"`(systemctl enable .*?)`", notes(uninstall(files, found, PROGRAM)))
    assert set(again.split()[3:]) == {"wattspan.service", "wattspan-capper.socket"}


def test_uninstall_without_installation_is_a_no_op(files: tuple[ServiceFile, ...]) -> None:
    assert uninstall(files, InstallationState(), PROGRAM) == ()


def test_every_action_is_one_sentence(files: tuple[ServiceFile, ...]) -> None:
    found = replace(installed(files), journal=True, state=("/var/lib/wattspan",))
    plans = (
        install(files, InstallationState()),
        install(files, found),
        uninstall(files, found, PROGRAM),
        uninstall(files, found, PROGRAM, purge=True),
    )
    for action in (action for plan in plans for action in plan):
        for done in (False, True):
            said = action.sentence(done=done)
            assert "\n" not in said
            assert said[0].isupper() or said.startswith(("/", "systemd"))
            assert said.endswith(".") or "systemctl enable" in said
        assert action_facts(action)["sentence"] == action.sentence(done=False)


# --------------------------------------------------------------------------- in a tree of its own


root = entered_in(new_root)


def carried_out(plan: Plan, root: Path) -> list[str]:
    said: list[str] = []
    assert apply_plan(plan, root, said.append, lambda command: "") == ()
    return said


def contents(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): f"{p.lstat().st_mode:o} {p.read_text() if p.is_file() else ''}"
        for p in root.rglob("*")
    }


def test_uninstall_restores_the_filesystem_exactly(
    root: Path, files: tuple[ServiceFile, ...]
) -> None:
    (root / "usr/local/lib").mkdir(parents=True)
    before = contents(root)
    carried_out(install(files, inspect_host(root, files)), root)
    for file in files:
        path = root / file.path.lstrip("/")
        assert path.read_text() == file.text
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert set(done_to(install(files, inspect_host(root, files))).values()) == {"Keep"}
    carried_out(uninstall(files, inspect_host(root, files), PROGRAM), root)
    assert contents(root) == before


def test_directory_with_a_foreign_unit_remains(root: Path, files: tuple[ServiceFile, ...]) -> None:
    carried_out(install(files, inspect_host(root, files)), root)
    other = root / f"{UNITS}/other.service".lstrip("/")
    other.write_text("[Service]\n")
    said = carried_out(uninstall(files, inspect_host(root, files), PROGRAM), root)
    assert other.read_text() == "[Service]\n"
    assert "Removed /usr/local/lib/udev, which was empty." in said
    assert not [told for told in said if told.startswith(f"Removed {UNITS},")]


def test_file_that_changes_between_the_look_and_the_write_is_not_overwritten(
    root: Path, files: tuple[ServiceFile, ...]
) -> None:
    plan = install(files, inspect_host(root, files))
    theirs = root / AGENT_UNIT.lstrip("/")
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mine")
    (failed,) = apply_plan(plan, root, lambda said: None, lambda command: "")
    assert (
        failed == f"Write {AGENT_UNIT}: it has changed since the inspection; run the command again."
    )
    assert theirs.read_text() == "mine"
    assert (root / f"{UNITS}/wattspan-capper.service".lstrip("/")).exists()


def test_link_is_never_written_through(root: Path, files: tuple[ServiceFile, ...]) -> None:
    theirs = root / AGENT_UNIT.lstrip("/")
    theirs.parent.mkdir(parents=True)
    theirs.symlink_to("/etc/passwd")
    carried_out(install(files, inspect_host(root, files)), root)
    assert theirs.is_symlink()
    assert not (root / "etc/passwd").exists()


def test_failed_command_does_not_stop_the_others(
    root: Path, files: tuple[ServiceFile, ...]
) -> None:
    plan = install(files, replace(inspect_host(root, files), live=True, booted=True, udev=True))
    ran: list[str] = []

    def run(command: Sequence[str]) -> str:
        ran.append(command[0])
        return "exit code 1, no such thing" if command[0] == "udevadm" else ""

    failed = apply_plan(plan, root, lambda said: None, run)
    assert failed[0] == "`udevadm control --reload` failed: exit code 1, no such thing."
    assert ran[-1] == "systemctl"


@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [("systemctl", InstallationError, 1), (PROGRAM, LimitNotRestoredError, 6)],
)
def test_uninstall_stops_at_a_running_service_or_a_retained_limit(
    root: Path,
    files: tuple[ServiceFile, ...],
    failing: str,
    error: type[InstallationError],
    code: int,
) -> None:
    carried_out(install(files, inspect_host(root, files)), root)
    found = replace(inspect_host(root, files), live=True, booted=True, journal=True)
    before = contents(root)
    with pytest.raises(error, match="Nothing was removed") as raised:
        apply_plan(
            uninstall(files, found, PROGRAM),
            root,
            lambda said: None,
            lambda command: "exit code 6, it stays" if command[0] == failing else "",
        )
    assert raised.value.exit_code == code
    assert contents(root) == before
