// The first lines: what the host draws, what that comes to, and one bar of where it goes.

import { html, keep, style, write } from "./elements.js";
import * as figures from "./figures.js";
import { atLayer, isSpent, split } from "./flow.js";

export class Summary {
  #list;
  #sentence = html("p", { class: "sentence" });
  #bar = html("div", { class: "bar", "aria-hidden": "true" });

  constructor(list, parent) {
    this.#list = list;
    parent.append(this.#bar, this.#sentence);
  }

  /** `now` and `hour` are flows that have been understood; there may be no hour yet. */
  draw(data, now, hour) {
    keep(this.#list, facts(data, now, hour), (fact) => fact.name, makeFact, (element, fact) => {
      const [term, value, note] = element.children;
      write(term, fact.name);
      write(value, fact.value);
      write(note, fact.note);
    });
    const kinds = split(now);
    const whole = kinds.reduce((sum, [, watts]) => sum + watts, 0);
    keep(this.#bar, kinds, ([kind]) => kind, ([kind]) => html("span", { class: kind }),
      (part, [, watts]) => style(part, "width", `${(100 * watts / whole).toFixed(2)}%`));
    write(this.#sentence, sentence(kinds, now));
  }
}

function makeFact() {
  return html("div", {}, html("dt"), html("dd", { class: "big" }), html("dd", { class: "small" }));
}

function facts(data, now, hour) {
  const known = now.watts !== null;
  const shown = [{
    name: "Power now", value: figures.watts(now.watts),
    note: known ? `mean of the last ${figures.duration(now.seconds)}`
      : split(now).length ? "not known of every device" : "not measured yet",
  }];
  if (hour) {
    shown.push({
      name: "Energy", value: figures.joules(hour.joules),
      note: `in ${figures.duration(hour.seconds)}, ${figures.watts(hour.watts)} on average`,
    });
  }
  const { cost, carbon } = data.snapshot;
  if (cost) shown.push(weighed("Cost", cost, figures.money, ""));
  if (carbon) shown.push(weighed("Carbon", carbon, grams, " CO₂e"));
  return shown;
}

const grams = (value, unit) =>
  unit === "g" ? figures.si(value, "g", 1000) : `${figures.si(value, "")}${unit}`;

function weighed(name, figure, shown, suffix) {
  const perHour = figure.per_hour === null ? "–" : `${shown(figure.per_hour, figure.unit)}${suffix}/h`;
  const sofar = `${shown(figure.total, figure.unit)}${suffix} so far`;
  const unknown = figure.unknown_joules > 0
    ? `; ${figures.joules(figure.unknown_joules)} at an unknown rate` : "";
  return { name, value: perHour, note: `${sofar}, by ${ORIGINS[figure.origin] ?? figure.origin}${unknown}` };
}

const ORIGINS = { constant: "a constant", schedule: "the time of day", metric: "a metric" };

function sentence(kinds, { total, nodes }) {
  if (!kinds.length) return "No power is known yet.";
  if (total === null) {
    const unknown = atLayer({ nodes }, "device").filter((device) => device.watts === null);
    const names = unknown.map((device) => figures.name(device.name, 60)).join(", ");
    return `The power of ${names} is not known now, so neither is that of the host.`;
  }
  const of = (wanted) => figures.share(
    kinds.filter(([kind]) => wanted(kind)).reduce((sum, [, watts]) => sum + watts, 0), total);
  const spent = of(isSpent);
  return `Now processes spend ${spent}; ${of((kind) => kind === "idle")} is what the hardware draws `
    + `at rest; ${of((kind) => !isSpent(kind) && kind !== "idle")} nobody can be charged for.`;
}
