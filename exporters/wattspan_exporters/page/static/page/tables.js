// Tables that keep their rows: devices and spans.

import { html, keep, set, svg, write } from "./elements.js";
import * as figures from "./figures.js";

// A table whose rows become cards on a narrow screen is still a table to a screen reader.
const ROW = { role: "row" };
const CELL = { role: "cell" };

/** Columns are `{title, text(row)}` or `{title, draw(cell, row)}`; the first heads its row. */
class Table {
  #rows = html("tbody", { role: "rowgroup" });

  constructor(parent, caption, columns, key, empty) {
    this.columns = columns;
    this.key = key;
    const heads = columns.map(({ title, number }) =>
      html("th", { scope: "col", role: "columnheader", class: number ? "number" : null }, title));
    this.table = html("table", { role: "table" },
      html("caption", { class: "hidden" }, caption),
      html("thead", { role: "rowgroup" }, html("tr", ROW, ...heads)), this.#rows);
    this.empty = html("p", { class: "note" }, empty);
    parent.append(this.table, this.empty);
  }

  draw(rows) {
    this.table.hidden = !rows.length;
    this.empty.hidden = Boolean(rows.length);
    keep(this.#rows, rows, this.key, () => this.#make(), (element, row) => {
      this.columns.forEach((column, index) => {
        const cell = element.children[index];
        if (column.text) write(cell.firstElementChild, column.text(row));
        else column.draw(cell.firstElementChild, row);
      });
    });
  }

  #make() {
    const cells = this.columns.map(({ title, number }, index) => html(index ? "td" : "th", {
      ...(index ? CELL : { scope: "row", role: "rowheader" }),
      "data-title": title, class: number ? "number" : null,
    }, html("span")));
    return html("tr", ROW, ...cells);
  }
}

/** The devices of a snapshot, each with the limit of its power: a GPU's own, or a CPU's cap. */
export function devicesOf({ domains, tuning }) {
  const caps = new Map(tuning.caps.filter(({ knob }) => knob === "cpu_power").map((cap) => [cap.device, cap]));
  return domains.filter((domain) => domain.in_cover).map((domain) => {
    const cap = caps.get(domain.hw_id);
    return {
      ...domain,
      limit: domain.gpu?.limit_watts ?? cap?.enforced ?? cap?.requested ?? null,
      usual: domain.gpu?.default_limit_watts ?? cap?.default ?? null,
    };
  });
}

export function devicesTable(parent) {
  return new Table(parent, "Devices: power, limits, state, and how each figure was obtained", [
    { title: "Device", draw: deviceName },
    { title: "Power", number: true, text: (d) => figures.watts(d.power_watts) },
    { title: "Idle", number: true, text: (d) => figures.watts(d.idle_power_watts) },
    { title: "Limit", number: true, draw: limit },
    { title: "Used", number: true, text: (d) => figures.share(d.gpu?.utilization_ratio ?? null, 1) },
    { title: "Temp.", number: true, text: (d) => figures.celsius(d.gpu?.temperature_celsius) },
    { title: "Throttling", text: throttling },
    { title: "Gaps", text: gaps },
    { title: "Figures", text: (d) => d.provenance },
  ], (d) => d.hw_id, "No device is known yet: a source names its devices when it is first read.");
}

function deviceName(cell, device) {
  if (!cell.children.length) {
    cell.append(html("span", { class: "swatch", "aria-hidden": "true" }), html("bdi", { class: "name" }), " ", html("bdi", { class: "detail" }));
  }
  const [swatch, name, detail] = cell.children;
  set(swatch, { class: `swatch ${device.hw_type}` });
  write(name, figures.name(device.hw_name, 80));
  const id = device.hw_id === device.hw_name ? "" : figures.name(device.hw_id, 60);
  write(detail, device.present ? id : `${id} lost`.trim());
}

/** The limit in force, and as a short bar how near the device is to it. */
function limit(cell, device) {
  if (!cell.children.length) {
    cell.append(html("span"), svg("svg", { class: "meter", width: 56, height: 5, "aria-hidden": "true" },
      svg("rect", { class: "meter-ground", width: 56, height: 5, rx: 1 }),
      svg("rect", { class: "meter-value", height: 5, rx: 1 })));
  }
  const [text, meter] = cell.children;
  const { limit: now, usual, power_watts: drawn } = device;
  const lowered = usual !== null && now !== null && now < usual - 0.5;
  write(text, lowered ? `${figures.watts(now)} of ${figures.watts(usual)}` : figures.watts(now));
  const known = now > 0 && drawn !== null;
  set(meter, { class: known ? "meter" : "meter none" });
  if (known) set(meter.lastElementChild, { width: (56 * Math.min(1, drawn / now)).toFixed(1) });
}

function throttling({ gpu }) {
  const reasons = gpu?.throttling ?? null;
  return reasons === null ? "–" : reasons.join(", ").replaceAll("_", " ") || "none";
}

function gaps(device) {
  const reasons = Object.entries(device.gap_seconds);
  return reasons.length === 0 ? "none" : reasons.map(([reason, seconds]) => `${reason.replaceAll("_", " ")} ${figures.duration(seconds)}`).join(", ");
}

export function spansTable(parent) {
  return new Table(parent, "Spans: the energy of each name, most first", [
    { title: "Span", draw: spanName },
    { title: "Energy", number: true, text: (s) => figures.joules(s.joules) },
    { title: "Calls", number: true, text: (s) => figures.count(s.calls) },
    { title: "Per call", number: true, text: (s) => figures.joules(each(s.joules, s.calls)) },
    { title: "Per token", number: true, text: (s) => figures.joules(each(s.joules, s.output_tokens)) },
    { title: "Time a call", number: true, text: (s) => figures.seconds(each(s.seconds, s.calls)) },
    { title: "Trace", draw: trace },
  ], (s) => `${s.service}\u0000${s.name}`,
  "No spans yet. An application that sends OpenTelemetry spans to the agent gets joules per call and "
  + "per token here; docs/how-to/instrument-python.md says how.");
}

const each = (sum, count) => (count ? sum / count : null);

function spanName(cell, span) {
  if (!cell.children.length) {
    cell.append(html("bdi", { class: "name" }), " ", html("bdi", { class: "detail" }));
  }
  write(cell.children[0], figures.name(span.name, 80));
  write(cell.children[1], figures.name(span.service, 60));
}

/** A trace of this span: its id, and a button that copies it. */
function trace(cell, span) {
  if (!span.trace) {
    cell.kept?.clear();
    write(cell, "–");
    return;
  }
  keep(cell, [span], () => "copy", makeCopy, (button, { trace: id, name }) => {
    if (button.dataset.trace === id) return;
    button.dataset.trace = id;
    set(button, { "aria-label": `Copy the trace id of ${figures.name(name, 60)}: ${id}`, title: id });
    write(button.firstElementChild, `${id.slice(0, 8)}…`);
  });
  if (cell.firstChild.nodeType === Node.TEXT_NODE) cell.firstChild.remove();
}

function makeCopy() {
  const state = html("span", { class: "copied", role: "status" });
  const button = html("button", { type: "button", class: "copy" }, html("code"), state);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(button.dataset.trace);
      write(state, " copied");
    } catch {
      // Without TLS a browser lends its clipboard to nobody: the whole id stands there to be taken.
      write(button.firstElementChild, button.dataset.trace);
      getSelection().selectAllChildren(button.firstElementChild);
      return;
    }
    setTimeout(() => write(state, ""), 2000);
  });
  return button;
}
