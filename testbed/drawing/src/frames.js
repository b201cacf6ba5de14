// What Prometheus answered, as the data frames that Grafana's Prometheus data source makes of it.
import { createDataFrame, FieldType } from '@grafana/data';

export function toFrames(answers) {
  const shown = answers.filter((answer) => !answer.target.hide);
  return shown.flatMap((answer) =>
    answer.target.format === 'table'
      ? [asTable(answer, shown.length > 1)]
      : answer.result.map((series) => asSeries(answer, series))
  );
}

function samples(series) {
  return series.values ?? [series.value];
}

// Prometheus writes numbers as text, with a spelling of its own for the infinite.
function number(text) {
  return { '+Inf': Infinity, '-Inf': -Infinity }[text] ?? Number(text);
}

export function legend(format, labels, expression) {
  if (format === '__auto') {
    return Object.keys(labels).length > 0 ? '' : expression;
  }
  if (format) {
    return format.replace(/\{\{\s*(.+?)\s*\}\}/g, (_, label) => labels[label] ?? '');
  }
  const { __name__: name = '', ...rest } = labels;
  const written = Object.entries(rest).map(([label, value]) => `${label}="${value}"`);
  return written.length > 0 ? `${name}{${written.join(', ')}}` : name || expression;
}

function asSeries({ refId, target, step }, series) {
  const name = legend(target.legendFormat, series.metric, target.expr);
  const points = samples(series);
  return createDataFrame({
    refId,
    name: name || undefined,
    meta: { type: 'timeseries-multi', custom: { resultType: series.values ? 'matrix' : 'vector' } },
    fields: [
      {
        name: 'Time',
        type: FieldType.time,
        config: step ? { interval: step * 1000 } : {},
        values: points.map(([seconds]) => seconds * 1000),
      },
      {
        name: 'Value',
        type: FieldType.number,
        labels: series.metric,
        config: name ? { displayNameFromDS: name } : {},
        values: points.map(([, value]) => number(value)),
      },
    ],
  });
}

function asTable({ refId, result }, several) {
  const labels = [...new Set(result.flatMap((series) => Object.keys(series.metric)))].sort();
  const rows = result.flatMap((series) =>
    samples(series).map(([seconds, value]) => [seconds * 1000, series.metric, number(value)])
  );
  return createDataFrame({
    refId,
    meta: { preferredVisualisationType: 'rawPrometheus' },
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: rows.map(([time]) => time) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        config: { filterable: true },
        values: rows.map(([, metric]) => metric[label] ?? ''),
      })),
      {
        name: several ? `Value #${refId}` : 'Value',
        type: FieldType.number,
        config: {},
        values: rows.map(([, , value]) => value),
      },
    ],
  });
}
