import { cpSync, mkdirSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { defineConfig } from 'vite';

const installed = join(import.meta.dirname ?? process.cwd(), 'node_modules');

// Where Grafana's components look for what they load at run time, and what stands there.
const STATIC = {
  'public/build/img/icons': '@grafana/ui/dist/public/img/icons',
  'public/fonts/inter/Inter-Regular.woff2': 'inter-ui/web/Inter-Regular.woff2',
  'public/fonts/inter/Inter-Medium.woff2': 'inter-ui/web/Inter-Medium.woff2',
  'public/fonts/inter/Inter-Italic.woff2': 'inter-ui/web/Inter-Italic.woff2',
  'public/fonts/inter/Inter-MediumItalic.woff2': 'inter-ui/web/Inter-MediumItalic.woff2',
  'public/fonts/roboto/L0xTDF4xlVMF-BfR8bXMIhJHg45mwgGEFl0_3vrtSM1J-gEPT5Ese6hmHSh0mQ.woff2':
    '@fontsource/roboto-mono/files/roboto-mono-latin-400-normal.woff2',
};

// What Grafana's components load only when somebody edits a query or opens a map: megabytes.
const UNUSED = /(ReactMonacoEditor|CodeMirrorEditor|OpenLayersProvider)(\.mjs)?$/;

const unused = {
  name: 'unused',
  enforce: 'pre',
  resolveId: (source) => (UNUSED.test(source) ? join(import.meta.dirname ?? process.cwd(), 'src/nothing.js') : null),
};

const assets = {
  name: 'assets',
  closeBundle() {
    for (const [target, source] of Object.entries(STATIC)) {
      const path = join('dist', target);
      mkdirSync(dirname(path), { recursive: true });
      cpSync(join(installed, source), path, { recursive: true });
    }
  },
};

export default defineConfig({
  base: './',
  esbuild: { jsx: 'automatic' },
  plugins: [unused, assets],
  resolve: { dedupe: ['react', 'react-dom', '@grafana/data', '@grafana/schema'] },
  build: {
    chunkSizeWarningLimit: 20000,
    minify: false,
    sourcemap: false,
    rollupOptions: { onwarn() {} },
    reportCompressedSize: false,
  },
  logLevel: 'warn',
});
