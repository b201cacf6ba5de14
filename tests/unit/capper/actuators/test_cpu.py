"""CPU package limits on trees of zones, with a kernel's behaviour behind their files."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed.emulated_faults import FaultyPowercapTree
from testbed.fake_actuators import FakeRapl
from testbed.powercap_layouts import LAYOUTS
from testbed.process_rights import without_root

from wattspan.capper.actuators.cpu import CpuPower
from wattspan.model import KnobState, Trouble
from wattspan.ports import ActuatorError
from wattspan.testing import ManualClock

P0 = "rapl:package-0"
NOBODY = 65_534


class Host:
    def __init__(self, root: Path, layout: str = "xeon-2s") -> None:
        self.tree = FaultyPowercapTree(root, LAYOUTS[layout], cpus=2)
        self.kernel = FakeRapl()
        self.power = CpuPower(root, ManualClock(), put=self.kernel.put)

    def file(self, name: str, zone: str = "intel-rapl:0") -> Path:
        return self.tree.path(zone) / name

    def set(self, name: str, value: object, zone: str = "intel-rapl:0") -> None:
        self.file(name, zone).write_text(f"{value}\n")

    @property
    def state(self) -> KnobState:
        return self.power.read(P0)

    def refused(self, value: int, device: str = P0) -> ActuatorError:
        with pytest.raises(ActuatorError) as caught:
            self.power.write(device, value)
        return caught.value


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "sys")
    yield host
    host.tree.close()


@contextmanager
def host_with(layout: str, root: Path) -> Iterator[Host]:
    host = Host(root, layout)
    yield host
    host.tree.close()


# ----------------------------------------------------------------------------------- finding


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ("xeon-2s", ["rapl:package-0", "rapl:package-1"]),
        ("tpmi-2s", ["rapl:package-0", "rapl:package-1"]),  # psys is listed between them
        ("client", ["rapl:package-0"]),  # core, uncore and psys are left alone
        ("client-mmio", ["rapl:package-0"]),
        ("multi-die", [f"rapl:package-{s}-die-{d}" for s in (0, 1) for d in (0, 1)]),
        ("many-sockets", [f"rapl:package-{socket}" for socket in range(12)]),
        ("epyc-2s", []),  # AMD's zones have no limits
        ("psys-only", []),
    ],
)
def test_packages_are_found_by_name(layout: str, devices: list[str], tmp_path: Path) -> None:
    with host_with(layout, tmp_path / "sys") as host:
        assert [state.key.device for state in host.power.devices()] == devices


def test_long_term_limit_is_found_by_name_and_not_by_number(host: Host) -> None:
    host.set("constraint_0_name", "short_term")
    host.set("constraint_1_name", "long_term")
    host.power.write(P0, 150_000)
    assert host.file("constraint_1_power_limit_uw").read_text() == "150000000\n"
    assert host.file("constraint_0_power_limit_uw").read_text() == "270000000\n"


def test_package_without_a_long_term_limit_is_not_listed(host: Host) -> None:
    host.set("constraint_0_name", "peak_power")
    assert [state.key.device for state in host.power.devices()] == ["rapl:package-1"]


def test_zone_is_known_by_its_directory_too(host: Host) -> None:
    assert host.state.aliases == ("intel-rapl:0", "package-0")


def test_memory_with_a_limit_of_its_own_is_left_alone(host: Host) -> None:
    memory = host.tree.path("intel-rapl:0:0")
    (memory / "constraint_0_name").write_text("long_term\n")
    (memory / "constraint_0_power_limit_uw").write_text("30000000\n")
    assert len(host.power.devices()) == 2
    host.power.write(P0, 150_000)
    assert (memory / "constraint_0_power_limit_uw").read_text() == "30000000\n"


def test_enforced_limit_is_the_lower_one_of_package_and_mirror(tmp_path: Path) -> None:
    with host_with("client-mmio", tmp_path / "sys") as host:
        host.set("constraint_0_power_limit_uw", 15_000_000, "intel-rapl-mmio:0")
        host.set("constraint_0_power_limit_uw", 28_000_000)
        assert (host.state.requested, host.state.enforced) == (28_000, 15_000)
        state = host.power.write(P0, 20_000)
        assert (state.requested, state.enforced) == (20_000, 15_000)
        mirror = host.file("constraint_0_power_limit_uw", "intel-rapl-mmio:0")
        assert mirror.read_text() == "15000000\n"  # read, and never written


def test_package_with_only_a_mirror_limit_is_not_listed(tmp_path: Path) -> None:
    with host_with("client-mmio", tmp_path / "sys") as host:
        host.set("constraint_0_name", "peak_power")
        assert host.power.devices() == ()


def test_two_drivers_of_one_package_are_one_device(host: Host) -> None:
    second = host.tree.path("intel-rapl:1")
    (second / "name").write_text("package-0\n")
    (second / "constraint_0_power_limit_uw").write_text("200000000\n")
    (state,) = host.power.devices()
    assert (state.requested, state.enforced) == (270_000, 200_000)


def test_host_without_powercap_has_no_device(tmp_path: Path) -> None:
    power = CpuPower(tmp_path, ManualClock())
    assert power.devices() == ()
    with pytest.raises(ActuatorError, match="no such package has a long-term power limit"):
        power.read(P0)


# ----------------------------------------------------------------------------------- reading


def test_default_limit_is_the_specified_tdp(host: Host) -> None:
    host.set("constraint_0_power_limit_uw", 200_000_000)
    assert (host.state.default, host.state.maximum) == (270_000, 270_000)


@pytest.mark.parametrize("told", ["0", None, "nonsense"])
def test_default_limit_without_specification_is_the_first_limit_read(
    host: Host, told: str | None
) -> None:
    if told is None:
        host.file("constraint_0_max_power_uw").unlink()
    else:
        host.set("constraint_0_max_power_uw", told)
    assert host.state.default == 270_000
    host.power.write(P0, 150_000)
    assert (host.state.default, host.state.maximum) == (270_000, 270_000)


def test_default_limit_follows_firmware_above_the_specification(host: Host) -> None:
    host.set("constraint_0_power_limit_uw", 4_095_000_000)
    assert (host.state.default, host.state.maximum) == (270_000, 4_095_000)
    host.power.write(P0, 150_000)
    assert host.power.write(P0, 4_095_000).requested == 4_095_000


def test_minimum_limit_is_reported_if_the_device_has_one(host: Host) -> None:
    assert host.state.minimum is None
    host.set("constraint_0_min_power_uw", 75_000_000)
    assert host.state.minimum == 75_000


def test_limits_that_are_switched_off_are_not_in_force(host: Host) -> None:
    host.set("enabled", 0)
    assert (host.state.requested, host.state.enforced) == (270_000, None)


def test_unreadable_limit_removes_only_its_zone(host: Host) -> None:
    host.set("constraint_0_power_limit_uw", "-3")
    assert [state.key.device for state in host.power.devices()] == ["rapl:package-1"]
    with pytest.raises(ActuatorError, match="'-3' is no number of microwatts"):
        host.power.read(P0)


# ----------------------------------------------------------------------------------- writing


def test_reported_limit_is_the_register_readback(host: Host) -> None:
    assert host.power.write(P0, 150_100).requested == 150_000  # in eighths of a watt


@pytest.mark.parametrize("unit", [125_000, 1_000_000, 15_625, 3_907])
def test_original_is_restored_to_the_last_bit_of_the_register(host: Host, unit: int) -> None:
    host.kernel.unit = unit
    original = 123_456_789 // unit * unit
    host.set("constraint_0_power_limit_uw", original)
    before = host.state
    host.power.write(P0, 100_000)
    assert before.requested is not None
    assert host.power.write(P0, before.requested) == before
    assert int(host.file("constraint_0_power_limit_uw").read_text()) == original


def test_emulated_host_is_given_time_to_look_at_its_files(host: Host) -> None:
    clock = ManualClock()

    def look(_mono: int) -> None:
        host.set("constraint_0_power_limit_uw", 150_000_000)  # rounded down, a little later

    clock.on_sleep = look
    power = CpuPower(host.tree.root, clock, answers_after=50_000_000)
    assert power.write(P0, 150_100).requested == 150_000


def test_value_that_overflows_the_register_is_found_out(host: Host) -> None:
    host.kernel.unit = 1_000
    error = host.refused(40_000)
    assert error.trouble is Trouble.MALFORMED
    assert "to 40 W: it was taken without an error, and reads back as 7.232 W" in str(error)


@pytest.mark.parametrize("number", [errno.ENODATA, errno.EIO])
def test_locked_register_is_detected_by_the_write_error(host: Host, number: int) -> None:
    host.kernel.refuses = number
    error = host.refused(150_000)
    assert (error.locked, error.trouble) == (True, Trouble.DENIED)
    assert "firmware has locked the register until the next boot" in str(error)
    assert errno.errorcode[number] in str(error)


def test_locked_register_is_detected_by_an_unchanged_value(host: Host) -> None:
    host.kernel.keeps = True
    error = host.refused(150_000)
    assert (error.locked, error.trouble) == (True, Trouble.DENIED)
    assert "took a value and kept the old one" in str(error)


def test_limits_that_are_switched_off_are_not_lowered(host: Host) -> None:
    host.set("enabled", 0)
    error = host.refused(150_000)
    assert (error.locked, error.trouble) == (False, Trouble.ABSENT)
    assert f"echo 1 > {host.tree.root}" in str(error)
    assert host.state.requested == 270_000


def test_lock_that_reads_as_disabled_is_reported_as_a_lock(host: Host) -> None:
    host.set("enabled", 0)
    host.kernel.refuses = errno.ENODATA
    assert host.refused(150_000).locked


def test_original_is_given_back_even_where_limits_were_switched_off_since(host: Host) -> None:
    host.power.write(P0, 150_000)
    host.set("enabled", 0)
    assert host.power.write(P0, 270_000).requested == 270_000


def test_limit_that_was_never_set_is_not_replaced(host: Host) -> None:
    host.set("constraint_0_power_limit_uw", 0)
    assert host.state.requested is None
    assert "could not be restored" in str(host.refused(150_000))
    assert host.kernel.written == []


@pytest.mark.parametrize(
    ("number", "trouble", "words"),
    [
        (errno.EACCES, Trouble.DENIED, "as root"),
        (errno.EPERM, Trouble.DENIED, "as root"),
        (errno.EROFS, Trouble.DENIED, "read-only file system"),
        (errno.EBUSY, Trouble.RETRY, "busy"),
        (errno.EINVAL, Trouble.MALFORMED, "invalid argument"),
        (errno.ENODEV, Trouble.RETRY, "no such device"),
        (errno.EMFILE, Trouble.RETRY, "too many open files"),
    ],
)
def test_every_error_of_writing_has_its_sentence(
    host: Host, number: int, trouble: Trouble, words: str
) -> None:
    host.kernel.refuses = number
    error = host.refused(150_000)
    assert (error.trouble, error.locked) == (trouble, False)
    assert words in str(error)
    assert "package-0" in str(error)
    assert host.state.requested == 270_000


def test_invalid_powercap_tree_is_a_device_error(host: Host) -> None:
    power = CpuPower(host.tree.root, ManualClock())
    limit = host.file("constraint_0_power_limit_uw")
    kept = limit.rename(limit.with_name("kept"))
    limit.mkdir()
    with pytest.raises(ActuatorError, match="read the power limit of package-0: is a directory"):
        power.write(P0, 150_000)
    limit.rmdir()
    kept.rename(limit)
    assert power.write(P0, 150_000).requested == 150_000


@pytest.mark.needs_root
def test_write_without_root_reports_the_kernel_permission_error() -> None:
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        host = Host(root / "sys")
        power = CpuPower(host.tree.root, ManualClock())
        with without_root(), pytest.raises(ActuatorError, match="permission denied") as caught:
            power.write(P0, 150_000)
        assert caught.value.trouble is Trouble.DENIED
        assert power.read(P0).requested == 270_000
        host.tree.close()
    finally:
        shutil.rmtree(root)


def test_offline_package_is_distinguished_from_an_unknown_one(host: Host) -> None:
    host.power.devices()
    host.tree.remove("intel-rapl:0")
    assert "vanished" in str(host.refused(150_000))
    assert host.refused(150_000).trouble is Trouble.RETRY
    assert host.refused(150_000, "rapl:package-7").trouble is Trouble.ABSENT


def test_renumbered_packages_are_identified_by_name(host: Host) -> None:
    """Like after one of them was offline: a cap must not land on the wrong socket."""
    host.power.devices()
    host.set("name", "package-1", "intel-rapl:0")
    host.set("name", "package-0", "intel-rapl:1")
    host.power.write(P0, 150_000)
    assert host.file("constraint_0_power_limit_uw", "intel-rapl:1").read_text() == "150000000\n"
    assert host.file("constraint_0_power_limit_uw", "intel-rapl:0").read_text() == "270000000\n"


def test_renumbered_constraints_are_identified_by_name(host: Host) -> None:
    host.power.devices()
    host.set("constraint_0_name", "short_term")
    host.set("constraint_1_name", "long_term")
    assert host.power.read(P0).requested == 324_000
