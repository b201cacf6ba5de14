"""The live page in a real browser, before worlds that are made up: content of any host."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from playwright.sync_api import Browser, ViewportSize
from testbed import page_worlds
from testbed.browser import Tab, opened
from testbed.drawing.browser import browser as chromium
from testbed.fixtures import entered
from testbed.page_server import STATIC, PageServer
from testbed.tuned import PIPELINED
from testbed.waiting import eventually

from wattspan.tuning.serialization import row_to_json

pytestmark = [pytest.mark.long, pytest.mark.needs_browser]

DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
WEIGHT = 150_000  # bytes that the whole page may have, uncompressed

# for every drawn node: incoming ribbons, outgoing ribbons, and its own value.
BALANCES = """() => {
  const ribbons = [...document.querySelectorAll('.ribbon')].map(r => r.dataset);
  const sum = (end, id) => ribbons.filter(r => r[end] === id)
    .reduce((all, r) => all + Number(r.watts), 0);
  return [...document.querySelectorAll('.node')].map(({dataset: {id, layer, watts}}) => [
    id, layer, Number(watts), sum('target', id), sum('source', id)]);
}"""

# contrast of every text with its background by the WCAG definition, worst first
CONTRASTS = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (colour) => {
    const [r, g, b] = rgba(colour).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
    return 'white';
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || !element.getClientRects().length) continue;
    if (element.closest('input:disabled + span, .hidden, .skip, noscript')) continue;
    const style = getComputedStyle(element);
    const colour = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const [a, b] = [light(colour), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found.push([ratio, node.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
}"""

# Every word in the tables that does not stand on one line.
BROKEN_WORDS = """() => {
  const broken = [];
  for (const cell of document.querySelectorAll('#devices td, #spans td')) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      for (const {0: word, index} of node.data.matchAll(/\\S+/g)) {
        const range = document.createRange();
        range.setStart(node, index);
        range.setEnd(node, index + word.length);
        const lines = new Set([...range.getClientRects()].map(({top}) => Math.round(top)));
        if (lines.size > 1) broken.push(word);
      }
    }
  }
  return broken;
}"""

OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


browser = entered(chromium, "module")


def shown(tab: Tab, text: str) -> None:
    eventually(lambda: text in tab.text("body"), f"the page says {text!r}")


def fits(tab: Tab, width: int) -> None:
    """The page is redrawn for another width one frame after the resize."""
    eventually(lambda: tab.page.evaluate(OVERFLOW) <= 0, f"it fits into {width} pixels")


def test_whole_page_is_small() -> None:
    files = [file for file in STATIC.rglob("*") if file.suffix in {".html", ".css", ".js"}]
    assert sum(file.stat().st_size for file in files) <= WEIGHT
    assert len(files) > 5


def test_flow_as_drawn_conserves(browser: Browser) -> None:
    with PageServer(page_worlds.eight_gpus()) as server, opened(browser, server.url) as tab:
        balances = tab.page.evaluate(BALANCES)
    assert {layer for _, layer, *_ in balances} == {"device", "type", "rest", "group", "process"}
    for node, layer, watts, into, out in balances:
        if layer != "device":
            assert into == pytest.approx(watts, abs=1e-6), node
        if layer in {"device", "type"}:
            assert out == pytest.approx(watts, abs=1e-6), node
        assert out <= watts + 1e-6, node


def test_ribbon_colour_needs_a_certain_majority(browser: Browser) -> None:
    told = page_worlds.world()
    for link in told["now"]["links"]:
        del link["type"]  # as in the agent's data: by type up to the groups, then together
    told["now"]["links"] = page_worlds.merged(told["now"]["links"])
    ribbons = (
        "[...document.querySelectorAll('.ribbon')].map(r => "
        "[r.dataset.source + ' ' + r.dataset.target, r.classList[1]])"
    )
    with PageServer(told) as server, opened(browser, server.url) as tab:
        kinds = dict(tab.page.evaluate(ribbons))
    assert kinds["t:cpu g:llm.service"] == "cpu"
    assert kinds["g:slurm job 4711 p:0"] == "gpu", "560 W of 647 W at least"
    assert kinds["g:slurm job 4711 p:1"] == "mixed", "47 W that might be anything"
    assert kinds["p:3 s:vllm serve/chat llama-3.1-70b"] == "gpu"
    assert kinds["g:alice p:6"] == "cpu"
    assert kinds["d:intel-rapl:0 r:idle"] == "idle"


def test_bars_do_not_overlap(browser: Browser) -> None:
    with PageServer(page_worlds.eight_gpus()) as server, opened(browser, server.url) as tab:
        boxes = tab.page.evaluate(
            "[...document.querySelectorAll('.node .bar')].map(n => n.getBoundingClientRect())"
            ".map(r => [Math.round(r.x), r.y, r.bottom])"
        )
        scales = tab.page.evaluate(
            "[...document.querySelectorAll('.drawing svg')]"
            ".map(s => s.getBoundingClientRect().width / s.getAttribute('width'))"
        )
        chart = tab.page.evaluate(
            "[...document.querySelectorAll('.chart, .uplot')].map(e => e.clientWidth)"
        )
    assert scales == [1], "drawn for the room that there is"
    assert chart[0] == chart[1], "drawn for the room that there is"
    columns: dict[int, list[tuple[float, float]]] = {}
    for x, top, bottom in boxes:
        columns.setdefault(x, []).append((top, bottom))
    assert len(columns) == 4
    for column in columns.values():
        column.sort()
        for (_, bottom), (top, _) in pairwise(column):
            assert top >= bottom


def test_every_text_can_be_read_against_its_ground(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        for size in (DESKTOP, PHONE):
            tab.page.set_viewport_size(size)
            for scheme in ("light", "dark"):
                tab.page.emulate_media(color_scheme=scheme)
                contrasts = tab.page.evaluate(CONTRASTS)
                assert len(contrasts) > 100
                assert [one for one in contrasts if one[0] < 4.5] == [], scheme


@pytest.mark.parametrize(
    "world",
    [
        *("eight_gpus", "hostile", "unknown"),
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("world", "quiet")),
    ],
)
def test_page_fits_every_width(browser: Browser, world: str) -> None:
    told = getattr(page_worlds, world)()
    known = world != "unknown"
    with PageServer(told) as server, opened(browser, server.url) as tab:
        drawing, listing = tab.page.locator("#drawing"), tab.page.locator("#list")
        for width in (1000, 700, 390, 320):
            tab.page.set_viewport_size({"width": width, "height": 844})
            wanted = (known and width > 680, known and width < 680)

            def settled(wanted: tuple[bool, bool] = wanted) -> bool:
                return (drawing.is_visible(), listing.is_visible()) == wanted

            eventually(settled, f"the page's form at {width} pixels")
            fits(tab, width)


def test_table_words_are_not_wrapped(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        for width in (1280, 900, 800, 768, 700, 390):
            tab.page.set_viewport_size({"width": width, "height": 844})
            fits(tab, width)
            assert tab.page.evaluate(BROKEN_WORDS) == [], width


def test_throttling_is_shown_as_none_reasons_or_unknown(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        throttling = tab.page.locator("#devices td[data-title=Throttling]").all_inner_texts()
    assert throttling == ["none", "sw power cap", "–", "–", "–"]


def test_division_by_learned_cost_is_named_beside_the_provenance(browser: Browser) -> None:
    told = page_worlds.world()
    told["snapshot"]["domains"][-1]["method"] = "learned"
    told["snapshot"]["domains"][-2]["method"] = "counters"
    with PageServer(told) as server, opened(browser, server.url) as tab:
        figures = tab.page.locator("#devices td[data-title=Figures]").all_inner_texts()
    assert figures == [*["emulated"] * 3, "emulated, by counters", "emulated, by learned cost"]


def test_hostile_names_stay_text(browser: Browser) -> None:
    with PageServer(page_worlds.hostile()) as server, opened(browser, server.url) as tab:
        for form in ("drawing", "list"):
            tab.page.locator(f"#form [value={form}]").check()
            assert tab.page.locator("img, script:not([src])").count() == 0
            assert "owned" not in tab.page.title().partition("onerror")[0]
            body = tab.text("body")
            assert page_worlds.IMAGE in body
            assert page_worlds.REVERSED in body
            assert "(no name)" in body
            assert max(map(len, body.split())) <= 500, "ten kilobytes are cut short"
        # bidirectional text does not affect its surroundings
        isolated = "e => getComputedStyle(e).unicodeBidi"
        for name in tab.page.locator("#list .name").all():
            assert name.evaluate(isolated).startswith("isolate")


def test_now_and_the_last_hour_are_switched_by_keyboard(browser: Browser) -> None:
    told = page_worlds.world()
    with PageServer(told) as server, opened(browser, server.url) as tab:
        bar = tab.page.locator(".node[data-id='t:gpu']")
        now = float(bar.get_attribute("data-watts") or 0)
        tab.page.locator("#stretch [value=now]").focus()
        tab.page.keyboard.press("ArrowRight")
        assert tab.page.locator("#stretch [value=hour]").is_checked()
        assert float(bar.get_attribute("data-watts") or 0) == pytest.approx(0.8 * now)
        tab.page.keyboard.press("ArrowLeft")
        assert float(bar.get_attribute("data-watts") or 0) == pytest.approx(now)


def test_bar_shows_and_announces_its_figures(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        tab.page.locator(".node[data-id='d:gpu:GPU-8c2a11f0-0000']").focus()
        tab.page.keyboard.press("ArrowRight")
        tab.page.keyboard.press("ArrowRight")
        focused = "document.activeElement.dataset.id"
        assert tab.page.evaluate(focused) == "g:slurm job 4711"
        readout = tab.text("#readout")
        assert re.search(
            r"slurm job 4711 .*697\sW · 6\.97\skJ in 10\ss · 54\s% of the host", readout
        )
        assert "slurm job 4711" in tab.text("#told")
        lit = tab.page.evaluate("[...document.querySelectorAll('.ribbon.on')].map(r => r.dataset)")
        assert {"t:gpu", "g:slurm job 4711"} <= {ribbon["source"] for ribbon in lit}
        assert "p:3" not in {ribbon["target"] for ribbon in lit}, "another group's process"
        tab.page.keyboard.press("Enter")
        tab.page.locator("#skip, .skip").focus()
        assert "slurm job 4711" in tab.text("#readout"), "it is held"
        tab.page.locator(".node[aria-pressed=true]").focus()
        tab.page.keyboard.press("Escape")
        assert tab.page.locator(".ribbon.on").count() == 0


def test_update_keeps_focus_scroll_and_elements(browser: Browser) -> None:
    told = page_worlds.world()
    with PageServer(told) as server, opened(browser, server.url) as tab:
        tab.page.locator(".node[data-id='p:0']").focus()
        tab.page.evaluate("scrollTo(0, 120)")
        count = tab.page.evaluate("document.querySelectorAll('*').length")
        jobs = [
            (group, name, {k: 1.1 * w for k, w in by.items()})
            for group, name, by in page_worlds.JOBS
        ]
        watts = tab.page.locator(".node[data-id='p:0']")
        before = watts.get_attribute("data-watts")
        server.live = page_worlds.world(jobs=jobs)
        eventually(lambda: watts.get_attribute("data-watts") != before, "new figures are shown")
        assert tab.page.evaluate("document.activeElement.dataset.id") == "p:0"
        assert tab.page.evaluate("scrollY") == 120
        assert tab.page.evaluate("document.querySelectorAll('*').length") == count


def test_removed_nodes_leave_no_elements(browser: Browser) -> None:
    elements = "document.querySelectorAll('*').length"
    with PageServer(page_worlds.quiet()) as server, opened(browser, server.url) as tab:
        node = tab.page.locator(".node")

        def counted(told: dict[str, Any], nodes: int) -> int:
            server.live = told
            eventually(lambda: node.count() == nodes, f"{nodes} bars")
            return int(tab.page.evaluate(elements))

        few, many = node.count(), len(page_worlds.eight_gpus()["now"]["nodes"])
        big = counted(page_worlds.eight_gpus(), many)
        small = counted(page_worlds.quiet(), few)
        assert small < big / 2
        assert counted(page_worlds.eight_gpus(), many) == big
        assert counted(page_worlds.quiet(), few) == small


def test_bars_keep_their_order_until_one_clearly_outgrows_another(browser: Browser) -> None:
    def told(first: float, second: float) -> dict[str, Any]:
        return page_worlds.world(jobs=[("a", "a", {"cpu": first}), ("b", "b", {"cpu": second})])

    groups = "[...document.querySelectorAll('.node[data-layer=group]')].map(n => n.dataset.id)"
    with PageServer(told(100, 90)) as server, opened(browser, server.url) as tab:
        first = tab.page.locator(".node[data-id='g:a']")
        assert tab.page.evaluate(groups) == ["g:a", "g:b"]
        server.live = told(90, 100)
        eventually(lambda: first.get_attribute("data-watts") == "90", "a is less than b")
        assert tab.page.evaluate(groups) == ["g:a", "g:b"]
        server.live = told(40, 100)
        eventually(lambda: first.get_attribute("data-watts") == "40", "a is far less than b")
        assert tab.page.evaluate(groups) == ["g:b", "g:a"]


def test_page_reports_a_stopped_server_and_recovers(
    browser: Browser,
) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        assert tab.text("#fresh-text") == "Live"
        server.stop()
        eventually(lambda: "No answer for" in tab.text("#fresh-text"), "the page is stale")
        assert "the page retries" in tab.text("#stale")
        assert tab.page.locator("body.stale").count() == 1
        assert "1294" in tab.text("#figures"), "the last figures stay"
        server.start()
        eventually(lambda: tab.text("#fresh-text") == "Live", "the page goes on")
        assert tab.text("#stale") == ""
        assert tab.page.locator("body.stale").count() == 0


def test_stalled_agent_is_distinguished_from_a_missing_one(
    browser: Browser,
) -> None:
    told = page_worlds.world() | {"age": 40}
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert tab.text("#fresh-text") == "Figures are old"
        assert "last measurement is of" in tab.text("#stale")


def test_failed_page_part_affects_only_itself(browser: Browser) -> None:
    told = page_worlds.world() | {"power": None}
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert len(tab.texts("#devices tbody tr")) == 5
        assert len(tab.texts("#health > li")) == 3
        assert tab.wrongs
        tab.wrongs.clear()
        assert tab.text("#fresh-text") == "Live"
        tab.wrongs.clear()


def test_missing_figures_are_explained(browser: Browser) -> None:
    with PageServer(page_worlds.unknown()) as server, opened(browser, server.url) as tab:
        body = tab.text("body")
        for sentence in (
            "not measured yet",
            "Waiting for the first figures",
            "No history yet.",
            "No device is known yet",
            "No spans yet.",
            "Tuning is off.",
        ):
            assert sentence in body
        assert "EMULATED" not in body
        assert tab.page.locator("#stretch [value=hour]").is_disabled()


def test_unknown_power_is_a_dash(browser: Browser) -> None:
    with PageServer(page_worlds.blind()) as server, opened(browser, server.url) as tab:
        for form in ("drawing", "list"):
            tab.page.locator(f"#form [value={form}]").check()
            nodes = tab.page.locator(f"#{form} [data-layer=device]").all_text_contents()
            (gpu,) = (text for text in nodes if "H100" in text)
            assert "–" in gpu
            assert "0 W" not in gpu.replace("\u00a0", " ")
        assert tab.text("#figures .big").replace("\u00a0", " ") == "≥ 185 W"
        assert "unknown for NVIDIA H100 80GB HBM3 0" in tab.text("#figures")
        assert "≥" in tab.texts("#figures .big")[1]
        assert tab.page.title().startswith("≥")
        assert "NaN" not in tab.page.content()


def test_problems_stand_at_the_top(browser: Browser) -> None:
    told = page_worlds.blind()
    with PageServer(told) as server, opened(browser, server.url) as tab:
        banner = tab.text("#problems")
        assert banner.startswith("3 problems")
        assert "NVIDIA H100 80GB HBM3 0 gives no readings" in banner
        assert "ipmi is down: Cannot open /dev/ipmi0" in banner
    told["snapshot"]["sources"] += [page_worlds.source(f"otlp{n}", False, 0) for n in range(2)]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert "2 more in Health" in tab.text("#problems")
    with PageServer(page_worlds.quiet()) as server, opened(browser, server.url) as tab:
        assert not tab.page.locator("#problems").is_visible()


# painted pixels of the plot in the middle of each of so many steps
HEIGHTS = """(steps) => {
  const canvas = document.querySelector('#plot canvas');
  const [box, over] = [canvas, document.querySelector('#plot .u-over')]
    .map(e => e.getBoundingClientRect());
  const scale = canvas.width / box.width;
  const [left, top] = [over.left - box.left, over.top - box.top].map(v => Math.round(v * scale));
  const [wide, tall] = [over.width, over.height].map(v => Math.round(v * scale));
  const pixels = canvas.getContext('2d').getImageData(left, top, wide, tall).data;
  const coloured = (at) => Math.max(...pixels.slice(at, at + 3))
    - Math.min(...pixels.slice(at, at + 3)) > 40 && pixels[at + 3] > 200;
  return [...Array(steps).keys()].map((step) => {
    const column = Math.round(wide * (step + 0.5) / steps);
    return [...Array(tall).keys()].filter(row => coloured(4 * (row * wide + column))).length;
  });
}"""


def test_first_step_of_the_chart_is_that_of_the_known_devices(browser: Browser) -> None:
    """One device of the stack is known a step later than the others."""
    told = page_worlds.world(page_worlds.two_packages())
    for one in told["power"]["series"]:
        one["watts"] = [None, *one["watts"][-4:]]
    told["power"]["series"][1]["watts"][1] = None
    sums = [
        sum(one["watts"][step] or 0.0 for one in told["power"]["series"]) for step in range(1, 5)
    ]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        heights = tab.page.evaluate(HEIGHTS, 5)[1:]
    assert [high / heights[-1] for high in heights] == pytest.approx(
        [one / sums[-1] for one in sums], abs=0.03
    )


def test_gaps_are_gaps_and_the_chart_is_read_by_keyboard(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        chart = tab.page.locator("[role=slider]")
        assert chart.get_attribute("data-gaps") == "1"
        chart.focus()
        tab.page.keyboard.press("Home")
        assert "15" not in (chart.get_attribute("aria-valuenow") or "")
        first = chart.get_attribute("aria-valuetext") or ""
        for _ in range(410 // 12):
            tab.page.keyboard.press("PageUp")
        assert chart.get_attribute("aria-valuetext") != first
        assert "at least" in (chart.get_attribute("aria-valuetext") or "")
        assert "1 of 5 devices without a figure" in tab.text("#power-readout")


def test_every_control_and_region_has_a_name(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        tree = tab.page.locator("body").aria_snapshot()
        unnamed = re.findall(
            r"^\s*- (?:button|link|radio|slider|table|group|list)(?: \[[^]]*\])*:?$",
            tree,
            re.MULTILINE,
        )
        headings = re.findall(r'heading "([^"]+)" \[level=2\]', tree)
        regions = re.findall(r'region "([^"]+)"', tree)
    assert [line for line in unnamed if "list" not in line] == []
    assert headings == regions
    assert {"Where the energy goes", "Power over time", "Tuner", "Health"} <= set(headings)
    for part in (
        "banner",
        "main",
        "contentinfo",
        'radio "Now" [checked]',
        'slider "Power at a time"',
    ):
        assert part in tree
    assert re.search(r'button "python train.py, process: 647\sW, 50\s% of the host"', tree)
    assert re.search(r'rowheader "NVIDIA H100 80GB HBM3 0 gpu', tree)


def test_page_is_operable_by_keyboard(browser: Browser) -> None:
    focused = (
        "(e => e.getAttribute('name') ?? e.getAttribute('class') ?? e.getAttribute('href'))"
        "(document.activeElement)"
    )
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        reached = []
        while "live.json" not in reached and len(reached) < 30:
            tab.page.keyboard.press("Tab")
            reached.append(str(tab.page.evaluate(focused)).split()[0])
    # One stop for the whole drawing: arrow keys go on from there.
    assert reached == [
        *("skip", "stretch", "form", "node", "chart", "trace", "trace", "trace"),
        *("metrics", "healthz", "live.json"),
    ]


def test_flow_list_matches_the_drawing(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        drawn = tab.page.evaluate(BALANCES)
        tab.page.locator("#form [value=list]").check()
        listed = dict(
            tab.page.evaluate(
                "[...document.querySelectorAll('#list li')]"
                ".map(({dataset}) => [dataset.id, Number(dataset.watts)])"
            )
        )
    wanted = {node: watts for node, layer, watts, *_ in drawn if layer != "type"}
    assert listed == pytest.approx(wanted)


def test_tuner_over_budget_is_marked(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        held, released, declined = tab.texts("#tuner .job")
    assert "Hold 520 W: 3.1 % slower" in held
    assert "520\u00a0W of 700\u00a0W" in held
    assert "OVER" not in held
    assert "Surely saved\n371\u00a0kJ" in held
    assert "Saved, as an estimate\n412\u00a0kJ" in held
    assert "OVER" in released
    assert "not applied" in declined
    assert "slower" not in declined
    assert "Surely saved\n0\u00a0J" in declined
    assert "Saved, as an estimate\n–" in declined


def test_declared_job_shows_asked_and_given_terms(browser: Browser) -> None:
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        held, released, _ = tab.texts("#tuner .job")
    assert (
        "User 1000 declared train <b> and asked for a budget of 20.0\u00a0%. "
        "Given (limited): a budget of 5.0\u00a0%, the objective energy, the knobs gpu_power; "
        "mode apply. The budget of 20 % is limited to 5 %: the operator permits no more."
    ) in held
    assert "declared" not in released


def test_tracked_server_has_load_headroom_and_misses(browser: Browser) -> None:
    told = page_worlds.world()
    load = {
        "load": 11.34,
        "bin": 4,
        "bin_bound": 16.0,
        "headroom": 1.41,
        "objectives": [
            {"name": "ttft_p99", "limit_seconds": 0.4, "allowed": 0.01, "requests": 0, "misses": 0},
            {
                "name": "tbt_p99",
                "limit_seconds": 0.1,
                "allowed": 0.01,
                "requests": 400,
                "misses": 3,
            },
        ],
    }
    server_job = page_worlds.job("llm/chat", "holding", "Hold 560 W.", load=load, budget=0.0)
    told["snapshot"]["tuning"]["jobs"] = [server_job]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        (text,) = tab.texts("#tuner .job")
    assert "Load\n11.3, bin up to 16 requests in flight" in text
    assert "Headroom\n1.4 times the load" in text
    assert "Over ttft_p99\n–" in text
    assert "Over tbt_p99\n0.8\u00a0% of 400, 1.0\u00a0% permitted" in text
    assert "OVER" not in text
    told["snapshot"]["tuning"]["jobs"] = [server_job | {"load": load | {"headroom": None}}]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert "Headroom\n–" in tab.texts("#tuner .job")[0]


def test_pipelines_show_their_ranks(browser: Browser) -> None:
    told = page_worlds.world()
    job = page_worlds.job("gpt/iteration", "holding", PIPELINED.decision.sentence)
    job["pipelines"] = row_to_json(PIPELINED)["pipelines"]
    told["snapshot"]["tuning"]["jobs"] = [job]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert not tab.page.locator("#tuner .partners").is_visible()
        texts = tab.texts("#tuner .pipeline")
        rows = tab.texts("#tuner .pipeline:first-child tbody tr")
    assert len(texts) == 2
    assert texts[0].startswith("Pipeline dp-0 (straggler): 1.16\u00a0s per iteration")
    assert "it waits for one of 1.17\u00a0s" in texts[0]
    assert rows[0].split("\t") == [
        "0", "GPU-0", "1635\u00a0MHz", "1635\u00a0MHz", "12.1\u00a0%", "5.31\u00a0kJ",
    ]  # fmt: skip
    assert "no complete iteration yet" in texts[1]


def test_other_hosts_of_a_job_are_named_beside_its_pipelines(browser: Browser) -> None:
    told = page_worlds.world()
    job = page_worlds.job("gpt/iteration", "holding", PIPELINED.decision.sentence)
    job |= {name: row_to_json(PIPELINED)[name] for name in ("pipelines", "partners")}
    told["snapshot"]["tuning"]["jobs"] = [job]
    with PageServer(told) as server, opened(browser, server.url) as tab:
        texts = tab.texts("#tuner .partners li")
    assert texts == [
        "Other hosts not used\n\nNo etcd member decides.",
        "host-2 record of 1.2\u00a0s ago · pipeline dp-2 is the straggler\n\n"
        "Its pipeline dp-2 takes 1.17 s.",
    ]


def test_trace_id_can_be_copied(browser: Browser) -> None:
    permitted = {"permissions": ["clipboard-read", "clipboard-write"]}
    with PageServer(page_worlds.world()) as server, opened(browser, server.url, **permitted) as tab:
        tab.page.locator("#spans .trace").first.focus()
        tab.page.keyboard.press("Control+C")
        copied = tab.page.evaluate("navigator.clipboard.readText()")
    assert copied == "4bf92f3577b34da6a3ce929d0e0e4736"


def test_language_models_have_joules_per_token(browser: Browser) -> None:
    told = page_worlds.world()
    with PageServer(told) as server, opened(browser, server.url) as tab:
        assert not tab.page.locator("#models-section").is_visible()
    model = {
        "service": "vllm",
        "model": "<b>llama</b>",
        "gpu_joules": {"input": 100.0, "output": 800.0},
        "tokens": {"input": 2000, "output": 400},
        "requests": {"model": 9, "tokens": 1},
    }
    client = {"service": "shop", "model": "llama", "role": "client", "requests": 357, "tokens": {}}
    theirs = {**model, "owner": "eve"}
    spans = {"inference": [model, theirs], "unmetered": [client]}
    told["snapshot"] |= {"spans": spans, "bounded": ["gpu"]}
    with PageServer(told) as server, opened(browser, server.url) as tab:
        cells = tab.texts("#models tbody td, #models tbody th")
    figures = [
        "<b>llama</b> vllm",
        "10",
        "≥\u00a0900\u00a0J",
        "≥\u00a090.0\u00a0J",
        "≥\u00a050.0\u00a0mJ",
        "≥\u00a02.00\u00a0J",
        "90\u00a0%",
    ]
    assert cells[:7] == figures
    assert cells[7:14] == ["<b>llama</b> vllm@eve", *figures[1:]]
    assert cells[14:] == ["llama (client) shop", "357", *["–"] * 5]


def test_serving_engines_have_joules_with_their_uncertainty(browser: Browser) -> None:
    with PageServer(page_worlds.quiet()) as server, opened(browser, server.url) as tab:
        assert not tab.page.locator("#engines-section").is_visible()
    with PageServer(page_worlds.world()) as server, opened(browser, server.url) as tab:
        rows = tab.texts("#engines tbody tr")
    chat, code, embed = ([cell.replace("\u00a0", " ") for cell in row.split("\t")] for row in rows)
    assert chat == [
        *("chat llama@vllm", "82.5 ± 0.9 mJ", "30.0 ± 9.0 mJ", "700 ± 60 mJ", "114 ± 5 J"),
        *("25 %", "read"),
    ]
    assert code == [
        *("code", *["–"] * 5),
        "not read: connection refused. Start the engine with its metrics, or correct `url`.",
    ]
    assert embed == ["embed", *["–"] * 5, "read"]


@pytest.mark.parametrize(
    ("parts", "memory_requests", "figures"),
    [
        (
            {"gpu": 100.0, "cpu": 5.0, "memory": 1.0, "idle": 0.0},
            60,
            ("100 J", "5.00 J", "1.00 J", "0 J", "106 J", "1.06 J"),
        ),
        ({"gpu": 100.0, "cpu": 5.0}, None, ("100 J", "5.00 J", "–", "–", "≥ 105 J", "≥ 1.05 J")),
        ({"gpu": 100.0, "cpu": 5.0, "memory": 3.0}, 20, ("100 J", "5.00 J", "3.00 J", *"–––")),
    ],
    ids=["all", "no-memory", "memory-of-some"],
)
def test_requests_have_joules_of_the_whole_host_by_part(
    browser: Browser,
    parts: dict[str, float],
    memory_requests: int | None,
    figures: tuple[str, ...],
) -> None:
    with PageServer(page_worlds.quiet()) as server, opened(browser, server.url) as tab:
        assert not tab.page.locator("#hosts-section").is_visible()
    told = page_worlds.world()
    known = page_worlds.host_energy(parts)
    if memory_requests is not None:
        known["part_requests"]["memory"] = memory_requests
    told["snapshot"]["engines"][0] |= {"host": known, "owner": "eve"}
    model = {"service": "api", "model": "tiny", "gpu_joules": {}, "tokens": {}, "requests": {}}
    told["snapshot"]["spans"] = {"inference": [model], "unmetered": []}
    with PageServer(told) as server, opened(browser, server.url) as tab:
        rows = tab.texts("#hosts tbody tr")
    tiny, chat, *_ = ([cell.replace("\u00a0", " ") for cell in row.split("\t")] for row in rows)
    assert tiny == ["tiny api", *"–" * 7]
    assert chat == ["chat llama@eve", *figures, "engine metrics"]


def test_hidden_page_sends_no_requests(browser: Browser) -> None:
    hide = (
        "hidden => { Object.defineProperty(document, 'hidden',"
        " {value: hidden, configurable: true});"
        " document.dispatchEvent(new Event('visibilitychange')); }"
    )
    with PageServer(page_worlds.world()) as server, opened(browser, server.url, clock=True) as tab:
        tab.page.clock.run_for(60_000)
        assert len(tab.asked) > 1, "the clock is the page's"
        tab.page.evaluate(hide, True)
        before, said = len(tab.asked), tab.text("#fresh-text")
        tab.page.clock.run_for(60_000)
        assert len(tab.asked) <= before + 1, "no more than what was under way"
        assert tab.text("#fresh-text") == said, "no answer is missing that nobody asked for"
        tab.page.evaluate(hide, False)
        with tab.page.expect_response("**/live.json"):
            tab.page.clock.run_for(2000)
