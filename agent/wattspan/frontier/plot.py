"""A plot of the frontier as one SVG file without scripts, fonts or other files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from textwrap import wrap
from typing import NamedTuple

from wattspan.frontier.estimates import ConfidenceInterval, SettingEstimates, frontier
from wattspan.util.text import printable

_WIDTH, _HEIGHT = 860, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 84, 64
_TICKS = 6
_CHARACTER, _LINE = 7.8, 14  # pixels: the width of a letter at most, the height of a label
_POINT = 6  # pixels: the radius of a point with its edge
_RING = 10  # pixels: that of the ring around the baseline
_TITLE_LENGTH = 72
_NOTE_LINE = 17  # pixels: the height of a line of the note

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.title { font-size: 17px; font-weight: 600 }
.note { fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.frontier { fill: none; stroke: #0969da; stroke-width: 2 }
.bar { stroke: #8c959f; stroke-width: 1 }
.on { fill: #0969da }
.off { fill: #8c959f }
.baseline { fill: none; stroke: #bc4c00; stroke-width: 2.5 }
@media (prefers-color-scheme: dark) {
  .sheet { fill: #0d1117 } text { fill: #e6edf3 } .note { fill: #9198a1 }
  .grid { stroke: #30363d } .frontier { stroke: #4493f8 } .on { fill: #4493f8 }
}
"""


class _Axis(NamedTuple):
    """A linear axis from ``low`` to ``high``, drawn from pixel ``start`` to pixel ``end``."""

    low: float
    high: float
    start: int
    end: int

    def at(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        step = _round_step((self.high - self.low) / _TICKS)
        return [n * step for n in range(ceil(self.low / step), floor(self.high / step) + 1)]


def _round_step(rough: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power: float = 10.0 ** floor(log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def plot(estimates: SettingEstimates, title: str, note: str, unit: str) -> str:
    """Energy over time per unit of work: all settings, their intervals, and the frontier."""
    members = frontier(estimates)
    time = {number: estimates.time.value(number) for number in estimates.measured}
    energy = {number: estimates.energy.value(number) for number in estimates.measured}
    across = _axis(list(time.values()), _LEFT, _WIDTH - _RIGHT)
    up = _axis(list(energy.values()), _HEIGHT - _BOTTOM, _TOP)
    notes = wrap(printable(note), int((_WIDTH - _LEFT - _RIGHT) / _CHARACTER)) or [""]
    # The sheet grows upward, so that the axes and the points stay where they are.
    above = _NOTE_LINE * (len(notes) - 1)
    sheet = (0, -above, _WIDTH, _HEIGHT + above)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{" ".join(map(str, sheet))}"'
        ' role="img">',
        f"<title>{_text(title)}</title><style>{_STYLE}</style>",
        f'<rect class="sheet" y="{-above}" width="{_WIDTH}" height="{_HEIGHT + above}"'
        ' fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="{24 - above}">{_text(_shortened(title))}</text>',
        *(
            f'<text class="note" x="{_LEFT}" y="{43 - above + _NOTE_LINE * n}">{_text(line)}</text>'
            for n, line in enumerate(notes)
        ),
        *_legend(),
        *_grid(across, up, unit),
        *_bars(time, energy, across, up),
    ]
    line = " ".join(f"{across.at(time[n].value):.1f},{up.at(energy[n].value):.1f}" for n in members)
    parts.append(f'<polyline class="frontier" points="{line}"/>')
    places = {n: (across.at(time[n].value), up.at(energy[n].value)) for n in estimates.measured}
    labels = _Labels([_Box.around(*at, _RING if n == 0 else _POINT) for n, at in places.items()])
    for number in sorted(places, key=lambda n: (n != 0, n not in members, time[n].value)):
        x, y = places[number]
        name = f"{estimates.settings[number]}"
        figures = f"{time[number].value:.4g} s, {energy[number].value:.4g} J per {_text(unit)}"
        mark = "on" if number in members else "off"
        parts.append(
            f'<circle class="{mark}" cx="{x:.1f}" cy="{y:.1f}" r="5">'
            f"<title>{_text(name)}: {figures}</title></circle>"
        )
        if number == 0:
            parts.append(f'<circle class="baseline" cx="{x:.1f}" cy="{y:.1f}" r="9"/>')
        parts += labels.label(x, y, name)
    return "\n".join((*parts, "</svg>\n"))


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float, radius: float) -> _Box:
        return cls(x - radius, y - radius, x + radius, y + radius)

    def meets(self, other: _Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class _Labels:
    """Places labels beside their points, where they cover nothing; others are left out.

    A point without a label still has its name as a tooltip.
    """

    def __init__(self, taken: list[_Box]) -> None:
        self._taken = taken

    def label(self, x: float, y: float, name: str) -> Iterator[str]:
        width = _CHARACTER * len(name)
        for anchor, at, baseline, left in (
            ("start", x + 12, y - 6, x + 12),
            ("start", x + 12, y + 15, x + 12),
            ("end", x - 12, y - 6, x - 12 - width),
            ("end", x - 12, y + 15, x - 12 - width),
            ("middle", x, y - 13, x - width / 2),
            ("middle", x, y + 22, x - width / 2),
        ):
            box = _Box(left, baseline - _LINE + 3, left + width, baseline + 3)
            inside = box.left > _LEFT and box.right < _WIDTH and box.bottom < _HEIGHT - _BOTTOM
            if inside and not any(box.meets(one) for one in self._taken):
                self._taken.append(box)
                yield _label(at, baseline, name, anchor)
                return


def _legend() -> Iterator[str]:
    """The marks, in one line above the axes."""
    x, y = _LEFT + _POINT, 60
    for mark, radius, text in (
        ("on", 5, "frontier"),
        ("off", 5, "beaten beyond chance"),
        ("baseline", 7, "baseline"),
    ):
        yield f'<circle class="{mark} key" cx="{x}" cy="{y}" r="{radius}"/>'
        yield f'<text class="note" x="{x + 12}" y="{y + 4}">{text}</text>'
        x += round(12 + _CHARACTER * len(text) + 24)


def _axis(values: Sequence[ConfidenceInterval], start: int, end: int) -> _Axis:
    """The range of the estimates, and of the intervals as far as it does not dwarf them."""
    least, most = min(one.value for one in values), max(one.value for one in values)
    room = max(most - least, 0.02 * most)
    low = min(max(one.low, least - room) for one in values)
    high = max(min(one.high, most + room) for one in values)
    margin = 0.06 * (high - low)
    return _Axis(max(0.0, low - margin), high + margin, start, end)


def _grid(across: _Axis, up: _Axis, unit: str) -> Iterator[str]:
    for value in across.ticks():
        x = across.at(value)
        yield _line("grid", (x, up.start), (x, up.end))
        yield _label(x, up.start + 20, f"{value:.6g}")
    for value in up.ticks():
        y = up.at(value)
        yield _line("grid", (across.start, y), (across.end, y))
        yield _label(across.start - 10, y + 4, f"{value:.6g}", "end")
    yield _label((across.start + across.end) / 2, up.start + 46, f"seconds per {unit}")
    height = (up.start + up.end) / 2
    rotated = f' transform="rotate(-90 20 {height})"'
    yield _label(20, height, f"joules per {unit}", attributes=rotated)


def _bars(
    time: dict[int, ConfidenceInterval],
    energy: dict[int, ConfidenceInterval],
    across: _Axis,
    up: _Axis,
) -> Iterator[str]:
    for number, seconds in time.items():
        joules = energy[number]
        x, y = across.at(seconds.value), up.at(joules.value)
        yield _line("bar", (across.at(seconds.low), y), (across.at(seconds.high), y))
        yield _line("bar", (x, up.at(joules.low)), (x, up.at(joules.high)))


def _line(kind: str, start: tuple[float, float], end: tuple[float, float]) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _label(x: float, y: float, text: str, anchor: str = "middle", attributes: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}'
    return f"<text {place}>{_text(text)}</text>"


def _text(text: str) -> str:
    return escape(printable(text))


def _shortened(title: str) -> str:
    return title if len(title) <= _TITLE_LENGTH else f"{title[: _TITLE_LENGTH - 1]}…"
