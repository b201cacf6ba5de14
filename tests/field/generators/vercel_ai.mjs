// Record spans of Vercel's AI SDK with its mock model: node vercel_ai.mjs > CASE.toml
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { generateText, streamText, stepCountIs, tool } from "ai";
import { MockLanguageModelV3, simulateReadableStream } from "ai/test";
import { trace } from "@opentelemetry/api";
import { InMemorySpanExporter, NodeTracerProvider, SimpleSpanProcessor } from "@opentelemetry/sdk-trace-node";
import { z } from "zod";

const exporter = new InMemorySpanExporter();
const provider = new NodeTracerProvider({ spanProcessors: [new SimpleSpanProcessor(exporter)] });
provider.register();

const usage = {
  inputTokens: { total: 1200, noCache: 200, cacheRead: 1000, cacheWrite: 0 },
  outputTokens: { total: 80, text: 80, reasoning: 0 },
};
let calls = 0;
const model = new MockLanguageModelV3({
  doGenerate: async () => {
    calls += 1;
    const content = calls === 1
      ? [{ type: "tool-call", toolCallId: "call-1", toolName: "weather", input: "{}" }]
      : [{ type: "text", text: "done" }];
    const unified = calls === 1 ? "tool-calls" : "stop";
    return { content, finishReason: { unified, raw: unified }, usage, warnings: [] };
  },
  doStream: async () => ({
    stream: simulateReadableStream({
      chunks: [
        { type: "stream-start", warnings: [] },
        { type: "text-start", id: "1" },
        { type: "text-delta", id: "1", delta: "done" },
        { type: "text-end", id: "1" },
        { type: "finish", finishReason: { unified: "stop", raw: "stop" }, usage },
      ],
    }),
  }),
});
const experimental_telemetry = { isEnabled: true };
await generateText({
  model,
  prompt: "hello",
  tools: { weather: tool({ inputSchema: z.object({}), execute: async () => "sunny" }) },
  stopWhen: stepCountIs(3),
  experimental_telemetry,
});
const streamed = streamText({ model, prompt: "hello", experimental_telemetry });
for await (const _ of streamed.textStream);
await provider.forceFlush();

const kinds = ["INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER"];
const spans = exporter.getFinishedSpans();
const time = ([seconds, nanos]) => seconds + nanos / 1e9;
const first = Math.min(...spans.map((span) => time(span.startTime)));
const numbers = (map, key) => map.get(key) ?? (map.set(key, map.size + 1), map.size);
const traces = new Map(), ids = new Map();
const require = createRequire(import.meta.url);
const version = (name) => JSON.parse(readFileSync(require.resolve(`${name}/package.json`))).version;
const lines = [
  'id = "vercel-ai"',
  `source = "ai ${version("ai")} from npm, with @opentelemetry/sdk-trace-node ${version("@opentelemetry/sdk-trace-node")}"`,
  'input = "TODO"',
  'right = "TODO"',
];
for (const span of spans) {
  const context = span.spanContext();
  lines.push("", "[[span]]", `name = ${JSON.stringify(span.name)}`, `kind = "${kinds[span.kind]}"`);
  lines.push(`trace = ${numbers(traces, context.traceId)}`, `id = ${numbers(ids, context.spanId)}`);
  if (span.parentSpanContext) lines.push(`parent = ${numbers(ids, span.parentSpanContext.spanId)}`);
  lines.push(`start = ${(time(span.startTime) - first).toFixed(3)}`);
  lines.push(`end = ${(time(span.endTime) - first + 0.001).toFixed(3)}`, "[span.attributes]");
  for (const [name, value] of Object.entries(span.attributes)) {
    if (typeof value === "string") lines.push(`${JSON.stringify(name)} = ${JSON.stringify(value.slice(0, 100))}`);
    if (typeof value === "boolean" || Number.isInteger(value)) lines.push(`${JSON.stringify(name)} = ${value}`);
    else if (typeof value === "number") lines.push(`${JSON.stringify(name)} = ${value.toFixed(3)}`);
  }
}
console.log(lines.join("\n"));
