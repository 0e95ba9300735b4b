// Fast ingest with the official JavaScript client; see peers.py for how this is called.
//
//   node fast_ingest.mjs <node_modules> --version
//   node fast_ingest.mjs <node_modules> '{"url": ..., "subject": ..., "payload": ..., "counts": [<warm-up>, <measured>],
//                                         "flow": ..., "outstanding_acks": ..., "one_by_one": ...}'

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";

const [folder, request] = process.argv.slice(2);

// An `import` would search beside this file, where nothing is installed.
const require = createRequire(join(resolve(folder), "any.js"));

async function ingest(startFastIngest, nc, count, { subject, payload, flow, outstanding_acks, one_by_one }) {
  const options = { allowGaps: false, ackInterval: flow, maxOutstandingAcks: outstanding_acks };
  const batch = await startFastIngest(nc, subject, payload, options);
  if (count === 1) return await batch.end(); // a batch cannot start with its last message here
  if (one_by_one) {
    for (let sent = 1; sent < count - 1; sent++) await batch.add(subject, payload);
    return await batch.last(subject, payload);
  }
  // An add that is awaited is written to the socket at once, alone. Those that fit into the window need no waiting, and
  // without it they are written together, several times as fast; only the last one is held back until there is room.
  let acked = 0;
  for (let sent = 1; sent < count - 1; ) {
    const end = Math.min(count - 1, Math.max(sent + 1, acked + flow * outstanding_acks));
    const adds = [];
    for (; sent < end; sent++) adds.push(batch.add(subject, payload));
    acked = (await Promise.all(adds)).at(-1).ackSeq;
  }
  return await batch.last(subject, payload);
}

async function main() {
  const { connect } = require("@nats-io/transport-node");
  const { startFastIngest } = require("@nats-io/jetstream/internal");
  const version = JSON.parse(readFileSync(join(folder, "@nats-io/jetstream/package.json"), "utf8")).version;
  if (!startFastIngest) throw new Error(`@nats-io/jetstream ${version} has no fast ingest; 3.4.0 has`);
  if (request === "--version") {
    console.log(`${version} (node ${process.versions.node})`);
    return;
  }
  const job = JSON.parse(request);
  job.payload = new TextEncoder().encode(job.payload);
  const nc = await connect({ servers: job.url });
  let values;
  for (const count of job.counts) {
    const started = performance.now();
    const used = process.cpuUsage();
    const ack = await ingest(startFastIngest, nc, count, job);
    const elapsed = (performance.now() - started) / 1000;
    const { user, system } = process.cpuUsage(used); // microseconds
    values = { messages_per_s: count / elapsed, cpu_s_per_million: (user + system) / count };
    if (ack.count !== count) throw new Error(`${ack.count} stored of ${count}`);
  }
  await nc.close();
  console.log(JSON.stringify(values));
}

main().catch((error) => {
  console.error(String(error).split("\n")[0]); // one line is what is reported; node's own last one is its version
  process.exit(1);
});
