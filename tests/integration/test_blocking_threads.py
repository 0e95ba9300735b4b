"""What only the blocking driver can get wrong: waiting on the thread that everything else waits for."""

from __future__ import annotations

import socket
import threading
import time

from support.patience import PATIENCE_S

import jetspark.blocking
from jetspark import (
    BufferFull,
    ConnectionClosed,
    ConnectionEvent,
    ConnectionLost,
    Disconnected,
    NoResponders,
    Reconnected,
    RequestTimeout,
    UsageError,
)
from jetspark.server import NatsServer


def test_waiting_inside_on_event_is_refused_instead_of_hanging() -> None:
    refused: list[UsageError] = []
    happened = threading.Event()

    def on_event(event: ConnectionEvent) -> None:
        if isinstance(event, Reconnected):
            for wait in (nc.flush, lambda: nc.request("anything")):
                try:
                    wait()
                except UsageError as error:
                    refused.append(error)
            nc.publish("from.on_event", b"publishing does not wait")
            happened.set()

    with NatsServer(jetstream=False) as server:
        nc = jetspark.blocking.connect(server.url, on_event=on_event)
        with nc:
            subscription = nc.subscribe("from.on_event")
            server.restart()
            assert happened.wait(PATIENCE_S)
            assert "would never end" in str(refused[0])
            assert len(refused) == 2
            assert subscription.next(30).data == b"publishing does not wait"


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as nc:
        nc.subscribe("a", callback=lambda message: None)
        nc.flush()
        assert len(set(threading.enumerate()) - before) == 2
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
    assert set(threading.enumerate()) - before == set()


def test_several_threads_share_the_messages_of_one_subscription() -> None:
    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as nc:
        subscription = nc.subscribe("shared", max_messages=3000)
        shares: list[list[int]] = [[], [], []]
        threads = [
            threading.Thread(target=lambda share=share: share.extend(int(m.data) for m in subscription))
            for share in shares
        ]
        for thread in threads:
            thread.start()
        for number in range(3000):
            nc.publish("shared", b"%d" % number)
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(shares[0] + shares[1] + shares[2]) == list(range(3000))
        for share in shares:
            assert share == sorted(share)


def test_many_threads_ask_at_once_and_each_gets_its_own_answer_while_the_server_comes_and_goes() -> None:
    """Threads take turns at reading the socket; a turn that is lost would be a request that never ends."""
    wrong: list[bytes] = []
    answered = [0] * 8
    stop = threading.Event()

    def ask(nc: jetspark.blocking.Client, who: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            question = b"%d:%d" % (who, number)
            try:
                answer = nc.request("echo", question, timeout=1).data
            except (RequestTimeout, NoResponders):
                continue  # asked while there was no server, or before the service was back
            if answer != question:
                wrong.append(answer)
            answered[who] += 1

    with (
        NatsServer(jetstream=False) as server,
        jetspark.blocking.connect(server.url) as service,
        jetspark.blocking.connect(server.url) as nc,
    ):
        service.subscribe("echo", callback=lambda message: message.respond(message.data))
        service.flush()
        threads = [threading.Thread(target=ask, args=(nc, who)) for who in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            marks = [count + 30 for count in answered]
            deadline = time.monotonic() + PATIENCE_S
            while any(count < mark for count, mark in zip(answered, marks, strict=True)):
                assert time.monotonic() < deadline, answered
                time.sleep(0.01)
            server.kill()
            server.start()
        stop.set()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert wrong == []
        nc.flush()


def test_closing_ends_the_wait_of_the_thread_that_reads() -> None:
    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as nc:
        nc.subscribe("silent")
        nc.flush()  # so that the connection's thread is at its work, and can be relieved of it
        outcome: list[BaseException] = []

        def ask() -> None:
            try:
                nc.request("silent", timeout=30)
            except ConnectionClosed as error:
                outcome.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while not nc._transport._lease.holder:
            time.sleep(0.001)
        nc.publish("anything")  # with another thread reading, the rest still works
        nc.flush()
        nc.close()
        asking.join(30)
        assert len(outcome) == 1


def test_closing_inside_on_event_ends_the_connection() -> None:
    happened = threading.Event()
    raised: list[Exception] = []

    def on_event(event: ConnectionEvent) -> None:
        if isinstance(event, Reconnected):
            nc.publish("a", b"in doubt, since nobody waits for its confirmation")
            try:
                nc.close()
            except ConnectionLost as error:
                raised.append(error)
            happened.set()

    with NatsServer(jetstream=False) as server:
        nc = jetspark.blocking.connect(server.url, on_event=on_event)
        server.restart()
        assert happened.wait(PATIENCE_S)
        assert nc.is_closed
        assert [str(error) for error in raised] == [
            "closed before the server confirmed (1 published messages are unconfirmed)"
        ]
        nc.close()


def test_draining_and_closing_inside_a_callback_do_not_wait_for_it() -> None:
    with NatsServer(jetstream=False) as server:
        for end in ("drain", "close"):
            received: list[bytes] = []
            errors: list[Exception] = []
            nc = jetspark.blocking.connect(server.url)

            def callback(
                message: jetspark.blocking.Message,
                nc: jetspark.blocking.Client = nc,
                end: str = end,
                received: list[bytes] = received,
                errors: list[Exception] = errors,
            ) -> None:
                received.append(message.data)
                try:
                    getattr(nc, end)(timeout=10)
                except Exception as error:
                    errors.append(error)

            subscription = nc.subscribe("a", callback=callback)
            nc.flush()
            with jetspark.blocking.connect(server.url) as other:  # ours is closed as soon as the first one comes
                for number in range(3):
                    other.publish("a", b"%d" % number)
            assert subscription._reader.callback_runner is not None
            subscription._reader.callback_runner.thread.join(30)
            assert nc.is_closed
            assert (received[0], errors) == (b"0", [])


def test_publishing_inside_on_event_does_not_wait_for_room() -> None:
    outcomes: list[Exception] = []
    happened = threading.Event()

    def on_event(event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected):
            try:
                for _ in range(2):
                    nc.publish("a", bytes(100))
            except BufferFull as error:
                outcomes.append(error)
            happened.set()

    with NatsServer(jetstream=False) as server:
        nc = jetspark.blocking.connect(server.url, on_event=on_event, send_buffer_bytes=64)
        server.restart()
        assert happened.wait(PATIENCE_S)
        assert len(outcomes) == 1
        nc.close()


def test_closing_ends_the_thread_that_waits_for_a_greeting() -> None:
    with NatsServer(jetstream=False) as server, socket.create_server(("127.0.0.1", 0)) as silent:
        others = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        nc = jetspark.blocking.connect([server.url, others], connect_timeout_s=60)
        server.kill()
        silent.settimeout(20)
        accepted, _ = silent.accept()
        with accepted:
            nc.close()
            nc._transport._thread.join(PATIENCE_S)
            assert not nc._transport._thread.is_alive()


def test_a_thread_that_has_the_number_of_one_that_has_ended_is_not_taken_for_it() -> None:
    """The system gives the number of the connection's thread to the next one, once the connection is closed."""
    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as client:
        number = client._transport._thread.ident
    found: list[Exception] = []

    def ask() -> None:
        if threading.get_ident() == number:
            try:
                client.request("nobody", timeout=1)
            except Exception as error:
                found.append(error)

    for _ in range(200):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        if found:
            break
    assert {type(each) for each in found} <= {ConnectionClosed}
