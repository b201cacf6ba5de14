// The flow as a drawing: bars and ribbons, kept by id so that changes are animated.

import { byId, keep, set, svg, write } from "./elements.js";
import * as figures from "./figures.js";
import { TITLES, paths } from "./flow.js";
import { NODE, Order, layout } from "./layout.js";

const HEAD = 24; // above the nodes: the columns' titles
const FOOT = 6;

export class Drawing {
  #order = new Order();
  #pen = document.createElement("canvas").getContext("2d");
  #svg = svg("svg", {
    role: "group",
    "aria-label": "Flow of power. Arrow keys move between bars, Enter pins one, Escape releases it.",
  });
  #titles = svg("g", { class: "titles", "aria-hidden": "true" });
  #ribbons = svg("g", { class: "ribbons", "aria-hidden": "true" });
  #nodes = svg("g", { class: "nodes" });
  #pinned = null;
  #pointed = null;
  #current = null; // the node that Tab reaches
  #plan = null;

  /** `selected(node, chosen)`: the displayed node, or null; `chosen` after an action of the user. */
  constructor(parent, selected) {
    this.selected = selected;
    this.#svg.append(this.#titles, this.#ribbons, this.#nodes);
    parent.append(this.#svg);
    this.#svg.addEventListener("keydown", (event) => this.#key(event));
    this.#svg.addEventListener("click", (event) => {
      if (!event.target.closest(".node")) this.#pin(null);
    });
  }

  draw(flow, width) {
    const style = getComputedStyle(this.#svg);
    this.#pen.font = `600 ${style.fontSize} ${style.fontFamily}`;
    this.#plan = layout(flow, width, this.#order);
    const { height, columns, places, ribbons, room } = this.#plan;
    const tall = Math.ceil(HEAD + height + FOOT);
    set(this.#svg, { width, height: tall, viewBox: `0 0 ${width} ${tall}` });
    if (!places.has(this.#pinned)) this.#pinned = null;
    if (!places.has(this.#pointed)) this.#pointed = null;
    if (!places.has(this.#current)) this.#current = columns[0]?.nodes[0]?.id ?? null;
    keep(this.#titles, columns, (c) => c.layer, () => svg("text", { y: 11 }), (text, column) => {
      write(text, TITLES[column.layer]);
      set(text, { x: column.x });
    });
    keep(this.#ribbons, ribbons, (r) => r.key, () => svg("path"), (path, { link, path: d, tall }) => {
      set(path, {
        d, "stroke-width": tall, transform: `translate(0 ${HEAD})`, "data-source": link.source.id,
        "data-target": link.target.id, "data-watts": link.watts,
      });
    });
    const standing = columns.flatMap((column) => column.nodes.map((node) => places.get(node.id)));
    keep(this.#nodes, standing, (p) => p.node.id, (p) => this.#make(p.node.id), (group, place) =>
      this.#update(group, place, room, flow.total),
    );
    this.#show(false);
  }

  #make(id) {
    const name = svg("tspan", { class: "name" });
    const figure = svg("tspan", { class: "figure" });
    const group = svg("g", { class: "node", role: "button" },
      svg("rect", { class: "reach", x: -4 }),
      svg("rect", { class: "bar", width: NODE, rx: 1.5 }),
      svg("text", { x: NODE + 6 }, name, figure));
    Object.assign(group, { name, figure }).dataset.id = id;
    group.addEventListener("pointerenter", (event) => {
      if (event.pointerType === "mouse") this.#point(id);
    });
    group.addEventListener("pointerleave", () => this.#point(null));
    group.addEventListener("focus", () => {
      this.#current = id;
      if (group.matches(":focus-visible")) this.#point(id);
      this.#reach();
    });
    group.addEventListener("blur", () => this.#point(null));
    group.addEventListener("click", () => this.#pin(this.#pinned === id ? null : id));
    return group;
  }

  #update(group, { node, x, top, slot, y, tall }, room, total) {
    const [reach, bar, text] = group.children;
    set(group, {
      transform: `translate(${x} ${(HEAD + top).toFixed(1)})`,
      tabindex: node.id === this.#current ? 0 : -1, "data-id": node.id,
      "data-layer": node.layer, "data-watts": node.watts, "aria-pressed": node.id === this.#pinned,
    });
    // The label of the focused node is constant while a screen reader speaks it.
    if (document.activeElement !== group) set(group, { "aria-label": description(node, total) });
    set(reach, { width: Math.max(room - 4, 0), height: slot });
    set(bar, {
      y: (y - top).toFixed(1), height: Math.max(tall, 1.5).toFixed(1),
      class: `bar ${node.kind ?? "several"}`,
    });
    const two = slot >= 36;
    const figure = two
      ? `${figures.watts(node.watts)} · ${figures.share(node.watts, total)}`
      : figures.watts(node.watts);
    const space = room - 16 - (two ? 0 : this.#pen.measureText(`${figure}  `).width);
    write(group.name, this.#fit(label(node), space));
    write(group.figure, figure);
    set(group.figure, two ? { x: NODE + 6, dy: 16, dx: null } : { x: null, dy: null, dx: 6 });
    set(text, { y: (slot / 2 + (two ? -4 : 4)).toFixed(1) });
  }

  /** The beginning and the end of a name, as much as fits. */
  #fit(text, space) {
    const wide = (shown) => this.#pen.measureText(shown).width > space;
    if (text.length < 80 && !wide(text)) return text;
    let kept = Math.min(text.length - 1, 60);
    while (kept > 2 && wide(figures.short(text, kept))) kept -= 1;
    return figures.short(text, kept);
  }

  #point(id) {
    if (this.#pointed === id) return;
    this.#pointed = id;
    this.#show(true);
  }

  #pin(id) {
    if (this.#pinned === id) return;
    this.#pinned = id;
    for (const group of this.#nodes.children) {
      set(group, { "aria-pressed": group.dataset.id === id });
    }
    this.#show(true);
  }

  #show(chosen) {
    const place = this.#plan?.places.get(this.#pointed ?? this.#pinned);
    const on = place ? paths(place.node) : new Set();
    const lit = new Set([...on].flatMap((link) => [link.source.id, link.target.id]));
    if (place) lit.add(place.node.id);
    this.#svg.classList.toggle("dim", Boolean(place));
    const shapes = this.#ribbons.children;
    (this.#plan?.ribbons ?? []).forEach(({ link }, index) => {
      set(shapes[index], { class: `ribbon ${link.kind}${on.has(link) ? " on" : ""}` });
    });
    for (const group of this.#nodes.children) {
      group.classList.toggle("on", lit.has(group.dataset.id));
      group.classList.toggle("at", group.dataset.id === place?.node.id);
    }
    this.selected(place?.node ?? null, chosen);
  }

  #reach() {
    for (const group of this.#nodes.children) {
      set(group, { tabindex: group.dataset.id === this.#current ? 0 : -1 });
    }
  }

  #key(event) {
    const from = event.target.closest(".node");
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Enter" || event.key === " ") {
      this.#pin(this.#pinned === from.dataset.id ? null : from.dataset.id);
    } else if (event.key === "Escape") {
      this.#pin(null);
      this.#point(null);
    } else {
      const id = this.#neighbour(from.dataset.id, event.key);
      if (id === undefined) return;
      [...this.#nodes.children].find((group) => group.dataset.id === id)?.focus();
    }
    event.preventDefault();
  }

  #neighbour(id, key) {
    const { columns, places } = this.#plan;
    const across = columns.findIndex(({ nodes }) => nodes.some((node) => node.id === id));
    const nodes = columns[across].nodes;
    const down = nodes.findIndex((node) => node.id === id);
    const { node } = places.get(id);
    const most = (links, end) =>
      links.reduce((a, b) => (a && a.watts >= b.watts ? a : b), null)?.[end].id ?? id;
    if (key === "ArrowDown") return nodes[Math.min(down + 1, nodes.length - 1)].id;
    if (key === "ArrowUp") return nodes[Math.max(down - 1, 0)].id;
    if (key === "ArrowRight") return most(node.out, "target");
    if (key === "ArrowLeft") return most(node.into, "source");
    if (key === "Home") return nodes[0].id;
    if (key === "End") return nodes.at(-1).id;
    return undefined;
  }
}

/** The displayed name of a node. */
export function label(node) {
  if (node.layer === "type" || node.layer === "rest") {
    return figures.TYPES[node.kind] ?? node.name;
  }
  return figures.name(node.name);
}

const LAYER_NAMES = {
  device: "device", type: "hardware type", rest: "not attributed to a process",
  group: "group", process: "process", span: "span",
};

function description(node, total) {
  const portion = figures.share(node.watts, total);
  return `${label(node)}, ${LAYER_NAMES[node.layer]}: ${figures.watts(node.watts)}, ${portion} of the host`;
}

/** The sentence above the drawing: exact figures of one node, or a hint. */
export function showReadout(node, flow, chosen) {
  let facts = ["Hover over a bar, tap it, or reach it with Tab and the arrow keys for its exact figures."];
  if (node) {
    // Watts are energy divided by its own time, which differs slightly from the displayed period.
    const lasted = node.watts > 0 ? node.joules / node.watts : flow.seconds;
    facts = [
      node.detail && node.detail !== node.name ? figures.name(node.detail, 80) : LAYER_NAMES[node.layer],
      figures.watts(node.watts),
      `${figures.joules(node.joules)} in ${figures.duration(lasted)}`,
      `${figures.share(node.watts, flow.total)} of the host`,
      node.provenance,
    ].filter((fact, index, all) => fact && all.indexOf(fact) === index);
  }
  write(byId("readout-name"), node ? label(node) : "");
  write(byId("readout-facts"), facts.join(" · "));
  if (chosen) write(byId("told"), node ? `${label(node)}: ${facts.join(", ")}` : "");
}
