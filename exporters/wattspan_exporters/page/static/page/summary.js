// The first and the last lines: large figures, the health of each source, the cost of the agent itself.

import { html, keep, set, write } from "./elements.js";
import * as figures from "./figures.js";

/** `now` and `hour` are flows that `analyse` returned; `hour` may be null. */
export function drawFigures(list, data, now, hour) {
  keep(list, facts(data, now, hour), (fact) => fact.name, makeFact, (element, fact) => {
    const [term, value, note] = element.children;
    write(term, fact.name);
    write(value, fact.value);
    write(note, fact.note);
  });
}

function makeFact() {
  return html("div", {}, html("dt"), html("dd", { class: "big" }), html("dd", { class: "small" }));
}

function facts(data, now, hour) {
  const known = now.watts !== null;
  const shown = [{
    name: "Power now", value: figures.flowWatts(now),
    note: known ? `mean of the last ${figures.duration(now.seconds)}` : unknownPower(now),
  }];
  if (hour) {
    shown.push({
      name: "Energy", value: figures.leastJoules(hour.joules, hour.bounded),
      note: `in ${figures.duration(hour.seconds)}, ${figures.lowerBound(figures.flowWatts(hour), hour.bounded && hour.watts !== null)} on average`,
    });
  }
  const { cost, carbon, host } = data.snapshot;
  const partial = (host?.energy_certainty ?? "known") !== "known";
  if (cost) shown.push(weighed("Cost", cost, figures.money, "", partial));
  if (carbon) shown.push(weighed("Carbon", carbon, grams, " CO₂e", partial));
  return shown;
}

/** The devices without a power, by name. */
function unknownPower({ nodes }) {
  const unknown = [...nodes.values()].filter(({ layer, watts }) => layer === "device" && watts === null);
  const names = unknown.map(({ name }) => figures.name(name, 60)).join(", ");
  return names ? `unknown for ${names}` : "not measured yet";
}

const grams = (value, unit) =>
  unit === "g" ? figures.si(value, "g", 1000) : `${figures.si(value, "")}${unit}`;

/** With `partial`, energy is unknown and in no amount; an amount of 0 is then unknown. */
function weighed(name, figure, shown, suffix, partial) {
  const perHour = figure.per_hour === null ? "–" : `${shown(figure.per_hour, figure.unit)}${suffix}/h`;
  const total = partial && figure.total === 0 ? "–" : `${shown(figure.total, figure.unit)}${suffix}`;
  const sofar = `${figures.lowerBound(total, partial)} so far`;
  const unknown = figure.unknown_joules > 0
    ? `; ${figures.joules(figure.unknown_joules)} at an unknown rate` : "";
  return { name, value: perHour, note: `${sofar}, by ${ORIGINS[figure.origin] ?? figure.origin}${unknown}` };
}

const ORIGINS = { constant: "a constant", schedule: "the time of day", metric: "a metric" };

/** The banner of what fails now: sources, exporters, and devices without readings. */
export function drawProblems(banner, { sources, domains }) {
  const failing = sources.filter(({ up, failures }) => !up || failures.length);
  const found = [
    ...domains.filter((d) => d.in_cover && d.silent && (d.present || d.lost)).map((d) =>
      `${figures.name(d.hw_name, 60)} gives no readings: its energy is unknown, and sums lack it.`),
    ...failing.map(({ source, up, failures }) =>
      `${source}${up ? "" : " is down"}: ${failures[0] ?? "it gives nothing."}`),
  ];
  banner.hidden = !found.length;
  const [title, list] = banner.children;
  write(title, found.length === 1 ? "1 problem" : `${found.length} problems`);
  const more = found.length > MOST ? [`${found.length - MOST} more in Health, below.`] : [];
  keep(list, [...found.slice(0, MOST), ...more], (text) => text, () => html("li"), (line, text) => {
    write(line, figures.sentence(text));
  });
}

const MOST = 3;

export function drawHealth(list, sources) {
  keep(list, sources, (source) => source.source, makeSource, (item, source) => {
    const [mark, name, reads, failures] = item.children;
    const troubled = source.failures.length > 0;
    const state = !source.up ? "down" : troubled ? "troubled" : "up";
    set(item, { class: state });
    write(mark, { up: "●", troubled: "▲", down: "✕" }[state]);
    write(name, source.source);
    const failed = source.failed ? `, ${figures.count(source.failed)} failed` : "";
    write(reads, `${state === "troubled" ? "up, with failures" : state} · ${figures.count(source.reads)} reads${failed}`);
    keep(failures, source.failures, (sentence) => sentence, () => html("li"), (line, sentence) => {
      write(line, figures.sentence(sentence));
    });
    failures.hidden = !troubled;
  });
}

function makeSource() {
  return html("li", {}, html("span", { class: "mark", "aria-hidden": "true" }),
    html("strong"), html("span", { class: "reads" }), html("ul"));
}

export function drawAgent(line, agent, cores) {
  const missed = agent.missed_ticks ? `${figures.count(agent.missed_ticks)} missed` : "none missed";
  const cpu = cores === null ? "–" : `${figures.percent(cores)} of a core`;
  write(line, `The agent itself: ${cpu} · ${figures.bytes(agent.rss_bytes)} · ${figures.count(agent.processes)} processes watched · `
    + `${figures.count(agent.ticks)} polls, ${missed} · running since ${new Date(agent.started_unix_ns / 1e6).toLocaleString("en", { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" })}`);
}
