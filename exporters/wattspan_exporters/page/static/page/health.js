// The health of each source, and what the agent itself costs.

import { html, keep, set, write } from "./elements.js";
import * as figures from "./figures.js";

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
