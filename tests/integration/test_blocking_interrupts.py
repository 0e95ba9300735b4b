"""A KeyboardInterrupt at any step of a blocking call leaves a connection that works, or one that is cleanly lost."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Self

import pytest
from support.interrupts import Interrupt, Places, apart, count_places, sample

import jetspark.blocking
from jetspark import ConsumerConfig, JetSparkError, KVConfig, StreamConfig
from jetspark.blocking import Client
from jetspark.server import NatsServer

# A session that was interrupted in the middle of a read or write is given up within a second, and then dialled anew.
# Below the 30 s for which closing waits for a server that does not answer.
PATIENCE_S = 25.0

Operation = Callable[[Client], object]


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    with NatsServer() as server, jetspark.blocking.connect(server.url) as service:
        service.subscribe("echo", callback=lambda message: message.respond(message.data))
        js = service.jetstream()
        js.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True, allow_direct=True))
        stream = js.stream("S")
        stream.create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=60))
        js.create_kv(KVConfig(bucket="b")).put("key", b"value")
        service.flush()
        yield server


def _publish(nc: Client) -> None:
    nc.publish("anywhere", b"data")


def _js_publish(nc: Client) -> None:
    nc.jetstream(timeout=2).publish("s.a", b"data")


def _js_publish_async(nc: Client) -> None:
    nc.jetstream(timeout=2).publish_async("s.a", b"data").result(2)


def _fetch(nc: Client) -> None:
    js = nc.jetstream(timeout=2)
    js.publish("s.b", b"data")
    consumer = js.stream("S").consumer("c")
    for message in consumer.fetch(1, timeout=1):
        message.ack()
    consumer.close()


def _kv_get(nc: Client) -> None:
    nc.jetstream(timeout=2).kv("b").get("key")


def _fast_publisher(nc: Client) -> None:
    with nc.jetstream(timeout=2).fast_publisher() as publisher:
        publisher.publish("s.c", b"data")
        publisher.flush(2)


def _subscribe(nc: Client) -> None:
    with nc.subscribe("mine") as subscription:
        nc.publish("mine", b"data")
        subscription.next(timeout=2)


OPERATIONS: dict[str, Operation] = {
    "request": lambda nc: nc.request("echo", b"?", timeout=2),
    "request_many": lambda nc: list(nc.request_many("echo", b"?", timeout=2, max_messages=1)),
    "publish": _publish,
    "flush": lambda nc: nc.flush(2),
    "subscribe": _subscribe,
    "js_publish": _js_publish,
    "js_publish_async": _js_publish_async,
    "fetch": _fetch,
    "kv_get": _kv_get,
    "fast_publisher": _fast_publisher,
}


def answers(nc: Client) -> bool:
    """Whether the connection answers, or says that it is over."""
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at and not nc.is_closed:
        try:
            return nc.request("echo", b"still there?", timeout=1).data == b"still there?"
        except JetSparkError:
            continue  # the session was given up, and the request with it
    return nc.is_closed


@contextmanager
def connected(server: NatsServer) -> Iterator[Client]:
    nc = jetspark.blocking.connect(server.url, reconnect_wait_s=0.01, reconnect_wait_max_s=0.01)
    try:
        yield nc
    finally:
        began = time.monotonic()
        try:
            nc.close(timeout=5)
        except JetSparkError:
            pass  # what is in doubt is in doubt; that it ends is what counts
        assert nc.is_closed
        assert time.monotonic() - began < PATIENCE_S


def interrupt_everywhere(server: NatsServer, operation: Operation, *, at: Places, at_most: int) -> None:
    wrong: list[str] = []
    with ExitStack() as opened:
        nc = opened.enter_context(connected(server))
        operation(nc)
        places = count_places(lambda: operation(nc), at=at)
        for number in sample(places, at_most, seed=7):
            interrupt = Interrupt(number, at=at)
            try:
                with interrupt:
                    apart(partial(operation, nc))
            except (KeyboardInterrupt, JetSparkError):
                pass
            except RuntimeError as error:
                # Between the end of a `with` block and its `__exit__`, where no signal is looked at, the lock of the
                # interrupted thread was released for it.
                if at != "any" or "un-acquired lock" not in str(error):
                    raise
            if not interrupt.place or answers(nc):
                continue
            wrong.append(f"{number} {interrupt.place}")
            nc = opened.enter_context(connected(server))
    assert wrong == []


def test_a_session_that_ends_when_a_thread_is_about_to_read_it_is_no_error_of_that_thread(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(server) as nc:
        transport, ended = nc._transport, list[object]()

        class EndsTheSession(selectors.PollSelector):
            """Made by a thread that is to read in place of the connection's, before it looks at the socket."""

            def __enter__(self) -> Self:
                if not ended:
                    ended.append(transport._socket)
                    transport.give_up_session()
                    while transport._socket is ended[0]:
                        time.sleep(0.001)
                return self

        monkeypatch.setattr("jetspark.blocking.transport.selectors.PollSelector", EndsTheSession)
        while not ended:  # the connection's thread may be the one that reads
            with suppress(JetSparkError):
                nc.request("echo", b"lost with its session", timeout=1)
        assert answers(nc)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_where_signals_are_seen_leaves_a_connection_that_answers(name: str, server: NatsServer) -> None:
    interrupt_everywhere(server, OPERATIONS[name], at="signals", at_most=60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_bytecode_leaves_a_connection_that_answers(name: str, server: NatsServer) -> None:
    interrupt_everywhere(server, OPERATIONS[name], at="any", at_most=400)


@pytest.mark.parametrize("name", ["close", "drain"])
def test_closing_that_was_interrupted_is_done_by_the_next(name: str, server: NatsServer) -> None:
    def opened() -> Client:
        nc = jetspark.blocking.connect(server.url)
        nc.subscribe("anything")
        nc.publish("anywhere", b"data")
        return nc

    first = opened()
    places = count_places(getattr(first, name))
    for number in sample(places, 25, seed=11):
        nc = opened()
        try:
            with Interrupt(number):
                getattr(nc, name)()
        except (KeyboardInterrupt, JetSparkError):
            pass
        began = time.monotonic()
        try:
            nc.close()
        except JetSparkError:
            pass
        assert nc.is_closed
        assert time.monotonic() - began < PATIENCE_S


def test_an_interrupt_of_a_thread_that_waits_costs_nothing(server: NatsServer) -> None:
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    with connected(server) as nc, connected(server) as service:
        service.subscribe("silent")
        service.flush()
        subscription = nc.subscribe("nothing")
        future = nc.jetstream().publish_async("s.a", b"")
        consumer = nc.jetstream().stream("S").create_consumer(ConsumerConfig(durable_name="d", filter_subject="s.none"))
        for wait in (
            lambda: nc.request("silent", timeout=30),
            lambda: subscription.next(timeout=30),
            lambda: next(iter(subscription)),
            lambda: consumer.fetch(1, timeout=30),
            lambda: next(nc.request_many("silent", timeout=30)),
        ):
            timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()
            assert answers(nc)
        assert future.result(30).stream == "S"
        assert nc._machine.sessions == 1
        assert len(nc._machine.requests) == 0


def test_no_other_thread_waits_for_ever_after_an_interrupt(server: NatsServer) -> None:
    """Threads that wait while the main thread reads for all of them are told by somebody."""
    with connected(server) as nc:
        stop = threading.Event()
        ends: list[str] = []

        def ask() -> None:
            while not stop.is_set():
                try:
                    nc.request("echo", b"other", timeout=1)
                except JetSparkError:
                    pass
            ends.append("asked")

        def read() -> None:
            with nc.subscribe("ticks") as ticks:
                for message in ticks:
                    if message.data == b"last":
                        break
            ends.append("read")

        threads = [threading.Thread(target=ask), threading.Thread(target=read)]
        for thread in threads:
            thread.start()
        places = count_places(lambda: nc.request("echo", b"?", timeout=2))
        for number in sample(places, 40, seed=3):
            try:
                with Interrupt(number):
                    nc.publish("ticks", b"x")
                    nc.request("echo", b"?", timeout=2)
            except (KeyboardInterrupt, JetSparkError):
                pass
        assert answers(nc)
        stop.set()
        give_up_at = time.monotonic() + PATIENCE_S
        while "read" not in ends and time.monotonic() < give_up_at:
            nc.publish("ticks", b"last")
            time.sleep(0.05)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(ends) == ["asked", "read"]


STORM = """
import random, signal, sys, threading, time
import jetspark.blocking
from jetspark import JetSparkError

url, interrupts = sys.argv[1], int(sys.argv[2])
rng = random.Random(5)
nc = jetspark.blocking.connect(url, reconnect_wait_s=0.01, reconnect_wait_max_s=0.01)
main, sent, is_over = threading.main_thread().ident, 0, False

def interrupt():
    global sent
    while sent < interrupts:
        time.sleep(rng.random() * 0.002)
        sent += 1
        signal.pthread_kill(main, signal.SIGINT)

def work():
    while sent < interrupts:
        nc.publish("anywhere", b"data")
        nc.request("echo", b"?", timeout=2)
        nc.flush(2)
        nc.jetstream(timeout=2).publish("s.storm", b"data")

storm = threading.Thread(target=interrupt)
while True:
    try:
        if not storm.is_alive() and not sent:
            storm.start()
        work()
        storm.join()
        break
    except (KeyboardInterrupt, JetSparkError):
        pass
give_up_at = time.monotonic() + 60
while True:
    try:
        assert nc.request("echo", b"still there?", timeout=1).data == b"still there?"
        break
    except JetSparkError:
        assert time.monotonic() < give_up_at
try:
    nc.close(timeout=5)
except JetSparkError:
    pass
assert nc.is_closed
print("done")
"""


def test_a_connection_survives_a_storm_of_interrupts(server: NatsServer) -> None:
    result = subprocess.run(
        [sys.executable, "-c", STORM, server.url, "500"], capture_output=True, text=True, timeout=250, check=False
    )
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr
