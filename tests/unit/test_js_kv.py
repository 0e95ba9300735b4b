from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.core.step_runner import Sleep
from jetspark.errors import ConfigError, Conflict, KeyExists, KeyNotFound, PermissionDenied, RequestTimeout
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import External, StreamSource, SubjectTransform
from jetspark.jetstream.features import ServerFacts
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.kv import (
    STALE_READS,
    Bucket,
    KeyWrite,
    KVConfig,
    KVEntry,
    Writes,
    check_filter,
    check_key,
    check_keys,
    create_bucket,
    entry_of_delivery,
    key_of,
    operation_of,
    watch_options,
)
from jetspark.jetstream.operations import Api, Operation, Request


def bucket(**config: Any) -> Bucket:
    return Bucket.of(Api(), KVConfig(bucket="b", **config).to_stream(api_level=5))


def run(operation: Operation[Any], *replies: dict[str, Any] | CoreMessage | Exception) -> tuple[Any, list[Request]]:
    """The result, and what was asked."""
    waiting = iter(replies)
    requests = []
    try:
        request = next(operation)
        while True:
            if isinstance(request, Sleep):
                request = operation.send(CoreMessage("", b"", None, None, None))
                continue
            requests.append(request)
            reply = {} if request.is_silent else next(waiting)
            if isinstance(reply, Exception):
                request = operation.throw(reply)
                continue
            if not isinstance(reply, CoreMessage):
                reply = CoreMessage("inbox", json.dumps(reply).encode(), None, None, None)
            request = operation.send(reply)
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


def direct(key: str, sequence: int, value: bytes = b"v", block: str = "") -> CoreMessage:
    """What a replica answers."""
    headers = f"NATS/1.0\r\nNats-Stream: KV_b\r\nNats-Subject: $KV.b.{key}\r\nNats-Sequence: {sequence}\r\n"
    headers += f"Nats-Time-Stamp: 2026-01-01T00:00:00Z\r\n{block}\r\n"
    return CoreMessage("inbox", value, None, headers.encode(), None)


def headers_of(request: Request) -> dict[str, Any]:
    return dict(request.headers or {})


def body_of(request: Request) -> dict[str, Any]:
    return dict(json.loads(request.data))


def stream_info(**config: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"messages": 7, "bytes": 700, "first_seq": 1, "last_seq": 9, "consumer_count": 0}
    state |= {"first_ts": "2026-01-01T00:00:00Z", "last_ts": "2026-01-01T00:00:00Z"}
    described: dict[str, Any] = {"name": "KV_b", "subjects": ["$KV.b.>"]} | config
    return {"config": described, "state": state, "created": "2026-01-01T00:00:00Z"}


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
        ("@a..b@", None),
        ("a:", "'a'"),
    ],
)
def test_other_keys_are_refused_with_the_spelling_that_works(key: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        check_key(key)
    assert ("would do" in str(refused.value)) == (hint is not None)
    assert hint is None or f"{hint} would do" in str(refused.value)
    for others in (["a", "b.c"], []):
        with pytest.raises(ConfigError) as of_many:
            check_keys([*others, key, *others])
        assert str(of_many.value) == str(refused.value)


def test_many_keys_are_looked_at_together() -> None:
    check_keys([])
    check_keys(["a"])
    check_keys([f"order.{number}=/_-" for number in range(5000)])
    for wrong in ("a\nb", "a\n", "\n", ""):
        with pytest.raises(ConfigError, match="key="):
            check_keys(["a", wrong, "b"])


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


def test_what_a_bucket_does_not_mention_its_stream_does_not_either() -> None:
    plain = KVConfig(bucket="b").to_stream()
    assert plain.max_messages_per_subject == 1
    assert (plain.allow_atomic, plain.allow_batched) == (None, None)  # nothing is known of the server
    assert (plain.mirror_direct, plain.allow_message_ttl, plain.duplicate_window_s) == (None, None, None)
    marked = KVConfig(bucket="b", limit_marker_ttl_s=1).to_stream()
    assert (marked.allow_message_ttl, marked.subject_delete_marker_ttl_s) == (True, 1)
    mirror = KVConfig(bucket="m", mirror=StreamSource(name="KV_b")).to_stream(api_level=5)
    assert mirror.mirror == StreamSource(name="KV_b")
    assert (mirror.mirror_direct, mirror.allow_batched) == (True, None)


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("history", 1, 64),
        ("limit_marker_ttl_s", 1, None),
        ("max_bytes", -1, None),
        ("max_value_bytes", -1, 2**31 - 1),
        ("replicas", 1, 5),
    ],
)
def test_numbers_of_a_bucket_have_bounds(field: str, least: int, most: int | None) -> None:
    for value in (least, most):
        fine: dict[str, Any] = {field: value}
        assert getattr(KVConfig(bucket="b", **fine), field) == value
    for value in (least - 1, None if most is None else most + 1):
        if value is not None:
            wrong: dict[str, Any] = {field: value}
            with pytest.raises(ConfigError, match=f"{field}={value}: expected"):
                KVConfig(bucket="b", **wrong)


def test_a_bucket_may_be_given_by_its_name() -> None:
    assert KVConfig.of("b") == KVConfig(bucket="b")
    config = KVConfig(bucket="b", history=3)
    assert KVConfig.of(config) is config
    for wrong in ("", "a.b", "a b"):
        with pytest.raises(ConfigError, match=f"bucket={wrong!r}"):
            KVConfig.of(wrong)
    for wrong_name in ("", 5):
        with pytest.raises(ConfigError, match=f"bucket={wrong_name!r}: expected a name"):
            Bucket(Api(), wrong_name, "b", direct=True, atomic=True)  # type: ignore[arg-type]


def test_keys_of_gathered_buckets_become_keys_of_this_one() -> None:
    transform = SubjectTransform(source="$KV.x.>", destination="$KV.y.>")
    sources = [
        StreamSource(name="a"),
        StreamSource(name="KV_c"),
        StreamSource(name="b"),  # of another account, say: the keys are right already
        StreamSource(name="d", subject_transforms=[transform]),
        StreamSource(name="e", external=External(api_prefix="$JS.hub.API")),
    ]
    gathered = KVConfig(bucket="b", sources=sources).to_stream().sources
    assert gathered is not None
    assert [source.name for source in gathered] == ["KV_a", "KV_c", "KV_b", "KV_d", "KV_e"]
    assert [source.subject_transforms for source in gathered] == [
        [SubjectTransform(source="$KV.a.>", destination="$KV.b.>")],
        [SubjectTransform(source="$KV.c.>", destination="$KV.b.>")],
        None,
        [transform],
        None,
    ]


def test_a_bucket_is_created_as_the_server_allows() -> None:
    """What a context knows of its server comes from the server's greeting, or from one question."""
    info, requests = run(create_bucket(Api(), KVConfig(bucket="b")), stream_info())
    assert info.config.name == "KV_b"
    [request] = requests
    assert request.subject == "$JS.API.STREAM.CREATE.KV_b"
    assert "allow_atomic" not in body_of(request)

    class Known(Api):
        def known(self) -> ServerFacts:
            return ServerFacts(2, "2.12.0")

    _, [request] = run(create_bucket(Known(), KVConfig(bucket="b")), stream_info())
    assert body_of(request)["allow_atomic"] is True
    assert "allow_batched" not in body_of(request)


def test_an_entry_is_the_last_value_of_a_key_or_a_revision_of_it() -> None:
    entry, [request] = run(bucket().get("k", None), direct("k", 7))
    assert (request.subject, request.data) == ("$JS.API.DIRECT.GET.KV_b.$KV.b.k", b"")
    created = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    assert entry == KVEntry(bucket="b", key="k", value=b"v", revision=7, created=created)
    assert (entry.operation, entry.pending) == ("put", 0)
    _, [request] = run(bucket().get("k", 7), direct("k", 7))
    assert body_of(request) == {"seq": 7}
    for answer in (direct("other", 7), direct("k", 7, block="KV-Operation: DEL\r\n"), message_status("404 Not Found")):
        with pytest.raises(KeyNotFound):
            run(bucket().get("k", 7), answer)
    with pytest.raises(ConfigError, match="revision=0"):
        run(bucket().get("k", 0))
    with pytest.raises(ConfigError, match="key='a b'"):
        run(bucket().get("a b", None))


def message_status(line: str) -> CoreMessage:
    return CoreMessage("inbox", b"", None, f"NATS/1.0 {line}\r\n\r\n".encode(), None)


def test_a_bucket_without_direct_access_is_read_at_its_leader() -> None:
    leader = Bucket(Api(), "b", "b", direct=False, atomic=False)
    entry, [request] = run(leader.get("k", None), found(7))
    assert (request.subject, entry.revision) == ("$JS.API.STREAM.MSG.GET.KV_b", 7)


def test_an_entry_of_a_watch_says_how_many_are_still_to_come() -> None:
    def delivered(block: bytes | None) -> KVEntry:
        reply = b"$JS.ACK.KV_b.c.1.9.3.1767225600000000000.4"
        return entry_of_delivery("b", AckableMessage("$KV.b.k", b"v", reply, block, None))

    created = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    expected = KVEntry(bucket="b", key="k", value=b"v", revision=9, created=created, pending=4)
    assert delivered(None) == delivered(b"NATS/1.0\r\nOwn: 1\r\n\r\n") == expected
    assert delivered(b"NATS/1.0\r\nKV-Operation: PURGE\r\n\r\n").operation == "purge"


def test_a_status_is_what_the_stream_says() -> None:
    status, [request] = run(bucket().status(), stream_info(max_msgs_per_subject=5, max_age=60_000_000_000))
    assert (request.subject, status.bucket) == ("$JS.API.STREAM.INFO.KV_b", "b")
    assert (status.values, status.bytes, status.history, status.ttl_s) == (7, 700, 5, 60.0)
    status, _ = run(bucket().status(), stream_info())
    assert (status.history, status.ttl_s) == (1, 0.0)


def test_a_snapshot_is_not_taken_beyond_the_end_of_the_stream() -> None:
    sequence, [request] = run(bucket().snapshot_sequence(8), stream_info())
    assert (sequence, request.subject) == (8, "$JS.API.STREAM.INFO.KV_b")
    assert run(bucket().snapshot_sequence(10), stream_info())[0] == 9


def test_filters_become_subjects_of_the_bucket_that_takes_the_writes() -> None:
    mirror = Bucket.of(Api(), KVConfig(bucket="m", mirror=StreamSource(name="b")).to_stream())
    assert mirror.subjects(["a", "x.*"]) == ["$KV.b.a", "$KV.b.x.*"]
    with pytest.raises(ConfigError, match="filters='abc': expected a list"):
        mirror.subjects("abc")


def test_writes_to_a_mirror_in_another_domain_are_part_of_its_api() -> None:
    def mirror(api: Api, prefix: str) -> Bucket:
        source = StreamSource(name="b", external=External(api_prefix=prefix))
        return Bucket.of(api, KVConfig(bucket="m", mirror=source).to_stream())

    assert bucket().write_subject("k") == "$KV.b.k"
    assert bucket().write_subjects(["k", "a.b"]) == ["$KV.b.k", "$KV.b.a.b"]
    assert mirror(Api(), "$JS.hub.API").write_subjects(["k"]) == ["$JS.hub.API.$KV.b.k"]
    with pytest.raises(ConfigError, match="key='a b'"):
        bucket().write_subjects(["k", "a b"])
    assert mirror(Api(), "$JS.hub.API").write_subject("k") == "$JS.hub.API.$KV.b.k"
    assert mirror(Api("$JS.leaf.API"), "$JS.hub.API").write_subject("k") == "$JS.hub.API.$KV.b.k"
    assert Bucket.of(Api("$JS.leaf.API"), KVConfig(bucket="b").to_stream()).write_subject("k") == "$JS.leaf.API.$KV.b.k"


def test_a_ttl_below_that_of_the_markers_is_refused_where_the_server_would_raise_it() -> None:
    kept = bucket(history=2, limit_marker_ttl_s=30)
    with pytest.raises(ConfigError, match="ttl=29: expected at least limit_marker_ttl_s=30"):
        run(kept.put("k", b"", ttl_s=29))
    _, [request] = run(kept.put("k", b"", ttl_s=30), ack(1))
    assert headers_of(request) == {"Nats-TTL": "30s"}
    # With one revision, or in a mirror, of which nobody knows, the server is asked.
    source = StreamSource(name="o")
    for other in (
        bucket(limit_marker_ttl_s=30),
        bucket(history=2),
        Bucket.of(Api(), KVConfig(bucket="b", history=2, limit_marker_ttl_s=30, mirror=source).to_stream()),
        Bucket(Api(), "b", "b", direct=True, atomic=True),
    ):
        assert run(other.put("k", b"", ttl_s=1), ack(1))[0] == 1


@pytest.mark.parametrize("ttl", ["5", 0.5, -1, True])
def test_a_ttl_that_is_none_is_refused_before_anything_is_asked(ttl: Any) -> None:
    with pytest.raises(ConfigError, match=f"ttl={ttl!r}"):
        next(bucket().check_ttl(ttl))


def test_a_value_in_a_transaction_is_bytes_as_they_are_and_may_have_a_ttl() -> None:
    writes = Writes(bucket())
    value = bytearray(b"1")
    writes.put("a", value, None, ttl_s=30)  # type: ignore[arg-type]
    writes.put("b", b"2", None)
    value[:] = b"9"
    with pytest.raises(ConfigError, match="value"):
        writes.put("c", "text", None)  # type: ignore[arg-type]
    assert [(each.value, each.headers) for each in writes.messages()] == [(b"1", {"Nats-TTL": "30s"}), (b"2", None)]


def test_a_marker_may_depend_on_a_revision() -> None:
    _, [request] = run(bucket().mark("k", "delete", None, None), ack(1))
    assert (request.subject, headers_of(request)) == ("$KV.b.k", {"KV-Operation": "DEL"})
    _, [request] = run(bucket().mark("k", "purge", 3, None), ack(1))
    purge = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-Expected-Last-Subject-Sequence": "3"}
    assert headers_of(request) == purge
    with pytest.raises(Conflict):
        run(bucket().mark("k", "delete", 3, None), WRONG)
    with pytest.raises(ConfigError, match="revision=-1"):
        run(bucket().mark("k", "delete", -1, None))


def test_revision_0_says_that_there_is_no_value() -> None:
    _, [request] = run(bucket().update("k", b"", 0, None), ack(1))
    assert headers_of(request) == {"Nats-Expected-Last-Subject-Sequence": "0"}
    _, [request] = run(bucket().create("k", b"", None), ack(1))
    assert headers_of(request) == {"Nats-Expected-Last-Subject-Sequence": "0"}
    writes = Writes(bucket())
    writes.update("a", b"1", 0)
    writes.put("c", b"2", 0)
    assert [expected_by(each) for each in writes.messages()] == [(None, 0), (None, 0)]
    with pytest.raises(ConfigError, match="revision=None"):
        writes.update("d", b"", None)  # type: ignore[arg-type]
    for wrong in (-1, 1.5):
        with pytest.raises(ConfigError, match=f"revision={wrong}"):
            writes.put("d", b"", wrong)  # type: ignore[arg-type]


ABSENT = CoreMessage("inbox", b"", None, b"NATS/1.0 404 Message Not Found\r\n\r\n", None)
DENIED = PermissionDenied("publish", "$JS.API.STREAM.MSG.GET.KV_b")


def test_a_key_that_never_was_is_vacant_at_revision_0() -> None:
    assert run(bucket().vacant_revision("k"), ABSENT)[0] == 0
    leader = Bucket(Api(), "b", "b", direct=False, atomic=False)
    assert run(leader.vacant_revision("k"), NOTHING)[0] == 0


def test_a_value_that_a_replica_shows_is_looked_for_at_the_leader_where_we_may() -> None:
    revision, requests = run(bucket().vacant_revision("k"), direct("k", 7), found(9, "KV-Operation: DEL"))
    assert (revision, requests[-1].subject) == (9, "$JS.API.STREAM.MSG.GET.KV_b")
    with pytest.raises(KeyExists):
        run(bucket().vacant_revision("k"), direct("k", 7), found(9))
    with pytest.raises(KeyExists):
        run(bucket().vacant_revision("k"), direct("k", 7), DENIED)


def test_a_conflict_whose_keys_may_not_be_read_names_all_of_them() -> None:
    writes = Writes(bucket(allow_atomic=True))
    writes.update("a", b"", 3)
    writes.update("b", b"", 4)
    assert run(writes.conflict(), found(3), DENIED)[0].keys == ("a", "b")


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
    deleted = direct("k", 9, block="KV-Operation: DEL\r\n")
    revision, requests = run(bucket().create("k", b"v", None), WRONG, deleted, ack(10))
    assert revision == 10
    assert headers_of(requests[-1])["Nats-Expected-Last-Subject-Sequence"] == "9"
    # The right to read this key is enough.
    assert [each.subject for each in requests] == ["$KV.b.k", "$JS.API.DIRECT.GET.KV_b.$KV.b.k", "$KV.b.k"]
    for value in (direct("k", 9), direct("k", 12)):
        with pytest.raises(KeyExists):
            run(bucket().create("k", b"v", None), WRONG, value)
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), WRONG, deleted, WRONG)


@pytest.mark.parametrize("stale", [ABSENT, direct("k", 7), direct("k", 7, block="KV-Operation: DEL\r\n")])
def test_create_does_not_believe_a_replica_that_is_behind_the_refusal(stale: CoreMessage) -> None:
    gone = direct("k", 9, block="KV-Operation: DEL\r\n")
    revision, requests = run(bucket().create("k", b"v", None), WRONG, stale, found(9, "KV-Operation: DEL"), ack(10))
    assert (revision, requests[2].subject) == (10, "$JS.API.STREAM.MSG.GET.KV_b")
    revision, _ = run(bucket().create("k", b"v", None), WRONG, stale, DENIED, stale, gone, ack(10))
    assert revision == 10
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), WRONG, stale, DENIED, stale, direct("k", 9))
    with pytest.raises(RequestTimeout):  # the time of the call bounds it
        run(bucket().create("k", b"v", None), WRONG, stale, DENIED, stale, RequestTimeout("request", 5))


@pytest.mark.parametrize("stale", [ABSENT, direct("k", 7), direct("k", 7, block="KV-Operation: DEL\r\n")])
def test_create_tries_again_when_a_replica_stays_behind_the_refusal(stale: CoreMessage) -> None:
    behind: list[CoreMessage | Exception] = [stale, DENIED, *[stale] * STALE_READS]
    revision, requests = run(bucket().create("k", b"v", None), WRONG, *behind, ack(10))
    expected = "7" if stale.raw_headers is not None and b"KV-Operation" in stale.raw_headers else "0"
    assert (revision, headers_of(requests[-1])) == (10, {"Nats-Expected-Last-Subject-Sequence": expected})
    gone = direct("k", 9, block="KV-Operation: DEL\r\n")
    assert run(bucket().create("k", b"v", None), WRONG, *behind, WRONG, gone, ack(10))[0] == 10
    other = {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 7"}}
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), WRONG, *behind, other)


def test_a_refusal_that_names_no_sequence_leaves_the_last_word_to_the_leader() -> None:
    unnamed = {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence"}}
    with pytest.raises(KeyExists):
        run(bucket().create("k", b"v", None), unnamed, direct("k", 7), found(9))
    assert run(bucket().create("k", b"v", None), unnamed, ABSENT, ack(10))[0] == 10


def test_a_snapshot_of_one_key_asks_for_this_key_alone() -> None:
    [message], [request] = run(bucket().snapshot_of_one("k"), direct("k", 7))
    assert (message.sequence, request.subject) == (7, "$JS.API.DIRECT.GET.KV_b.$KV.b.k")
    assert run(bucket().snapshot_of_one("k"), ABSENT)[0] == []


def test_a_late_update_is_a_conflict() -> None:
    with pytest.raises(Conflict) as conflict:
        run(bucket().update("k", b"v", 3, None), WRONG)
    assert conflict.value.keys == ("k",)


def test_a_watch_has_one_beginning() -> None:
    assert watch_options("b", ()).filter_subjects == ("$KV.b.>",)
    assert watch_options("b", ("x", "y.*")).filter_subjects == ("$KV.b.x", "$KV.b.y.*")
    assert watch_options("b", ()).deliver_policy == "last_per_subject"
    assert [watch_options("b", (), meta_only=each).headers_only for each in (False, True)] == [False, True]
    assert not watch_options("b", ()).headers_only
    assert watch_options("b", (), include_history=True).deliver_policy == "all"
    assert watch_options("b", (), updates_only=True).deliver_policy == "new"
    assert watch_options("b", (), from_revision=4).start_sequence == 4
    for wrong in (0, 2.5, "4"):
        with pytest.raises(ConfigError, match="from_revision"):
            watch_options("b", (), from_revision=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="meta_only=1"):
        watch_options("b", (), meta_only=1)  # type: ignore[arg-type]
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
    assert writes.revisions(PubAck(stream="KV_b", sequence=12)) == {"a": 10, "c": 11, "z": 12}
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
