"""Certified settings are stored by job fingerprint, with bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wattspan.model import Knob
from wattspan.tuning.decisions.certified_settings import (
    MAX_CERTIFIED,
    CertifiedSettings,
    command_digest,
    from_json,
    to_json,
)
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint

KNOB = Knob.GPU_POWER
JOB = Fingerprint("0123456789abcdef", "NVIDIA H100", "570.1", 8, "trainer", "train_step")
SETTING = CertifiedLevels(
    560_000, 700_000, 0.031, 0.08, 46, 0.02, {"GPU-1": 540_000, "GPU-2": 560_000}
)


def job(number: int) -> Fingerprint:
    return replace(JOB, command=str(number))


def test_known_job_starts_from_its_certified_setting() -> None:
    book = CertifiedSettings().certified(JOB, KNOB, SETTING)
    assert book.recall(JOB, Knob.GPU_POWER) == SETTING


@pytest.mark.parametrize(
    "other",
    [
        {"command": "another"},
        {"model": "NVIDIA A100"},
        {"driver": "580.1"},
        {"devices": 4},
        {"service": "other"},
        {"span": "step"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_fingerprint_has_no_certificate(other: dict[str, Any]) -> None:
    book = CertifiedSettings().certified(JOB, KNOB, SETTING)
    assert book.recall(replace(JOB, **other), Knob.GPU_POWER) is None
    assert book.recall(JOB, Knob.CPU_POWER) is None


def test_certificates_are_per_actuator() -> None:
    clock = replace(SETTING, level=1500, original=1980, levels={})
    book = CertifiedSettings().certified(JOB, KNOB, SETTING).certified(JOB, Knob.GPU_CLOCK, clock)
    assert book.recall(JOB, Knob.GPU_POWER) == SETTING
    assert book.recall(JOB, Knob.GPU_CLOCK) == clock


def test_latest_certificate_wins() -> None:
    later = replace(SETTING, level=600_000, levels={})
    book = CertifiedSettings().certified(JOB, KNOB, SETTING).certified(JOB, KNOB, later)
    assert book.recall(JOB, Knob.GPU_POWER) == later


def test_setting_that_failed_twice_is_forgotten() -> None:
    once = CertifiedSettings().certified(JOB, KNOB, SETTING).failed(JOB, Knob.GPU_POWER)
    assert once.recall(JOB, Knob.GPU_POWER) == SETTING
    assert once.failed(JOB, Knob.GPU_POWER).recall(JOB, Knob.GPU_POWER) is None


def test_new_certificate_replaces_a_failure() -> None:
    book = (
        CertifiedSettings()
        .certified(JOB, KNOB, SETTING)
        .failed(JOB, Knob.GPU_POWER)
        .certified(JOB, KNOB, SETTING)
    )
    assert book.failed(JOB, Knob.GPU_POWER).recall(JOB, Knob.GPU_POWER) == SETTING


def test_unknown_certificate_can_neither_fail_nor_be_used() -> None:
    book = CertifiedSettings().certified(JOB, KNOB, SETTING)
    assert book.failed(job(1), Knob.GPU_POWER) is book


def test_least_recently_used_certificate_is_evicted() -> None:
    book = CertifiedSettings()
    for number in range(MAX_CERTIFIED):
        book = book.certified(job(number), KNOB, SETTING)
    book = book.failed(job(0), KNOB).certified(job(MAX_CERTIFIED), KNOB, SETTING)
    assert len(book.entries) == MAX_CERTIFIED
    assert book.recall(job(0), Knob.GPU_POWER) == SETTING
    assert book.recall(job(1), Knob.GPU_POWER) is None


# ------------------------------------------------------------------------------------- as JSON


def written(book: CertifiedSettings) -> Any:
    return json.loads(json.dumps(to_json(book)))


def test_certificates_round_trip() -> None:
    book = (
        CertifiedSettings()
        .certified(JOB, KNOB, SETTING)
        .certified(job(1), KNOB, replace(SETTING, levels={}))
    )
    book = book.failed(JOB, Knob.GPU_POWER)
    again = from_json(written(book))
    assert list(again.entries.items()) == list(book.entries.items())


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        "book",
        7,
        {},
        {"version": 2, "entries": []},
        {"version": 1},
        {"version": 1, "entries": "none"},
        {"version": 1, "entries": {"0": 1}},
    ],
    ids=repr,
)
def test_invalid_certificate_file_reads_as_empty(facts: object) -> None:
    assert from_json(facts) == CertifiedSettings()


def spoil(*path: str, value: object) -> Callable[[Any], None]:
    def spoiled(entry: Any) -> None:
        *way, last = path
        for name in way:
            entry = entry[name]
        entry[last] = value

    return spoiled


@pytest.mark.parametrize(
    "damage",
    [
        spoil("fingerprint", value=None),
        spoil("fingerprint", "command", value=7),
        spoil("knob", value="steering"),
        spoil("failures", value=True),
        spoil("failures", value=2),
        spoil("setting", value=[]),
        spoil("setting", "level", value=None),
        spoil("setting", "level", value=800_000),
        spoil("setting", "level", value=1.5),
        spoil("setting", "levels", value=[1]),
        spoil("setting", "levels", value={"GPU-1": 900_000}),
        spoil("setting", "levels", value={f"GPU-{n}": 1 for n in range(2000)}),
        spoil("setting", "slowdown", value=float("nan")),
        spoil("setting", "saving", value="much"),
        spoil("setting", "noise", value=True),
        spoil("setting", "pairs", value=2**70),
        lambda entry: entry.clear(),
    ],
)
def test_only_invalid_entries_are_left_out(damage: Callable[[Any], None]) -> None:
    facts = written(
        CertifiedSettings().certified(JOB, KNOB, SETTING).certified(job(1), KNOB, SETTING)
    )
    damage(facts["entries"][0])
    book = from_json(facts)
    assert [fingerprint for fingerprint, _ in book.entries] == [job(1)]


def test_later_duplicate_certificate_wins() -> None:
    facts = written(
        CertifiedSettings().certified(JOB, KNOB, SETTING).certified(job(1), KNOB, SETTING)
    )
    facts["entries"] += written(
        CertifiedSettings().certified(JOB, KNOB, replace(SETTING, pairs=7))
    )["entries"]
    book = from_json(facts)
    assert [fingerprint for fingerprint, _ in book.entries] == [job(1), JOB]
    assert book.recall(JOB, Knob.GPU_POWER) == replace(SETTING, pairs=7)


def test_certificate_file_keeps_the_latest_entries() -> None:
    facts = written(CertifiedSettings().certified(JOB, KNOB, SETTING))
    (entry,) = facts["entries"]
    facts["entries"] = [
        {**entry, "fingerprint": {**entry["fingerprint"], "command": str(number)}}
        for number in range(MAX_CERTIFIED + 10)
    ]
    book = from_json(facts)
    assert len(book.entries) == MAX_CERTIFIED
    assert book.recall(job(9), Knob.GPU_POWER) is None
    assert book.recall(job(10), Knob.GPU_POWER) == SETTING


# -------------------------------------------------------------------------------------- digests

COMMAND = "/opt/conda/bin/python -u train.py --config llama.yaml --batch-size 32 --lr 3e-4"


def test_digest_is_short_and_lasts() -> None:
    assert command_digest(COMMAND) == command_digest(COMMAND.split()) == "74c4bc0e8d71c1bd"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py", "/usr/bin/python train.py"),
        ("python train.py --local_rank=0", "python train.py --local_rank=7"),
        ("torchrun --master_port 29500 t.py", "torchrun --master_port 31000 t.py"),
        ("torchrun --rdzv-endpoint=a:1 t.py", "torchrun --rdzv-endpoint=b:2 t.py"),
        ("serve --host 0.0.0.0 --port 8000", "serve --host 0.0.0.0 --port 8001"),
        ("t.py init=tcp://10.0.0.7:2345", "t.py init=tcp://10.0.0.7:9999"),
        ("t.py --seed 1 --lr 2", "t.py --seed 4711 --lr 2"),
        ("t.py --seed -1 --lr 2", "t.py --seed 4711 --lr 2"),
        ("t.py trainer.seed=1", "t.py trainer.seed=2"),
        ("t.py --run-name happy-tree-4 -x", "t.py --run-name sad-stone-5 -x"),
        ("t.py --output_dir=/data/a", "t.py --output_dir=/data/b"),
        ("t.py --log-file a.log", "t.py --log-file b.log"),
        ("t.py out-20260131-120102", "t.py out-20261121-174500"),
        ("t.py 2026-01-31T12:01:02.5Z", "t.py 2026-11-21T17:45:00.1Z"),
        ("t.py ckpt_1763747100", "t.py ckpt_1763747200"),
        (
            "t.py 8d9cf7f3-0b0a-4c39-8a1b-2f46e3d8a1c0",
            "t.py 00000000-0b0a-4c39-8a1b-2f46e3d8a1c0",
        ),
        ("python /tmp/tmpab12cd_x/train.py", "python /tmp/tmpzz98yx_w/train.py"),
        ("sh /dev/shm/4711/run.sh", "sh /dev/shm/4712/run.sh"),
        ("tail --pid=7 /proc/7/maps", "tail --pid=8 /proc/8/maps"),
        (
            "python -c main(tracker_fd=5, pipe_handle=7)",
            "python -c main(tracker_fd=6, pipe_handle=9)",
        ),
    ],
)
def test_same_job_has_the_same_digest(one: str, other: str) -> None:
    assert command_digest(one) == command_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("python train.py", "python infer.py"),
        ("python3.11 train.py", "python3.12 train.py"),
        ("t.py --batch-size 32", "t.py --batch-size 64"),
        ("t.py --lora-rank 8", "t.py --lora-rank 16"),
        ("t.py --rank 8", "t.py --rank 16"),
        ("t.py --task-name mrpc", "t.py --task-name qqp"),
        ("t.py --data-dir /data/a", "t.py --data-dir /data/b"),
        ("t.py --checkpoint_path llama-7b", "t.py --checkpoint_path llama-70b"),
        ("t.py --max-tokens 1024", "t.py --max-tokens 4096"),
        ("t.py --steps 1000", "t.py --steps 2000"),
        ("t.py --seed 1", "t.py --seed 1 extra"),
        ("t.py --seed=1 -O0", "t.py --seed=1 -O3"),
        ("t.py --seed", "t.py"),
        ("t.py --seed --lr 2", "t.py --seed --wd 2"),
        ("t.py seed a", "t.py seed b"),
        ("t.py --ratio 4:30", "t.py --ratio 4:60"),
        ("python /tmp/a.py", "python /tmp/b.py"),
        ("python /tmp/llama70b/t.py", "python /tmp/llama13b/t.py"),
        ("t.py 2048", "t.py 4096"),
        ("t.py a b", "t.py b a"),
        ("serve http://a:80", "serve http://b:80"),
    ],
)
def test_another_job_has_another_digest(one: str, other: str) -> None:
    assert command_digest(one) != command_digest(other)


def test_image_fingerprint_covers_every_field() -> None:
    images = ["team/app:1", "team/app:2", "other/app:1", "app:1", "app@sha256:" + "0" * 64]
    assert len({command_digest(image) for image in images}) == len(images)
    assert command_digest(" team/app:1\n") == command_digest("team/app:1")
    assert command_digest("app") != command_digest(["app"])


@pytest.mark.parametrize("command", ["", "  ", [], ["\udcff"], "\ud800 x", ["a" * 10**6]])
def test_arbitrary_command_has_a_digest(command: str | list[str]) -> None:
    assert len(command_digest(command)) == 16
