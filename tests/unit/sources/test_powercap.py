"""The powercap reader on real files: failures affect only their zone and name the cause."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from testbed.covers import cover_of, cover_of_batch
from testbed.descriptors import no_free_descriptor
from testbed.powercap_host import PowercapHost, counters, epochs

from wattspan.model import Provenance, Trouble
from wattspan.ports import Batch
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.sources.rapl.sysfs import access_failure
from wattspan.testing import ManualClock

PACKAGE, MEMORY = "intel-rapl:0", "intel-rapl:0:0"
ALL = {"rapl:package-0", "rapl:package-0/dram", "rapl:package-1", "rapl:package-1/dram"}


def only_failure(batch: Batch) -> tuple[Trouble, str | None]:
    (failure,) = batch.failures
    return failure.trouble, failure.domain_id


def test_every_counter_is_read_and_labelled(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        batch = host.read_after()
        assert counters(batch).keys() == ALL
        assert {d.provenance for d in batch.domains} == {Provenance.EMULATED}
        assert not batch.failures


def test_reading_has_the_value_and_time_of_the_file(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        batch = host.read_after()
        shown = int((host.tree.path(PACKAGE) / "energy_uj").read_text())
        assert counters(batch)["rapl:package-0"] == shown > 0
        assert {reading.at for reading in batch.readings} == {host.clock.now()}


def test_unchanged_domains_are_the_same_object(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        first = host.read_after().domains
        assert host.read_after(10).domains is first


def test_directories_are_not_scanned_at_every_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PowercapHost(tmp_path) as host:
        host.source.read()

        def refuse(path: Path) -> None:
            raise AssertionError(f"{path} was listed")

        monkeypatch.setattr(Path, "iterdir", refuse)
        assert counters(host.read_after()).keys() == ALL


def test_vanished_zone_affects_only_itself(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.vanish(MEMORY)
        batch = host.read_after()
        assert counters(batch).keys() == ALL - {"rapl:package-0/dram"}
        assert {d.id for d in batch.domains} == ALL - {"rapl:package-0/dram"}
        assert only_failure(batch) == (Trouble.ABSENT, "rapl:package-0/dram")


def test_offline_package_removes_its_dram_zone(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.vanish("intel-rapl:1")
        batch = host.read_after()
        assert counters(batch).keys() == {"rapl:package-0", "rapl:package-0/dram"}
        assert {failure.domain_id for failure in batch.failures} == {
            "rapl:package-1",
            "rapl:package-1/dram",
        }


def test_reregistered_zone_starts_a_new_epoch(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        assert set(epochs(host.read_after()).values()) == {0}
        host.engine.vanish(MEMORY)
        host.read_after()
        host.engine.reappear(MEMORY)
        batch = host.read_after(6)
        assert epochs(batch) == {name: int(name == "rapl:package-0/dram") for name in ALL}
        assert not batch.failures


def test_zone_reregistered_between_ticks_starts_a_new_epoch(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.vanish(MEMORY)
        host.engine.reappear(MEMORY)
        assert epochs(host.read_after())["rapl:package-0/dram"] == 1


def test_zone_that_returns_under_another_directory_keeps_its_id(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = {domain.id for domain in host.read_after().domains}
        host.engine.vanish("intel-rapl:1")
        host.read_after()
        host.engine.reappear("intel-rapl:1", "intel-rapl:a")
        batch = host.read_after(6)
        assert {domain.id for domain in batch.domains} == before
        assert epochs(batch)["rapl:package-1/dram"] == 1


def test_denied_zone_names_the_remedy(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        assert host.engine.deny(PACKAGE) == "EACCES"
        batch = host.read_after()
        assert counters(batch).keys() == ALL - {"rapl:package-0"}
        assert only_failure(batch) == (Trouble.DENIED, "rapl:package-0")
        remedy = batch.failures[0].remedy
        assert "group wattspan" in remedy
        assert "`systemd-tmpfiles --create wattspan.conf`" in remedy
        assert (
            "CAP_" not in remedy
        )  # root could read every file, and the unit removes that permission
        assert {domain.id for domain in batch.domains} == ALL  # known, and silent


def test_denied_zone_that_is_granted_again_is_read_again(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.engine.deny(PACKAGE)
        host.read_after()
        host.engine.mend(PACKAGE)
        batch = host.read_after(6)
        assert counters(batch).keys() == ALL
        assert not batch.failures


def test_unreadable_counter_is_retried_every_tick(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        assert host.engine.fail(PACKAGE) == "EIO"
        for _ in range(3):
            assert only_failure(host.read_after()) == (Trouble.RETRY, "rapl:package-0")
        host.engine.mend(PACKAGE)
        assert counters(host.read_after(6)).keys() == ALL


@pytest.mark.parametrize(
    "content", [b"not a number\n", b"-5\n", b"1_000\n", b"\n", b"0x10\n", b"9" * 30]
)
def test_invalid_counter_affects_only_itself(tmp_path: Path, content: bytes) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.garble(PACKAGE, content)
        batch = host.read_after()
        assert counters(batch).keys() == ALL - {"rapl:package-0"}
        assert only_failure(batch) == (Trouble.MALFORMED, "rapl:package-0")
        host.engine.mend(PACKAGE)
        assert counters(host.read_after(6)).keys() == ALL


def test_counter_beyond_its_range_is_rejected(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.garble(MEMORY, b"65712999629\n")
        assert only_failure(host.read_after()) == (Trouble.MALFORMED, "rapl:package-0/dram")


def test_directory_as_counter_affects_only_itself(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        path = host.tree.path(PACKAGE) / "energy_uj"
        path.unlink()
        path.mkdir()
        batch = host.read_after()
        assert counters(batch).keys() == ALL - {"rapl:package-0"}
        assert only_failure(batch) == (Trouble.MALFORMED, "rapl:package-0")


@pytest.mark.parametrize("name", [b"", b"\n", b"a/b\n", b"\xff\xfe\n", b"a\x00b\n"])
def test_unnamed_package_removes_itself_and_its_subzones(tmp_path: Path, name: bytes) -> None:
    with PowercapHost(tmp_path) as host:
        (host.tree.path(PACKAGE) / "name").write_bytes(name)
        batch = host.read_after()
        assert counters(batch).keys() == {"rapl:package-1", "rapl:package-1/dram"}
        assert {failure.trouble for failure in batch.failures} == {Trouble.MALFORMED}
        assert len(batch.failures) == 2


@pytest.mark.parametrize("content", [None, "", "many\n", "-1\n", "0\n"])
def test_zone_without_a_range_is_still_counted(tmp_path: Path, content: str | None) -> None:
    with PowercapHost(tmp_path) as host:
        path = host.tree.path(PACKAGE) / "max_energy_range_uj"
        path.unlink()
        if content is not None:
            path.write_text(content)
        batch = host.read_after()
        assert counters(batch).keys() == ALL
        (package,) = [d for d in batch.domains if d.id == "rapl:package-0"]
        assert package.modulus is None


def test_range_that_could_not_be_read_at_the_start_is_used_later(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        path = host.tree.path(PACKAGE) / "max_energy_range_uj"
        content = path.read_text()
        path.unlink()
        before = host.read_after()
        path.write_text(content)
        after = host.read_after(6)
        moduli = before.domains[0].modulus, after.domains[0].modulus
        assert moduli == (None, 262_143_328_911)
        assert epochs(after) == epochs(before)


def test_zones_wrap_at_their_own_range(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        modulus = {d.id: d.modulus for d in host.read_after().domains}
        assert modulus["rapl:package-0"] == 262_143_328_911
        assert modulus["rapl:package-0/dram"] == 65_712_999_628


def test_tree_that_is_emptied_is_one_failure_and_no_error(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.vanish("intel-rapl:0")
        host.engine.vanish("intel-rapl:1")
        batch = host.read_after()
        assert batch.domains == batch.readings == ()
        assert {failure.trouble for failure in batch.failures} == {Trouble.ABSENT}


def test_masked_zones_name_the_container(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        (tmp_path / "devices/virtual/powercap").rename(tmp_path / "elsewhere")
        batch = host.read_after()
        (failure,) = batch.failures
        assert failure.trouble is Trouble.DENIED
        assert "container" in failure.remedy


def test_tree_without_links_is_read_as_well(tmp_path: Path) -> None:
    with PowercapHost(tmp_path / "sys") as host:
        copy = tmp_path / "copy/class/powercap"
        copy.parent.mkdir(parents=True)
        (host.tree.root / "devices/virtual/powercap").rename(copy)
        source = PowercapSource(tmp_path / "copy", host.clock)
        assert counters(source.read()).keys() == ALL
        source.close()


def test_zones_that_only_limit_power_are_no_counters(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        dtpm = tmp_path / "class/powercap/dtpm:0"
        dtpm.mkdir()
        (dtpm / "name").write_text("soc\n")
        (dtpm / "power_uw").write_text("1\n")
        batch = host.read_after()
        assert counters(batch).keys() == ALL
        assert not batch.failures


def test_mirrored_dies_are_detected_by_their_counters(tmp_path: Path) -> None:
    for layout, members in (("mirrored-dies", 1), ("multi-die", 8)):
        with PowercapHost(tmp_path / layout, layout) as host:
            assert len(cover_of_batch(host.read_after())) == members


def test_one_mirror_counts_while_the_original_is_unreadable(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "mirrored-dies") as host:
        host.read_after()
        host.engine.deny("intel-rapl:0")
        for seconds in (0.1, 6, 6):
            batch = host.read_after(seconds)
            assert cover_of_batch(batch) == {"rapl:package-0-die-1"}
            assert cover_of(batch.domains) == {"rapl:package-0-die-0"}


def test_dies_are_compared_when_they_become_readable(tmp_path: Path) -> None:
    with PowercapHost(tmp_path, "mirrored-dies") as host:
        for die in range(4):
            host.engine.deny(f"intel-rapl:{die}")
        assert len(cover_of_batch(host.read_after())) == 4
        for die in range(4):
            host.engine.mend(f"intel-rapl:{die}")
        assert len(cover_of_batch(host.read_after(6))) == 1


def test_close_leaves_no_descriptor_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with PowercapHost(tmp_path) as host:
        host.read_after()
        host.engine.vanish(PACKAGE)
        host.read_after()
        host.engine.reappear(PACKAGE)
        host.read_after(6)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_source_without_zones_reports_a_failure(tmp_path: Path) -> None:
    batch = PowercapSource(tmp_path, ManualClock()).read()
    (failure,) = batch.failures
    assert failure.trouble is Trouble.ABSENT
    assert str(failure).startswith(f"Cannot read {tmp_path}/class/powercap: ")


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.EACCES, Trouble.DENIED),
        (errno.EPERM, Trouble.DENIED),
        (errno.EINVAL, Trouble.RETRY),
        (errno.ENODATA, Trouble.RETRY),
        (errno.EIO, Trouble.RETRY),
        (errno.ENODEV, Trouble.ABSENT),
        (errno.EISDIR, Trouble.MALFORMED),
        (errno.EMFILE, Trouble.RETRY),
        (errno.ENOSYS, Trouble.RETRY),
    ],
)
def test_every_error_has_a_meaning_and_a_remedy(number: int, trouble: Trouble) -> None:
    failure = access_failure(Path("/x/energy_uj"), OSError(number, "?"), "rapl:package-0")
    assert failure.trouble is trouble
    assert failure.cause
    assert failure.remedy.endswith(".")


def test_scan_without_descriptors_keeps_the_counters(tmp_path: Path) -> None:
    with PowercapHost(tmp_path) as host:
        before = counters(host.read_after())
        with no_free_descriptor(os.getpid()):
            batch = host.read_after(60)
        assert counters(batch).keys() == before.keys() == ALL
        assert set(epochs(batch).values()) == {0}
        assert [(one.trouble, one.cause) for one in batch.failures] == [
            (Trouble.RETRY, "the agent has too many files open")
        ]
        batch = host.read_after(60)
        assert set(epochs(batch).values()) == {0}
        assert not batch.failures
