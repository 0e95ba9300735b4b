"""What only the blocking driver can get wrong: waiting on the thread that everything else waits for."""

from __future__ import annotations

import threading

import jetspark.blocking
from jetspark import ConnectionEvent, Reconnected, UsageError
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
            assert happened.wait(20)
            assert "would wait for ever" in str(refused[0])
            assert len(refused) == 2
            assert subscription.next(5).data == b"publishing does not wait"


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as nc:
        nc.subscribe("a", callback=lambda message: None)
        nc.flush()
        assert len(set(threading.enumerate()) - before) == 2
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
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
            thread.join(20)
        assert sorted(shares[0] + shares[1] + shares[2]) == list(range(3000))
        for share in shares:
            assert share == sorted(share)
