"""Which programs `wattspan service` lets services run, and which it refuses."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
from testbed.fixtures import entered_in
from testbed.process_rights import new_root

from wattspan.installation.files import service_files, service_files_directory
from wattspan.installation.program import (
    REMEDY,
    PathComponent,
    RequiredFile,
    TrustedOwners,
    program_files,
    required_files,
    requirement_faults,
    trusted_owners,
    writable_by_others,
)
from wattspan.sources.nvml.source import LIBRARY_PLACES

PROGRAM = "/usr/local/lib/wattspan/bin/wattspan"

FOLDER, FILE, LINK = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755, stat.S_IFLNK | 0o777


def need(*steps: PathComponent) -> RequiredFile:
    return RequiredFile("the program", steps[-1].path, steps, run=True)


def test_root_owned_executable_program_is_accepted() -> None:
    good = need(
        PathComponent("/opt", FOLDER),
        PathComponent("/opt/wattspan", LINK),
        PathComponent("/srv/wattspan", FILE),
    )
    assert requirement_faults([good]) == ()


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (
            [PathComponent("/root", FOLDER), PathComponent("/root/wattspan", FILE)],
            "below /root, which is hidden",
        ),
        ([PathComponent("/home", FOLDER), PathComponent("/home/w", FILE)], "below /home"),
        (
            [PathComponent("/tmp", FOLDER), PathComponent("/tmp/w", FILE)],
            "below /tmp, where services may not execute",
        ),
        (
            [PathComponent("/opt", FOLDER), PathComponent("/opt/w", None)],
            "does not exist: there is no /opt/w",
        ),
        (
            [PathComponent("/opt", stat.S_IFDIR | 0o700), PathComponent("/opt/w", FILE)],
            "/opt denies access",
        ),
        (
            [PathComponent("/opt", stat.S_IFDIR | 0o777), PathComponent("/opt/w", FILE)],
            "by every user through",
        ),
        (
            [PathComponent("/opt", stat.S_IFDIR | 0o1777), PathComponent("/opt/w", FILE)],
            "by every user through",
        ),
        ([PathComponent("/opt", FOLDER, uid=1000), PathComponent("/opt/w", FILE)], "by user 1000"),
        (
            [PathComponent("/opt", stat.S_IFDIR | 0o775, gid=50), PathComponent("/opt/w", FILE)],
            "by group 50",
        ),
        ([PathComponent("/opt/w", stat.S_IFREG | 0o744)], "chmod a+x /opt/w"),
        ([PathComponent("/opt/w", stat.S_IFREG | 0o700)], "is not readable for the user wattspan"),
        ([PathComponent("/opt/my tools/w", FILE)], "characters that unit files do not allow"),
        ([PathComponent("/opt/100%/w", FILE)], "characters that unit files do not allow"),
    ],
)
def test_program_that_services_cannot_or_must_not_run_is_refused(
    steps: list[PathComponent], why: str
) -> None:
    sentence, remedy = requirement_faults([need(*steps)])
    assert why in sentence
    assert steps[-1].path in sentence
    assert remedy == REMEDY


def test_locations_hidden_by_the_units_are_rejected() -> None:
    for file in service_files(service_files_directory(), PROGRAM):
        for paths in re.findall(r"^NoExecPaths=(.*)$", file.text, re.MULTILINE):
            for path in (word.removeprefix("-") for word in paths.split()):
                steps = PathComponent(path, FOLDER), PathComponent(f"{path}/w", FILE)
                assert f"{path}/w, is below /" in requirement_faults([need(*steps)])[0]


def test_units_can_load_the_library_of_nvidia_from_each_place() -> None:
    for file in service_files(service_files_directory(), PROGRAM):
        paths = {
            key: [word.removeprefix("-") for word in words.split()]
            for key, words in re.findall(r"^(NoExecPaths|ExecPaths)=(.*)$", file.text, re.MULTILINE)
        }
        if file.path.endswith(("wattspan.service", "wattspan-capper.service")):
            for place in map(Path, LIBRARY_PLACES):
                denied = any(map(place.is_relative_to, paths["NoExecPaths"]))
                assert denied == any(map(place.is_relative_to, paths["ExecPaths"]))


def test_program_directory_may_be_writable_for_administrators() -> None:
    debian = TrustedOwners(groups=frozenset({0, 50}))
    steps = (
        PathComponent("/usr/local/lib", stat.S_IFDIR | 0o2775, gid=50),
        PathComponent("/usr/local/lib/w", FILE),
    )
    assert requirement_faults([need(*steps)], debian) == ()


def test_similar_directory_name_is_not_a_home() -> None:
    assert (
        requirement_faults([need(PathComponent("/homes", FOLDER), PathComponent("/homes/w", FILE))])
        == ()
    )


# --------------------------------------------------------------------------- in a tree of its own


def program_in(root: Path, home: str = "/usr/bin") -> str:
    """A virtual environment as it looks to a service, whose base interpreter is in ``home``."""
    venv = root / PROGRAM.lstrip("/")
    base = root / home.lstrip("/") / "python3"
    for path in (venv, base):
        path.parent.mkdir(parents=True, exist_ok=True)
    (venv.parent / "python").symlink_to(f"{home}/python3")
    (venv.parents[1] / "pyvenv.cfg").write_text(f"home = {home}\nversion = 3.11.2\n")
    base.write_bytes(b"\x7fELF")
    base.chmod(0o755)
    venv.write_text(f"#!/{venv.parent.relative_to(root).as_posix()}/python\nimport wattspan\n")
    venv.chmod(0o755)
    return PROGRAM


root = entered_in(new_root)


def test_program_links_are_resolved(root: Path) -> None:
    needs = required_files(root, program_in(root))
    assert [n.what for n in needs] == [
        "the program",
        "its interpreter",
        "the directory of its base interpreter",
    ]
    assert needs[1].steps[-1].path == "/usr/bin/python3"
    assert requirement_faults(needs, trusted_owners(root)) == ()


def test_environment_with_interpreter_in_root_home_is_rejected(root: Path) -> None:
    sentence, *_ = requirement_faults(
        required_files(root, program_in(root, "/root/bin")), trusted_owners(root)
    )
    assert "its interpreter" in sentence
    assert "below /root" in sentence


def changed(root: Path, part: str, mode: int) -> tuple[str, ...]:
    """Findings on a program in whose environment ``part`` has that mode."""
    program = program_in(root)
    inside = root / PROGRAM.lstrip("/")
    packages = inside.parents[1] / "lib/python3.11/site-packages"
    (packages / "wattspan/capper").mkdir(parents=True)
    (packages / "wattspan/capper/journal.py").write_text("")
    (packages / "some.pth").write_text("")
    (packages / "broken").symlink_to("nowhere")
    (inside.parents[1] / "lib64").symlink_to("lib")
    if part:
        (inside.parents[1] / part).chmod(mode)
    assert requirement_faults(required_files(root, program), trusted_owners(root)) == ()
    return writable_by_others(program_files(root, program), trusted_owners(root))


def test_root_owned_environment_is_accepted(root: Path) -> None:
    assert changed(root, "", 0) == ()


@pytest.mark.parametrize(
    ("part", "mode"),
    [
        ("lib/python3.11/site-packages/wattspan/capper", 0o777),
        ("lib/python3.11/site-packages/wattspan/capper/journal.py", 0o666),
        ("lib/python3.11/site-packages/some.pth", 0o666),
        ("lib", 0o777),
        ("pyvenv.cfg", 0o646),
    ],
)
def test_program_any_file_of_which_others_may_change_is_refused(
    root: Path, part: str, mode: int
) -> None:
    (sentence,) = changed(root, part, mode)
    venv = "/usr/local/lib/wattspan"
    assert f"every user can change {venv}/{part}. " in sentence
    assert f"`chown -R root: {venv}` and `chmod -R go-w {venv}`" in sentence


def test_linked_module_is_checked(root: Path) -> None:
    program = program_in(root)
    packages = (root / PROGRAM.lstrip("/")).parents[1] / "lib"
    packages.mkdir()
    (root / "srv/theirs").mkdir(parents=True)
    (root / "srv/theirs/module.py").write_text("")
    (root / "srv/theirs/module.py").chmod(0o666)
    (packages / "theirs").symlink_to("/srv/theirs")
    (sentence,) = writable_by_others(program_files(root, program), trusted_owners(root))
    assert "every user can change /srv/theirs/module.py. Run `chown -R root: /srv/theirs`" in (
        sentence
    )


def test_environment_behind_a_link_is_the_one_of_that_root(root: Path) -> None:
    program = program_in(root)
    venv = (root / program.lstrip("/")).parents[1]
    (root / "srv").mkdir()
    venv.rename(root / "srv/there")
    venv.symlink_to("/srv/there")
    (root / "srv/there/pyvenv.cfg").chmod(0o666)
    (sentence,) = writable_by_others(program_files(root, program), trusted_owners(root))
    assert "every user can change /srv/there/pyvenv.cfg. Run `chown -R root: /srv/there`" in (
        sentence
    )


def test_environment_of_this_host_is_checked(root: Path) -> None:
    program_in(root)
    inside = root / PROGRAM.lstrip("/")
    inside.write_text(f"#!{inside.parent}/python\n")
    deep = inside.parents[1] / "lib/python3.11/site-packages/msgspec/__init__.py"
    deep.parent.mkdir(parents=True)
    deep.write_text("")
    found = {part.path for part in program_files(Path("/"), str(inside))}
    assert {str(deep), str(deep.parent), str(inside), str(inside.parents[1])} <= found


def test_foreign_files_are_named_once_and_counted() -> None:
    parts = [PathComponent(f"/opt/v/{name}", FILE, uid=65534, tree="/opt/v") for name in "aabc"]
    (sentence,) = writable_by_others([PathComponent("/opt", FOLDER), *parts])
    assert "user 65534 can change /opt/v/a and 2 more files" in sentence


def test_parent_directory_remedy_is_not_recursive() -> None:
    (sentence,) = writable_by_others([PathComponent("/srv", FOLDER, uid=1000)])
    assert "`chown root: /srv` and `chmod go-w /srv`" in sentence


def test_links_that_lead_in_circles_lead_nowhere(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("../../a")
    sentence, _ = requirement_faults(required_files(root, "/a"), trusted_owners(root))
    assert "does not exist" in sentence
