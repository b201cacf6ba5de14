// A web server with one page that computes and one that waits.
import { createHash } from "node:crypto";
import { createServer } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import { SpanKind, trace } from "@opentelemetry/api";

const tracer = trace.getTracer("server");

const pages = {
  "/hash": async (query) => {
    const rounds = Number(query.get("rounds") ?? 100_000);
    let digest = Buffer.alloc(32);
    for (let round = 0; round < rounds; round++) {
      digest = createHash("sha256").update(digest).digest();
    }
    return digest.toString("hex");
  },
  "/wait": async () => {
    await sleep(100);
    return "done";
  },
};

const server = createServer((request, response) => {
  const url = new URL(request.url, "http://localhost");
  const page = pages[url.pathname];
  if (page === undefined) {
    response.writeHead(404).end();
    return;
  }
  const name = `${request.method} ${url.pathname}`;
  tracer.startActiveSpan(name, { kind: SpanKind.SERVER }, async (span) => {
    response.end(await page(url.searchParams));
    span.end();
  });
});

server.listen(Number(process.env.PORT ?? 8080), "127.0.0.1", () => {
  console.log(`listening on ${server.address().port}`);
});
