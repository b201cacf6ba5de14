// Spans of opentelemetry-js whose text was cut inside an emoji, beside good ones.
//
//   npm install @opentelemetry/api@1.9.1 @opentelemetry/sdk-trace-base@2.12.1 \
//     @opentelemetry/resources@2.12.1 @opentelemetry/exporter-trace-otlp-{http,proto,grpc}@0.223.1
//   node otlp_javascript.mjs http/json|http/protobuf|grpc cut|values
import { context, SpanKind, trace } from '@opentelemetry/api';
import { resourceFromAttributes } from '@opentelemetry/resources';
import { BasicTracerProvider, BatchSpanProcessor } from '@opentelemetry/sdk-trace-base';

const [protocol, what] = process.argv.slice(2);
const packages = { 'http/json': 'http', 'http/protobuf': 'proto', grpc: 'grpc' };
const { OTLPTraceExporter } = await import(
  `@opentelemetry/exporter-trace-otlp-${packages[protocol]}`
);
const provider = new BasicTracerProvider({
  resource: resourceFromAttributes({ 'service.name': 'shop', 'process.pid': 4242 }),
  spanLimits: { attributeValueLengthLimit: 12 },
  spanProcessors: [new BatchSpanProcessor(new OTLPTraceExporter())],
});
const tracer = provider.getTracer('field', '1.0');
const span = (name, attributes = {}) => {
  const made = tracer.startSpan(name, { kind: SpanKind.SERVER, attributes });
  made.addEvent('happened', { note: attributes.note ?? '' });
  made.end();
};
span('first');
if (what === 'cut') {
  span('cut value', { note: 'eleven text\u{1f600} and more' });
  span('cut name \u{1f600}'.slice(0, 10), { 'gen_ai.usage.input_tokens': 7 });
  span('low half \u{1f600}'.slice(10));
} else {
  span('numbers', { nan: NaN, infinite: -Infinity, large: 2 ** 60, real: 0.1, yes: true });
  span('arrays', { list: ['a\u{1f600}', 'b'], numbers: [1, 2.5, NaN], empty: [] });
  span('tokens', { 'gen_ai.usage.input_tokens': 12, 'gen_ai.usage.output_tokens': 34 });
}
span('last');
await provider.forceFlush();
await provider.shutdown();
