// Bars with values: Grafana's BarGauge, laid out by its VizRepeater.
import { getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation } from '@grafana/data';
import { BarGauge, VizRepeater } from '@grafana/ui';

export function BarGaugePanel({ panel, frames, fieldConfig, replaceVariables, theme, timeZone, width, height }) {
  const { options } = panel;
  const values = getFieldDisplayValues({
    data: frames,
    fieldConfig,
    reduceOptions: options.reduceOptions,
    replaceVariables,
    theme,
    timeZone,
  });
  return (
    <VizRepeater
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      itemSpacing={options.displayMode === 'lcd' ? 2 : 10}
      maxVizHeight={options.maxVizHeight ?? 300}
      minVizHeight={options.minVizHeight ?? 16}
      minVizWidth={options.minVizWidth ?? 8}
      orientation={options.orientation ?? VizOrientation.Auto}
      renderCounter={0}
      source={frames}
      width={width}
      height={height}
      renderValue={({ value, width, height, orientation, alignmentFactors, count }) => (
        <BarGauge
          alignmentFactors={count > 1 ? alignmentFactors : undefined}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          displayMode={options.displayMode ?? 'gradient'}
          field={value.field}
          height={height}
          itemSpacing={options.displayMode === 'lcd' ? 2 : 10}
          namePlacement={options.namePlacement}
          orientation={orientation}
          showUnfilled={options.showUnfilled ?? true}
          text={options.text}
          theme={theme}
          value={count === 1 ? { ...value.display, title: undefined } : value.display}
          valueDisplayMode={options.valueMode}
          width={width}
        />
      )}
    />
  );
}
