// The transformation partitionByValues: a frame becomes one for each combination of the values of
// some of its fields. Grafana has it in its core, which npm does not have.
import { map } from 'rxjs';

function partition(frame, { fields: names = [], keepFields = false, naming = {} }) {
  const keys = frame.fields.filter(({ name, config }) => names.includes(config.displayName ?? name));
  if (keys.length === 0) {
    return [frame];
  }
  const groups = new Map();
  for (let row = 0; row < frame.length; row++) {
    const name = keys.map(({ values }) => values[row]).join(naming.separator2 ?? ' ');
    groups.set(name, [...(groups.get(name) ?? []), row]);
  }
  const kept = frame.fields.filter((field) => keepFields || !keys.includes(field));
  return [...groups].map(([name, rows]) => ({
    ...frame,
    name,
    length: rows.length,
    fields: kept.map((field) => ({ ...field, state: {}, values: rows.map((row) => field.values[row]) })),
  }));
}

export const partitionByValues = {
  id: 'partitionByValues',
  name: 'Partition by values',
  operator: (options) => (source) =>
    source.pipe(map((frames) => frames.flatMap((frame) => partition(frame, options)))),
};
