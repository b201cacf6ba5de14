// Points of two figures. Grafana's XY chart is not in npm: axes and legend are Grafana's, the
// points are drawn here. Mapped automatically: the first two numbers of each frame are x and y.
import { FieldType, formattedValueToString, getFieldDisplayName, getFieldSeriesColor } from '@grafana/data';
import { AxisPlacement, ScaleDirection, ScaleOrientation } from '@grafana/schema';
import { UPlotChart, UPlotConfigBuilder, VizLegend } from '@grafana/ui';

const LEGEND = 28; // pixels
const MARGIN = 1.15; // of the greatest value, to the end of an axis

export function XYChartPanel({ panel, frames, theme, width, height }) {
  const series = frames.flatMap((frame) => {
    const [x, y] = frame.fields.filter(({ type }) => type === FieldType.number);
    const name = y && getFieldDisplayName(y, frame, frames); // not the frame's: it is what Grafana shows
    return y ? [{ name, x, y, color: getFieldSeriesColor(y, theme).color }] : [];
  });
  const items = series.map(({ name, color }) => ({ label: name, color, yAxis: 1 }));
  const config = configure(series, theme);
  return (
    <>
      <UPlotChart config={config} data={[[0, 1], [0, 1]]} height={height - LEGEND} width={width} />
      {panel.options?.legend?.showLegend !== false && (
        <VizLegend displayMode="list" items={items} placement="bottom" />
      )}
    </>
  );
}

function configure(series, theme) {
  const builder = new UPlotConfigBuilder();
  builder.addScale({
    scaleKey: 'x',
    isTime: false,
    orientation: ScaleOrientation.Horizontal,
    direction: ScaleDirection.Right,
    range: () => [0, most(series.map(({ x }) => x))],
  });
  builder.addScale({
    scaleKey: 'y',
    orientation: ScaleOrientation.Vertical,
    direction: ScaleDirection.Up,
    range: () => [0, most(series.map(({ y }) => y))],
  });
  builder.addAxis(axis('x', AxisPlacement.Bottom, series[0]?.x, theme));
  builder.addAxis(axis('y', AxisPlacement.Left, series[0]?.y, theme));
  builder.addSeries({ scaleKey: 'y', theme, lineWidth: 0, pathBuilder: () => null, pointsBuilder: () => undefined });
  builder.addHook('draw', (plot) => series.forEach((one) => points(plot, one)));
  return builder;
}

function most(fields) {
  return MARGIN * Math.max(...fields.flatMap(({ values }) => values.filter(Number.isFinite)), Number.MIN_VALUE);
}

function axis(scaleKey, placement, field, theme) {
  return {
    scaleKey,
    placement,
    theme,
    label: field?.config.custom?.axisLabel,
    formatValue: (value, decimals) => (field ? formattedValueToString(field.display(value, decimals)) : String(value)),
  };
}

function points(plot, { x, y, color }) {
  const { ctx } = plot;
  const radius = ((y.config.custom?.pointSize?.fixed ?? 5) / 2) * window.devicePixelRatio;
  ctx.save();
  ctx.strokeStyle = color;
  ctx.fillStyle = color;
  x.values.forEach((value, index) => {
    ctx.beginPath();
    ctx.arc(plot.valToPos(value, 'x', true), plot.valToPos(y.values[index], 'y', true), radius, 0, 2 * Math.PI);
    ctx.globalAlpha = (y.config.custom?.fillOpacity ?? 50) / 100;
    ctx.fill();
    ctx.globalAlpha = 1;
    ctx.stroke();
  });
  ctx.restore();
}
