"""Small linear systems, against solutions by hand and by exhaustive search."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from wattspan.util.linear_systems import non_negative_solution, product, solved, swept


def test_solution_satisfies_the_system() -> None:
    matrix = [[4.0, 1.0], [1.0, 3.0]]

    (one, other) = solved(matrix, [[1.0, 2.0], [0.0, 11.0]])

    assert one == pytest.approx([1 / 11, 7 / 11])
    assert other == pytest.approx([-1.0, 4.0])


def test_product_with_the_identity_is_the_matrix() -> None:
    matrix = [[1.0, 2.0], [3.0, 4.0]]

    assert product(matrix, [[1.0, 0.0], [0.0, 1.0]]) == matrix
    assert product(matrix, matrix) == [[7.0, 10.0], [15.0, 22.0]]


def test_sweeping_gives_inverse_solution_and_remaining_square() -> None:
    matrix = [[4.0, 1.0, 1.0], [1.0, 3.0, 2.0], [1.0, 2.0, 5.0]]

    found = swept(swept(matrix, 0), 1)

    assert found[0] == pytest.approx([3 / 11, -1 / 11, 1 / 11])
    assert found[1] == pytest.approx([-1 / 11, 4 / 11, 7 / 11])
    assert found[2] == pytest.approx([-1 / 11, -7 / 11, 5 - 15 / 11])


def _objective(matrix: list[list[float]], rights: list[float], x: list[float]) -> float:
    size = range(len(x))
    square = sum(x[i] * matrix[i][j] * x[j] for i in size for j in size)
    return square / 2 - sum(rights[i] * x[i] for i in size)


def _exhaustive(matrix: list[list[float]], rights: list[float]) -> float:
    """The least objective over all sets of positive variables."""
    size = range(len(rights))
    best = 0.0
    for count in range(1, len(rights) + 1):
        for chosen in combinations(size, count):
            part = [[matrix[i][j] for j in chosen] for i in chosen]
            (found,) = solved(part, [[rights[i] for i in chosen]])
            if min(found) >= 0:
                x = [0.0] * len(rights)
                for i, each in zip(chosen, found, strict=True):
                    x[i] = each
                best = min(best, _objective(matrix, rights, x))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_non_negative_solution_is_the_best_of_all_sets(seed: int) -> None:
    chance = random.Random(seed)
    rows = [[chance.gauss(0, 1) for _ in range(5)] for _ in range(6)]
    matrix = [
        [sum(row[i] * row[j] for row in rows) + 0.01 * (i == j) for j in range(5)] for i in range(5)
    ]
    rights = [chance.gauss(0, 3) for _ in range(5)]

    found = non_negative_solution(matrix, rights)

    assert min(found) >= 0
    best = _exhaustive(matrix, rights)
    assert _objective(matrix, rights, found) == pytest.approx(best, abs=1e-6)


def test_solution_with_negative_slopes_only_is_zero() -> None:
    assert non_negative_solution([[1.0, 0.0], [0.0, 1.0]], [-1.0, -2.0]) == [0.0, 0.0]


def test_solution_of_no_equations_is_empty() -> None:
    assert non_negative_solution([], []) == []
