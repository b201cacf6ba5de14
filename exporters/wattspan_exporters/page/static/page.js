// The page: asks the agent for news and shows it, each part on its own.

import { byId, html, keep, set, write } from "./page/elements.js";
import { Drawing, Readout } from "./page/drawing.js";
import * as figures from "./page/figures.js";
import { split, understand } from "./page/flow.js";
import { drawAgent, drawHealth } from "./page/health.js";
import { List } from "./page/list.js";
import { poll } from "./page/poll.js";
import { Power } from "./page/power.js";
import { Summary } from "./page/summary.js";
import { devicesOf, devicesTable, spansTable } from "./page/tables.js";
import { Tuner } from "./page/tuner.js";

const SILENT = 3; // seconds without an answer after which figures are called old
const OLD = 15; // seconds that figures may be old while the agent answers
const NARROW = 640; // pixels below which the drawing cannot be read

let data = null;
let aged = 0; // seconds since the snapshot, when it was answered
let answered = performance.now(); // or asked again after a time in which nothing was asked
let flow = null; // the flow that is shown: now, or over the last hour
let looked = null; // the node whose figures are shown

const readout = new Readout(byId("readout"), byId("told"));
const drawing = new Drawing(byId("drawing"), (node, chosen) => {
  looked = node;
  readout.tell(node, flow, chosen);
});
const list = new List(byId("list"));
const summary = new Summary(byId("figures"), byId("split"));
const power = new Power(byId("power"), byId("power-readout"));
const devices = devicesTable(byId("devices"));
const spans = spansTable(byId("spans"));
const tuner = new Tuner(byId("tuner"), byId("tuner-mode"));

function drawHead() {
  write(byId("host"), figures.name(data.snapshot.host_name, 80));
  document.title = `${figures.watts(data.now.watts)} · ${figures.name(data.snapshot.host_name, 60)} · wattspan`;
  byId("emulated").hidden = !data.snapshot.emulated;
  write(byId("version"), `wattspan ${data.snapshot.agent_version}`);
}

/** The width of a section's content, whatever of it is shown: that of its title's line. */
const room = (title) => byId(title).parentElement.clientWidth;

function drawFlow() {
  const hour = byId("stretch").querySelector("[value=hour]");
  hour.disabled = !data.hour;
  const length = data.hour ? data.hour.seconds : 3600;
  write(byId("hour-label"), `Last ${length > 3590 ? "hour" : figures.duration(length)}`);
  flow = understand(hour.checked && data.hour ? data.hour : data.now);
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
  () => summary.draw(data, understand(data.now), data.hour && understand(data.hour)),
  () => power.draw(data.power, room("power-title")),
  () => devices.draw(devicesOf(data.snapshot)),
  () => spans.draw(data.hour_spans),
  () => tuner.draw(data.snapshot.tuning),
  () => drawHealth(byId("health"), data.snapshot.sources),
  () => drawAgent(byId("agent"), data.snapshot.agent, data.agent_cpu),
  drawAge,
];

/** One part that fails costs only itself. */
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
  if (document.hidden) return; // nothing is asked meanwhile, so no answer is missing
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
  // The sentence is announced once, so it holds no running seconds.
  write(byId("stale"), unanswered
    ? "The agent does not answer. What is shown is what it said last; this page keeps asking."
    : old ? `The agent answers, but has measured nothing new since ${figures.clock(at, true)}.` : "");
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
    readout.tell(looked, flow, false);
  });
}

poll(
  "live.json",
  (news, age) => {
    [data, aged] = [news, age];
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
