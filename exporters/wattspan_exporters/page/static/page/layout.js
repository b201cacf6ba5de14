// Positions of nodes and ribbons by d3-sankey, in an order of nodes that is stable over time.

import { sankey, sankeyLinkHorizontal } from "../vendor/d3-sankey.js";
import { KINDS, LAYERS, atLayer } from "./flow.js";

export const NODE = 10; // width of a node's bar
const LINE = 20; // pixels between nodes: a line of text
const TALL = 320; // pixels of all watts together
const COLUMNS = 200; // remembered orders

/** The order of each column: nodes keep their places unless one clearly exceeds its neighbour. */
export class Order {
  #places = new Map();

  of(layer, nodes, total) {
    const before = this.#places.get(layer) ?? [];
    const known = nodes.filter((node) => before.includes(node.id));
    known.sort((a, b) => before.indexOf(a.id) - before.indexOf(b.id));
    const fresh = nodes.filter((node) => !before.includes(node.id));
    for (const node of fresh.sort((a, b) => b.watts - a.watts)) {
      const place = known.findIndex((other) => other.watts < node.watts);
      known.splice(place < 0 ? known.length : place, 0, node);
    }
    for (let swapped = true; swapped; ) {
      swapped = false;
      for (let i = 1; i < known.length; i += 1) {
        if (known[i].watts > 1.25 * known[i - 1].watts + 0.01 * total) {
          [known[i - 1], known[i]] = [known[i], known[i - 1]];
          swapped = true;
        }
      }
    }
    this.#places.delete(layer);
    this.#places.set(layer, known.map((node) => node.id));
    if (this.#places.size > COLUMNS) this.#places.delete(this.#places.keys().next().value);
    return known;
  }
}

/** Positions and shapes: `{width, height, columns, places by node id, ribbons, room}`. */
export function layout(flow, width, order) {
  const columns = LAYERS.map((layer) => ({ layer, nodes: atLayer(flow, layer) })).filter(
    (column) => column.nodes.length,
  );
  const total = columns[0]?.nodes.reduce((sum, node) => sum + node.watts, 0) ?? 0;
  const pitch = width / columns.length;
  const ranks = new Map();
  const nodes = columns.flatMap((column, index) => {
    column.x = Math.round(index * pitch);
    column.nodes = arranged(column, order, total, ranks);
    return column.nodes.map((node) => {
      ranks.set(node.id, ranks.size);
      return { id: node.id, node, column: index, fixedValue: node.watts || total / 1e6 || 1 };
    });
  });
  const height = TALL + LINE * (Math.max(1, ...columns.map((column) => column.nodes.length)) - 1);
  const graph = sankey()
    .nodeId(({ id }) => id)
    .nodeAlign(({ column }) => column)
    .nodeSort((a, b) => ranks.get(a.id) - ranks.get(b.id))
    .nodeWidth(NODE)
    .nodePadding(LINE)
    .extent([[0, 0], [width, height]])({
      nodes,
      links: flow.links.map((link) => (
        { link, source: link.source.id, target: link.target.id, value: link.watts }
      )),
    });
  const places = new Map();
  for (const placed of graph.nodes) {
    const { node, column, y0, y1 } = placed;
    placed.x0 = columns[column].x;
    placed.x1 = placed.x0 + NODE;
    const tall = node.watts > 0 ? y1 - y0 : 0;
    const slot = Math.max(tall, LINE);
    places.set(node.id, { node, x: placed.x0, tall, slot, y: y0, top: y0 - (slot - tall) / 2 });
  }
  const path = sankeyLinkHorizontal();
  const ribbons = graph.links.map((placed) => ({
    key: `${placed.link.kind}|${placed.source.id}|${placed.target.id}`,
    link: placed.link, path: path(placed), tall: Math.max(placed.width, 0.75).toFixed(2),
  }));
  return { width, height, columns, places, ribbons, room: pitch - NODE };
}

function arranged(column, order, total, ranks) {
  const nodes = order.of(column.layer, column.nodes, total);
  if (column.layer === "device") return sorted(nodes, (node) => KINDS.indexOf(node.kind));
  if (column.layer === "type") return sorted(nodes, (node) => KINDS.indexOf(node.kind));
  if (column.layer === "group") return nodes;
  return sorted(nodes, (node) => {
    const most = node.into.reduce((a, b) => (a && a.watts >= b.watts ? a : b), null);
    return most ? (ranks.get(most.source.id) ?? 0) : Infinity;
  });
}

const sorted = (nodes, key) => [...nodes].sort((a, b) => key(a) - key(b) || 0);
