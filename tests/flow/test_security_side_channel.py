"""An attack by power: an unprivileged reader of api.sock tries to learn another's secret."""

from __future__ import annotations

import random

import pytest
from testbed.secret_load import AGENT, INTERVAL, ROOT, STRANGER, VictimPast, joules, told

from wattspan.config.settings import AgentSettings
from wattspan.http.sockets import Peer
from wattspan.model import SECOND

SECRET = [random.Random(7).random() < 0.5 for _ in range(64)]
PER_SECOND = SECOND // INTERVAL
IDLE, WORK = 1_000_000, 2_000_000  # microjoules of an interval: 10 W and 20 W
OFFERED = int(AgentSettings().api_resolution)


def modulated(secret: list[bool]) -> VictimPast:
    """Each bit takes a second: work first and rest then, or the other way round."""
    half = PER_SECOND // 2
    energies = [
        energy for bit in secret for energy in ([WORK] * half + [IDLE] * half)[:: 1 if bit else -1]
    ]
    return VictimPast(until=len(secret) * SECOND, energies=energies)


def guesses(past: VictimPast, *, resolution: int, peer: Peer = STRANGER) -> list[bool | None]:
    """The reader's guess from half-second windows; None if undecidable."""
    found: list[bool | None] = []
    for second in range(past.until // SECOND):
        start, middle, end = (second * SECOND + part * SECOND // 2 for part in (0, 1, 2))
        first, then = (
            joules(told(past, *window, resolution=resolution, peer=peer))
            for window in ((start, middle), (middle, end))
        )
        found.append(None if abs(first - then) < 1e-4 else first > then)
    return found


def test_secret_is_recoverable_at_the_sampling_interval() -> None:
    """The interface before the resolution bound; root still has it."""
    assert guesses(modulated(SECRET), resolution=0) == SECRET
    assert guesses(modulated(SECRET), resolution=OFFERED, peer=ROOT) == SECRET
    assert guesses(modulated(SECRET), resolution=OFFERED, peer=Peer(principal=AGENT)) == SECRET


def test_secret_is_not_recoverable_at_the_published_resolution() -> None:
    assert guesses(modulated(SECRET), resolution=OFFERED) == [None] * len(SECRET)


@pytest.mark.parametrize("peer", [STRANGER, Peer(), Peer(uid=None, address=("10.0.0.1", 5))])
def test_unknown_user_is_untrusted(peer: Peer) -> None:
    assert guesses(modulated(SECRET[:4]), resolution=OFFERED, peer=peer) == [None] * 4


def accuracy(windows: int, *, resolution: int, rounds: int = 40) -> float:
    """Share of correct guesses of one bit, represented by 1 W for 100 ms of each second.

    Everything else on the package draws 10 W with a deviation of 2 W from interval to interval.
    The reader asks for the very interval, and takes the mean of ``windows``.
    """
    noise, right = random.Random(11), 0
    for number in range(rounds):
        bit = number % 2 == 0
        energies = [
            round(noise.gauss(1_000_000, 200_000)) + (100_000 if bit and interval == 3 else 0)
            for _ in range(windows)
            for interval in range(PER_SECOND)
        ]
        past = VictimPast(until=windows * SECOND, energies=energies)
        total = 0.0
        for second in range(windows):
            start = second * SECOND + 3 * INTERVAL
            found = joules(told(past, start, start + INTERVAL, resolution=resolution))
            assert found is not None
            total += found
        threshold = 1.0 + (0.05 if resolution == 0 else 0.005)
        right += (total / windows > threshold) == bit
    return right / rounds


def test_residual_leak_is_slower_for_shorter_work() -> None:
    before, after = accuracy(25, resolution=0), accuracy(25, resolution=OFFERED)
    assert before > 0.8
    assert after < before


def test_unfinished_cell_is_not_published() -> None:
    past = modulated([True])
    for until in range(0, SECOND, INTERVAL):
        past.until = until
        answer = told(past, 0, SECOND, resolution=OFFERED)
        assert joules(answer) is None
        assert answer["complete"] is False


def test_published_figures_have_their_resolution() -> None:
    past = modulated(SECRET[:2])
    assert told(past, 0, SECOND, resolution=OFFERED)["device_resolution_seconds"] == 1.0
    assert told(past, 0, SECOND, resolution=OFFERED, peer=ROOT)["device_resolution_seconds"] is None
