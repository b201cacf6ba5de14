"""The few shapes that every query here is made of.

A counter is only read by ``rate`` (power, speed) or ``spent`` (a total over the displayed range),
and every selector names the scrape's job and instance.
"""

from __future__ import annotations

JOB = 'job=~"$job"'
HOST = f'{JOB}, instance="$instance"'  # dashboards of one host
HOSTS = f'{JOB}, instance=~"$instance"'  # dashboards of one host or several
KIND = 'group_kind="$group_kind"'  # groups of different kinds overlap: never without it
COVER = 'hw_parent=""'  # the disjoint domains: never a sum over hw_energy without it

JOULES_PER_KWH = "3.6e6"


def series(name: str, *matchers: str, scope: str = HOSTS) -> str:
    return f"{name}{{{', '.join((scope, *matchers))}}}"


def rate(selector: str) -> str:
    """Per second, over the shortest window that the scrape interval allows."""
    return f"rate({selector}[$__rate_interval])"


def spent(selector: str) -> str:
    """Total over the displayed time range."""
    return f"increase({selector}[$__range])"


def spent_to_the_end(selector: str) -> str:
    """As ``spent``, at every step of a graph: it chooses series, it is not drawn."""
    return f"increase({selector}[$__range] @ end())"


def at_the_end(selector: str) -> str:
    """The last value in the range that is shown, the same at every step: it chooses series."""
    return f"last_over_time({selector}[$__range] @ end())"


def by(labels: str, expr: str) -> str:
    return f"sum by ({labels}) ({expr})"


def each(above: str, below: str) -> str:
    """``above`` for each one of ``below``, where there is any."""
    return f"{above} / ({below} > 0)"


def most(count: int, labels: str, selector: str) -> str:
    """The series with most energy over the displayed range, the same at every step of a graph."""
    return f"topk({count}, {by(labels, spent_to_the_end(selector))})"


def among(count: int, labels: str, expr: str, selector: str) -> str:
    """``expr`` of the series with most energy, for one selected figure."""
    return f"{expr} and on ({labels}) {most(count, labels, selector)}"


def top(count: int, labels: str, selector: str) -> str:
    """Power of the series with most energy over the range, so that the selection is constant."""
    return among(count, labels, by(labels, rate(selector)), selector)


def rest(count: int, labels: str, selector: str) -> str:
    """Total power of the series that ``top`` leaves out, also while it has none that exists."""
    return remainder(f"sum({rate(selector)}) - {total(top(count, labels, selector))}")


def total(powers: str) -> str:
    """The sum of ``powers``; 0 without any, because a difference with no series is none."""
    return f"(sum({powers}) or vector(0))"


def remainder(difference: str) -> str:
    """A difference of powers in whole milliwatts: sums of floats are not exact, and may be -4e-14.

    A remainder is never negative.
    """
    return f"clamp_min(round({difference}, 0.001), 0)"
