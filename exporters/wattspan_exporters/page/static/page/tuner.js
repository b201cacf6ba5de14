// The tuner: state, decision and slowdown of each job.

import { byId, html, keep, set, svg, write } from "./elements.js";
import * as figures from "./figures.js";

const WIDE = 220;

export function drawTuner(tuning) {
  write(byId("tuner-mode"), tuning.mode);
  set(byId("tuner-mode"), { class: `badge ${tuning.mode}` });
  write(byId("tuner-note"), note(tuning));
  byId("tuner-note").hidden = !byId("tuner-note").textContent;
  keep(byId("jobs"), tuning.jobs, (job) => `${job.job} ${job.knob}`, makeJob, update);
}

function note({ mode, jobs, capper }) {
  if (mode === "off") {
    return "Tuning is off. [autotune] mode = \"advise\" shows the saving of lower power limits here; "
      + "\"apply\" sets them within a slowdown budget: docs/how-to/turn-on-tuning.md.";
  }
  const alone = mode === "apply" && capper.answers === false
    ? "The capper does not respond, so no limit can be set: docs/reference/caps.md. " : "";
  return alone + (jobs.length ? "" : "No job yet. A job appears when its spans arrive.");
}

function makeJob() {
  const job = html("li", { class: "job" });
  job.name = html("h3");
  job.state = html("span");
  job.says = html("p", { class: "says" });
  job.declared = html("p", { class: "says" });
  job.facts = html("dl", { class: "facts" });
  job.pipelines = html("div", { class: "pipelines" });
  job.partners = html("ul", { class: "partners" });
  const head = html("div", { class: "job-head" }, html("bdi", {}, job.name), job.state);
  job.append(head, job.says, bullet(job), job.declared, job.facts, job.pipelines, job.partners);
  return job;
}

/** Slowdown as a bar, its bound as a whisker, the budget as a line. */
function bullet(job) {
  job.bar = svg("rect", { class: "bullet-value", y: 5, height: 8 });
  job.bound = svg("line", { class: "bullet-bound", y1: 9, y2: 9 });
  job.end = svg("line", { class: "bullet-bound", y1: 5, y2: 13 });
  job.budget = svg("line", { class: "bullet-budget", y1: 0, y2: 18 });
  job.words = html("span", { class: "words" });
  job.bullet = html("div", { class: "bullet" },
    svg("svg", { width: WIDE, height: 18, viewBox: `0 0 ${WIDE} 18`, "aria-hidden": "true" },
      svg("rect", { class: "meter-ground", y: 5, width: WIDE, height: 8 }),
      job.bar, job.bound, job.end, job.budget),
    job.words);
  return job.bullet;
}

function update(element, job) {
  write(element.name, figures.name(job.job, 80));
  write(element.state, job.state.replaceAll("_", " ") + (job.applied ? "" : " · not applied"));
  set(element.state, { class: job.applied && job.state.startsWith("hold") ? "state held" : "state" });
  write(element.says, figures.sentence(job.decision.sentence));
  slowdown(element, job);
  write(element.declared, declaration(job.declared));
  element.declared.hidden = !job.declared;
  keep(element.facts, facts(job), ([name]) => name, makeFact, (pair, [name, value]) => {
    write(pair.firstElementChild, name);
    write(pair.lastElementChild, value);
  });
  const pipelines = job.pipelines ?? [];
  element.pipelines.hidden = !pipelines.length;
  keep(element.pipelines, pipelines, (one) => one.name, makePipeline, updatePipeline);
  const partners = job.partners ?? [];
  element.partners.hidden = !partners.length;
  keep(element.partners, partners, (one) => one.host, makePartner, updatePartner);
}

/** What an application asked for, what it was given, and why; "" without a declaration. */
function declaration(declared) {
  if (!declared) return "";
  const { name, uid, asked, given, decision, reason } = declared;
  return `User ${uid} declared ${figures.name(name, 60)} and asked for ${terms(asked)}. `
    + `Given (${decision}): ${terms(given)}; mode ${given.mode}. ${figures.sentence(reason)}`;
}

function terms({ max_slowdown: budget, objective, knobs, first_watts: first, floor_watts: floor }) {
  const parts = [];
  if (budget !== null) parts.push(`a budget of ${figures.percent(budget)}`);
  if (objective !== null) parts.push(`the objective ${objective}`);
  if (knobs !== null) parts.push(`the knobs ${knobs.join(", ") || "none"}`);
  if (first) parts.push(`${Math.round(first)}\u00a0W first`);
  if (floor) parts.push(`${Math.round(floor)}\u00a0W or more`);
  return parts.join(", ") || "the operator's terms";
}

function slowdown(element, { slowdown: slower, slowdown_bound: bound, budget, confidence }) {
  element.bullet.hidden = slower === null;
  if (slower === null) return;
  const most = Math.max(budget * 1.5, (bound ?? slower) * 1.1, 0.01);
  const at = (fraction) => ((WIDE * Math.max(0, Math.min(fraction, most))) / most).toFixed(1);
  const over = (bound ?? slower) > budget;
  set(element.bar, { width: at(slower), class: over ? "bullet-value over" : "bullet-value" });
  set(element.bound, { x1: at(slower), x2: at(bound ?? slower) });
  set(element.end, { x1: at(bound ?? slower), x2: at(bound ?? slower) });
  set(element.budget, { x1: at(budget), x2: at(budget) });
  const sure = bound === null ? "" : `, at most ${figures.percent(bound)} (${Math.round(100 * confidence)}\u00a0% confidence)`;
  write(element.words, `${figures.percent(slower)} slower${sure}; budget ${figures.percent(budget)}${over ? ": OVER" : ""}`);
}

function facts(job) {
  const unit = `\u00a0${job.unit}`;
  const setting = job.applied ? common(job.decision.caps) : null;
  const original = common(job.original);
  const whole = (value) => `${Math.round(value)}${unit}`;
  return [
    ["Work", job.span ? `${figures.name(job.service, 60)} › ${figures.name(job.span, 60)}` : figures.name(job.service, 60)],
    ["Setting", setting === null ? "–" : original === null ? whole(setting) : `${whole(setting)} of ${whole(original)}`],
    ...load(job.load),
    ["Saving", job.saving === null ? "–" : figures.percent(job.saving)],
    ["Surely saved", figures.joules(job.saved_surely_joules)],
    ["Saved, as an estimate", figures.joules(job.saved_joules)],
    ["Decided", figures.clock(job.since_unix_ns / 1e9, true)],
  ];
}

/** Load bin, headroom and misses of a job whose setting follows its load. */
function load(tracked) {
  if (!tracked) return [];
  const { load: requests, bin_bound: bound, headroom, objectives } = tracked;
  return [
    ["Load", `${requests.toFixed(1)}, bin up to ${bound} requests in flight`],
    ["Headroom", headroom === null ? "–" : `${headroom.toFixed(1)} times the load`],
    ...objectives.map(({ name, requests: known, misses, allowed }) => [
      `Over ${name}`,
      known ? `${figures.percent(misses / known)} of ${known}, ${figures.percent(allowed)} permitted` : "–",
    ]),
  ];
}

const RANK_TITLES = ["Rank", "Device", "Clock", "Plan", "Waiting", "Saved"];

/** A pipeline of a job: its iteration times, why its ranks have their clocks, and the ranks. */
function makePipeline() {
  const heads = RANK_TITLES.map((title) => html("th", { scope: "col" }, title));
  const one = html("div", { class: "pipeline" });
  one.times = html("p", { class: "says" });
  one.says = html("p", { class: "says" });
  one.ranks = html("tbody");
  one.append(one.times, one.says, html("table", { class: "ranks" }, html("thead", {}, html("tr", {}, ...heads)), one.ranks));
  return one;
}

function updatePipeline(element, pipeline) {
  write(element.times, iterationTimes(pipeline));
  write(element.says, figures.sentence(pipeline.sentence));
  element.says.hidden = !pipeline.name; // the only pipeline's sentence is that of the job
  const ranks = pipeline.ranks.map((rank, number) => ({ ...rank, number }));
  keep(element.ranks, ranks, (rank) => rank.device, makeRank, (row, rank) => {
    const cells = [
      `${rank.number}`,
      figures.name(rank.device, 40),
      megahertz(rank.clock),
      megahertz(rank.planned),
      rank.waiting === null ? "–" : figures.percent(rank.waiting),
      figures.joules(rank.saved_joules),
    ];
    cells.forEach((text, place) => write(row.children[place], text));
  });
}

function makeRank() {
  return html("tr", {}, ...RANK_TITLES.map((title) => html("td", { "data-title": title })));
}

function iterationTimes({ name, reason, unit_time_seconds: now, original_time_seconds: original, straggler_time_seconds: other }) {
  const text = `${name ? `Pipeline ${figures.name(name, 40)}` : "Pipeline"} (${reason.replaceAll("_", " ")})`;
  if (now === null) return `${text}: no complete iteration yet`;
  return `${text}: ${figures.seconds(now)} per iteration`
    + (original === null ? "" : `, ${figures.seconds(original)} at the original clocks`)
    + (other === null ? "" : `; it waits for one of ${figures.seconds(other)}`);
}

/** Another host of a job: the age of its record, and what that says. */
function makePartner() {
  const one = html("li", { class: "says" });
  one.host = html("span", { class: "name" });
  one.notes = html("span", { class: "detail" });
  one.says = html("p");
  one.append(html("bdi", {}, one.host), " ", one.notes, one.says);
  return one;
}

function updatePartner(element, { host, used, age_seconds: age, straggler, sentence }) {
  write(element.host, host ? figures.name(host, 60) : "Other hosts");
  const notes = [
    used ? "" : "not used",
    age === null ? "" : `record of ${figures.duration(age)} ago`,
    straggler ? `pipeline ${figures.name(straggler, 40)} is the straggler` : "",
  ];
  write(element.notes, notes.filter(Boolean).join(" · "));
  write(element.says, figures.sentence(sentence));
}

function megahertz(value) {
  return value === null ? "–" : `${value}\u00a0MHz`;
}

/** The setting of all devices; null if they differ or none is set. */
function common(settings) {
  const values = new Set(Object.values(settings));
  return values.size === 1 ? [...values][0] : null;
}

function makeFact() {
  return html("div", {}, html("dt"), html("dd"));
}
