"""Exact division of whole amounts."""

from __future__ import annotations

from collections.abc import Sequence


def split(total: int, weights: Sequence[int]) -> list[int]:
    """``total`` divided in proportion to ``weights``, by largest remainder (Hamilton's method).

    The parts are whole, never negative, add up to ``total`` exactly, and each differs from its
    exact proportion by less than one. Ties go to the earlier weight. ``sum(weights)`` must be
    positive; ValueError if a weight is negative or all are zero.
    """
    whole = sum(weights)
    if whole <= 0 or min(weights) < 0:
        raise ValueError("weights must not be negative, nor all zero")
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    if left:
        remainders = [total * weight % whole for weight in weights]
        by_remainder = sorted(range(len(weights)), key=remainders.__getitem__, reverse=True)
        for i in by_remainder[:left]:
            parts[i] += 1
    return parts
