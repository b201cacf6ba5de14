// The dashboard: its name, its variables, and its panels in Grafana's panel chrome.
import { dateTime, dateTimeFormat, renderMarkdown } from '@grafana/data';
import { PanelChrome } from '@grafana/ui';
import { Component } from 'react';

import { box } from './layout.js';
import { PLUGINS } from './panels/index.js';
import { replacer } from './variables.js';

const PADDING = 16;

export function Dashboard({ given, panels, theme }) {
  const width = given.width - 2 * PADDING;
  const range = { from: dateTime(given.from), to: dateTime(given.to) };
  const shared = {
    annotations: given.annotations,
    variables: given.variables,
    replaceVariables: replacer(given.variables),
    theme,
    timeRange: { ...range, raw: range },
    timeZone: given.timeZone,
  };
  const height = Math.max(...panels.map(({ panel }) => bottom(box(panel.gridPos, width))));
  return (
    <div id="dashboard" style={{ background: theme.colors.background.canvas, boxSizing: 'border-box', padding: PADDING, width: given.width }}>
      <Header given={given} theme={theme} />
      <div style={{ position: 'relative', height }}>
        {panels.map((prepared) => {
          const place = box(prepared.panel.gridPos, width);
          return (
            <div
              data-panel={prepared.panel.id}
              key={prepared.panel.id ?? `row-${place.top}`}
              style={{ position: 'absolute', ...place }}
            >
              {prepared.panel.type === 'row' ? (
                <Row title={shared.replaceVariables(prepared.panel.title)} theme={theme} />
              ) : (
                <Panel prepared={prepared} place={place} shared={shared} />
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function bottom({ top, height }) {
  return top + height;
}

function Header({ given, theme }) {
  const time = (value) => dateTimeFormat(value, { timeZone: given.timeZone, format: 'HH:mm' });
  const chip = {
    border: `1px solid ${theme.colors.border.medium}`,
    borderRadius: theme.shape.radius.default,
    display: 'inline-flex',
    overflow: 'hidden',
  };
  const name = { background: theme.colors.background.secondary, padding: '4px 8px', fontWeight: 500 };
  return (
    <header style={{ alignItems: 'center', display: 'flex', flexWrap: 'wrap', gap: 12, marginBottom: 12, fontSize: 12 }}>
      <h1 style={{ fontSize: 20, margin: '0 8px 0 0' }}>{given.dashboard.title}</h1>
      {Object.entries(given.variables)
        .filter(([, { hidden }]) => !hidden)
        .map(([key, { label, text }]) => (
          <span key={key} style={chip}>
            <span style={name}>{label}</span>
            <span style={{ padding: '4px 8px' }}>{text}</span>
          </span>
        ))}
      <span style={{ ...chip, marginLeft: 'auto', padding: '4px 8px' }}>
        {time(given.from)} to {time(given.to)}
      </span>
    </header>
  );
}

function Row({ title, theme }) {
  return (
    <div style={{ color: theme.colors.text.primary, fontSize: 16, fontWeight: 500, lineHeight: '30px' }}>
      <span style={{ color: theme.colors.text.secondary, marginRight: 8 }}>▾</span>
      {title}
    </div>
  );
}

function Panel({ prepared, place, shared }) {
  const { panel, state, problems } = prepared;
  const Drawn = PLUGINS[panel.type];
  const failed = (message) => {
    const mine = window.drawing.panels.find(({ id }) => id === panel.id);
    mine.state = 'error';
    mine.problems.push(message);
  };
  return (
    <PanelChrome
      description={panel.description && (() => renderMarkdown(panel.description))}
      displayMode={panel.transparent ? 'transparent' : 'default'}
      height={place.height}
      title={replacer({ ...shared.variables, ...panel.scopedVars })(panel.title ?? '')}
      width={place.width}
    >
      {(width, height) => {
        if (state === 'error') {
          return <Message text={problems.join('; ')} />;
        }
        if (state === 'empty' && panel.type !== 'stat') {
          return <Message text={panel.fieldConfig?.defaults?.noValue ?? 'No data'} />;
        }
        return (
          <Boundary failed={failed}>
            <Drawn {...shared} {...prepared} width={width} height={height} />
          </Boundary>
        );
      }}
    </PanelChrome>
  );
}

function Message({ text }) {
  return (
    <div style={{ alignItems: 'center', display: 'flex', height: '100%', justifyContent: 'center', overflow: 'hidden' }}>
      {text}
    </div>
  );
}

// One panel that cannot be drawn costs only itself.
class Boundary extends Component {
  state = { message: null };

  static getDerivedStateFromError(error) {
    return { message: String(error?.message ?? error) };
  }

  componentDidCatch(error) {
    this.props.failed(String(error?.message ?? error));
  }

  render() {
    return this.state.message ? <Message text={this.state.message} /> : this.props.children;
  }
}
