// Spans of Deno's own OpenTelemetry, and one with a name that was cut inside an emoji.
//
//   npm install deno@2.9.6 @opentelemetry/api@1.9.1
//   OTEL_DENO=true OTEL_EXPORTER_OTLP_PROTOCOL=http/json|http/protobuf deno run -A otlp_deno.ts
import { trace } from 'npm:@opentelemetry/api@1.9.1';

const tracer = trace.getTracer('field', '1.0');
const span = (name: string, attributes: Record<string, unknown> = {}) =>
  tracer.startSpan(name, { attributes: attributes as never }).end();
span('first');
span('cut value', { note: 'a\ud83d' });
span('cut name \ud83d');
span('tokens', { 'gen_ai.usage.input_tokens': 12, real: 0.5, nan: NaN });
span('last');
