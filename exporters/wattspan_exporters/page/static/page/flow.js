// Analysis of a flow without the document: layers, hardware types, paths.

const MOSTLY = 0.8; // least certain share of a kind for its colour

export const LAYERS = ["device", "type", "group", "process", "span"];
export const TITLES = {
  device: "Devices", type: "Hardware", group: "Groups", process: "Processes", span: "Spans",
};
export const KINDS = [
  "gpu", "cpu", "memory", "enclosure", "mixed", "idle", "unattributed", "undivided",
];
const ENDS = ["idle", "unattributed", "undivided"]; // kinds that belong to no process

/** The column of a node: idle and unattributed are in the column of hardware types. */
export const layerOf = (node) => (node.layer === "rest" ? "type" : node.layer);

/** The kind of a node; null for a mixture. */
function kindOf(node) {
  return node.layer === "rest" ? (ENDS.includes(node.name) ? node.name : "undivided") : node.type;
}

/**
 * The flow with the kind of each link and the links of each node.
 *
 * Links from groups on have no type. Their kind is the one that is certain for most of the watts:
 * in a group with 1 W that is not GPU, a process with 500 W has at least 499 W of GPU.
 */
export function analyse(flow) {
  const seen = flow.nodes.filter((node) => node.watts > 0 || node.layer === "device");
  const nodes = new Map(seen.map((node) => [
    node.id, { ...node, kind: kindOf(node), into: [], out: [], sure: new Map() },
  ]));
  const links = flow.links
    .filter((link) => nodes.has(link.source) && nodes.has(link.target) && link.watts > 0)
    .map((link) => ({ ...link, source: nodes.get(link.source), target: nodes.get(link.target) }))
    .sort((a, b) => rank(a.source) - rank(b.source));
  for (const link of links) {
    const sure = certain(link);
    for (const [kind, watts] of sure) add(link.target.sure, kind, watts);
    link.kind = link.target.layer === "rest" ? link.target.kind : mostly(sure, link.watts);
    link.source.out.push(link);
    link.target.into.push(link);
  }
  return { ...flow, nodes, links, total: flow.watts };
}

const rank = (node) => LAYERS.indexOf(layerOf(node));

const add = (sums, kind, watts) => sums.set(kind, (sums.get(kind) ?? 0) + watts);

/** The least watts of each kind in a link. */
function certain({ source, type, watts }) {
  const known = type ?? source.kind;
  if (known) return [[known, watts]];
  return [...source.sure].map(([kind, most]) => [kind, Math.max(0, watts - (source.watts - most))]);
}

function mostly(sure, watts) {
  return sure.find(([, least]) => least >= MOSTLY * watts)?.[0] ?? "mixed";
}

/** A node's watts by kind, in the order of KINDS; one part of its own kind if it has no sources. */
export function parts(node) {
  if (node.kind) return [[node.kind, node.watts]];
  const sums = new Map();
  for (const link of node.into) add(sums, link.kind, link.watts);
  if (!sums.size) return [["mixed", node.watts]];
  return KINDS.filter((kind) => sums.has(kind)).map((kind) => [kind, sums.get(kind)]);
}

/** All links upstream and downstream of a node. */
export function paths(node) {
  const found = new Set();
  const follow = (from, side, end) => {
    for (const link of from[side]) {
      if (!found.has(link)) {
        found.add(link);
        follow(link[end], side, end);
      }
    }
  };
  follow(node, "into", "source");
  follow(node, "out", "target");
  return found;
}

export function atLayer(flow, layer) {
  return [...flow.nodes.values()].filter((node) => layerOf(node) === layer);
}

/** The host's watts by kind, without zeros. */
export function split(flow) {
  const nodes = atLayer(flow, "type").filter(({ watts }) => watts > 0);
  const sums = new Map();
  for (const { kind, watts } of nodes) add(sums, kind, watts);
  return KINDS.filter((kind) => sums.has(kind)).map((kind) => [kind, sums.get(kind)]);
}
