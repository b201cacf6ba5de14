// Grafana's TimeSeries: axes, lines, areas, stacks, thresholds and legend. Annotations and
// exemplars are drawn by plugins of Grafana's that npm does not have; here by `marks.js`.
import { FieldType } from '@grafana/data';
import { TimeSeries } from '@grafana/ui';

import { markAnnotations, markExemplars } from './marks.js';

const DRAWN = new Set([FieldType.number, FieldType.enum]);

export function TimeSeriesPanel({ panel, frames, answers, annotations, theme, timeRange, timeZone, width, height }) {
  const hooked = new WeakSet();
  const exemplars = answers.flatMap((answer) => answer.exemplars ?? []);
  return (
    <TimeSeries
      frames={frames.map(graphable).filter((frame) => frame.fields.length > 1)}
      height={height}
      legend={panel.options?.legend ?? { showLegend: true, displayMode: 'list', placement: 'bottom', calcs: [] }}
      options={panel.options}
      structureRev={1}
      timeRange={timeRange}
      timeZone={[timeZone]}
      width={width}
    >
      {(builder) => {
        if (!hooked.has(builder)) {
          hooked.add(builder);
          builder.addHook('draw', (plot) => {
            markAnnotations(plot, annotations, theme);
            markExemplars(plot, exemplars, theme);
          });
        }
        return null;
      }}
    </TimeSeries>
  );
}

// A plot takes numbers over time; what is not finite is a hole in its line.
function graphable(frame) {
  const fields = frame.fields.filter(({ type }) => type === FieldType.time || DRAWN.has(type));
  return {
    ...frame,
    fields: fields.map((field) =>
      field.type === FieldType.number
        ? { ...field, values: field.values.map((value) => (Number.isFinite(value) ? value : null)) }
        : field
    ),
  };
}
