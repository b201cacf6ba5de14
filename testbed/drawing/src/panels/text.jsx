// Markdown by Grafana's renderer and styles.
import { renderTextPanelMarkdown } from '@grafana/data';

export function TextPanel({ panel, replaceVariables }) {
  const html = renderTextPanelMarkdown(replaceVariables(panel.options?.content ?? ''));
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: html }} />;
}
