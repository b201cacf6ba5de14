"""What `wattspan service` decides, told what is there; and what it does, in a tree of its own."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from support.requirements import ROOT
from wattspan.service.installation.apply import InstallationError, LimitNotRestoredError, apply_plan
from wattspan.service.installation.files import (
    FileState,
    NonRegularFile,
    ServiceFile,
    file_state,
    install_place,
    service_files,
    service_files_directory,
    with_digest,
    with_program_path,
)
from wattspan.service.installation.inspection import inspect_host
from wattspan.service.installation.plan import (
    OLDEST_SYSTEMD,
    InstallationState,
    Keep,
    Note,
    Plan,
    Remove,
    RemoveFolder,
    Run,
    Write,
    action_facts,
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
    """What happens to each path."""
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


def test_each_file_goes_where_its_reader_looks(files: tuple[ServiceFile, ...]) -> None:
    assert {file.path for file in files} == {
        f"{UNITS}/wattspan.service",
        f"{UNITS}/wattspan-capper.service",
        f"{UNITS}/wattspan-capper.socket",
        "/usr/local/lib/sysusers.d/wattspan.conf",
        "/usr/local/lib/tmpfiles.d/wattspan.conf",
        "/usr/local/lib/udev/rules.d/60-wattspan.rules",
    }


def test_nothing_goes_to_etc() -> None:
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


def test_shipped_units_run_nothing_that_is_not_there_after_rewriting() -> None:
    for file in service_files(service_files_directory(), PROGRAM):
        assert "/usr/bin/wattspan" not in file.text, file.path


@pytest.mark.parametrize("name", ["README.md", "wattspan.env", "sysusers.d/notes.txt"])
def test_what_no_part_of_the_system_reads_is_not_installed(name: str) -> None:
    assert install_place(name) == ""


# -------------------------------------------------------------------------------------- marks


def test_marked_file_is_ours_until_a_byte_of_it_changes() -> None:
    text = with_digest("[Service]\nExecStart=/x\n")
    assert file_state(text.encode(), text) is FileState.CURRENT
    assert file_state(text.encode(), with_digest("other")) is FileState.OUTDATED
    for changed in (text + "\n", text.replace("/x", "/y"), "# a note\n" + text):
        assert file_state(changed.encode(), text) is FileState.EDITED


def test_file_without_a_mark_is_somebody_elses_even_with_the_same_text() -> None:
    assert file_state(b"[Service]\n", with_digest("[Service]\n")) is FileState.FOREIGN
    assert file_state(NonRegularFile("a link to /dev/null")) is FileState.FOREIGN
    assert file_state(b"\xff\xfe") is FileState.FOREIGN


def test_nothing_is_nobodys() -> None:
    assert file_state(None) is FileState.ABSENT


# --------------------------------------------------------------------------------- installing


def test_on_a_host_without_it_every_file_is_written(files: tuple[ServiceFile, ...]) -> None:
    plan = install(files, InstallationState())
    assert done_to(plan) == {file.path: "Write" for file in files}


def test_second_installation_writes_nothing(files: tuple[ServiceFile, ...]) -> None:
    assert set(done_to(install(files, installed(files))).values()) == {"Keep"}


def test_what_an_earlier_installation_wrote_is_brought_up_to_date(
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


def test_override_in_etc_is_told_of(files: tuple[ServiceFile, ...]) -> None:
    found = InstallationState(overriding=("/etc/systemd/system/wattspan.service",))
    assert "/etc/systemd/system/wattspan.service takes precedence" in notes(install(files, found))


def test_user_is_made_before_systemd_looks(files: tuple[ServiceFile, ...]) -> None:
    ran = commands(install(files, InstallationState()))
    assert ran[0] == "systemd-sysusers /usr/local/lib/sysusers.d/wattspan.conf"
    assert ran[1].startswith("systemd-tmpfiles --create /usr/local/lib/tmpfiles.d/")
    assert ran[-1] == "systemctl daemon-reload"


def test_nothing_is_started_and_the_command_for_it_is_said(files: tuple[ServiceFile, ...]) -> None:
    plan = install(files, InstallationState())
    assert not [ran for ran in commands(plan) if "start" in ran or "enable" in ran]
    assert "systemctl enable --now wattspan.service" in notes(plan)


def test_for_another_root_no_command_is_run(files: tuple[ServiceFile, ...]) -> None:
    elsewhere = replace(installed(files), live=False, journal=True)
    assert commands(install(files, elsewhere)) == []
    assert commands(uninstall(files, elsewhere, PROGRAM)) == []


def test_where_systemd_does_not_run_it_is_not_asked(files: tuple[ServiceFile, ...]) -> None:
    plan = install(files, InstallationState(booted=False, udev=False))
    assert not [ran for ran in commands(plan) if ran.startswith(("systemctl", "udevadm"))]
    assert "does not run this host" in notes(plan)


@pytest.mark.parametrize(("version", "warned"), [(247, True), (248, False), (None, False)])
def test_who_has_too_old_a_systemd_is_told_that_it_ignores_some_of_the_units(
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
    assert inspect_host(Path("/"), (), lambda: told).systemd == version
    assert inspect_host(tmp_path, (), lambda: told).systemd is None


@pytest.mark.parametrize(
    "page", ["reference/units.md", "how-to/install-as-a-service.md", "how-to/install.md"]
)
def test_pages_name_the_oldest_systemd_that_knows_all_of_the_units(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"systemd (\d+) or newer", text)) == {str(OLDEST_SYSTEMD)}


def test_configuration_is_not_made_but_explained(files: tuple[ServiceFile, ...]) -> None:
    assert "wattspan config show" in notes(install(files, InstallationState()))
    assert "config.toml" not in notes(install(files, InstallationState(configured=True)))


def test_it_is_refused_where_a_package_has_brought_the_units() -> None:
    (sentence,) = refusals(
        InstallationState(packaged=("/lib/systemd/system/wattspan.service",)), ["x"]
    )
    assert "as a system package" in sentence
    assert "/lib/systemd/system/wattspan.service" in sentence


# ----------------------------------------------------------------------------------- removing


def test_agent_is_stopped_before_the_capper_and_both_before_a_file_goes(
    files: tuple[ServiceFile, ...],
) -> None:
    plan = uninstall(files, replace(installed(files), journal=True), PROGRAM)
    assert commands(plan)[:3] == [
        "systemctl disable --now wattspan.service",
        "systemctl disable --now wattspan-capper.socket wattspan-capper.service",
        f"{PROGRAM} caps restore",
    ]
    kinds = [type(action) for action in plan]
    assert kinds.index(Remove) == 3
    assert all(isinstance(a, Run) and a.required for a in plan[:3])


def test_only_what_was_written_is_removed(files: tuple[ServiceFile, ...]) -> None:
    found = installed(files)
    theirs = {**found.files, AGENT_UNIT: b"mine"}
    plan = uninstall(files, replace(found, files=theirs), PROGRAM)
    assert done_to(plan) == {f.path: "Remove" for f in files} | {AGENT_UNIT: "Keep"}
    assert "systemctl disable --now wattspan.service" not in commands(plan)


def test_what_was_measured_stays_unless_it_is_purged(files: tuple[ServiceFile, ...]) -> None:
    found = replace(installed(files), state=("/var/lib/wattspan",))
    assert "/var/lib/wattspan with the measured data is kept" in notes(
        uninstall(files, found, PROGRAM)
    )
    purged = uninstall(files, found, PROGRAM, purge=True)
    assert RemoveFolder("/var/lib/wattspan", recursive=True) in purged
    assert purged.index(RemoveFolder("/var/lib/wattspan", recursive=True)) > 6


def test_what_a_package_has_measured_is_not_purged(files: tuple[ServiceFile, ...]) -> None:
    found = InstallationState(
        packaged=("/usr/lib/systemd/system/wattspan.service",), state=("/var/lib/wattspan",)
    )
    plan = uninstall(files, found, PROGRAM, purge=True)
    assert [type(action) for action in plan] == [Note]
    assert "left to its package manager" in notes(plan)


def test_who_removes_what_came_before_a_package_is_told_how_its_services_run_again(
    files: tuple[ServiceFile, ...],
) -> None:
    found = replace(installed(files), packaged=("/usr/lib/systemd/system/wattspan.service",))
    assert "The services of the package are stopped and disabled now. " in notes(
        uninstall(files, found, PROGRAM)
    )
    (again,) = re.findall(r"`(systemctl enable .*?)`", notes(uninstall(files, found, PROGRAM)))
    assert set(again.split()[3:]) == {"wattspan.service", "wattspan-capper.socket"}


def test_where_nothing_is_installed_nothing_is_done(files: tuple[ServiceFile, ...]) -> None:
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


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    before = os.umask(0o022)
    try:
        (tmp_path / "root").mkdir()
        yield tmp_path / "root"
    finally:
        os.umask(before)


def carried_out(plan: Plan, root: Path) -> list[str]:
    said: list[str] = []
    assert apply_plan(plan, root, said.append, lambda command: "") == ()
    return said


def contents(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): f"{p.lstat().st_mode:o} {p.read_text() if p.is_file() else ''}"
        for p in root.rglob("*")
    }


def test_what_is_installed_is_removed_again_to_the_last_byte(
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


def test_directory_with_somebody_elses_unit_stays(
    root: Path, files: tuple[ServiceFile, ...]
) -> None:
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


def test_one_command_that_fails_costs_only_itself(
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
def test_nothing_is_removed_when_a_service_does_not_stop_or_a_limit_stays(
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
