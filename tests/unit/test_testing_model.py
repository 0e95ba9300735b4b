"""What is the model's own: time, misfortune, determinism and what it refuses. What it says is compared with a real
server in ``tests/conformance/test_batch_server.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from jetspark import ConfigError, Republish, ServerError, StreamConfig
from jetspark.errors import InvalidSubject
from jetspark.testing import BatchLimits, Delivery, ModelServer

SUBJECT = "s.a"


def make(limits: BatchLimits | None = None, **fields: Any) -> ModelServer:
    server = ModelServer(limits=limits)
    given: dict[str, Any] = {"subjects": ["s.>"], "allow_atomic": True, "allow_batched": True, **fields}
    server.create_stream(StreamConfig(name="S", **given))
    return server


def fast(
    server: ModelServer,
    id: str,
    sequence: int,
    operation: int = 1,
    *,
    now: float = 0.0,
    flow: int = 10,
    mode: str = "ok",
) -> list[str]:
    reply = f"_R.{id}.{flow}.{mode}.{sequence}.{operation}.$FI"
    return texts(server.publish(SUBJECT, b"", reply=reply, now=now))


def atomic(server: ModelServer, id: str, sequence: int, *, now: float = 0.0, commit: str = "") -> list[str]:
    headers = {"Nats-Batch-Id": id, "Nats-Batch-Sequence": str(sequence)}
    if commit:
        headers["Nats-Batch-Commit"] = commit
    return texts(server.publish(SUBJECT, b"", reply="_R", headers=headers, now=now))


def plain(server: ModelServer, *, now: float = 0.0, reply: str | None = "_R", **headers: str) -> list[str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return texts(server.publish(SUBJECT, b"", reply=reply, headers=given, now=now))


def texts(said: Sequence[Delivery]) -> list[str]:
    return [str(each.status.code) if each.status else each.data.decode() for each in said]


def err_codes(said: Sequence[str]) -> list[int]:
    return [json.loads(each)["error"]["err_code"] for each in said]


# Time


def test_an_idle_atomic_batch_falls_due_after_its_last_message() -> None:
    server = make()
    assert server.next_deadline() is None
    atomic(server, "B1", 1, now=100.0)
    atomic(server, "B1", 2, now=104.0)
    assert server.next_deadline() == 114.0
    assert server.on_time(113.9) == []
    [advisory] = server.on_time(114.0)
    assert advisory.subject == "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.S"
    assert json.loads(advisory.data) == {
        "type": "io.nats.jetstream.advisory.v1.stream_batch_abandoned",
        "id": "0000000000000000000001",
        "timestamp": "1970-01-01T00:01:54Z",
        "stream": "S",
        "batch": "B1",
        "reason": "timeout",
    }
    assert server.next_deadline() is None


def test_what_fell_due_before_a_message_is_said_before_its_reply() -> None:
    server = make(BatchLimits(timeout_s=2.0))
    atomic(server, "B2", 1, now=1.0)
    atomic(server, "B1", 1, now=0.5)
    said = server.publish("nobody.home", b"", reply="_R", now=50.0)
    assert [json.loads(each.data)["batch"] for each in said[:2]] == ["B1", "B2"]
    assert texts(said[2:]) == ["503"]


def test_an_idle_fast_batch_is_forgotten_in_silence_and_every_message_postpones_it() -> None:
    server = make()
    for step in range(5):
        fast(server, "F1", step + 1, 1 if step else 0, now=9.0 * step)
    assert server.next_deadline() == 46.0
    assert server.on_time(46.0) == []
    assert server.flow("S") == []
    assert err_codes(fast(server, "F1", 6, now=46.0)) == [10208]


def test_a_batch_that_expired_unnoticed_is_not_revived_by_its_next_message() -> None:
    server = make()
    fast(server, "F1", 1, 0)
    assert err_codes(fast(server, "F1", 2, now=10.0)) == [10208]


def test_a_message_id_is_forgotten_when_its_window_is_over_and_not_by_a_purge() -> None:
    server = make(duplicate_window_s=5.0)
    assert plain(server, now=0.0, Nats_Msg_Id="a") == ['{"stream":"S","seq":1}']
    server.purge_stream("S")
    assert plain(server, now=4.9, Nats_Msg_Id="a") == ['{"stream":"S","seq":1,"duplicate": true}']
    assert plain(server, now=5.0, Nats_Msg_Id="a") == ['{"stream":"S","seq":2}']
    assert plain(server, now=9.9, Nats_Msg_Id="a") == ['{"stream":"S","seq":2,"duplicate": true}']


# Flow among several


def test_publishers_of_one_stream_share_500_messages_per_ack() -> None:
    server = make()
    ids = [f"F{number}" for number in range(4)]
    sent = dict.fromkeys(ids, 0)
    for step in range(4 * 800):
        id = ids[step % 4]
        sent[id] += 1
        fast(server, id, sent[id], 1 if sent[id] > 1 else 0, flow=1000)
    assert [each.messages_per_ack for each in server.flow("S")] == [125] * 4
    assert [each.last_sequence for each in server.flow("S")] == [800] * 4
    for id in ids[1:]:
        fast(server, id, sent[id] + 1, 2)
    for sequence in range(801, 3000):
        fast(server, "F0", sequence)
    [alone] = server.flow("S")
    assert (alone.messages_per_ack, alone.max_flow) == (500, 1000)
    assert alone.acknowledged_sequence <= alone.last_sequence == 2999


def test_streams_do_not_share_their_flow() -> None:
    server = make()
    server.create_stream(StreamConfig(name="T", subjects=["t.>"], allow_batched=True))
    fast(server, "F1", 1, 0)
    said = server.publish("t.a", b"", reply="_R.F1.100.ok.1.0.$FI", now=0.0)
    assert texts(said) == ['{"type":"ack","seq":0,"msgs":100}']


# Leaders


def test_without_a_leader_every_publish_gets_a_503_or_silence() -> None:
    server = make(replicas=3)
    server.lose_leader("S", 0.0)
    [delivery] = server.publish(SUBJECT, b"", reply="_R", now=0.0)
    assert delivery.status is not None
    assert (delivery.status.code, delivery.data) == (503, b"")
    assert delivery.headers == {"Nats-Subject": SUBJECT}
    assert server.publish(SUBJECT, b"", now=0.0) == []
    server.elect_leader("S", 1.0)
    server.lose_leader("S", 1.0, is_silent=True)
    assert fast(server, "F1", 1, 0, now=1.0) == []
    server.elect_leader("S", 2.0)
    assert fast(server, "F1", 1, 0, now=2.0) == ['{"type":"ack","seq":0,"msgs":10}']


def test_what_no_ack_has_covered_vanishes_with_the_leader_and_the_new_one_says_so() -> None:
    server = make(replicas=3)
    for sequence in range(1, 14):
        fast(server, "F1", sequence, 1 if sequence > 1 else 0, mode="fail")
    server.lose_leader("S", 0.0, drop=2)
    [told] = server.elect_leader("S", 1.0)
    assert told == Delivery("_R.F1.10.fail.11.1.$FI", b'{"type":"ack","seq":11,"msgs":10}')
    assert server.last_sequence("S") == 11
    assert fast(server, "F1", 14, mode="fail", now=1.0) == [
        '{"type":"gap","last_seq":12,"seq":14}',
        '{"stream":"S","seq":11,"batch":"F1","count":11}',
    ]


def test_a_leader_that_is_cut_off_acknowledges_duplicates_of_what_it_will_lose() -> None:
    """The answers are those measured on nats-server 2.15.1, three nodes, the leader's partitioned off."""
    server = make(replicas=3)
    impossible = {"Nats-Expected-Last-Sequence": str(2**63 - 1)}

    def send(reply: str, id: str, **headers: str) -> list[str]:
        fields = {"Nats-Msg-Id": id} | headers
        return texts(server.publish(SUBJECT, b"", reply=reply, headers=fields, now=1.0))

    send("_R", "old")
    server.cut_off_leader("S", 1.0)
    assert send("_R.F1.10.fail.1.0.$FI", "new") == ['{"type":"ack","seq":0,"msgs":10}']
    assert err_codes(send("_R", "new")) == [10158]
    assert send("_R", "old") == ['{"stream":"S","seq":1,"duplicate": true}']
    assert send("_R", "newer") == []
    # The lie: a batch of duplicates, none of which is stored.
    assert send("_R.F2.1.fail.1.0.$FI", "new") == ['{"type":"ack","seq":0,"msgs":1}', '{"type":"ack","seq":1,"msgs":1}']
    assert send("_R.F2.1.fail.2.3.$FI", "") == ['{"stream":"S","seq":0,"batch":"F2","count":1}']
    # The question that finds it out.
    [_, answer] = send("_R.Q1.1.fail.1.2.$FI", "new", **impossible)
    assert err_codes([answer]) == [10158]
    [_, answer] = send("_R.Q2.1.fail.1.2.$FI", "old", **impossible)
    assert answer == '{"stream":"S","seq":1,"duplicate": true,"batch":"Q2","count":1}'
    assert err_codes(send("_R.Q3.1.fail.1.2.$FI", "newest", **impossible)) == [10071]
    server.lose_leader("S", 1.0)
    server.elect_leader("S", 1.0)
    assert err_codes(send("_R.Q4.1.fail.1.2.$FI", "new", **impossible)) == [10071]
    assert len(server.messages("S")) == 1


def test_a_leader_that_is_cut_off_stages_and_refuses_atomic_batches_and_is_silent_about_commits() -> None:
    """Measured as above: it has proposed the commit, so the next refusal counts it, and nobody can read it."""
    server = make(replicas=3)
    plain(server)
    atomic(server, "before", 1)
    server.cut_off_leader("S", 1.0)
    assert atomic(server, "new", 1, now=1.0) == [""]
    assert atomic(server, "new", 2, now=1.0, commit="1") == []
    fence = {"Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", "Nats-Expected-Last-Sequence": "99"}

    def ask(id: str) -> list[str]:
        return texts(server.publish(SUBJECT, b"", reply="_R", headers={"Nats-Batch-Id": id} | fence, now=1.0))

    assert "wrong last sequence: 3" in ask("new")[0]
    assert err_codes(ask("before")[1:]) == [10176]  # after its advisory
    assert len(server.messages("S")) == 1
    server.lose_leader("S", 2.0)
    server.elect_leader("S", 2.0)
    assert "wrong last sequence: 1" in ask("new")[0]


def test_what_takes_time_to_apply_counts_shows_later_and_is_answered_then() -> None:
    server = make(replicas=3)
    assert server.slow_down("S", 0.0, 3.0) == []
    assert plain(server, now=0.0) == []
    assert atomic(server, "B1", 1, now=1.0) == [""]
    assert atomic(server, "B1", 2, now=1.0, commit="1") == []
    stream = server.stream("S")
    assert (server.last_sequence("S"), stream.applied_sequence, server.next_answer_at()) == (3, 0, 3.0)
    assert texts(server.on_time(3.0)) == ['{"stream":"S","seq":1}']
    assert (stream.applied_sequence, server.next_answer_at()) == (1, 4.0)
    assert texts(server.on_time(4.0)) == ['{"stream":"S","seq":3,"batch":"B1","count":2}']
    assert fast(server, "F1", 1, 0, now=4.0) == ['{"type":"ack","seq":0,"msgs":10}']
    assert fast(server, "F1", 3, 2, now=4.0) == ['{"type":"gap","last_seq":2,"seq":3}']  # told at once
    assert texts(server.on_time(7.0)) == ['{"stream":"S","seq":5,"batch":"F1","count":3}']
    assert server.slow_down("S", 7.0, 0.0) == []
    assert plain(server, now=7.0) == ['{"stream":"S","seq":6}']


def test_a_replica_that_is_held_answers_every_second_direct_get_with_what_it_has() -> None:
    server = make(replicas=3, allow_direct=True)
    plain(server)
    server.hold_replica("S", True)
    plain(server)
    stream = server.stream("S")
    assert [stream.answering().last_sequence for _ in range(4)] == [2, 1, 2, 1]
    assert server.last_sequence("S") == 2
    server.hold_replica("S", False)
    assert [stream.answering().last_sequence for _ in range(2)] == [2, 2]
    with pytest.raises(ConfigError, match="one replica"):
        make().hold_replica("S", True)


@pytest.mark.parametrize(("drop", "left"), [(0, 3), (1, 1), (2, 1)])
def test_an_atomic_batch_that_was_not_applied_is_lost_as_a_whole_or_not_at_all(drop: int, left: int) -> None:
    server = make(replicas=3)
    server.slow_down("S", 0.0, 3.0)
    plain(server)
    atomic(server, "B1", 1)
    atomic(server, "B1", 2, commit="1")
    server.lose_leader("S", 1.0, drop=drop)
    assert server.last_sequence("S") == left
    assert server.elect_leader("S", 2.0) == []
    assert (server.leader("S"), server.stream("S").applied_sequence) == (1, 0)
    assert server.on_time(5.0) == []  # nobody knows whom to answer
    assert server.stream("S").applied_sequence == left


def test_a_fork_goes_its_own_way() -> None:
    server = make(replicas=3)
    plain(server)
    fork = server.fork()
    fork.cut_off_leader("S", 1.0)
    assert plain(fork, now=1.0) == []
    server.lose_leader("S", 1.0)
    server.elect_leader("S", 1.0)
    assert plain(server, now=1.0) == ['{"stream":"S","seq":2}']
    assert (fork.leader("S"), len(fork.messages("S"))) == (0, 1)
    assert (server.leader("S"), len(server.messages("S"))) == (1, 2)


def test_what_was_acknowledged_is_never_lost() -> None:
    server = make(replicas=3)
    for sequence in range(1, 14):
        fast(server, "F1", sequence, 1 if sequence > 1 else 0)
    server.lose_leader("S", 0.0, drop=1000)
    assert texts(server.elect_leader("S", 1.0)) == ['{"type":"ack","seq":10,"msgs":10}']
    assert [each.sequence for each in server.messages("S")] == list(range(1, 11))
    plain(server, now=1.0)
    plain(server, now=1.0, reply=None)
    atomic(server, "B1", 1, now=1.0, commit="1")
    plain(server, now=1.0, reply=None)
    server.lose_leader("S", 1.0, drop=1000)
    assert server.last_sequence("S") == 13


def test_what_a_new_leader_or_a_duplicate_was_told_about_is_never_lost_either() -> None:
    server = make(replicas=3)
    for sequence in (1, 2, 3):
        fast(server, "F1", sequence, 1 if sequence > 1 else 0)
    server.lose_leader("S", 0.0)
    assert texts(server.elect_leader("S", 1.0)) == ['{"type":"ack","seq":3,"msgs":10}']
    server.lose_leader("S", 1.0, drop=9)
    assert server.last_sequence("S") == 3
    server.elect_leader("S", 2.0)
    plain(server, reply=None, now=2.0, Nats_Msg_Id="m")
    assert plain(server, now=2.0, Nats_Msg_Id="m") == ['{"stream":"S","seq":4,"duplicate": true}']
    server.lose_leader("S", 2.0, drop=9)
    assert server.last_sequence("S") == 4


def test_a_batch_of_which_nothing_survived_is_unknown_and_its_ids_are_free() -> None:
    server = make(replicas=3)
    headers = {"Nats-Msg-Id": "m"}
    server.publish(SUBJECT, b"", reply="_R.F1.10.ok.1.0.$FI", headers=headers, now=0.0)
    server.lose_leader("S", 0.0, drop=1)
    assert server.elect_leader("S", 1.0) == []
    assert err_codes(fast(server, "F1", 2, now=1.0)) == [10208]
    assert plain(server, now=1.0, Nats_Msg_Id="m") == ['{"stream":"S","seq":1}']


def test_an_election_can_be_left_to_time() -> None:
    server = make(replicas=3)
    fast(server, "F1", 1, 0, now=0.0)
    server.lose_leader("S", 1.0, elected_at=4.0)
    assert server.next_deadline() == 4.0
    assert fast(server, "F1", 2, now=3.0) == ["503"]
    assert fast(server, "F1", 2, 2, now=5.0) == [
        '{"type":"ack","seq":1,"msgs":10}',
        '{"stream":"S","seq":2,"batch":"F1","count":2}',
    ]


def test_a_batch_does_not_outlive_an_election_that_takes_too_long() -> None:
    server = make(replicas=3)
    fast(server, "F1", 1, 0, now=0.0)
    server.lose_leader("S", 1.0, elected_at=12.0)
    assert server.on_time(12.0) == []
    assert err_codes(fast(server, "F1", 2, now=12.0)) == [10208]


def test_an_ended_batch_stays_ended_under_a_new_leader_once_its_time_is_up() -> None:
    server = make(replicas=3)
    fast(server, "F1", 1, 0, now=0.0)
    fast(server, "F1", 2, 3, now=1.0)
    server.lose_leader("S", 2.0)
    assert texts(server.elect_leader("S", 3.0)) == ['{"type":"ack","seq":1,"msgs":10}']
    fast(server, "F1", 2, 3, now=4.0)
    server.lose_leader("S", 5.0)
    assert server.elect_leader("S", 14.0) == []


def test_a_batch_that_is_open_again_keeps_its_deadline() -> None:
    server = make(replicas=3)
    fast(server, "F1", 1, 0, now=0.0)
    fast(server, "F1", 2, 3, now=1.0)
    server.lose_leader("S", 2.0)
    server.elect_leader("S", 3.0)
    assert server.next_deadline() == 11.0
    assert err_codes(fast(server, "F1", 2, now=11.0)) == [10208]


def test_a_rollup_is_not_lost_because_what_it_replaced_would_be() -> None:
    server = make(replicas=3, allow_rollup=True)
    plain(server)
    plain(server, reply=None, Nats_Rollup="sub")
    server.lose_leader("S", 0.0, drop=5)
    assert [each.sequence for each in server.messages("S")] == [2]


def test_a_wrong_last_id_stops_a_replicated_stream_for_good() -> None:
    # Measured on nats-server 2.15.1, and why publishes refuse to send the header.
    server = make(replicas=3)
    plain(server)
    assert err_codes(plain(server, Nats_Expected_Last_Msg_Id="x")) == [10070]
    assert plain(server) == []
    assert server.elect_leader("S", 1.0) == []
    assert plain(server, now=1.0) == []


def test_a_wrong_last_id_in_a_fast_batch_stops_a_replicated_stream_too() -> None:
    server = make(replicas=3)
    fast(server, "F1", 1, 0)
    headers = {"Nats-Expected-Last-Msg-Id": "x"}
    said = texts(server.publish(SUBJECT, b"", reply="_R.F1.10.ok.2.1.$FI", headers=headers, now=0.0))
    assert err_codes(said) == [10070]
    assert fast(server, "F1", 2, 4) == []
    assert plain(server) == []


def test_a_stream_with_one_replica_has_no_leader_to_lose() -> None:
    with pytest.raises(ConfigError, match="expected 2 or more"):
        make().lose_leader("S", 0.0)


def test_a_restart_ends_the_time_without_a_leader() -> None:
    server = make(replicas=3)
    server.lose_leader("S", 0.0)
    server.restart(1.0)
    assert plain(server, now=1.0) == ['{"stream":"S","seq":1}']


def test_a_restart_keeps_messages_and_sequences_and_no_batch() -> None:
    server = make()
    fast(server, "F1", 1, 0)
    atomic(server, "B1", 1)
    assert server.restart(1.0) == []
    assert server.next_deadline() is None
    assert [each.sequence for each in server.messages("S")] == [1]
    assert err_codes(fast(server, "F1", 2, now=1.0) + atomic(server, "B1", 2, now=1.0)) == [10208, 10176]


# Streams


def test_a_message_goes_to_the_stream_whose_subjects_match() -> None:
    server = ModelServer()
    server.create_stream(StreamConfig(name="A", subjects=["a.*.x", "b"]))
    server.create_stream(StreamConfig(name="C"))
    for subject in ("a.1.x", "b", "C", "a.1.y", "a.1.2.x"):
        server.publish(subject, b"", now=0.0)
    assert [each.subject for each in server.messages("A")] == ["a.1.x", "b"]
    assert [each.subject for each in server.messages("C")] == ["C"]
    server.update_stream(StreamConfig(name="C", subjects=["a.1.y"]))
    server.publish("a.1.y", b"", now=0.0)
    server.publish("C", b"", now=0.0)
    assert [each.subject for each in server.messages("C")] == ["C", "a.1.y"]


def test_an_update_leaves_alone_what_it_does_not_mention() -> None:
    server = make(max_message_bytes=3, max_messages=2)
    server.update_stream(StreamConfig(name="S", max_messages=1))
    assert err_codes(texts(server.publish(SUBJECT, b"1234", reply="_R", now=0.0))) == [10054]
    plain(server)
    plain(server)
    assert [each.sequence for each in server.messages("S")] == [2]


@pytest.mark.parametrize(
    ("config", "err_code"),
    [
        (StreamConfig(name="S", subjects=["s.>"], max_messages=1), 10058),
        (StreamConfig(name="T", subjects=["s.*"]), 10065),
        (StreamConfig(name="T", allow_atomic=True, persist_mode="async"), 10052),
    ],
)
def test_what_the_server_would_not_create_the_model_does_not(config: StreamConfig, err_code: int) -> None:
    server = make()
    server.create_stream(StreamConfig(name="S", subjects=["s.>"], allow_atomic=True, allow_batched=True))
    with pytest.raises(ServerError) as caught:
        server.create_stream(config)
    assert caught.value.err_code == err_code


@pytest.mark.parametrize("act", ["update", "delete", "purge", "messages", "flow"])
def test_a_stream_that_is_not_there_is_not_found(act: str) -> None:
    server = ModelServer()
    calls: dict[str, Callable[[], object]] = {
        "update": lambda: server.update_stream(StreamConfig(name="S")),
        "delete": lambda: server.delete_stream("S"),
        "purge": lambda: server.purge_stream("S"),
        "messages": lambda: server.messages("S"),
        "flow": lambda: server.flow("S"),
    }
    with pytest.raises(ServerError, match="stream not found"):
        calls[act]()


@pytest.mark.parametrize(
    "fields", [{"republish": Republish(destination="r.>")}, {"retention": "workqueue"}, {"allow_message_counter": True}]
)
def test_what_is_not_modelled_is_refused_rather_than_ignored(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use a real server"):
        make(**fields)


def test_a_subject_with_wildcards_cannot_be_published_to() -> None:
    with pytest.raises(InvalidSubject):
        make().publish("s.*", b"", now=0.0)


@pytest.mark.parametrize("fields", [{"max_messages": 0}, {"timeout_s": 0.0}, {"max_fast_inflight_total": -1}])
def test_limits_are_positive(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        BatchLimits(**fields)


# The rest


def test_an_id_is_quoted_as_go_quotes_which_is_not_always_json() -> None:
    server = make()
    assert atomic(server, 'a"b', 1, commit="1") == [r'{"stream":"S","seq":1,"batch":"a\"b","count":1}']
    assert atomic(server, "é\x7fz\U0010fffd", 1, commit="1") == [
        r'{"stream":"S","seq":2,"batch":"é\x7fz\U0010fffd","count":1}'
    ]


def test_two_models_that_are_told_the_same_say_the_same() -> None:
    def tell(server: ModelServer) -> list[Delivery]:
        said = []
        for step in range(200):
            said += server.publish(
                f"s.{step % 3}", b"", reply=f"_R.F{step % 5}.7.ok.{step // 5 + 1}.{1 if step > 4 else 0}.$FI", now=step
            )
            atomic(server, f"B{step % 7}", step // 7 + 1, now=step)
        return said + server.on_time(1000.0)

    assert tell(make()) == tell(make())


def test_headers_given_by_the_caller_are_copied() -> None:
    server = make()
    headers = {"own": "header"}
    server.publish(SUBJECT, b"", headers=headers, now=0.0)
    headers["own"] = "changed"
    [message] = server.messages("S")
    assert message.headers == {"own": "header"}


def test_importing_jetspark_does_not_load_the_testing_kit() -> None:
    code = "import sys, jetspark, jetspark.blocking; sys.exit('jetspark.testing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
