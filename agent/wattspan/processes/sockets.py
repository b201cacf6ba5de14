"""Dividing what processes did among the sockets they did it on.

What each process did is known, and what each socket did in all is known; who did what where is
only sampled: the CPU a process's main thread last ran on, and the CPUs it may run on at all. A
round of proportional fitting brings the guesses in line with both sums. Exact with one socket
and for processes bound to one; otherwise a process that moves between sockets within a tick, or
whose threads are spread over them, is divided like the sockets' own remaining load. Nothing is
lost: the parts of a process add up to what it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

ELSEWHERE = 1 / 16
"""Weight of a socket where a process may run but was not seen, against where it was."""

_ROUNDS = 6
_FITS = 0.01  # loads this near to what they should be are left alone

Weights = Mapping[int, float]


def weights_of(
    seen: int | None, allowed: Iterable[int], cpus: Mapping[int, int], threads: int
) -> dict[int, float]:
    """How likely a process ran on each socket.

    ``seen`` is where its main thread was, ``allowed`` where it may run, ``cpus`` the number of
    CPUs of each. The place of one thread says little about many.
    """
    open_to = [socket for socket in allowed if cpus.get(socket)] or list(cpus)
    if threads > 1 or seen not in open_to:
        return {socket: float(cpus.get(socket, 1) or 1) for socket in open_to}
    return {socket: 1.0 if socket == seen else ELSEWHERE for socket in open_to}


def apportion(
    spent: Sequence[int], weights: Sequence[Weights], room: Mapping[int, int]
) -> list[dict[int, int]]:
    """Divide each of ``spent`` over the sockets, by weight and so as to fill their ``room`` evenly.

    A socket's room is its busy time that nobody was charged with yet.
    """
    bound = dict.fromkeys(room, 0.0)
    free: list[tuple[int, Weights]] = []
    for amount, weight in zip(spent, weights, strict=True):
        if len(weight) == 1:
            for s in weight:
                bound[s] += amount
        else:
            free.append((amount, weight))
    factor = _fitted(free, bound, room) if free else {}
    return [
        _divide(amount, weight if len(weight) == 1 else _scaled(weight, factor))
        for amount, weight in zip(spent, weights, strict=True)
    ]


def _fitted(
    free: Sequence[tuple[int, Weights]], bound: Mapping[int, float], room: Mapping[int, int]
) -> dict[int, float]:
    """By how much each socket's weights must grow for the loads to fill the rooms evenly."""
    factor = dict.fromkeys(room, 1.0)
    open_room = sum(max(0, r) for r in room.values())
    for _ in range(_ROUNDS):
        load = dict(bound)
        for amount, weight in free:
            scaled = _scaled(weight, factor)
            whole = sum(scaled.values())
            if whole > 0:
                for s, w in scaled.items():
                    load[s] += amount * w / whole
        total = sum(load.values())
        if total <= 0 or open_room <= 0:
            break
        worst = 0.0
        for s in factor:
            if load[s] > 0:
                # A socket with no room left keeps a little weight: a bound process still ran.
                want = max(0, room[s]) * total / open_room
                worst = max(worst, abs(want / load[s] - 1))
                factor[s] = max(1e-6, factor[s] * want / load[s])
        if worst < _FITS:
            break
    return factor


def _scaled(weight: Weights, factor: Mapping[int, float]) -> dict[int, float]:
    return {s: w * factor.get(s, 0.0) for s, w in weight.items()}


def _divide(amount: int, weight: Mapping[int, float]) -> dict[int, int]:
    """Whole parts that add up: the heaviest socket takes what rounding leaves."""
    if len(weight) == 1:
        return dict.fromkeys(weight, amount) if amount else {}
    whole = sum(weight.values())
    heaviest = max(weight, key=weight.__getitem__)
    parts = {s: int(amount * (w / whole)) if whole else 0 for s, w in weight.items()}
    parts[heaviest] += amount - sum(parts.values())
    return {s: part for s, part in parts.items() if part > 0}
