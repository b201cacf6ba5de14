"""`wattspan service` as it is typed, on a tree that is another system's root."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.process_rights import umask

from wattspan.cli import cli

PROGRAM = "/usr/local/lib/wattspan/bin/wattspan"
UNIT = Path("usr/local/lib/systemd/system/wattspan.service")


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A system with a program in it that services can run."""
    with umask(0o022):
        folder = tmp_path / "root"
        for path, text in {PROGRAM: "#!/usr/bin/python3\n", "/usr/bin/python3": "\x7fELF"}.items():
            place = folder / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
            place.chmod(0o755)
        yield folder


def service(root: Path, *words: str) -> Result:
    told = ["--root", str(root), "--program", PROGRAM]
    return CliRunner().invoke(cli, ["service", words[0], *told, *words[1:]])


def contents(root: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(root)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


@pytest.mark.parametrize(
    "words", [["install"], ["install", "--json"], ["uninstall"], ["uninstall", "--purge"]]
)
@pytest.mark.parametrize("there", [False, True])
def test_dry_run_changes_nothing(root: Path, words: list[str], there: bool) -> None:
    if there:
        assert service(root, "install").exit_code == 0
        (root / "var/lib/wattspan").mkdir(parents=True)
    before = contents(root)
    done = service(root, *words, "--dry-run")
    assert done.exit_code == 0, done.output
    assert contents(root) == before


def test_dry_run_lists_the_actions_of_the_real_run(root: Path) -> None:
    def paths(done: Result, verb: str) -> list[str]:
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"{verb} ")]
        return [line.split()[1] for line in lines]

    planned = paths(service(root, "install", "--dry-run"), "Write")
    assert paths(service(root, "install"), "Wrote") == planned
    assert all((root / path.rstrip(":").lstrip("/")).is_file() for path in planned)
    assert len(planned) == 8


def test_json_output_lists_the_same_actions_as_text(root: Path) -> None:
    told = json.loads(service(root, "install", "--dry-run", "--json").stdout)
    assert (told["done"], told["dry_run"], told["refused"]) == (False, True, [])
    written = [action["path"] for action in told["actions"] if action["do"] == "write"]
    assert f"/{UNIT}" in written
    done = json.loads(service(root, "install", "--json").stdout)
    assert (done["done"], done["failed"]) == (True, [])
    again = json.loads(service(root, "install", "--json").stdout)
    assert [a["path"] for a in again["actions"] if a["do"] == "keep"] == written


def test_links_out_of_the_root_are_not_followed_for_writes_or_removals(
    root: Path, tmp_path: Path
) -> None:
    host = tmp_path / "host"
    (host / "wattspan").mkdir(parents=True)
    (host / "wattspan/store.db").write_text("measured")
    (root / "usr/local/lib/systemd").symlink_to(host)
    (root / "var").mkdir()
    (root / "var/lib").symlink_to(host)
    for words in (["install"], ["uninstall", "--purge"]):
        dry = service(root, *words, "--dry-run").output
        done = service(root, *words)
        assert done.exit_code == 0, done.output
        if words == ["install"]:
            for said in (dry, done.output):
                assert (
                    f"/{UNIT} unchanged: it is outside of this root, through a symbolic link"
                    in said
                )
        assert "/var/lib/wattspan" not in dry + done.output
        assert [str(path.relative_to(host)) for path in sorted(host.rglob("*"))] == [
            "wattspan",
            "wattspan/store.db",
        ]


def test_link_in_place_of_measured_data_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/wattspan").symlink_to(tmp_path / "elsewhere")
    done = service(root, "uninstall", "--purge")
    assert done.exit_code != 0
    assert "/var/lib/wattspan is a symbolic link, which is not followed: remove it." in done.output
    assert (tmp_path / "elsewhere").is_dir()


def test_status_lists_each_file(root: Path) -> None:
    nothing = service(root, "status")
    assert nothing.exit_code == 1
    assert nothing.stdout.count("not installed") == 8
    service(root, "install")
    assert service(root, "status").exit_code == 0
    (root / UNIT).write_text((root / UNIT).read_text().replace("Nice=5", "Nice=0"))
    changed = service(root, "status", "--json")
    assert changed.exit_code == 1
    assert json.loads(changed.stdout)["files"][f"/{UNIT}"] == "edited"


def test_print_option_prints_files_without_writing(root: Path) -> None:
    before = contents(root)
    done = service(root, "install", "--print")
    assert done.exit_code == 0
    assert f"==> /{UNIT} <==\n" in done.stdout
    assert f"\nExecStart={PROGRAM} run\n" in done.stdout
    files = json.loads(service(root, "install", "--print", "--json").stdout)["files"]
    assert len(files) == 8
    assert contents(root) == before


def test_install_refuses_a_packaged_service(root: Path) -> None:
    unit = root / "usr/lib/systemd/system/wattspan.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    for words in (["install"], ["install", "--dry-run"], ["install", "--json"]):
        before = contents(root)
        done = service(root, *words)
        assert done.exit_code == 1
        assert "installed as a system package with the unit /usr/lib/" in done.stderr
        assert contents(root) == before
    stands = service(root, "status")
    assert stands.exit_code == 0
    assert "Installed as a package" in stands.stdout


def test_package_shadowed_by_an_earlier_installation_is_not_well(root: Path) -> None:
    assert service(root, "install").exit_code == 0
    unit = root / "usr/lib/systemd/system/wattspan.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    stands = service(root, "status")
    assert stands.exit_code == 1
    assert f"/{UNIT}: takes precedence over the package" in stands.stdout
    assert "`wattspan service uninstall`" in stands.stdout
    assert f"/{UNIT}" in json.loads(service(root, "status", "--json").stdout)["shadowing"]
    assert service(root, "uninstall").exit_code == 0
    assert service(root, "status").exit_code == 0


def test_unit_of_the_administrator_is_listed_and_not_a_shadow(root: Path) -> None:
    vendor = root / "usr/lib/systemd/system/wattspan.service"
    theirs = root / "etc/systemd/system/wattspan.service"
    for place in (vendor, theirs):
        place.parent.mkdir(parents=True)
        place.write_text("[Service]\n")
    told = service(root, "status")
    assert told.exit_code == 0
    assert "/etc/systemd/system/wattspan.service: a file of the administrator" in told.stdout
    assert "over the package" not in told.stdout
    facts = json.loads(service(root, "status", "--json").stdout)
    assert facts["administrators"] == ["/etc/systemd/system/wattspan.service"]
    assert facts["shadowing"] == []
    theirs.unlink()
    theirs.symlink_to("/dev/null")
    masked = json.loads(service(root, "status", "--json").stdout)
    assert masked["administrators"] == []


def test_program_writable_by_others_is_refused(root: Path) -> None:
    (root / PROGRAM.lstrip("/")).parent.chmod(0o777)
    done = service(root, "install")
    assert done.exit_code == 1
    assert "can be changed by every user through /usr/local/lib/wattspan/bin" in done.stderr
    assert not (root / UNIT).exists()


def test_program_must_be_an_absolute_path(root: Path) -> None:
    done = CliRunner().invoke(
        cli, ["service", "install", "--root", str(root), "--program", "wattspan"]
    )
    assert done.exit_code == 2
    assert "not an absolute path" in done.stderr


def test_uninstall_without_installation_changes_nothing(root: Path) -> None:
    done = service(root, "uninstall")
    assert (done.exit_code, done.stdout) == (0, "There was nothing to do.\n")
