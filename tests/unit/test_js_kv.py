from __future__ import annotations

import json
from typing import Any

import pytest

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError, Conflict, KeyExists, ProtocolError
from jetspark.jetstream.config import StreamSource
from jetspark.jetstream.kv import (
    Bucket,
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


def test_a_transaction_is_one_batch_in_order() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", None)
    writes.put("c", b"2", 5)
    writes.mark("z", "purge", None)
    revisions, requests = run(writes.commit("id-1"), ack(12, batch="id-1", count=3))
    assert revisions == {"a": 10, "c": 11, "z": 12}
    headers = [dict(request.headers or {}) for request in requests]
    assert [fields["Nats-Batch-Sequence"] for fields in headers] == ["1", "2", "3"]
    assert [request.is_silent for request in requests] == [True, True, False]
    assert headers[1]["Nats-Expected-Last-Subject-Sequence"] == "5"
    assert (headers[2]["Nats-Batch-Commit"], headers[2]["Nats-Rollup"]) == ("1", "sub")
    assert run(Writes(bucket()).commit("id-2")) == ({}, [])


def test_a_conflict_names_the_keys_that_changed() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    writes.put("c", b"2", 6)
    with pytest.raises(Conflict) as conflict:
        run(writes.commit("id"), WRONG, found(5), found(9))
    assert conflict.value.keys == ("c",)
    writes = Writes(bucket())
    writes.put("a", b"1", 5)
    with pytest.raises(Conflict) as conflict:
        run(writes.commit("id"), WRONG, found(5))
    assert conflict.value.keys == ("a",)


def test_an_acknowledgement_of_another_size_is_not_believed() -> None:
    writes = Writes(bucket())
    writes.put("a", b"1", None)
    with pytest.raises(ProtocolError, match="acknowledged as one of"):
        run(writes.commit("id"), ack(1))
