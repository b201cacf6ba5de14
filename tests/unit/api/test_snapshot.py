"""``GET /v1/snapshot``: the snapshot schema, and the part of it that each user may see."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from testbed.constant_history import OURS, Asked, local_peer
from testbed.snapshots import CPU, GPU, MEMORY, J, busy_host, serving_host
from testbed.tuned import ACCOUNTS

from wattspan.api.energy import TimeGrid
from wattspan.api.snapshot_document import (
    SCHEMA_VERSION,
    SnapshotDocument,
    SnapshotSchemaError,
    decode_snapshot,
    restrict,
    snapshot_document,
)
from wattspan.http.sockets import Peer
from wattspan.model import (
    SECOND,
    Consumer,
    Footprint,
    Microjoules,
    Milliwatts,
    PayerInfo,
    ProcessRow,
    Provenance,
    RatedEnergy,
    RateOrigin,
    Snapshot,
)
from wattspan.tuning.serialization import tuning_accounts

ROOT = local_peer(9, 0)
STRANGER = local_peer(55, 2000)


def document_of(snapshot: Snapshot) -> SnapshotDocument:
    return decode_snapshot(msgspec.json.encode(snapshot_document(snapshot, "1.2.3")))


def test_snapshot_document_survives_encoding() -> None:
    built = snapshot_document(serving_host(), "1.2.3")
    assert decode_snapshot(msgspec.json.encode(built)) == built


def test_snapshot_document_holds_every_domain_with_its_accounts() -> None:
    document = document_of(busy_host())
    package, core, *_ = document.domains
    assert (package.energy_joules, package.consumers_joules) == (12_421.0, 9_400.0)
    assert (package.idle_joules, package.unattributed_joules) == (3_000.0, 21.0)
    assert (package.power_watts, package.method) == (84.2, "cpu-time")
    assert (core.hw_parent, core.in_cover, core.consumers_joules) == ("intel-rapl:0", False, None)
    gpu = document.domains[4].gpu
    assert (gpu.limit_watts, gpu.temperature_celsius) == (700.0, 61)
    assert document.domains[5].gap_seconds == {"lost": 3.2}


def test_snapshot_document_sums_the_cover() -> None:
    host = document_of(busy_host()).host
    assert host.power_watts == pytest.approx(84.2 + 41.7 + 9.1 + 612.3 + 71.2)
    assert host.energy_joules == 12_421 + 6_014 + 2_200 + 90_520 + 9_000


def test_host_power_is_unknown_while_the_power_of_a_present_device_is() -> None:
    snapshot = busy_host()
    first, *rest = snapshot.domains
    unknown = replace(first, power=None)
    assert document_of(replace(snapshot, domains=(unknown, *rest))).host.power_watts is None
    gone = replace(unknown, present=False)
    assert document_of(replace(snapshot, domains=(gone, *rest))).host.power_watts is not None


def test_snapshot_document_holds_processes_and_groups_by_hardware_type() -> None:
    document = document_of(busy_host())
    trainer, *_, rest = document.processes
    assert (trainer.pid, trainer.started, trainer.group) == (4123, 1, "trainer-7f9c")
    assert trainer.energy_joules == {CPU: 9_120.0, GPU: 81_000.0}
    assert trainer.power_watts == {CPU: 61.2, GPU: 540.1}
    assert (rest.pid, rest.name, rest.alive) == (None, "short-lived", False)
    assert [group.name for group in document.groups][:2] == ["trainer-7f9c", "serving"]
    assert document.other_joules == {CPU: 412.0}
    assert (document.ended_joules, document.bounded) == ({CPU: 95.0}, [GPU])


def test_names_are_printable() -> None:
    assert document_of(busy_host()).processes[3].name == "evil?[31m?name"
    assert document_of(replace(busy_host(), host="a\udcff")).host_name == "a?"


def test_snapshot_document_holds_spans() -> None:
    spans = document_of(serving_host()).spans
    chat = spans.names[1]
    assert (chat.service, chat.calls, chat.tokens["output"]) == ("llm", 912, 118_404)
    assert (chat.energy_joules, chat.tokens["input"]) == ({CPU: 620.0, GPU: 3310.0}, 4 * 118_404)
    assert spans.outside_joules == {"trainer": {CPU: 31.0, GPU: 899.0}, "llm": {CPU: 12.0}}
    assert (spans.received, spans.refused) == (54_540, {"invalid_id": 2})


def test_snapshot_document_holds_the_tuning_of_the_tuning_api() -> None:
    document = document_of(replace(busy_host(), tuning=ACCOUNTS))
    assert tuning_accounts(document.tuning).rows == ACCOUNTS.rows


def test_snapshot_reports_cost_with_its_hourly_rate() -> None:
    price = RatedEnergy("EUR", RateOrigin.CONSTANT, 300_000_000, 5 * 10**9, Microjoules(J))
    cost = document_of(replace(busy_host(), footprint=Footprint(cost=price))).cost
    assert (cost.unit, cost.per_kilowatt_hour, cost.total) == ("EUR", 0.3, 5.0)
    assert cost.per_hour == pytest.approx(0.3 * 0.8185)
    assert cost.unknown_joules == 1.0


def test_snapshot_reports_emulation_and_provenance() -> None:
    document = document_of(busy_host(Provenance.EMULATED))
    assert document.emulated
    assert {one.provenance for one in document.domains} == {Provenance.EMULATED}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"# HELP x\n"])
def test_other_documents_are_rejected(body: bytes) -> None:
    with pytest.raises(SnapshotSchemaError, match="not a snapshot"):
        decode_snapshot(body)


def test_documents_of_another_schema_version_are_rejected() -> None:
    document = msgspec.structs.replace(
        snapshot_document(busy_host(), "9.9.9"), schema_version=SCHEMA_VERSION + 1
    )
    with pytest.raises(SnapshotSchemaError, match=f"version {SCHEMA_VERSION + 1}"):
        decode_snapshot(msgspec.json.encode(document))


def test_unknown_fields_are_ignored() -> None:
    facts = msgspec.json.decode(msgspec.json.encode(snapshot_document(busy_host(), "1")))
    assert decode_snapshot(msgspec.json.encode({**facts, "newer": 1})).host_name == "node7"


# --------------------------------------------------------------------------------- permissions


def snapshot_with_our_process() -> Snapshot:
    ours = ProcessRow(PayerInfo(OURS, "ours"), {CPU: Microjoules(J)}, {CPU: Milliwatts(1000)})
    return replace(serving_host(), processes=(*busy_host().processes, ours))


def received(peer: Peer, resolution: int = SECOND) -> SnapshotDocument:
    asked = Asked(view=snapshot_with_our_process)
    asked.service._grid = TimeGrid(resolution)
    response = asked.get("/v1/snapshot", peer=peer)
    assert response.status == 200
    return decode_snapshot(response.body)


def test_root_sees_the_whole_snapshot() -> None:
    assert received(ROOT) == snapshot_document(snapshot_with_our_process(), "1.2.3")


def test_other_users_see_their_own_processes_only() -> None:
    document = received(local_peer(OURS.pid, 1000))
    assert document.restricted
    assert [Consumer(one.pid or 0, one.started or 0) for one in document.processes] == [OURS]
    assert received(STRANGER).processes == []


def test_other_users_see_no_group_span_or_remainder() -> None:
    document = received(STRANGER)
    assert (document.groups, document.spans.names, document.spans.outside_joules) == ([], [], {})
    assert (document.other_joules, document.ended_joules) == ({}, {})
    assert (document.cost, document.carbon) == (None, None)


def test_other_users_see_no_energy_of_devices_that_the_grid_hides() -> None:
    document = received(STRANGER)
    hidden = [one for one in document.domains if one.hw_type in (CPU, MEMORY)]
    assert len(hidden) == 4
    for one in hidden:
        assert one.energy_joules is one.pending_joules is one.idle_joules is None
        assert one.baseline_unknown_joules is None, "it rises with the energy of processes"
    assert document.host.energy_joules is None
    assert all(one.energy_joules for one in document.domains if one.hw_type is GPU)
    restricted = restrict(snapshot_document(busy_host(), "1"), lambda _: False, {"GPU-0": 5.0})
    gpus = {gpu.hw_id: (gpu.power_watts, gpu.energy_joules) for gpu in restricted.domains}
    assert gpus["GPU-0"] == (5.0, None)  # as a MIG instance
    assert gpus["GPU-1"][1] is not None


def test_other_users_see_the_power_of_the_last_settled_cell() -> None:
    asked = Asked()
    powers = TimeGrid(SECOND).latest_powers(asked.past, asked.past)
    assert powers == {"package-0": 10.0, "package-1": 20.0, "dram-0": 3.0}
    asked.past.horizon = asked.past.until - SECOND // 2
    assert set((TimeGrid(SECOND).latest_powers(asked.past, asked.past) or {}).values()) == {None}


def test_other_users_see_devices_in_full_where_nothing_is_coarse() -> None:
    document = received(STRANGER, resolution=0)
    assert all(one.energy_joules is not None for one in document.domains)
    assert document.processes == []


def test_snapshot_takes_no_parameters() -> None:
    assert "no such parameter" in Asked().problem(400, "/v1/snapshot", pid=1)
