// Grafana's table, as its table panel uses it: the first frame, sorted and sized by the options.
import { TableNG } from '@grafana/ui/unstable';

export function TablePanel({ panel, frames, fieldConfig, timeRange, width, height }) {
  const { options } = panel;
  return (
    <TableNG
      cellHeight={options.cellHeight}
      data={frames[0]}
      enablePagination={options.enablePagination}
      enableVirtualization={false}
      fieldConfig={fieldConfig}
      frozenColumns={options.frozenColumns?.left}
      height={height}
      noHeader={options.showHeader === false}
      noValue={fieldConfig.defaults.noValue}
      showTypeIcons={options.showTypeIcons}
      sortBy={options.sortBy}
      structureRev={1}
      timeRange={timeRange}
      width={width}
    />
  );
}
