"""Deltas of two checkpoints with non-monotonic totals."""

from dataclasses import replace

from testbed.known_totals import GPU, PACKAGE, Books, J

from wattspan.model import (
    Checkpoint,
    Domain,
    DomainAccount,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Instant,
    Microjoules,
)
from wattspan.storage.deltas import PROCESS, EnergyOwner, delta_between

CPU = HwType.CPU
REST = EnergyOwner.others(PROCESS, CPU)


def job(pid: int, hw_type: HwType = CPU) -> EnergyOwner:
    return EnergyOwner(PROCESS, hw_type, f"job{pid}", f"c{pid}")


def test_process_delta_is_energy_since_the_last_checkpoint() -> None:
    host = Books()
    first = host.spend({1: 10, 2: 5})
    second = host.spend({1: 3})
    owners = delta_between(first, second).owners
    assert owners[job(1)] == 3 * J
    assert job(2) not in owners
    assert owners[REST] == 1 * J


def test_delta_without_a_checkpoint_is_the_full_total() -> None:
    host = Books()
    host.spend({1: 10})
    delta = delta_between(None, host.spend({1: 3}))
    assert delta.owners[job(1)] == 13 * J
    assert {spent.domain.id: spent.energy for spent in delta.domains}[PACKAGE.id] == host.package


def test_process_that_left_the_list_keeps_its_last_joules_in_the_rest() -> None:
    host = Books()
    first = host.spend({1: 10, 2: 5})
    second = host.spend({1: 3, 2: 4})
    row = second.processes[0]
    second = replace(second, processes=second.processes[1:], retired=row.energy)
    owners = delta_between(first, second).owners
    assert job(1) not in owners
    assert owners[job(2)] == 4 * J
    assert owners[REST] == 3 * J + 1 * J


def test_relisted_process_counts_from_zero() -> None:
    host = Books()
    first = host.spend({1: 10})
    second = host.spend({1: 6})
    row = replace(second.processes[0], energy={CPU: Microjoules(4 * J)})
    second = replace(second, processes=(row,), retired={CPU: Microjoules(12 * J)})
    owners = delta_between(first, second).owners
    assert owners[job(1)] == 4 * J
    assert owners[REST] == 2 * J + 1 * J


def test_pid_in_another_boot_is_another_process() -> None:
    host = Books()
    first = host.spend({1: 10})
    host.boot_id = "next"
    second = host.spend({1: 2})
    row = replace(second.processes[0], energy={CPU: Microjoules(2 * J)})
    second = replace(second, processes=(row,), retired={CPU: Microjoules(10 * J)})
    assert delta_between(first, second).owners[job(1)] == 2 * J


def test_restarted_totals_count_in_full() -> None:
    old, new = Books(), Books()
    old.spend({1: 100})
    first = old.now()
    delta = delta_between(first, new.spend({1: 7}))
    assert {spent.domain.id: spent.energy for spent in delta.domains}[PACKAGE.id] == new.package
    assert delta.owners[job(1)] == 7 * J


def test_newly_attributed_domain_counts_its_energy_once() -> None:
    counted = replace(PACKAGE, resource=None)
    first = _books(DomainAccount(counted, Microjoules(100)))
    second = _books(
        DomainAccount(PACKAGE, Microjoules(110), Microjoules(6), Microjoules(0), Microjoules(104))
    )
    (spent,) = delta_between(first, second).domains
    assert (spent.energy, spent.consumers + spent.idle + spent.unattributed) == (10, 10)
    third = _books(DomainAccount(counted, Microjoules(130)))
    (spent,) = delta_between(second, third).domains
    assert (spent.energy, spent.consumers, spent.idle, spent.unattributed) == (20, 0, 0, 0)


def test_energy_from_before_a_change_of_the_cover_is_apart() -> None:
    outside = replace(PACKAGE, in_cover=False, resource=None, method="none")

    def books(domain: Domain, energy: int, uncounted: int, consumers: int) -> Checkpoint:
        used = Microjoules(consumers)
        return _books(
            DomainAccount(domain, Microjoules(energy), used, uncounted=Microjoules(uncounted))
        )

    def rows(one: Checkpoint, other: Checkpoint) -> list[tuple[bool, bool, int, int]]:
        deltas = delta_between(one, other).domains
        return [(d.domain.in_cover, d.attributed, d.energy, d.consumers) for d in deltas]

    inside, left = books(PACKAGE, 100, 0, 100), books(outside, 130, 20, 110)
    assert rows(inside, left) == [(False, False, 20, 0), (True, True, 10, 10)]
    late = books(outside, 137, 20, 117)  # an interval of the member settled later
    assert rows(left, late) == [(True, True, 7, 7)]
    again = books(PACKAGE, 150, 30, 120)
    assert rows(late, again) == [(True, True, 3, 3), (False, False, 10, 0)]
    undone = books(PACKAGE, 160, 36, 124)
    assert rows(again, undone) == [(True, True, 4, 4), (False, False, 6, 0)]


def test_names_that_claim_more_than_there_was_are_dropped_and_the_whole_stays() -> None:
    host = Books()
    first = host.spend({1: 10})
    second = host.spend({1: 3})
    liar = GroupRow(Group(GroupKind.CONTAINER, "liar"), {CPU: Microjoules(9_999 * J)}, {})
    owners = delta_between(first, replace(second, groups=(*second.groups, liar))).owners
    kinds = {owner.kind for owner in owners if owner.hw_type is CPU}
    assert GroupKind.CONTAINER not in kinds
    assert {PROCESS, GroupKind.USER} <= kinds
    assert sum(e for o, e in owners.items() if o.kind == PROCESS and o.hw_type is CPU) == 4 * J


def test_gap_without_energy_is_kept() -> None:
    host = Books()
    first = host.spend({})
    gaps = {account.domain.id: account.gaps for account in host.spend({}).accounts}
    second = replace(
        first,
        accounts=tuple(replace(a, gaps=gaps[a.domain.id]) for a in first.accounts),
    )
    (spent,) = delta_between(first, second).domains
    assert (spent.domain, spent.energy, set(spent.gaps.values())) == (GPU, 0, {10**9})


def _books(account: DomainAccount) -> Checkpoint:
    return Checkpoint(Instant(account.energy, 0), "boot", (account,))


def test_withheld_energy_is_the_energy_since_the_last_checkpoint() -> None:
    def account(energy: int, withheld: int) -> Checkpoint:
        parts = (Microjoules(energy), Microjoules(0), Microjoules(0), Microjoules(energy))
        return _books(DomainAccount(PACKAGE, *parts, withheld=Microjoules(withheld)))

    (spent,) = delta_between(account(100, 60), account(130, 80)).domains
    assert (spent.unattributed, spent.withheld) == (30, 20)
    (spent,) = delta_between(account(100, 60), account(130, 99)).domains
    assert spent.withheld == 30  # a part of the unattributed energy
