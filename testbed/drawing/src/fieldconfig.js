// A registry of field options for applyFieldOverrides. Grafana's own is made by its panel plugins,
// which npm does not have; what options of a panel's JSON do to a field is the same.
import { FieldConfigOptionsRegistry } from '@grafana/data';

const STANDARD = [
  'unit', 'min', 'max', 'fieldMinMax', 'decimals', 'displayName', 'noValue', 'thresholds', 'mappings',
  'links', 'actions', 'color', 'filterable', 'description',
];

// What the panel plugins presume where the JSON is silent.
const PALETTE = { mode: 'palette-classic' };
const THRESHOLDS = { mode: 'thresholds' };
const COLOR = {
  timeseries: PALETTE, barchart: PALETTE, xychart: PALETTE, piechart: PALETTE,
  stat: THRESHOLDS, bargauge: THRESHOLDS, gauge: THRESHOLDS, table: THRESHOLDS,
  'state-timeline': THRESHOLDS, 'status-history': THRESHOLDS,
};

export function fieldConfigOf(panel) {
  const { defaults = {}, overrides = [] } = panel.fieldConfig ?? {};
  return {
    defaults: {
      ...defaults,
      color: defaults.color ?? COLOR[panel.type],
      thresholds: lowest(defaults.thresholds) ?? {
        mode: 'absolute',
        steps: [{ value: -Infinity, color: 'green' }],
      },
      custom: defaults.custom ?? {},
    },
    overrides: overrides.map((rule) => ({
      ...rule,
      properties: rule.properties.map((property) =>
        property.id === 'thresholds' ? { ...property, value: lowest(property.value) } : property
      ),
    })),
  };
}

// JSON has no minus infinity: the lowest step is written with null, or with nothing.
function lowest(thresholds) {
  return (
    thresholds && {
      ...thresholds,
      steps: thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })),
    }
  );
}

export function registryFor({ defaults, overrides }) {
  const overridden = overrides
    .flatMap((rule) => rule.properties.map(({ id }) => id))
    .filter((id) => id.startsWith('custom.'))
    .map((id) => id.slice('custom.'.length));
  const custom = [...new Set([...Object.keys(defaults.custom), ...overridden])];
  return new FieldConfigOptionsRegistry(() => [
    ...STANDARD.map((id) => option(id, id, false)),
    ...custom.map((path) => option(`custom.${path}`, path, true)),
  ]);
}

function option(id, path, isCustom) {
  return {
    id,
    path,
    isCustom,
    name: id,
    editor: () => null,
    override: () => null,
    process: id === 'displayName' ? named : (value) => value,
    shouldApply: () => true,
  };
}

function named(value, { field, replaceVariables }) {
  return typeof value === 'string' ? replaceVariables(value, field.state.scopedVars) : value;
}
