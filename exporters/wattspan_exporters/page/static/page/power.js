// Power over time by uPlot: one stacked area per device; unknown time is hatched.

import uPlot from "../vendor/uPlot.js";
import { byId, html, keep, set, write } from "./elements.js";
import * as figures from "./figures.js";
import { KINDS } from "./flow.js";

const TALL = 240;

export class Power {
  #cursor = null; // the displayed index; null for the newest
  #data = null;
  #seen = "";
  #kind = ""; // the devices of the plot
  #plot = null;
  #parent = byId("plot");
  #slider = byId("chart");
  #legend = byId("legend");

  constructor() {
    this.#slider.addEventListener("blur", () => this.#move(null));
    this.#slider.addEventListener("keydown", (event) => this.#key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot?.redraw());
  }

  draw(power, width) {
    const length = Math.max(0, ...power.series.map((one) => one.watts.length));
    const shades = {};
    const series = power.series.toSorted((a, b) => KINDS.indexOf(a.type) - KINDS.indexOf(b.type)).map((one) => {
      const watts = [...Array(length - one.watts.length).fill(null), ...one.watts];
      shades[one.type] = (shades[one.type] ?? -1) + 1;
      return { ...one, watts, first: watts.findIndex((value) => value !== null), shade: shades[one.type] % 3 };
    });
    const some = series.some((one) => one.first >= 0) && length > 1;
    byId("power-note").hidden = some;
    byId("power").hidden = !some;
    byId("power-readout").hidden = !some;
    const kind = series.map((one) => `${one.type} ${one.id}`).join();
    const seen = `${power.end} ${power.step} ${length} ${width} ${kind}`;
    if (!some || seen === this.#seen) return;
    this.#seen = seen;
    const times = series[0].watts.map((_, index) => power.end - (length - 1 - index) * power.step);
    this.#data = { ...power, series, length, times, gaps: gaps(series, length) };
    if (this.#cursor !== null && this.#cursor >= length) this.#cursor = null;
    set(this.#slider, { "data-gaps": this.#data.gaps.length });
    this.#describe();
    // Each area covers the ones before it, so the highest is first.
    const data = [times, ...stacked(series).reverse()];
    if (kind !== this.#kind) {
      this.#kind = kind;
      this.#plot?.destroy();
      this.#plot = new uPlot(this.#options(width), data, this.#parent);
    } else {
      if (width !== this.#plot.width) this.#plot.setSize({ width, height: TALL });
      this.#plot.setData(data);
    }
    this.#move(this.#cursor);
  }

  #options(width) {
    const colour = (property) => () => getComputedStyle(this.#parent)[property];
    const own = (index) => () => getComputedStyle(this.#legend.children[index].firstChild).backgroundColor;
    const areas = this.#data.series.map((_, index) => ({
      fill: own(index), stroke: colour("backgroundColor"), width: 1, points: { show: false },
      paths: (plot, index) => this.#steps(plot, plot.data[index]),
    }));
    const axis = { stroke: colour("color"), font: "12px sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("outlineColor"), width: 1 };
    return {
      width, height: TALL, legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { range: (_, first, last) => [first - this.#data.step, last] },
        y: { range: (_, least, most) => uPlot.rangeNum(0, Math.max(most, 1e-3), 0.1, true) },
      },
      axes: [
        {
          ...axis, space: 90, size: 28, grid: { show: false },
          values: (_, splits, __, ___, every) => splits.map((time) => figures.clock(time, every < 60)),
        },
        { ...axis, grid, size: 62, values: (_, splits) => splits.map((level) => figures.si(level, "W", 10000)) },
      ],
      series: [{}, ...areas.reverse()],
      hooks: { draw: [(plot) => this.#hatch(plot)], setCursor: [(plot) => this.#pointed(plot)] },
    };
  }

  /** A bar for each step with a figure, also for the first one after unknown time. */
  #steps(plot, values) {
    const [fill, stroke] = [new Path2D(), new Path2D()];
    const ground = plot.valToPos(0, "y", true);
    const edge = (time) => Math.round(plot.valToPos(time, "x", true));
    this.#data.times.forEach((time, index) => {
      const value = values[index];
      if (value === null) return;
      const [left, right] = [edge(time - this.#data.step), edge(time)];
      const top = Math.round(plot.valToPos(value, "y", true));
      fill.rect(left, top, right - left, ground - top);
      stroke.moveTo(left, top);
      stroke.lineTo(right, top);
    });
    return { fill, stroke };
  }

  #hatch(plot) {
    const pen = plot.ctx;
    pen.save();
    pen.globalAlpha = 0.5;
    pen.fillStyle = pen.createPattern(hatchTile(getComputedStyle(this.#parent).color), "repeat");
    for (const { from, to } of this.#data.gaps) {
      const [left, right] = [this.#data.times[from] - this.#data.step, this.#data.times[to]]
        .map((time) => plot.valToPos(time, "x", true));
      pen.fillRect(left, plot.bbox.top, Math.max(2, right - left), plot.bbox.height);
    }
    pen.restore();
  }

  #pointed({ cursor }) {
    const index = cursor.left >= 0 ? cursor.idx : null;
    if (!this.#data || index === this.#cursor) return;
    this.#cursor = index;
    this.#describe();
  }

  /** Moves the cursor to an index; null hides it. */
  #move(index) {
    if (!this.#plot) return;
    const left = index === null ? -10 : this.#plot.valToPos(this.#data.times[index], "x");
    this.#plot.setCursor({ left, top: index === null ? -10 : 0 });
  }

  #describe() {
    const { series, length, times } = this.#data;
    const place = this.#cursor ?? length - 1;
    const values = series.map((one) => one.watts[place]);
    const known = values.filter((value) => value !== null);
    const total = known.reduce((sum, value) => sum + value, 0);
    const unknown = series.filter((one, i) => values[i] === null && one.first >= 0).length;
    const time = figures.clock(times[place], true);
    const sum = known.length ? `${unknown ? "at least " : ""}${figures.watts(total)}` : "no figure";
    const missing = unknown ? ` (${unknown} of ${series.length} devices without a figure)` : "";
    write(byId("power-time"), time);
    write(byId("power-total"), `${sum} in total${missing}`);
    set(this.#slider, {
      "aria-valuemax": length - 1, "aria-valuenow": place,
      "aria-valuetext": `${time}: ${sum} in total${missing}`,
    });
    keep(this.#legend, series, (one) => one.id, makeEntry, (item, one) => {
      const [swatch, name, watts] = item.children;
      set(swatch, { class: `swatch ${one.type} shade${one.shade}` });
      write(name, figures.name(one.name, 60));
      write(watts, figures.watts(one.watts[place]));
    });
  }

  #key(event) {
    if (!this.#data) return;
    const last = this.#data.length - 1;
    const at = this.#cursor ?? last;
    const far = Math.max(1, Math.round(60 / this.#data.step));
    const moves = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - far, PageUp: at + far, Home: 0, End: last, Escape: null,
    };
    if (!(event.key in moves)) return;
    const to = moves[event.key];
    this.#move(to === null ? null : Math.min(last, Math.max(0, to)));
    event.preventDefault();
  }
}

/** A square of 8 pixels with a diagonal line. */
function hatchTile(colour) {
  const tile = new OffscreenCanvas(8, 8);
  const pen = tile.getContext("2d");
  pen.fillStyle = colour;
  for (let x = 0; x < 8; x += 1) pen.fillRect(x, 7 - x, 1, 1);
  return tile;
}

/** The upper edges of the areas; null where the device is unknown. */
function stacked(series) {
  const sums = series[0].watts.map(() => 0);
  return series.map(({ watts }) => watts.map((value, index) => {
    if (value === null) return null;
    sums[index] += value;
    return sums[index];
  }));
}

/** Runs of indices at which a device is unknown after it was known. */
function gaps(series, length) {
  const missing = (index) => series.some(({ watts, first }) => watts[index] === null && first >= 0 && index > first);
  const found = [];
  for (let index = 0; index < length; index += 1) {
    if (!missing(index)) continue;
    if (found.at(-1)?.to === index - 1) found.at(-1).to = index;
    else found.push({ from: index, to: index });
  }
  return found;
}

function makeEntry() {
  return html("li", {}, html("span", { "aria-hidden": "true" }), html("bdi", { class: "name" }), html("span", { class: "watts" }));
}
