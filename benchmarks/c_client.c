/* The C client, libnats, at the work of several workloads; peers.py compiles this file and calls the program.
 *
 *     c_client --version                        prints the library's version
 *     c_client work=pull url=nats://... ...     does the work twice, warm-up first, and prints the second's values as JSON
 *
 * Works: core-publish, core-subscribe, publish-async, pull, pull-ack. Each is the library's fastest form that Debian
 * ships (3.4), which has no subscription that asks ahead: pulling is natsSubscription_Fetch.
 * Whatever goes wrong, a message too few or of another size included, ends the program with a line on standard error.
 */

#include <nats/nats.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PATIENCE_MS 60000

static int argument_count;
static char **arguments;
static char *payload;
static int payload_bytes;

static const char *text(const char *name) {
    size_t length = strlen(name);
    for (int i = 1; i < argument_count; i++)
        if (strncmp(arguments[i], name, length) == 0 && arguments[i][length] == '=')
            return arguments[i] + length + 1;
    fprintf(stderr, "no argument %s=\n", name);
    exit(2);
}

static int number(const char *name) { return atoi(text(name)); }

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void check(natsStatus status, const char *what) {
    if (status == NATS_OK)
        return;
    const char *last = nats_GetLastError(NULL);
    fprintf(stderr, "%s: %s%s%s\n", what, natsStatus_GetText(status), last ? ", " : "", last ? last : "");
    exit(1);
}

static double clock_s(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---- core -------------------------------------------------------------------------------------------------------- */

static void core_publish(natsConnection *connection, int count) {
    const char *subject = text("subject");
    for (int i = 0; i < count; i++)
        check(natsConnection_Publish(connection, subject, payload, payload_bytes), "publish");
    check(natsConnection_FlushTimeout(connection, PATIENCE_MS), "flush");
}

static atomic_int received, wrong_sizes;

static void on_message(natsConnection *connection, natsSubscription *subscription, natsMsg *message, void *closure) {
    if (natsMsg_GetDataLength(message) != payload_bytes)
        wrong_sizes++;
    natsMsg_Destroy(message);
    received++;
}

static void core_subscribe(natsConnection *connection, int count) {
    static natsSubscription *subscription;
    if (subscription == NULL) {
        check(natsConnection_Subscribe(&subscription, connection, text("subject"), on_message, NULL), "subscribe");
        check(natsSubscription_SetPendingLimits(subscription, -1, -1), "pending limits");
    }
    received = 0;
    char order[300];
    snprintf(order, sizeof order, "%s %d %d", text("subject"), count, payload_bytes);
    check(natsConnection_PublishString(connection, text("feed"), order), "order");
    double patience = clock_s(CLOCK_MONOTONIC) + PATIENCE_MS / 1e3;
    while (received < count) {
        nats_Sleep(1);
        if (clock_s(CLOCK_MONOTONIC) > patience)
            fail("messages were lost");
    }
}

/* ---- JetStream --------------------------------------------------------------------------------------------------- */

static jsCtx *context;
static natsSubscription *puller;
static atomic_int refused;

static void on_refusal(jsCtx *js, jsPubAckErr *error, void *closure) {
    fprintf(stderr, "publish: %s\n", error->ErrText ? error->ErrText : "no text");
    refused++;
}

static void publish_async(natsConnection *connection, int count) {
    const char *subject = text("subject");
    for (int i = 0; i < count; i++)
        check(js_PublishAsync(context, subject, payload, payload_bytes, NULL), "publish");
    jsPubOptions options;
    jsPubOptions_Init(&options);
    options.MaxWait = PATIENCE_MS;
    check(js_PublishAsyncComplete(context, &options), "acknowledgements");
    if (refused)
        fail("a message was refused");
}

static void pull(natsConnection *connection, int count, int acks) {
    int batch = number("batch");
    for (int left = count; left > 0;) {
        natsMsgList list = {0};
        check(natsSubscription_Fetch(&list, puller, left < batch ? left : batch, PATIENCE_MS, NULL), "fetch");
        for (int i = 0; i < list.Count; i++) {
            if (natsMsg_GetDataLength(list.Msgs[i]) != payload_bytes)
                wrong_sizes++;
            if (acks)
                check(natsMsg_Ack(list.Msgs[i], NULL), "ack");
        }
        left -= list.Count;
        natsMsgList_Destroy(&list);
    }
    if (acks)
        check(natsConnection_FlushTimeout(connection, PATIENCE_MS), "flush");
}

static void open_jetstream(natsConnection *connection, int pulls) {
    jsOptions options;
    jsOptions_Init(&options);
    options.PublishAsync.MaxPending = pulls ? 0 : number("window");
    options.PublishAsync.ErrHandler = on_refusal;
    options.PublishAsync.StallWait = PATIENCE_MS;
    check(natsConnection_JetStream(&context, connection, &options), "JetStream");
    if (!pulls)
        return;
    jsSubOptions binding;
    jsSubOptions_Init(&binding);
    binding.Stream = text("stream");
    binding.Consumer = text("consumer");
    check(js_PullSubscribe(&puller, context, text("subject"), NULL, NULL, &binding, NULL), "pull subscribe");
}

/* ---- the clock --------------------------------------------------------------------------------------------------- */

static void once(natsConnection *connection, const char *work, int count) {
    if (strcmp(work, "core-publish") == 0)
        core_publish(connection, count);
    else if (strcmp(work, "core-subscribe") == 0)
        core_subscribe(connection, count);
    else if (strcmp(work, "publish-async") == 0)
        publish_async(connection, count);
    else if (strcmp(work, "pull") == 0)
        pull(connection, count, 0);
    else if (strcmp(work, "pull-ack") == 0)
        pull(connection, count, 1);
    else
        fail("work=: expected core-publish, core-subscribe, publish-async, pull or pull-ack");
    if (wrong_sizes)
        fail("a message has another size");
}

int main(int argc, char **argv) {
    argument_count = argc;
    arguments = argv;
    if (argc > 1 && strcmp(argv[1], "--version") == 0)
        return printf("%s\n", nats_GetVersion()) < 0;
    const char *work = text("work");
    natsConnection *connection;
    check(natsConnection_ConnectTo(&connection, text("url")), "connect");
    payload_bytes = number("payload_bytes");
    if ((payload = malloc((size_t)payload_bytes + 1)) == NULL)
        fail("no memory");
    memset(payload, 'x', (size_t)payload_bytes);
    if (strncmp(work, "core-", 5) != 0)
        open_jetstream(connection, strncmp(work, "pull", 4) == 0);
    once(connection, work, number("warmup"));
    int count = number("count");
    double wall = clock_s(CLOCK_MONOTONIC), cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID);
    once(connection, work, count);
    wall = clock_s(CLOCK_MONOTONIC) - wall;
    cpu = clock_s(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("{\"messages_per_s\": %.3f, \"cpu_s_per_million\": %.6f}\n", count / wall, cpu * 1e6 / count);
    return 0;
}
