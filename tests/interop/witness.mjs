// The official JavaScript clients behind a pipe: one JSON command per line in, one JSON answer per line out.
//
//   {"id": 1, "do": "kvPut", "bucket": "b", "key": "k", "data": "<base64>"}   ->   {"id": 1, "result": 7}
//   {"id": 2, "do": "kvUpdate", ...}   ->   {"id": 2, "error": {"name": ..., "message": ..., "code": 10071}}
//
// Bytes are base64; headers are lists of [name, value], so that a name may have several values. Commands run side by
// side, each answered when it is done. What goes on for longer (a subscription, a watch) is answered with a handle once
// the server knows of it; `take` then reads from it. It ends with its input, so it never outlives the test run.

import readline from "node:readline";
import { connect, headers } from "@nats-io/transport-node";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { Kvm } from "@nats-io/kv";
import { Objm } from "@nats-io/obj";

let nc, js, jsm, kvm, objm;
const handles = new Map();

const bytes = (text) => Buffer.from(text ?? "", "base64");
const text = (data) => Buffer.from(data).toString("base64");

function toHeaders(pairs) {
  if (!pairs) return undefined;
  const result = headers();
  for (const [name, value] of pairs) result.append(name, value);
  return result;
}

function fromHeaders(result) {
  if (!result) return [];
  return [...result].flatMap(([name, values]) => values.map((value) => [name, value]));
}

const message = (m) => ({ subject: m.subject, reply: m.reply ?? "", data: text(m.data), headers: fromHeaders(m.headers) });

const delivery = (m) => ({
  ...message(m),
  sequence: m.info.streamSequence,
  delivered: m.info.deliveryCount,
  pending: m.info.pending,
});

const entry = (e) =>
  e && { bucket: e.bucket, key: e.key, value: text(e.value), revision: e.revision, operation: e.operation };

const object = (o) =>
  o && {
    name: o.name,
    description: o.description,
    size: o.size,
    chunks: o.chunks,
    digest: o.digest,
    deleted: o.deleted,
    metadata: o.metadata,
    headers: fromHeaders(o.headers),
    maxChunkSize: o.options?.max_chunk_size ?? null,
  };

const ack = (a) => ({ stream: a.stream, sequence: a.seq, duplicate: a.duplicate ?? false });

function keep(iterable, show, stop) {
  const handle = handles.size + 1;
  handles.set(handle, { iterator: iterable[Symbol.asyncIterator](), show, stop });
  return handle;
}

async function all(iterable, show) {
  const result = [];
  for await (const value of iterable) result.push(show(value));
  return result;
}

const bucket = (name) => kvm.open(name, { allow_direct: true });

const commands = {
  async connect({ url }) {
    nc = await connect({ servers: url, name: "witness" });
    js = jetstream(nc);
    jsm = await jetstreamManager(nc);
    kvm = new Kvm(js);
    objm = new Objm(js);
    return nc.info.version;
  },

  // ---- core ----

  async publish({ subject, data, headers, reply }) {
    nc.publish(subject, bytes(data), { headers: toHeaders(headers), reply });
    await nc.flush();
  },
  async subscribe({ subject, queue }) {
    const subscription = nc.subscribe(subject, { queue });
    await nc.flush();
    return keep(subscription, message, () => subscription.unsubscribe());
  },
  // Answers every request with its own data and headers, the subject added.
  async echo({ subject }) {
    const subscription = nc.subscribe(subject, {
      callback: (error, m) => {
        if (error) throw error;
        const answer = m.headers ?? headers();
        answer.append("Echo-Of", m.subject);
        m.respond(m.data, { headers: answer });
      },
    });
    await nc.flush();
    return keep(subscription, message, () => subscription.unsubscribe());
  },
  async request({ subject, data, headers, timeoutMs = 5000 }) {
    return message(await nc.request(subject, bytes(data), { headers: toHeaders(headers), timeout: timeoutMs }));
  },
  async take({ handle, n }) {
    const { iterator, show } = handles.get(handle);
    const result = [];
    while (result.length < n) {
      const { done, value } = await iterator.next();
      if (done) throw new Error(`ended after ${result.length} of ${n}`);
      result.push(show(value));
    }
    return result;
  },
  async stop({ handle }) {
    await handles.get(handle).stop();
    await nc.flush(); // the server knows, too
  },

  // ---- JetStream ----

  async streamCreate({ config }) {
    return (await jsm.streams.add(config)).config;
  },
  async streamInfo({ stream }) {
    const { config, state } = await jsm.streams.info(stream);
    return { config, state };
  },
  async consumerCreate({ stream, config }) {
    return (await jsm.consumers.add(stream, config)).name;
  },
  async consumerInfo({ stream, consumer }) {
    return await jsm.consumers.info(stream, consumer);
  },
  async jsPublish({ subject, data, headers, msgId, expectLastSequence }) {
    const expect = expectLastSequence === undefined ? undefined : { lastSequence: expectLastSequence };
    return ack(await js.publish(subject, bytes(data), { headers: toHeaders(headers), msgID: msgId, expect }));
  },
  // `answer` is ack (confirmed by the server), nak, term or none.
  async pull({ stream, consumer, n, answer = "ack", expiresMs = 5000 }) {
    const source = await js.consumers.get(stream, consumer);
    const result = [];
    for await (const m of await source.fetch({ max_messages: n, expires: expiresMs })) {
      if (answer === "ack" && !(await m.ackAck())) throw new Error(`no confirmation for ${m.info.streamSequence}`);
      if (answer === "nak") m.nak();
      if (answer === "term") m.term("not for us");
      result.push(delivery(m));
    }
    await nc.flush();
    return result;
  },

  // ---- key-value ----

  async kvCreateBucket({ bucket, options }) {
    return (await (await kvm.create(bucket, options)).status()).streamInfo.config;
  },
  async kvStatus({ bucket: name }) {
    const { bucket: found, history, ttl, values, maxValueSize } = await (await kvm.create(name)).status();
    return { bucket: found, history, ttl, values, maxValueSize };
  },
  async kvPut({ bucket: name, key, data }) {
    return await (await bucket(name)).put(key, bytes(data));
  },
  async kvGet({ bucket: name, key, revision }) {
    return entry(await (await bucket(name)).get(key, revision === undefined ? undefined : { revision }));
  },
  async kvCreate({ bucket: name, key, data, ttl }) {
    return await (await bucket(name)).create(key, bytes(data), ttl);
  },
  async kvUpdate({ bucket: name, key, data, revision }) {
    return await (await bucket(name)).update(key, bytes(data), revision);
  },
  async kvDelete({ bucket: name, key, revision }) {
    await (await bucket(name)).delete(key, { previousSeq: revision });
  },
  async kvPurge({ bucket: name, key, revision }) {
    await (await bucket(name)).purge(key, { previousSeq: revision });
  },
  async kvHistory({ bucket: name, key }) {
    return await all(await (await bucket(name)).history({ key }), entry);
  },
  async kvKeys({ bucket: name, filter }) {
    return await all(await (await bucket(name)).keys(filter), (key) => key);
  },
  async kvWatch({ bucket: name, options }) {
    const watch = await (await bucket(name)).watch(options);
    return keep(watch, entry, () => watch.stop());
  },

  // ---- object store ----

  async objCreateStore({ store, options }) {
    return (await (await objm.create(store, options)).status()).streamInfo.config;
  },
  async objPut({ store, name, data, description, metadata, headers, maxChunkSize }) {
    const options = maxChunkSize ? { max_chunk_size: maxChunkSize } : undefined;
    const meta = { name, description, metadata, headers: toHeaders(headers), options };
    return object(await (await objm.open(store)).putBlob(meta, bytes(data)));
  },
  async objGet({ store, name }) {
    const data = await (await objm.open(store)).getBlob(name);
    return data && text(data);
  },
  async objInfo({ store, name }) {
    return object(await (await objm.open(store)).info(name));
  },
  async objLink({ store, name, to }) {
    const source = await objm.open(store);
    return object(await source.link(name, await source.info(to)));
  },
  async objDelete({ store, name }) {
    await (await objm.open(store)).delete(name);
  },
  async objList({ store }) {
    return (await (await objm.open(store)).list()).map(object);
  },
};

const describe = (error) => ({
  name: error?.name ?? "Error",
  message: error?.message ?? String(error),
  code: typeof error?.code === "number" ? error.code : null,
});

async function answer(line) {
  const { id, do: name, ...args } = JSON.parse(line);
  let reply;
  try {
    if (!(name in commands)) throw new Error(`no command ${name}`);
    reply = { id, result: (await commands[name](args)) ?? null };
  } catch (error) {
    reply = { id, error: describe(error) };
  }
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}

const lines = readline.createInterface({ input: process.stdin });
lines.on("line", answer);
lines.on("close", async () => {
  await nc?.close();
  process.exit(0);
});
