"""Virtual time, the front's protocol and wires that break, without any publisher."""

from __future__ import annotations

import random

import pytest

from jetspark import StreamConfig
from jetspark.testing import ModelServer
from jetspark.testing.network import BEGINNING, Front, Network, Publication, VirtualClock, Wire

INFO_END = b"}\r\n"


class Client:
    """Writes what it is told and keeps what it hears."""

    def __init__(self, network: Network) -> None:
        self.heard = b""
        self.lost: list[str] = []
        self.had_room = 0
        self.wire: Wire = network.dial(self._on_data, self.lost.append, self._on_room)

    def _on_data(self, data: bytes) -> None:
        self.heard += data

    def _on_room(self) -> None:
        self.had_room += 1

    def news(self) -> bytes:
        heard, self.heard = self.heard, b""
        return heard


def make(seed: int = 1, *, service_s: float = 0.0, max_in_flight_bytes: int = 1 << 20) -> Network:
    model = ModelServer()
    model.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_batched=True, replicas=3))
    front = Front(model, VirtualClock(), service_s=service_s)
    return Network(front, random.Random(seed), max_in_flight_bytes=max_in_flight_bytes)


def talk(network: Network, client: Client, data: bytes) -> bytes:
    """What the server has to say to this."""
    client.wire.write(data)
    network.clock.run(network.clock.now + 1.0)
    return client.news()


# ---- clock -----------------------------------------------------------------------------------------------------------


def test_things_happen_by_time_and_then_in_the_order_they_were_planned() -> None:
    clock, seen = VirtualClock(), []
    clock.after(2.0, lambda: seen.append("c"))
    clock.after(1.0, lambda: seen.append("a"))
    clock.after(1.0, lambda: seen.append("b"))
    clock.after(3.0, lambda: seen.append("late"))
    assert clock.run(BEGINNING + 2.5) is False
    assert (seen, clock.now) == (["a", "b", "c"], BEGINNING + 2.5)


def test_what_is_cancelled_does_not_happen_and_what_is_late_happens_now() -> None:
    clock, seen = VirtualClock(), []
    clock.after(1.0, lambda: seen.append("no")).cancel()
    clock.at(BEGINNING - 5.0, lambda: seen.append(str(clock.now - BEGINNING)))
    clock.run(BEGINNING + 2.0)
    assert seen == ["0.0"]


def test_running_stops_when_it_is_done() -> None:
    clock, seen = VirtualClock(), []
    clock.after(1.0, lambda: seen.append(1))
    clock.after(2.0, lambda: seen.append(2))
    assert clock.run(BEGINNING + 9.0, lambda: bool(seen)) is True
    assert (seen, clock.now) == ([1], BEGINNING + 1.0)


# ---- front -----------------------------------------------------------------------------------------------------------


def test_a_client_is_greeted_and_its_pings_are_answered() -> None:
    network = make()
    client = Client(network)
    greeting = talk(network, client, b"CONNECT {}\r\nPING\r\n")
    assert greeting.startswith(b"INFO {")
    assert greeting.endswith(INFO_END + b"PONG\r\n")


def test_frames_are_read_however_they_are_cut() -> None:
    data = b"SUB r.> 7\r\nPUB s.a r.1 3\r\na\r\n\r\nHPUB s.a r.2 18 19\r\nNATS/1.0\r\nA: 1\r\n\r\nb\r\nPING\r\n"
    network = make()
    whole, bytewise = Client(network), Client(network)
    talk(network, whole, data)
    for number in range(len(data)):
        bytewise.wire.write(data[number : number + 1])
    network.clock.run(network.clock.now + 10.0)
    stored = network.front.model.messages("S")
    assert [message.data for message in stored] == [b"a\r\n", b"b"] * 2
    assert stored[1].headers == {"A": "1"}
    assert bytewise.heard.count(b"MSG r.1 7 ") == 1
    assert bytewise.heard.endswith(b"PONG\r\n")


def test_subscriptions_match_as_the_server_matches_them() -> None:
    network = make()
    client = Client(network)
    talk(network, client, b"SUB a.b 1\r\nSUB a.* 2\r\nSUB a.> 3\r\nSUB > 4\r\nSUB x 5\r\n")
    heard = talk(network, client, b"PUB a.b 1\r\nx\r\nPUB a.b.c 1\r\ny\r\n")
    assert sorted(line for line in heard.split(b"\r\n") if line.startswith(b"MSG")) == [
        b"MSG a.b 1 1",
        b"MSG a.b 2 1",
        b"MSG a.b 3 1",
        b"MSG a.b 4 1",
        b"MSG a.b.c 3 1",
        b"MSG a.b.c 4 1",
    ]


def test_of_a_queue_group_each_message_has_one_reader() -> None:
    network = make()
    members, other, writer = [Client(network) for _ in range(3)], Client(network), Client(network)
    for member in members:
        talk(network, member, b"SUB w.* workers 1\r\n")
    talk(network, other, b"SUB w.a 1\r\n")
    talk(network, writer, b"PUB w.a 1\r\nx\r\n" * 6)
    assert [member.news().count(b"MSG w.a 1 1") for member in members] == [2, 2, 2]
    assert other.news().count(b"MSG w.a 1 1") == 6


def test_an_unsubscribe_counts_from_the_subscription() -> None:
    network = make()
    client = Client(network)
    heard = talk(network, client, b"SUB a 1\r\nPUB a 1\r\nx\r\nUNSUB 1 2\r\n" + b"PUB a 1\r\nx\r\n" * 3)
    assert heard.count(b"MSG a 1 1") == 2
    assert talk(network, client, b"SUB a 2\r\nUNSUB 2\r\nPUB a 1\r\nx\r\n") == b""


def test_nobody_who_listens_is_told_at_once_and_somebody_prevents_it() -> None:
    network = make()
    client = Client(network)
    heard = talk(network, client, b"SUB r 1\r\nPUB nowhere r 0\r\n\r\n")
    assert heard.endswith(b"HMSG r 1 39 39\r\nNATS/1.0 503\r\nNats-Subject: nowhere\r\n\r\n\r\n")
    heard = talk(network, client, b"SUB nowhere 2\r\nPUB nowhere r 0\r\n\r\n")
    assert heard == b"MSG nowhere 2 r 0\r\n\r\n"


def test_nonsense_ends_the_session_with_a_word() -> None:
    network = make()
    client = Client(network)
    client.wire.write(b"HELLO\r\nPING\r\n")
    network.clock.run(network.clock.now + 1.0)
    assert b"PONG" not in client.heard
    assert network.front.sessions == 0


def test_a_server_that_needs_time_takes_one_message_after_the_other() -> None:
    network = make(service_s=0.1)
    times: list[float] = []
    network.front.watchers.append(lambda message: times.append(network.clock.now))
    client = Client(network)
    client.wire.write(b"PUB s.a 1\r\nx\r\n" * 3)
    network.clock.run(network.clock.now + 1.0)
    assert times[1] - times[0] == pytest.approx(0.1)
    assert times[2] - times[1] == pytest.approx(0.1)


def test_watchers_see_every_message_with_its_session() -> None:
    network = make()
    seen: list[Publication] = []
    network.front.watchers.append(seen.append)
    talk(network, Client(network), b"PUB s.a 1\r\nx\r\n")
    talk(network, Client(network), b"PUB s.b r 1\r\ny\r\n")
    assert [(each.client, each.subject, each.reply, each.data) for each in seen] == [
        (1, "s.a", "", b"x"),
        (2, "s.b", "r", b"y"),
    ]


# ---- wires -----------------------------------------------------------------------------------------------------------


def test_what_is_written_arrives_later_and_in_order() -> None:
    network = make()
    client = Client(network)
    for number in range(50):
        client.wire.write(b"PUB s.a 2\r\n%02d\r\n" % number)
    assert network.front.model.messages("S") == []
    network.clock.run(network.clock.now + 1.0)
    assert [int(message.data) for message in network.front.model.messages("S")] == list(range(50))


def test_a_cut_loses_an_end_of_what_is_on_the_wire_and_both_sides_learn_later() -> None:
    kept = set()
    for seed in range(30):
        network = make(seed)
        client = Client(network)
        network.clock.run(network.clock.now + 1.0)
        client.wire.write(b"PUB s.a 1\r\nx\r\n" * 10)
        client.wire.cut()
        assert client.lost == []
        client.wire.write(b"PUB s.a 1\r\nx\r\n")
        network.clock.run(network.clock.now + 2.0)
        assert client.lost == ["the connection was reset"]
        assert network.front.sessions == 0
        kept.add(len(network.front.model.messages("S")))
    assert max(kept) <= 10
    assert len(kept) > 5


def test_a_wire_is_full_and_says_when_it_is_not() -> None:
    network = make(max_in_flight_bytes=100)
    client = Client(network)
    client.wire.write(b"PUB s.a 100\r\n%b\r\n" % (b"x" * 100))
    before = client.wire.is_full
    network.clock.run(network.clock.now + 1.0)
    assert (before, client.wire.is_full, client.had_room) == (True, False, 1)


def test_a_killed_server_refuses_until_it_is_back_with_what_it_stored() -> None:
    network = make()
    client = Client(network)
    talk(network, client, b"PUB s.a 1\r\nx\r\n")
    network.kill_server(5.0)
    with pytest.raises(ConnectionRefusedError):
        Client(network)
    network.clock.run(network.clock.now + 5.0)
    assert client.lost == ["the server is gone"]
    talk(network, Client(network), b"PUB s.a 1\r\ny\r\n")
    assert [message.data for message in network.front.model.messages("S")] == [b"x", b"y"]


def test_refusing_lets_those_stay_who_are_in() -> None:
    network = make()
    client = Client(network)
    network.refuse(3.0)
    assert not network.is_reachable
    assert talk(network, client, b"PING\r\n").endswith(b"PONG\r\n")
    network.clock.run(network.clock.now + 3.0)
    assert network.is_reachable


def test_a_stream_without_a_leader_has_one_again_after_a_while() -> None:
    network = make()
    client = Client(network)
    network.lose_leader("S", 2.0)
    assert b"503" in talk(network, client, b"SUB r 1\r\nPUB s.a r 1\r\nx\r\n")
    network.clock.run(network.clock.now + 2.0)
    assert b'{"stream":"S","seq":1}' in talk(network, client, b"PUB s.a r 1\r\nx\r\n")


def test_a_partition_leaves_one_node_with_the_old_leader_and_the_others_with_a_new_one() -> None:
    network = make()
    here, there = (Client(network) for _ in range(2))  # on nodes 1 and 2
    network.clock.run(network.clock.now + 1.0)
    for client in (here, there):
        talk(network, client, b"SUB in.> 1\r\n")
    talk(network, here, b"PUB s.a in.1 1\r\nx\r\n")
    there.news()
    network.front.model.elect_leader("S", network.clock.now, leader=2)
    network.partition("S", 10.0, without_s=0.5)
    assert talk(network, there, b"PUB s.a in.2 1\r\nx\r\n") == b""  # it takes the message, and reaches nobody
    assert b'{"stream":"S","seq":2}' in talk(network, here, b"PUB s.a in.3 1\r\nx\r\n")
    assert there.news() == b""
    assert (network.front.model.leader("S"), network.front.parted_node) == (0, 2)
    network.clock.run(network.clock.now + 10.0)
    assert network.front.fork is None
    assert b'{"stream":"S","seq":3}' in talk(network, there, b"PUB s.a in.4 1\r\nx\r\n")


def test_a_node_behind_a_partition_has_no_leader_unless_it_led() -> None:
    network = make()
    client = Client(network)  # on node 1; node 0 leads
    network.clock.run(network.clock.now + 1.0)
    network.front.cut_off_node(1, "S")
    assert b" 503" in talk(network, client, b"SUB in.> 1\r\nPUB s.a in.1 1\r\nx\r\n")
    network.front.join()
    assert b'{"stream":"S","seq":1}' in talk(network, client, b"PUB s.a in.1 1\r\nx\r\n")


def test_an_answer_that_takes_time_comes_by_itself_and_with_a_cut_session_not_at_all() -> None:
    network = make()
    clients = [Client(network) for _ in range(2)]
    network.clock.run(network.clock.now + 1.0)
    for client in clients:
        client.news()
    network.slow_down("S", 5.0, apply_s=3.0)
    for number, client in enumerate(clients):
        assert talk(network, client, b"SUB in.%d.> 1\r\nPUB s.a in.%d.1 1\r\nx\r\n" % (number, number)) == b""
    network.cut_client(2)
    network.clock.run(network.clock.now + 5.0)
    assert b'{"stream":"S","seq":1}' in clients[0].news()
    assert (clients[1].news(), len(clients[1].lost)) == (b"", 1)
    assert b'{"stream":"S","seq":3}' in talk(network, clients[0], b"PUB s.a in.0.2 1\r\nx\r\n")
