// Draws the dashboard in document.json and says in `window.drawing` how each panel fared.
import { createTheme, ThemeContext } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';
import { createRoot } from 'react-dom/client';

import { Dashboard } from './dashboard.jsx';
import { arrange } from './layout.js';
import { prepare } from './prepare.js';

// Legends measure themselves and plots fit beside them: each takes a frame or two.
const FRAMES_TO_SETTLE = 12;
const FONTS = ['400 14px Inter', '500 14px Inter'];

window.drawing = { ready: false, panels: [] };

async function settled() {
  for (let frame = 0; frame < FRAMES_TO_SETTLE; frame++) {
    await new Promise(requestAnimationFrame);
  }
}

async function draw() {
  const given = await (await fetch('document.json')).json();
  const theme = createTheme({ colors: { mode: 'dark' } });
  const panels = arrange(given.dashboard.panels);
  const prepared = await Promise.all(panels.map((panel) => prepare(panel, given, theme)));
  window.drawing.panels = prepared
    .filter(({ panel }) => panel.type !== 'row')
    .map(({ panel, state, problems }) => ({
      id: panel.id,
      title: panel.title ?? '',
      type: panel.type,
      state,
      problems,
    }));
  const root = createRoot(document.getElementById('root'));
  const show = (content) =>
    root.render(
      <ThemeContext.Provider value={theme}>
        <GlobalStyles />
        {content}
      </ThemeContext.Provider>
    );
  show(null);
  await settled();
  // Grafana's components fit their text by measuring it: in the font it will be written in.
  await Promise.all(FONTS.map((font) => document.fonts.load(font)));
  show(<Dashboard given={given} panels={prepared} theme={theme} />);
  await settled();
  window.drawing.ready = true;
}

draw().catch((error) => {
  window.drawing = { ready: true, panels: [], failed: String(error?.stack ?? error) };
});
