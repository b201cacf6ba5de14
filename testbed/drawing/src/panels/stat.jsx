// Big values: Grafana's BigValue, laid out by its VizRepeater.
import { getDisplayValueAlignmentFactors, getFieldDisplayValues } from '@grafana/data';
import { BigValue, BigValueGraphMode, VizRepeater } from '@grafana/ui';

export function StatPanel({ panel, frames, fieldConfig, replaceVariables, theme, timeRange, timeZone, width, height }) {
  const { options } = panel;
  const values = getFieldDisplayValues({
    data: frames,
    fieldConfig,
    reduceOptions: options.reduceOptions,
    replaceVariables,
    theme,
    timeZone,
    sparkline: options.graphMode !== BigValueGraphMode.None,
    percentChange: options.showPercentChange,
  });
  return (
    <VizRepeater
      autoGrid
      getValues={() => values}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      itemSpacing={3}
      orientation={options.orientation ?? 'auto'}
      renderCounter={0}
      source={frames}
      width={width}
      height={height}
      renderValue={({ value, width, height, alignmentFactors, count }) => (
        <BigValue
          alignmentFactors={alignmentFactors}
          colorMode={options.colorMode ?? 'value'}
          count={count}
          graphMode={options.graphMode ?? 'area'}
          height={height}
          justifyMode={options.justifyMode}
          percentChangeColorMode={options.percentChangeColorMode}
          sparkline={value.sparkline && { ...value.sparkline, timeRange }}
          text={options.text}
          textMode={options.textMode}
          theme={theme}
          value={value.display}
          width={width}
        />
      )}
    />
  );
}
