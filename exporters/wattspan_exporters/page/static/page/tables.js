// The tables of devices, spans, language models, serving engines and requests on the whole host.

import { html, keep, set, write } from "./elements.js";
import * as figures from "./figures.js";

// Explicit roles keep the table a table for screen readers when CSS shows its rows as cards.
const ROW = { role: "row" };
const CELL = { role: "cell" };
const METHODS = new Map([["learned", "by learned cost"], ["counters", "by counters"]]);

/** Columns are `{title, text(row)}` or `{title, draw(cell, row)}`; the first is the row header. */
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

const number = (title, text) => ({ title, number: true, text });

/** The devices of a snapshot with their power limits: a GPU's own, or a CPU's cap. */
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
  return new Table(parent, "Devices: power, limits, state and provenance", [
    { title: "Device", draw: deviceName },
    number("Power", (d) => figures.watts(d.power_watts)),
    number("Idle", (d) => figures.watts(d.idle_power_watts)),
    { title: "Limit", number: true, draw: limit },
    number("Used", (d) => figures.share(d.gpu?.utilization_ratio ?? null, 1)),
    number("Temp.", (d) => figures.celsius(d.gpu?.temperature_celsius)),
    { title: "Throttling", text: throttling },
    { title: "Gaps", text: gaps },
    { title: "Figures", text: (d) => [d.provenance, METHODS.get(d.method)].filter(Boolean).join(", ") },
  ], (d) => d.hw_id, "No device is known yet. Devices appear after the first read of their source.");
}

function deviceName(cell, device) {
  if (!cell.children.length) {
    cell.append(html("span", { class: "swatch", "aria-hidden": "true" }), html("bdi", { class: "name" }), " ", html("bdi", { class: "detail" }));
  }
  const [swatch, name, detail] = cell.children;
  set(swatch, { class: `swatch ${device.hw_type}` });
  write(name, figures.name(device.hw_name, 80));
  const id = device.hw_id === device.hw_name ? "" : figures.name(device.hw_id, 60);
  write(detail, device.present ? `${id}${device.silent ? " no readings" : ""}`.trim() : `${id} lost`.trim());
}

/** The limit in force, and a bar of the power relative to it. */
function limit(cell, device) {
  if (!cell.children.length) {
    cell.append(html("span"), html("progress", { "aria-hidden": "true" }));
  }
  const [text, meter] = cell.children;
  const { limit: now, usual, power_watts: drawn } = device;
  const lowered = usual !== null && now !== null && now < usual - 0.5;
  write(text, lowered ? `${figures.watts(now)} of ${figures.watts(usual)}` : figures.watts(now));
  set(meter, { hidden: !(now > 0 && drawn !== null), max: now, value: drawn });
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
  return new Table(parent, "Spans by energy", [
    { title: "Span", draw: (cell, s) => nameAndDetail(cell, s.name, s.service) },
    number("Energy", (s) => figures.leastJoules(s.joules, s.bounded)),
    number("Calls", (s) => figures.count(s.calls)),
    { title: "Static", number: true, draw: staticPart },
    number("Per call", (s) => figures.leastJoules(each(s.joules, s.calls), s.bounded)),
    number("Per token", (s) => figures.leastJoules(each(s.joules, s.output_tokens), s.bounded)),
    number("Time a call", (s) => figures.seconds(each(s.seconds, s.calls))),
    { title: "Trace", draw: trace },
  ], (s) => `${s.service}\u0000${s.name}`,
  "No spans yet. Joules per call and per token appear here when an application sends OpenTelemetry "
  + "spans to the agent: docs/how-to/instrument-python.md.");
}

/** The models with energy, and those of requests without known energy, by role. */
export function modelsOf({ spans: { inference = [], unmetered = [] } = {}, bounded = [] }) {
  const unknown = unmetered.map((row) => ({
    ...row, model: `${row.model} (${row.role})`, requests: { [row.role]: row.requests }, gpu_joules: {}, tokens: {},
  }));
  return [...inference, ...unknown].map((row) => (
    { ...row, bounded: bounded.includes("gpu"), service: ownedBy(row.service, row.owner) }));
}

export function modelsTable(parent) {
  return new Table(parent, "Requests to language models since the start of the agent", [
    { title: "Model", draw: (cell, m) => nameAndDetail(cell, m.model, m.service) },
    number("Requests", (m) => figures.count(requests(m))),
    number("GPU energy", (m) => figures.leastJoules(gpuJoules(m), m.bounded)),
    number("Per request", (m) => figures.leastJoules(each(gpuJoules(m), requests(m)), m.bounded)),
    number("Per input token", (m) => figures.leastJoules(each(m.gpu_joules.input, m.tokens.input), m.bounded)),
    number("Per output token", (m) => figures.leastJoules(each(m.gpu_joules.output, m.tokens.output), m.bounded)),
    number("By learned energy", (m) => figures.share(gpuJoules(m) === null ? null : m.requests.model ?? 0, requests(m))),
  ], (m) => `${m.service}\u0000${m.model}`, "No request has its energy yet.");
}

/** Null for requests without known energy. */
const gpuJoules = ({ gpu_joules: { input = null, output = null } }) => (input === null ? null : input + output);
const requests = (model) => Object.values(model.requests).reduce((sum, count) => sum + count, 0);

function nameAndDetail(cell, name, detail) {
  if (!cell.children.length) {
    cell.append(html("bdi", { class: "name" }), " ", html("bdi", { class: "detail" }));
  }
  write(cell.children[0], figures.name(name, 80));
  write(cell.children[1], detail && figures.name(detail, 60));
}

export function enginesTable(parent) {
  const token = (type) => (e) => figures.estimate(e.token_joules[type], e.token_uncertainty_joules[type]);
  return new Table(parent, "Serving engines: joules with the half-widths of their 95 % ranges", [
    { title: "Engine", draw: (cell, e) => nameAndDetail(cell, e.engine, ownedBy(e.model, e.owner)) },
    number("Per token", token("all")),
    number("Per input token", token("input")),
    number("Per output token", token("output")),
    number("Per request", (e) => figures.estimate(e.request_joules, e.request_uncertainty_joules)),
    number("Idle", (e) => figures.share(e.idle_ratio, 1)),
    { title: "Page", text: (e) => (e.up ? "read" : figures.sentence(`not read${e.failure && `: ${e.failure}`}`)) },
  ], (e) => `${e.engine}\u0000${e.model}\u0000${e.owner}`, "");
}

/** Language models and then engines with the energy of the whole host; none if no energy is known. */
export function hostsOf({ spans: { inference = [] } = {}, engines = [] }) {
  const row = (name, sender, { owner, host }) => ({ name, sender: ownedBy(sender, owner), host });
  const rows = [
    ...inference.map((one) => row(one.model, one.service, one)),
    ...engines.map((one) => row(one.engine, one.model, one)),
  ];
  return rows.some(({ host }) => host) ? rows : [];
}

/**
 * Joules of a request by part. Parts of different requests have no sum; without a counter of the
 * memory it is a lower bound.
 */
export function hostsTable(parent) {
  return new Table(parent, "Energy of a request on the whole host, by part", [
    { title: "Model or engine", draw: (cell, row) => nameAndDetail(cell, row.name, row.sender) },
    ...["gpu", "cpu", "memory", "idle"].map((part) =>
      number(figures.TYPES[part], ({ host }) => figures.joules(host?.request_joules[part]))),
    number("Per request", ({ host }) => sumOf(host, "request_joules")),
    number("Per output token", ({ host }) => sumOf(host, "output_token_joules")),
    { title: "Figures", text: ({ host }) => host?.method.replaceAll("_", " ") ?? "–" },
  ], (row) => `${row.name}\u0000${row.sender}`, "");
}

function sumOf(host, figure) {
  const parts = Object.values(host?.[figure] ?? {});
  const known = parts.length && [host.part_requests, host.part_output_tokens].every((counts) =>
    new Set(Object.keys(host.joules).map((part) => counts[part])).size === 1);
  const sum = known ? parts.reduce((a, b) => a + b) : null;
  return figures.leastJoules(sum, known && !("memory" in host.joules));
}

const ownedBy = (name, owner) => (owner ? `${name}@${owner}` : name);
const each = (sum, count) => (count && sum !== null ? sum / count : null);

/** The static part of the GPU energy, and a bar of it; the origin of the static power as title. */
function staticPart(cell, { split }) {
  if (!cell.children.length) {
    cell.append(html("span"), html("progress", { "aria-hidden": "true" }));
  }
  const [text, meter] = cell.children;
  const whole = split ? split.static_joules + split.dynamic_joules : 0;
  const bound = split?.basis === "lower_bound";
  // A bound of "at least < 0.1 %" says nothing.
  const known = whole > 0 && !(bound && split.static_joules < whole / 1000);
  write(text, known ? figures.lowerBound(figures.share(split.static_joules, whole), bound) : "–");
  set(text, { title: split ? `Of its GPU energy. ${ORIGINS[split.basis]}` : null });
  set(meter, { hidden: !known, max: whole || 1, value: split?.static_joules ?? 0 });
}

const ORIGINS = {
  configured: "The static power is configured.",
  fitted: "The static power is fitted to windows with different shares of waiting time.",
  lower_bound: "The static power is at least the idle power, whose energy is in the account of idle energy.",
};

/** The id of a trace in a field that selects it on focus: without TLS, pages have no clipboard. */
function trace(cell, { trace: id, name }) {
  keep(cell, [id], String, makeTrace, (field) => {
    if (id) set(field, { "aria-label": `Trace id of ${figures.name(name, 60)}` });
  });
}

function makeTrace(id) {
  if (!id) return html("span", {}, "–");
  const field = html("input", { class: "trace", readonly: true, value: id, size: 9 });
  field.addEventListener("focus", () => field.select());
  return field;
}
