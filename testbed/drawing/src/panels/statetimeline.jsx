// States over time. Grafana's state timeline is not in npm: axes and plot are Grafana's, the bars
// are drawn here, in the colors and words that the field's mappings and thresholds give.
import { FieldType, formattedValueToString, getFieldDisplayName } from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { measureText, UPlotChart, UPlotConfigBuilder, VizLegend } from '@grafana/ui';

const LEGEND = 28; // pixels

export function StateTimelinePanel({ panel, frames, theme, timeRange, timeZone, width, height }) {
  const rows = frames.flatMap((frame) => {
    const time = frame.fields.find(({ type }) => type === FieldType.time);
    return frame.fields
      .filter((field) => field !== time && field.values.length > 0)
      .map((field) => ({ field, name: getFieldDisplayName(field, frame, frames), runs: runs(time, field) }));
  });
  const legend = panel.options?.legend?.showLegend !== false;
  const config = configure(rows, panel.options ?? {}, { theme, timeRange, timeZone });
  const data = [[timeRange.from.valueOf(), timeRange.to.valueOf()], ...rows.map((_, row) => [row, row])];
  return (
    <>
      <UPlotChart config={config} data={data} height={height - (legend ? LEGEND : 0)} width={width} />
      {legend && <VizLegend displayMode="list" items={legendOf(rows)} placement="bottom" />}
    </>
  );
}

// Stretches of one state, from the first sample that says so to the first that says otherwise.
function runs(time, field) {
  const interval = time.config.interval ?? 0;
  const found = [];
  field.values.forEach((value, index) => {
    const from = time.values[index];
    const last = found.at(-1);
    const shown = value == null ? null : field.display(value);
    const text = shown && formattedValueToString(shown);
    if (last && last.text === text && from - last.to <= interval) {
      last.to = from + interval;
    } else if (shown) {
      if (last && from - last.to <= interval) {
        last.to = from;
      }
      found.push({ from, to: from + interval, text, color: shown.color });
    }
  });
  return found;
}

function legendOf(rows) {
  const states = new Map(rows.flatMap(({ runs }) => runs.map(({ text, color }) => [text, color])));
  return [...states].map(([label, color]) => ({ label, color, yAxis: 1 }));
}

function configure(rows, { rowHeight = 0.9, showValue = 'auto' }, { theme, timeRange, timeZone }) {
  const builder = new UPlotConfigBuilder(timeZone);
  const edges = [timeRange.from.valueOf(), timeRange.to.valueOf()];
  builder.addScale({
    scaleKey: 'x',
    isTime: true,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => edges,
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Down,
    range: () => [-0.5, rows.length - 0.5],
  });
  builder.addAxis({ scaleKey: 'x', isTime: true, placement: AxisPlacement.Bottom, timeZone, theme, grid: { show: false } });
  builder.addAxis({
    scaleKey: 'y',
    placement: AxisPlacement.Left,
    splits: () => rows.map((_, row) => row),
    values: () => rows.map(({ name }) => name),
    grid: { show: false },
    ticks: { show: false },
    gap: 8,
    size: 24 + Math.max(...rows.map(({ name }) => measureText(name, 12).width)),
    theme,
  });
  rows.forEach(() =>
    builder.addSeries({ scaleKey: 'y', theme, lineWidth: 0, pathBuilder: () => null, pointsBuilder: () => undefined })
  );
  builder.addHook('draw', (plot) => rows.forEach(({ runs }, row) => bars(plot, row, runs, rowHeight, showValue, theme)));
  builder.setPrepData(() => [edges]);
  return builder;
}

function bars(plot, row, runs, rowHeight, showValue, theme) {
  const { ctx, bbox } = plot;
  const ratio = window.devicePixelRatio;
  const top = plot.valToPos(row - rowHeight / 2, 'y', true);
  const bottom = plot.valToPos(row + rowHeight / 2, 'y', true);
  ctx.save();
  ctx.font = `${12 * ratio}px ${theme.typography.fontFamily}`;
  ctx.textAlign = 'left';
  ctx.textBaseline = 'middle';
  for (const { from, to, text, color } of runs) {
    const left = Math.max(plot.valToPos(from, 'x', true), bbox.left);
    const right = Math.min(plot.valToPos(to, 'x', true), bbox.left + bbox.width);
    if (right <= left) {
      continue;
    }
    ctx.fillStyle = color;
    ctx.fillRect(left, Math.min(top, bottom), right - left, Math.abs(bottom - top));
    if (showValue !== 'never' && ctx.measureText(text).width + 8 * ratio < right - left) {
      ctx.fillStyle = theme.colors.getContrastText(color, 3);
      ctx.fillText(text, left + 4 * ratio, (top + bottom) / 2);
    }
  }
  ctx.restore();
}
