from __future__ import annotations

import json
from typing import Any

import pytest

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError, Conflict, KeyExists
from jetspark.jetstream.config import StreamSource
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.kv import (
    Bucket,
    KeyWrite,
    KVConfig,
    Writes,
    check_filter,
    check_key,
    key_of,
    operation_of,
    watch_options,
)
from jetspark.jetstream.operations import Api, Operation, Request


def bucket(**config: Any) -> Bucket:
    return Bucket.of(Api(), KVConfig(bucket="b", **config).to_stream(api_level=5))


def run(operation: Operation[Any], *replies: dict[str, Any]) -> tuple[Any, list[Request]]:
    """The result, and what was asked."""
    waiting = iter(replies)
    requests = []
    try:
        request = next(operation)
        while True:
            assert isinstance(request, Request)
            requests.append(request)
            reply = {} if request.is_silent else next(waiting)
            request = operation.send(CoreMessage("inbox", json.dumps(reply).encode(), None, None, None))
    except StopIteration as finished:
        return finished.value, requests


def ack(sequence: int, **more: Any) -> dict[str, Any]:
    return {"stream": "KV_b", "seq": sequence} | more


WRONG = {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 9"}}
NOTHING = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}


def found(sequence: int, block: str = "") -> dict[str, Any]:
    import base64

    message = {"subject": "$KV.b.k", "seq": sequence, "data": "", "time": "2026-01-01T00:00:00Z"}
    if block:
        message["hdrs"] = base64.b64encode(f"NATS/1.0\r\n{block}\r\n\r\n".encode()).decode()
    return {"message": message}


@pytest.mark.parametrize("key", ["a", "a.b", "order.1", "a/b=c_d-e", "A.9"])
def test_keys_of_the_ecosystem_are_keys(key: str) -> None:
    assert check_key(key) == key
    assert check_filter(key) == key


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("order:1", "'order.1'"),
        ("a b", "'a.b'"),
        ("user@host", "'user.host'"),
        ("", None),
        (".", None),
        ("a..b", None),
        ("a.*", None),
    ],
)
def test_other_keys_are_refused_with_the_spelling_that_works(key: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        check_key(key)
    assert (f"{hint} would do" in str(refused.value)) == (hint is not None)


@pytest.mark.parametrize("text", [">", "*", "a.*", "a.>", "*.b.>"])
def test_filters_have_wildcards_where_nats_has_them(text: str) -> None:
    assert check_filter(text) == text


@pytest.mark.parametrize("text", ["a.>.b", "a*", ">a", "a.b*"])
def test_wildcards_elsewhere_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        check_filter(text)


def test_a_bucket_is_the_stream_every_client_makes() -> None:
    stream = KVConfig(bucket="b", history=3, ttl_s=60).to_stream()
    assert (stream.name, stream.subjects, stream.max_messages_per_subject) == ("KV_b", ["$KV.b.>"], 3)
    assert (stream.discard, stream.allow_rollup, stream.deny_delete, stream.allow_direct) == ("new", True, True, True)
    assert (stream.max_age_s, stream.duplicate_window_s) == (60, 60)
    assert KVConfig(bucket="b", ttl_s=3600).to_stream().duplicate_window_s == 120
    assert KVConfig(bucket="b").to_stream(api_level=1).allow_atomic is None
    assert KVConfig(bucket="b").to_stream(api_level=2).allow_atomic is True
    assert KVConfig(bucket="b").to_stream(api_level=3).allow_batched is None
    assert KVConfig(bucket="b").to_stream(api_level=4).allow_batched is True
    assert KVConfig(bucket="b", allow_batched=False).to_stream(api_level=4).allow_batched is False
    mirror = KVConfig(bucket="m", mirror=StreamSource(name="b")).to_stream(api_level=5)
    assert mirror.mirror is not None
    assert (mirror.mirror.name, mirror.subjects, mirror.allow_atomic) == ("KV_b", None, None)
    assert Bucket.of(Api(), mirror).origin == "b"


def test_markers_say_what_happened() -> None:
    for headers, operation in (
        ({}, "put"),
        ({"KV-Operation": "DEL"}, "delete"),
        ({"KV-Operation": "PURGE"}, "purge"),
        ({"Nats-Marker-Reason": "MaxAge"}, "purge"),
        ({"Nats-Marker-Reason": "Remove"}, "delete"),
    ):
        assert operation_of(Headers(headers)) == operation
    assert key_of("b", "$KV.b.x.y") == "x.y"
    assert key_of("copy", "$KV.b.x.y") == "x.y"


def test_create_writes_over_a_deletion_and_not_over_a_value() -> None:
    revision, requests = run(bucket().create("k", b"v", None), WRONG, found(7, "KV-Operation: DEL"), ack(8))
    assert revision == 8
    assert dict(requests[-1].headers or {})["Nats-Expected-Last-Subject-Sequence"] == "7"
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), WRONG, found(7))
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), WRONG, NOTHING, WRONG)


def test_a_late_update_is_a_conflict() -> None:
    with pytest.raises(Conflict) as conflict:
        run(bucket().update("k", b"v", 3, None), WRONG)
    assert conflict.value.keys == ("k",)


def test_a_watch_has_one_beginning() -> None:
    assert watch_options("b", ()).filter_subjects == ("$KV.b.>",)
    assert watch_options("b", ("x", "y.*")).filter_subjects == ("$KV.b.x", "$KV.b.y.*")
    assert watch_options("b", ()).deliver_policy == "last_per_subject"
    assert watch_options("b", (), include_history=True).deliver_policy == "all"
    assert watch_options("b", (), updates_only=True).deliver_policy == "new"
    assert watch_options("b", (), from_revision=4).start_sequence == 4
    with pytest.raises(ConfigError, match="include_history with from_revision"):
        watch_options("b", (), include_history=True, from_revision=4)


def expected_by(write: KeyWrite) -> tuple[str | None, int] | None:
    """Whose revision a message of a transaction depends on (None is its own key), and which it is."""
    if write.expect is None:
        return None
    assert write.expect.last_subject_sequence is not None
    return write.expect.last_subject_sequence_subject, write.expect.last_subject_sequence


def test_a_transaction_is_one_batch_in_order() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", None)
    writes.put("c", b"2", 5)
    writes.mark("z", "purge", None)
    messages = writes.messages()
    assert [(each.subject, each.value) for each in messages] == [
        ("$KV.b.a", b"1"),
        ("$KV.b.c", b"2"),
        ("$KV.b.z", b""),
    ]
    assert [expected_by(each) for each in messages] == [None, (None, 5), None]
    assert messages[2].headers == {"KV-Operation": "PURGE", "Nats-Rollup": "sub"}
    ack = PubAck(stream="KV_b", sequence=12, batch="id", batch_size=3)
    assert writes.revisions(ack) == {"a": 10, "c": 11, "z": 12}
    assert Writes(bucket()).messages() == []


def test_a_conflict_names_the_keys_that_changed() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    writes.put("c", b"2", 6)
    writes.put("d", b"3", None)
    writes.expect("g.*", 7)
    conflict, requests = run(writes.conflict(), found(5), found(9), found(8))
    assert isinstance(conflict, Conflict)
    assert (conflict.bucket, conflict.keys) == ("b", ("c", "g.*"))
    assert [request.subject for request in requests] == ["$JS.API.STREAM.MSG.GET.KV_b"] * 3
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    conflict, _ = run(writes.conflict(), found(5))
    assert conflict.keys == ("a",)


def test_guards_ride_on_messages_without_a_revision_of_their_own() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    writes.put("c", b"2", None)
    writes.mark("d", "delete", None)
    writes.expect("read", revision=3)
    writes.expect("tree.>", revision=0)
    assert [expected_by(each) for each in writes.messages()] == [(None, 5), ("$KV.b.read", 3), ("$KV.b.tree.>", 0)]


def test_guards_without_a_seat_repeat_the_last_write() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    writes.expect("r1", revision=3)
    writes.expect("r2", revision=4)
    messages = writes.messages()
    assert [(each.subject, each.value) for each in messages] == [("$KV.b.a", b"1")] * 3
    assert [expected_by(each) for each in messages] == [(None, 5), ("$KV.b.r1", 3), ("$KV.b.r2", 4)]
    assert writes.revisions(PubAck(stream="KV_b", sequence=9, batch_size=3)) == {"a": 9}
    writes = Writes(bucket())
    writes.mark("a", "purge", 5)
    writes.expect("r1", revision=3)
    assert [each.headers for each in writes.messages()] == [
        {"KV-Operation": "PURGE", "Nats-Rollup": "sub"},
        {"KV-Operation": "DEL"},
    ]


def test_a_guard_over_written_keys_comes_with_the_first_of_them() -> None:
    writes = Writes(bucket())
    writes.put("other", b"", 1)
    writes.put("order.1", b"", None)
    writes.put("order.2", b"", None)
    writes.expect("read", revision=2)
    writes.expect("order.*", revision=9)
    assert [expected_by(each) for each in writes.messages()] == [
        (None, 1),
        ("$KV.b.order.*", 9),
        ("$KV.b.read", 2),
    ]
    writes = Writes(bucket())
    writes.put("order.1", b"", 4)
    writes.put("order.2", b"", None)
    writes.expect("order.*", revision=9)
    with pytest.raises(ConfigError, match=r"covers 'order\.1', which is written with a revision of its own"):
        writes.messages()


def test_guards_that_make_no_sense_are_refused() -> None:
    writes = Writes(bucket())
    writes.put("a", b"", None)
    writes.expect("g", revision=1)
    with pytest.raises(ConfigError, match="expected and written"):
        writes.expect("a", revision=1)
    with pytest.raises(ConfigError, match="expected and written"):
        writes.put("g", b"", None)
    with pytest.raises(ConfigError, match="expected twice"):
        writes.expect("g", revision=1)
    with pytest.raises(ConfigError, match="revision=-1"):
        writes.expect("h", revision=-1)
    with pytest.raises(ConfigError, match="key='h i'"):
        writes.expect("h i", revision=1)
    only = Writes(bucket())
    only.expect("g", revision=1)
    with pytest.raises(ConfigError, match="without a write"):
        only.messages()


def test_a_transaction_has_as_many_keys_as_the_server_likes() -> None:
    writes = Writes(bucket())
    for number in range(5000):
        writes.put(f"k.{number}", b"", None)
    assert len(writes.messages()) == 5000
