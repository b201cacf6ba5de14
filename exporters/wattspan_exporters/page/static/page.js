// The page: polls the agent and draws each section independently of the others.

import { byId, html, keep, set, write } from "./page/elements.js";
import { Drawing, showReadout } from "./page/drawing.js";
import * as figures from "./page/figures.js";
import { split, analyse } from "./page/flow.js";
import { List } from "./page/list.js";
import { poll } from "./page/poll.js";
import { Power } from "./page/power.js";
import { drawAgent, drawFigures, drawHealth, drawProblems } from "./page/summary.js";
import {
  devicesOf, devicesTable, enginesTable, hostsOf, hostsTable, modelsOf, modelsTable, spansTable,
} from "./page/tables.js";
import { drawTuner } from "./page/tuner.js";

const SILENT = 3; // seconds without a response until the page reports it
const OLD = 15; // seconds: largest age of figures that are not reported as old
const NARROW = 640; // pixels below which the flow is a list

let data = null;
let aged = 0; // seconds: age of the snapshot when it was received
let answered = performance.now(); // time of the last response, or of the return from hidden
let flow = null; // the displayed flow: now, or the last hour
let selected = null; // the node with displayed figures

const drawing = new Drawing(byId("drawing"), (node, chosen) => {
  selected = node;
  showReadout(node, flow, chosen);
});
const list = new List();
const power = new Power();
const tables = Object.fromEntries(Object.entries({
  devices: devicesTable, spans: spansTable, models: modelsTable, engines: enginesTable, hosts: hostsTable,
}).map(([name, table]) => [name, table(byId(name))]));

function drawHead() {
  write(byId("host"), figures.name(data.snapshot.host_name, 80));
  document.title = `${figures.flowWatts(data.now)} · ${figures.name(data.snapshot.host_name, 60)} · wattspan`;
  byId("emulated").hidden = !data.snapshot.emulated;
  write(byId("version"), `wattspan ${data.snapshot.agent_version}`);
}

/** A section with a table, only if there are rows. */
function drawSection(name, rows) {
  byId(`${name}-section`).hidden = !rows.length;
  tables[name].draw(rows);
}

/** The content width of a section. */
const room = (title) => byId(title).parentElement.clientWidth;

function drawFlow() {
  const hour = byId("stretch").querySelector("[value=hour]");
  hour.disabled = !data.hour;
  const length = data.hour ? data.hour.seconds : 3600;
  write(byId("hour-label"), `Last ${length > 3590 ? "hour" : figures.duration(length)}`);
  flow = analyse(hour.checked && data.hour ? data.hour : data.now);
  const some = flow.nodes.size > 0;
  const wide = room("flow-title");
  const asList = wide < NARROW || byId("form").querySelector("[value=list]").checked;
  byId("form").hidden = wide < NARROW;
  byId("flow-note").hidden = some;
  byId("drawing").hidden = asList || !some;
  byId("list").hidden = !asList || !some;
  byId("readout").hidden = asList || !some;
  byId("key").hidden = !some;
  const mixed = !asList && flow.links.some(({ kind }) => kind === "mixed");
  const kinds = [...split(flow), ...(mixed ? [["mixed", null]] : [])];
  keep(byId("key"), kinds, ([kind]) => kind, makeKey, (item, [kind, watts]) => {
    const portion = watts === null ? "" : ` ${figures.share(watts, flow.total)}`;
    write(item.lastElementChild, `${figures.TYPES[kind] ?? kind}${portion}`);
  });
  if (!some) return;
  if (asList) list.draw(flow);
  else drawing.draw(flow, wide);
}

function makeKey([kind]) {
  return html("li", {}, html("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), html("span"));
}

const parts = [
  drawHead,
  drawFlow,
  () => drawFigures(byId("figures"), data, analyse(data.now), data.hour && analyse(data.hour)),
  () => power.draw(data.power, room("power-title")),
  () => tables.devices.draw(devicesOf(data.snapshot)),
  () => tables.spans.draw(data.hour_spans),
  () => drawSection("models", modelsOf(data.snapshot)),
  () => drawSection("engines", data.snapshot.engines ?? []),
  () => drawSection("hosts", hostsOf(data.snapshot)),
  () => drawTuner(data.snapshot.tuning),
  () => drawProblems(byId("problems"), data.snapshot),
  () => drawHealth(byId("health"), data.snapshot.sources),
  () => drawAgent(byId("agent"), data.snapshot.agent, data.agent_cpu),
  drawAge,
];

/** Draws all sections; an error affects its own section only. */
function draw() {
  for (const part of data ? parts : []) {
    try {
      part();
    } catch (error) {
      console.error(error);
    }
  }
}

function drawAge() {
  if (document.hidden) return; // a hidden page sends no requests
  const silent = (performance.now() - answered) / 1000;
  const age = data ? aged + silent : null;
  const unanswered = silent > SILENT;
  const old = !unanswered && age !== null && age > OLD;
  document.body.classList.toggle("stale", unanswered || old);
  document.body.classList.toggle("loading", !data);
  const at = data ? data.snapshot.at_unix_ns / 1e9 : 0;
  const state = unanswered ? `No answer for ${figures.duration(Math.round(silent))}`
    : old ? "Figures are old" : data ? "Live" : "Loading …";
  write(byId("fresh-text"), state);
  // Screen readers announce each change, so the sentence contains no running time.
  write(byId("stale"), unanswered
    ? "The agent does not respond. The figures are those of its last response; the page retries."
    : old ? `The agent responds, but its last measurement is of ${figures.clock(at, true)}.` : "");
  write(byId("age"), data ? `Figures of ${figures.clock(at, true)}` : "");
}

let width = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width === width) return;
  width = contentRect.width;
  requestAnimationFrame(draw);
}).observe(byId("main"));

for (const choice of [byId("stretch"), byId("form")]) {
  choice.addEventListener("change", () => {
    if (!data) return;
    drawFlow();
    showReadout(selected, flow, false);
  });
}

poll(
  "live.json",
  (received, age) => {
    [data, aged] = [received, age];
    answered = performance.now();
    draw();
  },
  drawAge,
);
document.addEventListener("visibilitychange", () => {
  answered = performance.now();
});
setInterval(drawAge, 1000);
set(document.body, { class: "loading" });
