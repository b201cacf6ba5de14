"""Solutions of small systems of linear equations, as lists of rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

_ZERO = 1e-12
_MAX_ROUNDS = 3  # changes of the set of positive variables, per variable


def solved(
    matrix: Sequence[Sequence[float]], rights: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The solutions of a small positive definite system, by Gaussian elimination."""
    size = len(matrix)
    rows = [[*row, *column] for row, column in zip(matrix, zip(*rights, strict=True), strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, len(row)):
                row[j] -= factor * pivot[j]
    solutions = []
    for right in range(size, size + len(rights)):
        solution = [0.0] * size
        for i in range(size - 1, -1, -1):
            row = rows[i]
            known = sum(row[j] * solution[j] for j in range(i + 1, size))
            solution[i] = (row[right] - known) / row[i]
        solutions.append(solution)
    return solutions


def swept(matrix: Sequence[Sequence[float]], place: int) -> list[list[float]]:
    """The matrix after the SWEEP operator on one diagonal element, which must not be 0.

    Goodnight, "A tutorial on the SWEEP operator", The American Statistician 33 (1979). Sweeping
    [[A, b], [b', c]] on all of A gives [[A^-1, A^-1 b], [-b' A^-1, c - b' A^-1 b]].
    """
    pivot = matrix[place]
    scaled = [each / pivot[place] for each in pivot]
    scaled[place] = 1 / pivot[place]
    result = []
    for row in matrix:
        factor = row[place]
        cleared = [each - factor * other for each, other in zip(row, scaled, strict=True)]
        cleared[place] = -factor * scaled[place]
        result.append(cleared)
    result[place] = scaled
    return result


def product(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[list[float]]:
    """The product of two matrices."""
    columns = list(zip(*other, strict=True))
    return [[sum(map(mul, row, column)) for column in columns] for row in one]


def non_negative_solution(
    matrix: Sequence[Sequence[float]], rights: Sequence[float]
) -> list[float]:
    """The x >= 0 with the least x'Mx/2 - r'x, for a small positive definite M.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).
    Without convergence, which rounding may prevent, the last feasible solution.
    """
    size = len(rights)
    found = [0.0] * size
    passive: list[int] = []
    for _ in range(_MAX_ROUNDS * size):
        slopes = [
            rights[i] - sum(matrix[i][j] * found[j] for j in passive) if i not in passive else 0.0
            for i in range(size)
        ]
        best = max(range(size), key=slopes.__getitem__, default=0)
        if not slopes or slopes[best] <= 1e-9 * max(map(abs, rights)):
            break
        passive = sorted([*passive, best])
        wanted = _restricted(matrix, rights, passive)
        while min(wanted, default=1.0) <= 0:
            # As far towards the solution as no variable is negative.
            step = min(
                found[i] / (found[i] - each)
                for i, each in zip(passive, wanted, strict=True)
                if each <= 0
            )
            for i, each in zip(passive, wanted, strict=True):
                found[i] += step * (each - found[i])
            passive = [i for i in passive if found[i] > _ZERO]
            wanted = _restricted(matrix, rights, passive)
        found = [0.0] * size
        for i, each in zip(passive, wanted, strict=True):
            found[i] = each
    return found


def _restricted(
    matrix: Sequence[Sequence[float]], rights: Sequence[float], variables: Sequence[int]
) -> list[float]:
    """The solution with these variables only."""
    part = [[matrix[i][j] for j in variables] for i in variables]
    (found,) = solved(part, [[rights[i] for i in variables]])
    return found
