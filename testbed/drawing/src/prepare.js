// From a panel and its answers to fields that can be drawn, by Grafana's own transformations and
// field configuration; and what is wrong with it, where Grafana itself would be silent.
import {
  applyFieldOverrides,
  cacheFieldDisplayNames,
  fieldMatchers,
  FieldType,
  fieldReducers,
  getValueFormats,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

import { fieldConfigOf, registryFor } from './fieldconfig.js';
import { toFrames } from './frames.js';
import { PLUGINS } from './panels/index.js';
import { partitionByValues } from './partition.js';
import { replacer } from './variables.js';

standardTransformersRegistry.setInit(() =>
  [...new Set(Object.values(standardTransformers)), partitionByValues].map((info) => ({
    id: info.id,
    name: info.name,
    transformation: () => Promise.resolve(info),
    editor: () => null,
  }))
);

const UNITS = new Set(getValueFormats().flatMap(({ submenu }) => submenu.map(({ value }) => value)));
const FREE_UNIT = /^(prefix|suffix|time|si|count|currency|bool):./;

export async function prepare(panel, given, theme) {
  if (panel.type === 'row' || panel.type === 'text') {
    return { panel, state: 'text', problems: [], frames: [] };
  }
  const problems = [...wrong(panel)];
  const answers = given.results[String(panel.id)] ?? [];
  problems.push(...answers.filter(({ error }) => error).map(({ refId, error }) => `${refId}: ${error}`));
  const replaceVariables = replacer({ ...given.variables, ...panel.scopedVars });
  const raw = toFrames(answers.filter(({ error }) => !error));
  const fieldConfig = fieldConfigOf(panel);
  const transformed = await lastValueFrom(
    transformDataFrame(panel.transformations ?? [], raw, { interpolate: replaceVariables })
  );
  const frames = applyFieldOverrides({
    data: transformed,
    fieldConfig,
    fieldConfigRegistry: registryFor(fieldConfig),
    replaceVariables,
    theme,
    timeZone: given.timeZone,
  });
  cacheFieldDisplayNames(frames);
  problems.push(...surprising(panel, frames));
  const state = problems.length > 0 ? 'error' : frames.some(says) ? 'data' : 'empty';
  return { panel, state, problems, frames, fieldConfig, replaceVariables, answers };
}

function says(frame) {
  return frame.fields.some(
    (field) => field.type !== FieldType.time && field.values.some((value) => value != null && value !== '')
  );
}

function* wrong(panel) {
  if (!PLUGINS[panel.type]) {
    yield `nothing here draws a ${panel.type}`;
  }
  const { defaults = {}, overrides = [] } = panel.fieldConfig ?? {};
  const properties = overrides.flatMap((rule) => rule.properties);
  const units = [defaults.unit, ...properties.filter(({ id }) => id === 'unit').map(({ value }) => value)];
  for (const unit of units) {
    if (unit && !UNITS.has(unit) && !FREE_UNIT.test(unit)) {
      yield `Grafana knows no unit ${unit}`;
    }
  }
  for (const { matcher } of overrides) {
    if (!fieldMatchers.getIfExists(matcher.id)) {
      yield `Grafana knows no field matcher ${matcher.id}`;
    }
  }
  for (const { id, options } of panel.transformations ?? []) {
    if (!standardTransformersRegistry.getIfExists(id)) {
      yield `the transformation ${id} is not among those of @grafana/data`;
    }
    for (const reducer of options?.reducers ?? []) {
      if (!fieldReducers.getIfExists(reducer)) {
        yield `Grafana knows no calculation ${reducer}`;
      }
    }
  }
  for (const calc of [...(panel.options?.reduceOptions?.calcs ?? []), ...(panel.options?.legend?.calcs ?? [])]) {
    if (!fieldReducers.getIfExists(calc)) {
      yield `Grafana knows no calculation ${calc}`;
    }
  }
}

function* surprising(panel, frames) {
  if (panel.type === 'table' && frames.length > 1) {
    yield `a table shows one of its ${frames.length} frames; merge or join them`;
  }
}
