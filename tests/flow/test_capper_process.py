"""The real capper over an emulated host: however anybody ends, the original limit comes back."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from testbed.capper_fixtures import ORIGINAL, capper_fixture, gpu_fixture, host_fixture
from testbed.capper_process import CapperProcess, Gpu, finish
from testbed.emulated_faults import FaultyHost
from testbed.program import ENVIRONMENT, PROGRAM, fill, on_a_disk_of, with_read_only
from testbed.requirements import ROOT
from testbed.two_users import CgroupsOfTest, NoCgroupError
from testbed.waiting import eventually

from wattspan.capper.host_directory import open_capper_host
from wattspan.capper.journal import Journal
from wattspan.capper.protocol import CapperClient
from wattspan.emulation.host import EmulatedHost
from wattspan.ports import CapsError

pytestmark = pytest.mark.long

CAP, THEIRS = 500_000, 333_000


host = host_fixture("one-socket-h100", FaultyHost)
gpu = gpu_fixture()


capper = capper_fixture()


def caps(
    capper: CapperProcess, *words: str, within: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    emulated = [] if words[0] == "status" else capper.words[:2]
    return subprocess.run(
        [*within, *PROGRAM, "caps", *words, *emulated, *capper.words[2:]],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


# --------------------------------------------------------------------------------- root of what

HIDDEN = [
    "unshare", "--mount", "sh", "-c",
    "mount --make-rprivate / && mount -t proc -o hidepid=invisible proc /proc && "
    'exec setpriv --bounding-set=-all,+sys_admin --inh-caps=-all "$@"',
    "sh",
]  # fmt: skip
"""Runs a capper that sees processes as its unit's sandbox shows them."""


@pytest.mark.needs_root
@pytest.mark.parametrize("within", [[], HIDDEN], ids=["procfs", "hidden procfs"])
def test_root_of_a_container_is_not_root_of_the_host(
    host: EmulatedHost, tmp_path: Path, within: Sequence[str]
) -> None:
    with (
        CgroupsOfTest() as cgroups,
        CapperProcess(host, tmp_path, autotune__floor=0.3, within=within) as capper,
    ):
        try:
            directories = list(map(str, cgroups.container()))
        except NoCgroupError as error:
            pytest.skip(f"no cgroup can be made here: {error}")
        join = (
            f'for one in {" ".join(directories)}; do echo $$ >"$one/cgroup.procs"; done; exec "$@"'
        )
        capper.ready()
        inside = caps(capper, "restore", within=["sh", "-c", join, "sh"])
        assert inside.returncode != 0
        assert "Root of a container is not root of this host" in inside.stderr
        assert caps(capper, "restore").returncode == 0


# ----------------------------------------------------------------------- the capper itself ends


def hold(client: CapperClient, gpu: Gpu) -> None:
    """Have the cap in force: a hold returns after HOLD_TIMEOUT, perhaps before a write."""
    client.hold("job", {gpu.key: CAP}, "why")
    eventually(lambda: gpu.limit == CAP, "the limit is set")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_restores_and_ends(capper: CapperProcess, gpu: Gpu, number: int) -> None:
    client = capper.client()
    hold(client, gpu)
    assert gpu.limit == CAP
    assert capper.journal()[0]["original"] == ORIGINAL
    assert capper.end(number) == 0
    client.close()
    assert gpu.limit == ORIGINAL
    assert capper.journal() == []
    assert not (capper.sockets / "capper.sock").exists()


def killed_while_it_holds(capper: CapperProcess, gpu: Gpu) -> None:
    client = capper.client()
    hold(client, gpu)
    capper.end(signal.SIGKILL)
    client.close()


def test_restore_lifts_the_cap_of_a_killed_capper(capper: CapperProcess, gpu: Gpu) -> None:
    killed_while_it_holds(capper, gpu)
    assert gpu.limit == CAP
    done = caps(capper, "restore", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert len(told.pop("devices")) == 1
    assert told == {
        "by": "journal",
        "capper": None,
        "restored": 1,
        "foreign": [],
        "retained": 0,
        "troubles": [],
    }
    assert gpu.limit == ORIGINAL
    again = caps(capper, "restore")
    assert again.stdout == "0 limits were restored by the journal.\n"


def test_one_damaged_copy_of_the_journal_does_not_keep_a_cap(
    capper: CapperProcess, gpu: Gpu
) -> None:
    killed_while_it_holds(capper, gpu)
    (first,) = capper.directory.glob("journal-*.a.jsonl")
    first.write_bytes(first.read_bytes()[:100])
    done = caps(capper, "restore")
    assert done.returncode == 0, done.stderr
    assert "The journal is damaged" in done.stderr
    assert gpu.limit == ORIGINAL


@pytest.mark.exhaustive
def test_lost_journal_exits_with_6_until_the_device_is_accepted(
    capper: CapperProcess, gpu: Gpu, tmp_path: Path, host: EmulatedHost
) -> None:
    killed_while_it_holds(capper, gpu)
    (capper.directory / "audit.jsonl").unlink()
    for path in capper.directory.glob("journal-*"):
        path.write_bytes(bytes(path.stat().st_size))
    for _ in range(2):
        done = caps(capper, "restore", "--json")
        assert done.returncode == 6
        assert any(gpu.key.device in one for one in json.loads(done.stdout)["troubles"])
    with CapperProcess(host, tmp_path, sockets=capper.sockets) as successor:
        (row,) = [row for row in successor.ready().rows() if row.state.key == gpu.key]
        assert (row.lost, gpu.limit) == (True, CAP)
        assert "its original is unknown" in caps(successor, "status").stdout
        assert caps(successor, "restore").returncode == 6
        assert caps(successor, "accept").returncode == 0
        assert successor.journal() == []
        assert successor.end() == 0


def test_limit_of_an_earlier_boot_is_restored_if_in_force(capper: CapperProcess, gpu: Gpu) -> None:
    killed_while_it_holds(capper, gpu)
    left = Journal(
        capper.directory, open_capper_host(capper.state_dir, capper.host.directory).boot_id
    ).entries
    assert (gpu.limit, list(left)) == (CAP, [gpu.key])
    for path in capper.directory.glob("journal-*"):
        path.unlink()
    Journal(capper.directory, f"earlier {capper.host.directory.name}").save(left)
    done = caps(capper, "restore")
    assert done.stdout.endswith("\n1 limit was restored by the journal.\n"), done.stderr
    assert done.stdout.startswith("Devices: ")
    assert (gpu.limit, list(capper.directory.glob("journal-*"))) == (ORIGINAL, [])


def test_successor_of_a_killed_capper_restores_the_limit(
    capper: CapperProcess, gpu: Gpu, tmp_path: Path, host: EmulatedHost
) -> None:
    killed_while_it_holds(capper, gpu)
    assert gpu.limit == CAP
    with CapperProcess(host, tmp_path, sockets=capper.sockets) as successor:
        successor.ready()
        assert gpu.limit == ORIGINAL
        assert successor.journal() == []
        assert successor.end() == 0


@pytest.mark.parametrize(("when", "stands"), [("before", ORIGINAL), ("after", CAP)])
def test_limit_of_a_capper_killed_during_a_write_is_restored(
    host: EmulatedHost, tmp_path: Path, gpu: Gpu, when: str, stands: int
) -> None:
    program = [sys.executable, "-m", "testbed.blocking_capper", when]
    within = ["env", f"PYTHONPATH={ROOT}"]
    with CapperProcess(host, tmp_path, program=program, within=within) as capper:
        capper.ready()
        client = capper.client()
        client._timeout = 0.1
        with pytest.raises(CapsError, match="it takes too long"):
            client.hold("job", {gpu.key: CAP}, "why")
        eventually(lambda: "standing still" in capper.said, "it writes")
        client.close()
        (entry,) = capper.journal()
        assert (entry["value"], entry["original"]) == (CAP, ORIGINAL)
        assert gpu.limit == stands
        capper.end(signal.SIGKILL)
        done = caps(capper, "restore")
        assert done.returncode == 0, done.stderr
        assert gpu.limit == ORIGINAL
        assert capper.journal() == []


def test_restore_names_a_hung_capper(capper: CapperProcess, gpu: Gpu) -> None:
    capper.process.send_signal(signal.SIGSTOP)
    done = caps(capper, "restore")
    assert done.returncode == 6
    assert f"Process {capper.process.pid} is the one capper of this host" in done.stderr


def test_capper_restores_and_ends_with_its_standard_input(
    host: EmulatedHost, tmp_path: Path, gpu: Gpu
) -> None:
    words = ["--follow-stdin"]
    with CapperProcess(host, tmp_path, stdin=subprocess.PIPE, arguments=words) as capper:
        client = capper.ready().client()
        hold(client, gpu)
        capper.process.stdin.close()
        assert capper.process.wait(20) == 0
        client.close()
    assert gpu.limit == ORIGINAL


# -------------------------------------------------------------------------- the tuner's process


def test_lease_of_a_killed_tuner_ends_at_once(capper: CapperProcess, gpu: Gpu) -> None:
    holder = capper.holder(gpu.key, CAP)
    assert gpu.limit == CAP
    finish(holder)
    eventually(lambda: gpu.limit == ORIGINAL, "the original", within=8)


def test_lease_of_a_stopped_tuner_expires(host: EmulatedHost, tmp_path: Path, gpu: Gpu) -> None:
    with CapperProcess(host, tmp_path, caps__lease="5s") as capper:
        holder = capper.ready().holder(gpu.key, CAP)
        holder.send_signal(signal.SIGSTOP)
        assert gpu.limit == CAP
        eventually(lambda: gpu.limit == ORIGINAL, "the original")
        assert holder.poll() is None
        finish(holder)
        assert capper.row(gpu.key).holder == ""


# ----------------------------------------------------------------------------------- hard times


@pytest.mark.needs_root
def test_full_disk_prevents_device_writes(host: EmulatedHost, tmp_path: Path, gpu: Gpu) -> None:
    state = tmp_path / "state"
    with CapperProcess(host, tmp_path, within=on_a_disk_of("64k", state)) as capper:
        client = capper.ready().client()
        seen = Path(f"/proc/{capper.process.pid}/root{state}")
        fill(seen / "filler")
        with pytest.raises(CapsError, match="No space left") as refused:
            client.hold("job", {gpu.key: CAP}, "why")
        assert refused.value.refusal == "no_journal"
        assert gpu.limit == ORIGINAL
        (seen / "filler").unlink()
        eventually(lambda: held(client, gpu), "it is done once there is room")
        fill(seen / "filler")
        assert capper.end() == 0
        client.close()
    assert gpu.limit == ORIGINAL


@pytest.mark.needs_root
def test_limit_of_a_killed_capper_is_restored_from_a_read_only_disk(
    capper: CapperProcess, gpu: Gpu
) -> None:
    killed_while_it_holds(capper, gpu)
    before = capper.journal()
    done = caps(capper, "restore", within=with_read_only(capper.state_dir))
    assert done.returncode == 0
    assert done.stdout.endswith("\n1 limit was restored by the journal.\n")
    assert gpu.limit == ORIGINAL
    for unwritten in ("the journal", "the audit log"):
        assert re.search(f"Cannot .*{unwritten}.*Read-only file system.*writable", done.stderr)
    assert capper.journal() == before
    again = caps(capper, "restore")  # once it is writable
    assert again.stdout.endswith("0 limits were restored by the journal.\n")
    assert capper.journal() == []
    assert gpu.limit == ORIGINAL


@pytest.mark.needs_root
def test_successor_on_a_read_only_disk_only_restores(
    capper: CapperProcess, gpu: Gpu, tmp_path: Path, host: EmulatedHost
) -> None:
    killed_while_it_holds(capper, gpu)
    within = with_read_only(capper.state_dir)
    with CapperProcess(host, tmp_path, sockets=capper.sockets, within=within) as successor:
        client = successor.ready().client()
        assert gpu.limit == ORIGINAL
        with pytest.raises(CapsError, match="Read-only file system") as refused:
            client.hold("job", {gpu.key: CAP}, "why")
        assert refused.value.refusal == "no_journal"
        assert gpu.limit == ORIGINAL
        assert successor.end() == 0
        client.close()


def held(client: CapperClient, gpu: Gpu) -> bool:
    with suppress(CapsError):
        client.hold("job", {gpu.key: CAP}, "why")
    return gpu.limit == CAP


def test_foreign_limit_is_never_overwritten(capper: CapperProcess, gpu: Gpu) -> None:
    client = capper.client()
    hold(client, gpu)
    gpu.set(THEIRS)
    eventually(lambda: capper.row(gpu.key).foreign, "it is noticed")
    assert capper.row(gpu.key).holder == ""
    with pytest.raises(CapsError, match="another program has set") as refused:
        client.hold("job", {gpu.key: 320_000}, "why")
    assert refused.value.refusal == "foreign"
    client.close()
    assert capper.end() == 0
    assert gpu.limit == THEIRS
    audit = (capper.directory / "audit.jsonl").read_text().splitlines()
    deeds = [json.loads(line)["deed"] for line in audit]
    assert deeds == ["start", "write", "foreign", "refuse", "end"]


def test_foreign_limit_can_be_accepted(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost, tmp_path: Path
) -> None:
    client = capper.client()
    for theirs in (600_000, 580_000):
        hold(client, gpu)
        gpu.set(theirs)
        eventually(lambda: capper.row(gpu.key).foreign, "it is noticed")
        if theirs == 600_000:
            assert caps(capper, "accept").stdout == "1 foreign limit accepted.\n"
    client.close()
    assert capper.end() == 0
    assert json.loads(caps(capper, "accept", "--json").stdout) == {"accepted": 1}
    assert capper.journal() == []
    assert gpu.limit == 580_000


def test_lost_gpu_is_restored_on_return(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost
) -> None:
    client = capper.client()
    hold(client, gpu)
    host.ask(do="fault", gpu=0, fault="lost")
    try:
        with pytest.raises(CapsError) as lost:
            client.hold("job", {gpu.key: 450_000}, "why")
        assert lost.value.refusal == "lost"
        assert capper.journal()[0]["original"] == ORIGINAL
    finally:
        host.ask(do="fault", gpu=0, fault="lost", on=False)
    eventually(lambda: gpu.limit == ORIGINAL, "the original")
    eventually(lambda: capper.journal() == [], "the journal is empty")
    client.close()


def test_gpu_lost_during_a_kill_is_restored_later(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost
) -> None:
    client = capper.client()
    hold(client, gpu)
    host.ask(do="fault", gpu=0, fault="lost")
    try:
        assert capper.end() == 6
        assert "`wattspan caps restore`, or the next capper, tries again" in capper.said
        client.close()
        assert caps(capper, "restore").returncode == 6
    finally:
        host.ask(do="fault", gpu=0, fault="lost", on=False)
    assert gpu.limit == CAP
    assert caps(capper, "restore").returncode == 0
    assert gpu.limit == ORIGINAL


def test_reloaded_driver_is_capped_again_and_keeps_its_default_at_the_end(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost
) -> None:
    client = capper.client()
    hold(client, gpu)
    host.ask(do="fault", gpu=0, fault="reload_driver")

    def original() -> int | None:
        rows = {row.state.key: row for row in client.rows(renew=True)}
        return rows[gpu.key].original

    eventually(lambda: original() == 700_000, "the reset is noticed")
    eventually(lambda: gpu.limit == CAP, "the cap is applied again")
    assert client.state.resets == 1
    eventually(lambda: "was off: the device or its driver was absent" in capper.said, "it is said")
    client.close()
    assert capper.end() == 0
    assert gpu.limit == 700_000


def test_hung_driver_does_not_lose_the_original_limit(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost
) -> None:
    client = capper.client()
    hold(client, gpu)
    host.ask(do="fault", gpu=0, fault="hang")
    try:
        client._timeout = 0.1
        with pytest.raises(CapsError):
            client.hold("job", {gpu.key: 450_000}, "why")
        client.close()
        capper.end(signal.SIGKILL)
    finally:
        host.ask(do="fault", gpu=0, fault="hang", on=False)
    assert caps(capper, "restore").returncode == 0
    assert gpu.limit == ORIGINAL


def test_gpu_without_effective_caps_is_refused(
    capper: CapperProcess, gpu: Gpu, host: EmulatedHost
) -> None:
    client = capper.client()
    host.ask(do="fault", gpu=0, fault="deaf")
    try:
        with pytest.raises(CapsError, match="without an error") as refused:
            client.hold("job", {gpu.key: CAP}, "why")
        assert refused.value.refusal == "not_honoured"
    finally:
        host.ask(do="fault", gpu=0, fault="deaf", on=False)
    client.close()
    assert capper.journal() == []


def test_second_capper_of_a_host_is_refused(
    capper: CapperProcess, host: EmulatedHost, tmp_path: Path
) -> None:
    with CapperProcess(host, tmp_path) as second:
        assert second.process.wait(20) == 6
        assert f"Process {capper.process.pid} is the one capper of this host" in second.said
    assert capper.process.poll() is None


def test_capper_survives_invalid_requests_and_floods(
    host: EmulatedHost, tmp_path: Path, gpu: Gpu
) -> None:
    # The usual lease would expire within one of these on a slow machine.
    with CapperProcess(host, tmp_path, autotune__floor=0.3, caps__lease="10m") as capper:
        holder = capper.ready().holder(gpu.key, CAP)
        for nonsense in (
            b"\n" * 5000,
            b"{" * 200_000,
            b"[" * 60_000 + b"\n",
            b'{"do":"hold","job":"x","caps":[{"knob":"gpu_power","device":"x","value":1e99}]}\n',
            b"\xff\xfe\x00\n",
            b'{"do":"status"}\n' * 20_000,
        ):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(60)
                peer.connect(str(capper.sockets / "capper.sock"))
                with suppress(ConnectionError):  # or disconnected during its request
                    peer.sendall(nonsense)
                    assert b"refused" in peer.recv(65536)
        assert capper.process.poll() is None
        assert gpu.limit == CAP
        assert capper.row(gpu.key).holder == "job"
        finish(holder)


def test_fixed_caps_and_a_budget_hold_without_any_tuner(
    host: EmulatedHost, tmp_path: Path, gpu: Gpu
) -> None:
    ceiling = tmp_path / "ceiling.toml"
    with CapperProcess(
        host, tmp_path, caps__budget_watts=800, caps__budget_file=ceiling, caps__largest_step=1.0
    ) as capper:
        capper.ready()

        def total() -> int:
            return sum(row.state.requested or 0 for row in capper.rows())

        eventually(lambda: total() <= 800_000, "the budget is kept")
        ceiling.write_text('watts = 600\nwhy = "grid event"\n')
        eventually(lambda: total() <= 600_000, "the lower ceiling is kept")
        assert capper.row(gpu.key).holder == "budget"
        ceiling.unlink()
        capper.end(signal.SIGKILL)
        with CapperProcess(
            host, tmp_path, caps__budget_watts=800, caps__budget_file=ceiling
        ) as successor:
            successor.ready()
            assert sum(row.state.requested or 0 for row in successor.rows()) <= 600_000
            assert successor.end() == 0
    assert gpu.limit < ORIGINAL  # an imposed limit outlives its capper
    assert caps(successor, "restore").returncode == 0
    assert gpu.limit == ORIGINAL


def test_status_lists_holders_limits_and_reasons(capper: CapperProcess, gpu: Gpu) -> None:
    client = capper.client()
    client.hold("trainer", {gpu.key: CAP}, "Hold 500 W: 3.1 % slower.")
    shown = caps(capper, "status").stdout
    assert "gpu_power: 500 W of 200 W to 700 W, default 700 W" in shown
    assert "held for trainer: 500 W; the original is 650 W" in shown
    assert "because: Hold 500 W: 3.1 % slower" in shown
    told = json.loads(caps(capper, "status", "--json").stdout)
    assert told["pid"] == capper.process.pid
    assert [row["holder"] for row in told["rows"]] == ["", "trainer"]
    client.close()


def test_running_capper_restores_on_request(capper: CapperProcess, gpu: Gpu) -> None:
    client = capper.client()
    hold(client, gpu)
    done = caps(capper, "restore", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["by"] == "capper"
    assert json.loads(done.stdout)["restored"] == 1
    assert gpu.limit == ORIGINAL
    with pytest.raises(CapsError, match="until the capper restarts"):
        client.hold("job", {gpu.key: CAP}, "why")
    assert "nothing is set before a restart" in caps(capper, "status").stdout
    client.close()


def test_status_reports_a_missing_capper(tmp_path: Path) -> None:
    words = ["--set", f"agent.run_dir={tmp_path}"]
    done = subprocess.run(
        [*PROGRAM, "caps", "status", *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 6
    assert "No capper answers" in done.stderr


def test_capper_memory_is_small(capper: CapperProcess) -> None:
    status = Path(f"/proc/{capper.process.pid}/status").read_text()
    # Its own pages: how many of the shared files are mapped depends on the kernel's page cache.
    own = int(status.split("RssAnon:")[1].split()[0])
    assert own < 30_000, f"{own} kB"
    assert "Threads:\t1\n" in status


@pytest.mark.parametrize(
    ("cap", "told"),
    [
        (
            'device = "7"\nwatts = 400',
            '[[caps.fixed]] device = "7" matches nothing: the devices with a gpu_power are',
        ),
        (
            'device = "*"\nwatts = 60\nknob = "cpu_power"',
            "its limits are switched off, so a lower one would change nothing.",
        ),
    ],
    ids=["no device", "refused"],
)
def test_fixed_cap_without_effect_is_logged_once(
    cap: str, told: str, host: EmulatedHost, gpu: Gpu, tmp_path: Path
) -> None:
    assert host.sysfs is not None
    for switch in host.sysfs.glob("class/powercap/intel-rapl:?/enabled"):
        switch.write_text("0\n")
    file = tmp_path / "config.toml"
    file.write_text(f"[[caps.fixed]]\n{cap}\n")
    with CapperProcess(host, tmp_path, arguments=["--config", str(file)]) as capper:
        eventually(lambda: told in capper.said, "the capper names it")
        client = capper.client()
        for _ in range(3):
            client.rows()
        client.close()
        assert capper.end() == 0
        assert capper.said.count(told) == 1
    assert gpu.limit == ORIGINAL
