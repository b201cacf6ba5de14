// Annotations as dashed lines and exemplars as diamonds, on a plot that Grafana's components drew.

export function markAnnotations(plot, annotations, theme) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio;
  ctx.save();
  for (const { time, color: named } of annotations) {
    const color = theme.visualization.getColorByName(named);
    const x = plot.valToPos(time, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) {
      continue;
    }
    ctx.strokeStyle = color;
    ctx.fillStyle = color;
    ctx.lineWidth = 2 * ratio;
    ctx.setLineDash([5 * ratio, 5 * ratio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.beginPath();
    ctx.moveTo(x, bbox.top + bbox.height);
    ctx.lineTo(x - 4 * ratio, bbox.top + bbox.height + 5 * ratio);
    ctx.lineTo(x + 4 * ratio, bbox.top + bbox.height + 5 * ratio);
    ctx.fill();
  }
  ctx.restore();
}

export function markExemplars(plot, exemplars, theme) {
  const scale = plot.series[1]?.scale;
  if (!scale) {
    return;
  }
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales[scale];
  const half = 3.5 * window.devicePixelRatio;
  ctx.save();
  ctx.fillStyle = theme.visualization.getColorByName('blue');
  for (const { time, value } of exemplars) {
    const x = plot.valToPos(time, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) {
      continue;
    }
    // One beyond the axis stands at its edge, as in Grafana.
    const y = plot.valToPos(Math.min(Math.max(value, min), max), scale, true);
    ctx.beginPath();
    ctx.moveTo(x, y - half);
    ctx.lineTo(x + half, y);
    ctx.lineTo(x, y + half);
    ctx.lineTo(x - half, y);
    ctx.fill();
  }
  ctx.restore();
}
