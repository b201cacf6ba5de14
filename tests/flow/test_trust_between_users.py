"""Three users of one machine: one attacks the spans of another, the third is the agent's.

The victim's GPU energy is booked to the victim's spans only, whatever the attacker claims,
announces, executes or names. Run with three uids, and with three containers of one uid.
`python -m benchmarks.hostile --only trust` runs all attacks, with larger numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import user_attacks
from testbed.program import UNPRIVILEGED, Running, host_of
from testbed.requirements import find_program
from testbed.two_users import (
    CONTAINERS,
    JOB,
    THREE_USERS,
    CgroupsOfTest,
    NoCgroupError,
    Outcome,
    Target,
    TwoUsers,
    two_users,
)

pytestmark = [
    pytest.mark.needs_root,
    pytest.mark.alone,  # it measures energy
    pytest.mark.skipif(not find_program("setpriv"), reason="no setpriv; install util-linux"),
]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """An agent without capabilities on an emulated host, in a directory that every user enters."""
    with tempfile.TemporaryDirectory(prefix="wattspan-") as made:
        folder = Path(made)
        folder.chmod(0o755)
        run_dir, configuration = folder / "run", folder / "config.toml"
        run_dir.mkdir()
        configuration.write_text(JOB)
        with Running(
            folder,
            f"--config={configuration}",
            emulate="two-socket-h100",
            within=UNPRIVILEGED,
            agent__run_dir=run_dir,
            agent__interval="100ms",
            autotune__mode="advise",
        ) as agent:
            agent.measuring()
            tcp = agent.spans_address().removeprefix("http://")
            yield Target(run_dir, tcp, agent.address(), host_of(agent.process.pid))


@pytest.fixture(params=[THREE_USERS, CONTAINERS])
def users(request: pytest.FixtureRequest, target: Target) -> Iterator[TwoUsers]:
    """Attacker and victim are users, or containers of one user."""
    try:
        with CgroupsOfTest() as cgroups, two_users(target, cgroups, request.param) as users:
            yield users
    except NoCgroupError as error:
        pytest.skip(f"no cgroup can be made here: {error}")


def holds(outcome: Outcome) -> None:
    print(outcome.note)
    assert not outcome.faults


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_claimed_process_of_another_user_is_not_booked(users: TwoUsers, transport: str) -> None:
    to = "" if transport == "unix" else users.target.tcp
    holds(user_attacks.claimed_processes(users, to))


def test_announced_ids_of_another_user_leave_him_his_energy(users: TwoUsers) -> None:
    holds(user_attacks.announced_ids(users))


def test_announced_ids_of_a_victim_that_announces_too_are_its_own(users: TwoUsers) -> None:
    holds(user_attacks.announced_ids_of_both(users))


def test_setuid_program_gives_its_accomplice_no_rights_of_root(users: TwoUsers) -> None:
    holds(user_attacks.setuid_program(users))


def test_passed_connection_carries_no_energy_to_its_opener(users: TwoUsers) -> None:
    holds(user_attacks.passed_connection(users))


def test_delegated_cgroup_joins_no_container_of_another_user(users: TwoUsers) -> None:
    holds(user_attacks.delegated_container(users))


def test_flood_of_announced_starts_leaves_another_user_his_energy(users: TwoUsers) -> None:
    holds(user_attacks.flood_of_starts(users))


def test_forged_units_are_not_those_of_another_users_tuned_job(users: TwoUsers) -> None:
    holds(user_attacks.forged_units(users))


def test_secret_of_another_user_is_not_readable_through_short_windows(users: TwoUsers) -> None:
    holds(user_attacks.secret(users))


def test_many_engines_of_one_user_leave_another_user_his_row(users: TwoUsers) -> None:
    holds(user_attacks.many_engines(users))


def test_many_idle_senders_leave_another_user_his_energy(users: TwoUsers) -> None:
    holds(user_attacks.idle_senders(600)(users))
