"""Results as SVG files for docs/autotune.md. Only this module needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.tuner.curves import curves

from benchmarks.tuner.results import Results
from benchmarks.tuner.tables import LEAST, LOWEST, OURS

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images" / "autotune"
COLOURS = {OURS: "#0b6e4f", LOWEST: "#c8553d", LEAST: "#d9a441"}


def draw(found: Results, folder: Path = FOLDER) -> None:
    """Every figure for which there are results."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no figures: matplotlib is missing (pip install matplotlib)")
        return
    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "wattspan",
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    _curves(folder)
    for section, function in (
        ("table", _budget),
        ("table", _savings),
        ("certification", _certification),
        ("lengths", _lengths),
        ("example", _example),
    ):
        if section in found:
            function(found, folder)


def _curves(folder: Path) -> None:
    """Reaction of the jobs."""
    figure, (left, right) = _figure(1, 2, (9, 3.6))
    for curve in curves().values():
        style = "--" if curve.second_hand else "-"
        limits = [watts / curve.original for watts in curve.watts if watts >= 0.4 * curve.original]
        effects = curve.effects[-len(limits) :]
        left.plot(limits, [one.time for one in effects], style, marker=".", lw=1, label=curve.name)
        right.plot(limits, [one.energy for one in effects], style, marker=".", lw=1)
    left.axhline(1.05, color="black", lw=0.8)
    left.set(ylim=(0.9, 1.6), ylabel="time per unit of work", xlabel="limit, part of the original")
    right.set(ylabel="energy per unit of work", xlabel="limit, part of the original")
    figure.legend(loc="center right", frameon=False, fontsize=7)
    figure.subplots_adjust(right=0.8, left=0.07, wspace=0.25, bottom=0.15)
    _save(figure, folder, "curves")


def _budget(found: Results, folder: Path) -> None:
    """Whole-run slowdowns, cell by cell."""
    cells = found["table"]["cells"]
    figure, (axes,) = _figure(1, 1, (8, 0.2 * len(cells) + 1))
    for place, cell in enumerate(reversed(cells)):
        for shift, method in ((0.15, OURS), (-0.15, LOWEST), (-0.35, LEAST)):
            facts = cell["methods"].get(method)
            if facts is None:
                continue
            low, middle, high = (100 * one for one in facts["slowdowns"])
            colour = COLOURS[method]
            axes.plot([low, high], [place + shift] * 2, color=colour, lw=1.6)
            axes.plot([middle], [place + shift], "o", color=colour, ms=2.5)
    axes.axvline(100 * found["table"]["budget"], color="black", lw=1)
    axes.set_yticks(range(len(cells)), [one["name"] for one in reversed(cells)], fontsize=7)
    axes.set_ylim(-1, len(cells))
    axes.set_xscale("symlog", linthresh=10)
    axes.set_xlim(-3, 60)
    ticks = (-2, 0, 2, 5, 8, 10, 20, 40)
    axes.set_xticks(ticks, [str(one) for one in ticks])
    axes.set_xlabel(
        "slowdown of the whole run, %: median, 5 to 95 % of runs; the line is the budget"
    )
    for method, colour in COLOURS.items():
        axes.plot([], [], color=colour, label=method)
    axes.legend(loc="lower right", frameon=False, fontsize=7)
    figure.tight_layout()
    _save(figure, folder, "budget")


def _savings(found: Results, folder: Path) -> None:
    """Achieved part of the oracle's saving."""
    cells = [
        cell
        for cell in found["table"]["cells"]
        if cell["goal"] and OURS in cell["methods"] and cell["methods"][OURS]["share"] is not None
    ]
    figure, (axes,) = _figure(1, 1, (8, 0.18 * len(cells) + 1))
    for place, cell in enumerate(reversed(cells)):
        share = 100 * cell["methods"][OURS]["share"]
        reached = cell["methods"][OURS]["share"] >= cell["goal"]
        axes.barh(place, share, color=COLOURS[OURS] if reached else "#9aa5a0", height=0.7)
        axes.plot([100 * cell["goal"]] * 2, [place - 0.4, place + 0.4], color="black", lw=1.2)
    axes.set_yticks(range(len(cells)), [one["name"] for one in reversed(cells)], fontsize=7)
    axes.set_ylim(-1, len(cells))
    axes.set_xlim(0, 110)
    axes.set_xlabel("mean saving, % of the oracle's; the marks are the goals")
    figure.tight_layout()
    _save(figure, folder, "savings")


def _certification(found: Results, folder: Path) -> None:
    """Rate of held settings by their true cost."""
    figure, (axes,) = _figure(1, 1, (5, 3.2))
    rows = [one for one in found["certification"] if not one["remembered"]]
    for cv in sorted({one["cv"] for one in rows}):
        same = [one for one in rows if one["cv"] == cv]
        x = [100 * one["slowdown"] for one in same]
        y = [100 * one["held"] / one["runs"] for one in same]
        errors = [
            [100 * one["held"] / one["runs"] - 100 * one["low"] for one in same],
            [100 * one["high"] - 100 * one["held"] / one["runs"] for one in same],
        ]
        axes.errorbar(x, y, yerr=errors, marker="o", ms=3, lw=1, capsize=2, label=f"CV {cv:.0%}")
    axes.axvline(5, color="black", lw=0.8)
    axes.axhline(5, color="black", lw=0.8, ls=":")
    axes.set(xlabel="true slowdown of any cap, %", ylim=(0, 102))
    axes.set_ylabel("runs that held a setting, %")
    axes.legend(frameon=False)
    figure.tight_layout()
    _save(figure, folder, "certification")


def _lengths(found: Results, folder: Path) -> None:
    """Effect of the length of a job."""
    names = list(dict.fromkeys(one["cell"] for one in found["lengths"]))
    figure, panels = _figure(2, len(names), (8, 4.6))
    for column, name in enumerate(names):
        rows = [one for one in found["lengths"] if one["cell"] == name]
        for method, colour in COLOURS.items():
            for line, key in enumerate(("slowdown", "saving")):
                axes = panels[line * len(names) + column]
                values = [100 * one["methods"][method][key] for one in rows]
                axes.plot(
                    [one["units"] for one in rows], values, "o-", ms=3, color=colour, label=method
                )
                axes.set_xscale("log")
                axes.set_ylabel(f"{key}, %")
        panels[column].axhline(5, color="black", lw=0.8)
        panels[column].set_title(name, fontsize=9)
        panels[len(names) + column].set_xlabel("steps of the job")
    panels[0].legend(frameon=False, fontsize=7)
    figure.tight_layout()
    _save(figure, folder, "lengths")


def _example(found: Results, folder: Path) -> None:
    """One run in full."""
    example = found["example"]
    figure, (upper, lower) = _figure(2, 1, (8, 4.6), sharex=True)
    for method, line in example["lines"].items():
        hours, watts = zip(*line["set"], strict=True)
        end = line["slow"][-1][0]
        upper.step([*hours, end], [*watts, watts[-1]], where="post", lw=1, color=COLOURS[method])
        at, slow = zip(*line["slow"], strict=True)
        lower.plot(at, [100 * one for one in slow], lw=1.2, color=COLOURS[method], label=method)
    upper.axhline(example["oracle"], color="black", lw=0.8, ls=":")
    upper.set_ylabel("limit, W (dotted: oracle)")
    lower.axhline(100 * example["budget"], color="black", lw=0.8)
    lower.set(ylabel="slowdown so far, %", xlabel="hours", yscale="symlog")
    ticks = (0, 1, 5, 20, 50)
    lower.set_yticks(ticks, [str(one) for one in ticks])
    lower.legend(frameon=False)
    upper.set_title(example["cell"], fontsize=9)
    figure.tight_layout()
    _save(figure, folder, "run")


def _figure(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    panels = figure.subplots(rows, columns, squeeze=False, **more)
    return figure, list(panels.flat)


def _save(figure: Any, folder: Path, name: str) -> None:
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
