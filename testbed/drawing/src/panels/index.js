// What draws each kind of panel.
import { BarGaugePanel } from './bargauge.jsx';
import { StatPanel } from './stat.jsx';
import { StateTimelinePanel } from './statetimeline.jsx';
import { TablePanel } from './table.jsx';
import { TextPanel } from './text.jsx';
import { TimeSeriesPanel } from './timeseries.jsx';
import { XYChartPanel } from './xychart.jsx';

export const PLUGINS = {
  bargauge: BarGaugePanel,
  stat: StatPanel,
  'state-timeline': StateTimelinePanel,
  table: TablePanel,
  text: TextPanel,
  timeseries: TimeSeriesPanel,
  xychart: XYChartPanel,
};
