// Where panels stand: Grafana's grid of 24 columns, with every folded row unfolded.
export const COLUMNS = 24;
export const CELL = 30; // height of a grid row, pixels
export const GUTTER = 8;

export function arrange(panels) {
  const placed = [];
  let pushed = 0; // grid rows that unfolding has added so far
  for (const panel of [...panels].sort((a, b) => a.gridPos.y - b.gridPos.y || a.gridPos.x - b.gridPos.x)) {
    placed.push(moved(panel, pushed));
    const inside = panel.type === 'row' ? (panel.panels ?? []) : [];
    if (inside.length > 0) {
      const top = Math.min(...inside.map((one) => one.gridPos.y));
      const below = panel.gridPos.y + panel.gridPos.h + pushed;
      placed.push(...inside.map((one) => moved(one, below - top)));
      pushed += Math.max(...inside.map((one) => one.gridPos.y + one.gridPos.h)) - top;
    }
  }
  return placed;
}

export function box({ x, y, w, h }, width) {
  const column = (width - GUTTER * (COLUMNS - 1)) / COLUMNS;
  return {
    left: Math.round(x * (column + GUTTER)),
    top: y * (CELL + GUTTER),
    width: Math.round(w * (column + GUTTER) - GUTTER),
    height: h * (CELL + GUTTER) - GUTTER,
  };
}

function moved(panel, rows) {
  return { ...panel, gridPos: { ...panel.gridPos, y: panel.gridPos.y + rows } };
}
