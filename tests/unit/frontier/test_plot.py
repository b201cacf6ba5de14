"""The plot of a frontier: one SVG without references to anything else."""

from __future__ import annotations

import itertools
import random
from xml.etree import ElementTree

import pytest
from testbed.studies import noisy_trial, power_settings

from wattspan.frontier.estimates import SettingEstimates, frontier
from wattspan.frontier.plot import plot
from wattspan.frontier.trials import Setting

LEVELS = power_settings(100, 85, 70, 55)
SVG = "{http://www.w3.org/2000/svg}"


def estimates(repeat: int = 3) -> SettingEstimates:
    def curve(setting: Setting) -> tuple[float, float]:
        share = 1.0 if setting.power is None else setting.power.value
        return 1.3 - 0.3 * share, 300 * abs(share - 0.65) + 200

    rng = random.Random(2)
    return SettingEstimates(
        LEVELS,
        [noisy_trial(curve, one, block, 0.01, rng) for block in range(repeat) for one in LEVELS],
    )


def test_plot_shows_every_setting_and_the_frontier() -> None:
    found = estimates()
    root = ElementTree.fromstring(plot(found, "A title", "A note", "step"))
    points = [one for one in root.findall(f"{SVG}circle") if "key" not in str(one.get("class"))]
    assert len([one for one in points if one.get("class") in ("on", "off")]) == len(LEVELS)
    assert len([one for one in points if one.get("class") == "baseline"]) == 1
    (line,) = root.findall(f"{SVG}polyline")
    assert len(str(line.get("points")).split()) == len(frontier(found))
    assert any("seconds per step" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_points_lie_inside_the_sheet() -> None:
    root = ElementTree.fromstring(plot(estimates(), "t", "n", "step"))
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    for circle in root.findall(f"{SVG}circle"):
        assert 0 < float(str(circle.get("cx"))) < width
        assert 0 < float(str(circle.get("cy"))) < height


def test_plot_of_single_trials_has_no_infinite_bars() -> None:
    drawn = plot(estimates(repeat=1), "t", "n", "step")
    assert "inf" not in drawn
    assert "nan" not in drawn


def test_names_cannot_break_out_of_the_plot() -> None:
    drawn = plot(estimates(), "<script>&\x1b", '"><x', "a<b")
    root = ElementTree.fromstring(drawn)
    assert not root.findall(f".//{SVG}script")
    assert "\x1b" not in drawn
    assert "href" not in drawn


def label_boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """The labels of settings, each as wide as a narrow letter a character at least."""
    names = {str(one) for one in LEVELS}
    found = []
    for text in root.findall(f"{SVG}text"):
        if text.text in names:
            x, y, width = float(str(text.get("x"))), float(str(text.get("y"))), 5 * len(text.text)
            left = x - width * {"start": 0, "middle": 0.5, "end": 1}[str(text.get("text-anchor"))]
            found.append((left, y - 10, left + width, y))
    return found


def test_labels_overlap_nothing_and_are_not_cut_off() -> None:
    near = {LEVELS[0]: (1.0, 300.0), LEVELS[1]: (1.001, 299.0), LEVELS[2]: (1.3, 250.0),
            LEVELS[3]: (1.301, 249.5)}  # fmt: skip
    rng = random.Random(2)
    trials = [noisy_trial(near.__getitem__, one, block, 1e-5, rng) for block in range(2)
              for one in LEVELS]  # fmt: skip
    root = ElementTree.fromstring(plot(SettingEstimates(LEVELS, trials), "t", "n", "step"))
    boxes = label_boxes(root)
    assert len(boxes) >= 3
    width = float(str(root.get("viewBox")).split()[2])
    for number, (left, top, right, bottom) in enumerate(boxes):
        assert left > 0
        assert right < width
        for other in boxes[:number]:
            apart = left >= other[2] or other[0] >= right or top >= other[3] or other[1] >= bottom
            assert apart, (boxes[number], other)


@pytest.mark.parametrize("note", ["a b" * 120, "x" * 300, "W\n" * 60, ""])
def test_long_note_has_lines_that_are_not_cut_off(note: str) -> None:
    root = ElementTree.fromstring(plot(estimates(), "t", note, "step"))
    _, top, width, height = map(float, str(root.get("viewBox")).split())
    keys = ("frontier", "beaten beyond chance", "baseline")
    notes = [one for one in root.findall(f"{SVG}text")
             if one.get("class") == "note" and one.text not in keys]  # fmt: skip
    assert "".join(str(one.text or "") for one in notes).replace(" ", "") == note.replace(
        " ", ""
    ).replace("\n", "?")
    for one in notes:
        assert float(str(one.get("x"))) + 7.8 * len(one.text or "") < width
        assert top + 24 < float(str(one.get("y"))) < 50
    (sheet,) = root.findall(f"{SVG}rect")
    assert (float(str(sheet.get("y"))), float(str(sheet.get("height")))) == (top, height)
    places = [float(str(one.get("y"))) for one in notes]
    assert all(b - a >= 15 for a, b in itertools.pairwise(places))


def test_long_title_is_shortened() -> None:
    root = ElementTree.fromstring(plot(estimates(), "x" * 300, "n", "step"))
    (title,) = [one for one in root.findall(f"{SVG}text") if one.get("class") == "title"]
    assert len(str(title.text)) < 100
