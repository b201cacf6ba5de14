// Sends this process's spans to an OTLP endpoint; loaded before the application, by --import.
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-proto";
import { NodeSDK } from "@opentelemetry/sdk-node";

const sdk = new NodeSDK({ traceExporter: new OTLPTraceExporter() });
sdk.start();

for (const signal of ["SIGINT", "SIGTERM"]) {
  process.once(signal, async () => {
    await sdk.shutdown(); // what has not been sent yet
    process.exit(0);
  });
}
