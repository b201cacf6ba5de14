// The flow as nested lists with bars.

import { byId, html, keep, set, style, write } from "./elements.js";
import * as figures from "./figures.js";
import { label } from "./drawing.js";
import { KINDS, LAYERS, atLayer, parts } from "./flow.js";
import { Order } from "./layout.js";

export class List {
  #order = new Order();

  draw(flow) {
    const entry = (node, watts = node.watts) => ({ node, watts, total: flow.total });
    const devices = this.#order.of("device", atLayer(flow, "device"), flow.total);
    this.#fill(byId("devices-tree"), devices.map((node) => ({
      ...entry(node), parts: ofDevice(node), children: [],
    })));
    const groups = this.#order.of("group", atLayer(flow, "group"), flow.total);
    const ends = atLayer(flow, "type").filter((node) => node.layer === "rest");
    this.#fill(byId("groups-tree"), [
      ...groups.map((node) => this.#entry(entry(node), flow)),
      ...ends.map((node) => ({ ...entry(node), parts: parts(node), children: [] })),
    ]);
  }

  /** A node and its targets, with the watts that come from this node only. */
  #entry(entry, flow) {
    const { node, via } = entry;
    const onwards = new Map();
    for (const link of node.out) {
      const sofar = onwards.get(link.target) ?? { node: link.target, watts: 0, total: flow.total, via: [] };
      sofar.watts += link.watts;
      sofar.via.push(link);
      onwards.set(link.target, sofar);
    }
    const ids = new Map([...onwards.values()].map((child) => [child.node.id, child]));
    const next = LAYERS[LAYERS.indexOf(node.layer) + 1];
    const order = this.#order.of(`${next} of ${node.id}`, [...onwards.keys()], flow.total);
    return {
      ...entry,
      parts: via ? byKind(via) : parts(node),
      children: order.map((child) => this.#entry(ids.get(child.id), flow)),
    };
  }

  #fill(parent, entries) {
    keep(parent, entries, (entry) => entry.node.id, makeItem, (item, entry) => {
      const { node, watts, total } = entry;
      set(item, { "data-id": node.id, "data-layer": node.layer, "data-watts": watts });
      write(item.name, label(node));
      write(item.detail, node.layer === "process" && node.detail !== node.name ? figures.name(node.detail ?? "", 40) : "");
      write(item.watts, figures.watts(watts));
      write(item.share, figures.share(watts, total));
      keep(item.bar, entry.parts, ([kind]) => kind, ([kind]) => html("span", { class: kind }),
        (part, [, portion]) => style(part, "width", `${total > 0 ? (100 * portion / total).toFixed(2) : 0}%`));
      if (entry.children.length && !item.nested) {
        item.nested = html("ul");
        item.append(item.nested);
      }
      if (item.nested) this.#fill(item.nested, entry.children);
      if (item.nested && !entry.children.length) {
        item.nested.remove();
        item.nested = null;
      }
    });
  }
}

function makeItem() {
  const item = html("li");
  item.name = html("bdi", { class: "name" });
  item.detail = html("bdi", { class: "detail" });
  item.watts = html("span", { class: "watts" });
  item.share = html("span", { class: "share" });
  item.bar = html("span", { class: "bar", "aria-hidden": "true" });
  item.append(html("div", { class: "row" },
    html("span", { class: "who" }, item.name, " ", item.detail), item.watts, item.share, item.bar));
  return item;
}

/** A device's watts by kind: used by processes, idle, unattributed. */
function ofDevice(node) {
  const spent = byKind(node.out.map((link) => (
    link.target.layer === "rest" ? link : { ...link, kind: node.kind }
  )));
  return spent.length ? spent : parts(node);
}

function byKind(links) {
  const sums = new Map();
  for (const link of links) sums.set(link.kind, (sums.get(link.kind) ?? 0) + link.watts);
  return [...sums].sort(([a], [b]) => KINDS.indexOf(a) - KINDS.indexOf(b));
}
