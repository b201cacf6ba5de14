"""No external input makes a parser fail: each fuzz target, driven by hypothesis.

Valid inputs are cut, changed, repeated and mixed with the words they are made of. The same
functions are driven by coverage in tests/flow/test_fuzz_coverage.py, and for longer by `make fuzz`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.registry import CORPUS, Target, targets

TARGETS = targets()
_SLOW = {"config-words", "store-file", "grpc", "capper-protocol", "http", "capper-files", "nvml"}
"""Some milliseconds an input; of these fewer are tried here."""


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Samples of ``target`` after a few edits, or anything else."""
    words = st.sampled_from(target.words) if target.words else st.nothing()
    new = st.binary(max_size=8) | words
    edit = st.tuples(st.integers(0, 2**16), st.integers(0, 12), new)

    def edited(sample: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
        for at, length, put in edits:
            place = at % (len(sample) + 1)
            sample = sample[:place] + put + sample[place + length :]
        return sample[: target.largest]

    samples = st.sampled_from(target.seeds())
    return st.one_of(
        st.builds(edited, samples, st.lists(edit, min_size=1, max_size=5)),
        st.builds(lambda sample, cut: sample[: cut % (len(sample) + 1)], samples, st.integers(0)),
        st.builds(lambda one, other: (one + other)[: target.largest], samples, samples),
        st.lists(new, max_size=30).map(b"".join),
    )


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_targets_hold_for_any_input(name: str) -> None:
    target = TARGETS[name]
    chosen = settings(max_examples=settings().max_examples // (4 if name in _SLOW else 1))

    @chosen
    @given(inputs(target))
    def holds(data: bytes) -> None:
        target.run(data)

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_corpus_and_past_failures_pass(name: str) -> None:
    for seed in TARGETS[name].seeds():
        TARGETS[name].run(seed)


def test_fuzz_targets_are_documented_with_a_small_corpus() -> None:
    assert all(target.whose and target.holds and target.samples for target in TARGETS.values())
    kept = [path for path in Path(CORPUS).rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} <= TARGETS.keys()
    assert sum(path.stat().st_size for path in kept) < 200_000
