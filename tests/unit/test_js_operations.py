from __future__ import annotations

import base64
import copy
import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.connections import connected

from jetspark.core.connection import Connection
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import MAX_SUBJECT_BYTES
from jetspark.errors import (
    ConfigError,
    ConsumerNameInUse,
    ConsumerNotFound,
    FeatureUnavailable,
    InvalidSubject,
    JetStreamNotEnabled,
    JetStreamUnavailable,
    MessageNotFound,
    ProtocolError,
    RequestTimeout,
    ServerError,
    StreamNameInUse,
    StreamNotFound,
)
from jetspark.jetstream.config import ConsumerConfig, ConsumerLimits, Placement, StreamConfig, StreamSource
from jetspark.jetstream.features import FAST_INGEST
from jetspark.jetstream.operations import (
    LEADERLESS_RETRIES,
    LEADERLESS_WAIT_S,
    Api,
    Deadline,
    Operation,
    Request,
    api_prefix,
    direct_get,
    message_query,
)

UTC = datetime.UTC
STAMP = "2026-11-15T10:25:48.893408446Z"
API = Api()

# What nats-server 2.15.1 answers, field for field.
STREAM_CONFIG: dict[str, Any] = {
    "name": "S",
    "description": "kept",
    "subjects": ["s.>"],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": 10,
    "max_bytes": -1,
    "max_age": 9_007_199_254_740_991,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
    "allow_direct": True,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {"inactive_threshold": 5_000_000_000, "max_ack_pending": 7},
    "allow_msg_ttl": False,
    "sources": [{"name": "A", "opt_start_time": "2026-01-02T03:04:05.123456789Z", "future": 1}],
    "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1", "team": "a"},
    "future": {"deep": [1]},
}
STATE: dict[str, Any] = {
    "messages": 0,
    "bytes": 0,
    "first_seq": 0,
    "first_ts": "0001-01-01T00:00:00Z",
    "last_seq": 0,
    "last_ts": "0001-01-01T00:00:00Z",
    "consumer_count": 0,
}
CONSUMER_CONFIG: dict[str, Any] = {
    "durable_name": "c",
    "name": "c",
    "description": "kept",
    "deliver_policy": "by_start_time",
    "opt_start_time": "2026-01-02T03:04:05.123456789Z",
    "ack_policy": "none",
    "max_deliver": -1,
    "filter_subject": "s.paid",
    "replay_policy": "instant",
    "max_waiting": 512,
    "inactive_threshold": 9_007_199_254_740_991,
    "num_replicas": 0,
    "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1", "team": "a"},
    "future": {"deep": [1]},
}


def _stream(**config: Any) -> dict[str, Any]:
    return {
        "type": "io.nats.jetstream.api.v1.stream_info_response",
        "total": 0,
        "offset": 0,
        "limit": 0,
        "config": STREAM_CONFIG | config,
        "created": STAMP,
        "state": STATE,
        "cluster": {"leader": "n1"},
        "ts": STAMP,
    }


def _consumer(**config: Any) -> dict[str, Any]:
    return {
        "type": "io.nats.jetstream.api.v1.consumer_info_response",
        "stream_name": "S",
        "name": "c",
        "created": STAMP,
        "config": CONSUMER_CONFIG | config,
        "delivered": {"consumer_seq": 0, "stream_seq": 4},
        "ack_floor": {"consumer_seq": 0, "stream_seq": 4},
        "num_ack_pending": 0,
        "num_redelivered": 0,
        "num_waiting": 0,
        "num_pending": 3,
        "ts": STAMP,
    }


def _failed(code: int, err_code: int, description: str) -> dict[str, Any]:
    return {
        "type": "io.nats.jetstream.api.v1.stream_info_response",
        "error": {"code": code, "err_code": err_code, "description": description},
    }


def _direct(data: bytes, own_headers: str = "") -> CoreMessage:
    place = f"Nats-Stream: S\r\nNats-Subject: s.1\r\nNats-Sequence: 4\r\nNats-Time-Stamp: {STAMP}\r\n"
    return CoreMessage("_INBOX.x.1", data, None, f"NATS/1.0\r\n{own_headers}{place}\r\n".encode(), None)


NO_STREAM = _failed(404, 10059, "stream not found")
NO_CONSUMER = _failed(404, 10014, "consumer not found")
SUCCESS = {"type": "io.nats.jetstream.api.v1.stream_delete_response", "success": True}


def _message(reply: Any) -> CoreMessage:
    if isinstance(reply, CoreMessage):
        return reply
    data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return CoreMessage("_INBOX.x.1", data, None, None, None)


class Conversation:
    """Runs an operation against replies prepared in advance, and keeps what it asked."""

    def __init__(self, operation: Operation[Any], *replies: Any) -> None:
        self.asked: list[Request] = []
        self.result: Any = None
        self._operation = operation
        # Operations may change what they are given, and the replies are shared by all tests.
        self._replies = [_message(copy.deepcopy(reply) if isinstance(reply, dict) else reply) for reply in replies]

    def run(self) -> Conversation:
        try:
            self._note(next(self._operation))
            for reply in self._replies:
                self._note(self._operation.send(reply))
        except StopIteration as finished:
            assert len(self.asked) == len(self._replies), "not every reply was asked for"
            self.result = finished.value
            return self
        raise AssertionError(f"one request too many: {self.asked[-1]}")

    def _note(self, step: Request | Sleep) -> None:
        assert isinstance(step, Request)
        # Whatever an operation asks, a connection must agree to send.
        connection = Connection(ConnectOptions(), [], inbox="_INBOX.me", jitter=lambda: 0.0)
        connection.request(object(), step.subject, step.data, step.headers)
        self.asked.append(step)

    @property
    def requests(self) -> list[tuple[str, Any]]:
        """Subject and JSON body of each; None for an empty one."""
        return [(each.subject, json.loads(each.data) if each.data else None) for each in self.asked]


def _ask(operation: Operation[Any], *replies: Any) -> Conversation:
    return Conversation(operation, *replies).run()


def _answer_always(operation: Operation[Any], reply: Any) -> None:
    next(operation)
    for _ in range(10):
        operation.send(_message(reply))
    raise AssertionError("still asking")


def _refused(operation: Operation[Any]) -> Callable[[], Any]:
    """Starting an operation, which must not get as far as asking anything."""
    return lambda: next(operation)


# ---- the prefix ----------------------------------------------------------------------------------------------------


def test_the_api_is_found_below_a_prefix() -> None:
    assert api_prefix(None, None) == "$JS.API"
    assert api_prefix("hub", None) == "$JS.hub.API"
    assert api_prefix(None, "from.acc") == "from.acc"
    assert api_prefix(None, "from.acc.") == "from.acc"
    # The connection's domain is for those who name neither.
    assert api_prefix(None, None, "hub") == "$JS.hub.API"
    assert api_prefix("leaf", None, "hub") == "$JS.leaf.API"
    assert api_prefix(None, "from.acc", "hub") == "from.acc"


def test_a_domain_or_a_prefix_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^domain='hub' with prefix='x': expected one of the two$"):
        api_prefix("hub", "x")
    for domain in ("", "a.b", "a b", "*", ">"):
        with pytest.raises(ConfigError, match=r"^domain="):
            api_prefix(domain, None)
    for prefix in ("", ".", "a..b", "a b", "a.*", "a.>"):
        with pytest.raises(InvalidSubject):
            api_prefix(None, prefix)


@pytest.mark.parametrize(
    ("operation", "reply", "subject"),
    [
        (lambda api: api.account_info(), {}, "INFO"),
        (lambda api: api.stream_info("S"), _stream(), "STREAM.INFO.S"),
        (lambda api: api.consumer_info("S", "c"), _consumer(), "CONSUMER.INFO.S.c"),
        (lambda api: api.delete_stream("S"), SUCCESS, "STREAM.DELETE.S"),
        (
            lambda api: api.get_message("S", {"seq": 1}, direct=True),
            _direct(b""),
            "DIRECT.GET.S",
        ),
    ],
)
def test_every_request_goes_below_the_prefix(operation: Callable[[Api], Any], reply: Any, subject: str) -> None:
    for prefix in ("$JS.API", "$JS.hub.API", "from.acc"):
        assert _ask(operation(Api(prefix)), reply).asked[0].subject == f"{prefix}.{subject}"


# ---- the account ---------------------------------------------------------------------------------------------------


def test_account_info_is_asked_on_info_without_a_body() -> None:
    done = _ask(
        API.account_info(),
        {
            "type": "io.nats.jetstream.api.v1.account_info_response",
            "memory": 0,
            "storage": 38,
            "reserved_memory": 0,
            "reserved_storage": 0,
            "streams": 8,
            "consumers": 7,
            "limits": {"max_memory": -1, "max_storage": -1, "max_streams": -1, "max_consumers": -1},
            "api": {"level": 5, "total": 25, "errors": 4},
        },
    )
    assert done.requests == [("$JS.API.INFO", None)]
    assert (done.result.storage, done.result.streams, done.result.api_level) == (38, 8, 5)
    assert done.result.extra == {"reserved_memory": 0, "reserved_storage": 0}


def test_an_account_without_jetstream_says_so() -> None:
    with pytest.raises(JetStreamNotEnabled):
        _ask(API.account_info(), _failed(503, 10039, "JetStream not enabled for account"))


# ---- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_is_created_with_what_is_mentioned_and_nothing_else() -> None:
    config = StreamConfig(name="S", subjects=["s.>"], max_age_s=0.1, sources=[StreamSource(name="A")])
    done = _ask(API.create_stream(config), _stream() | {"did_create": True})
    assert done.requests == [
        (
            "$JS.API.STREAM.CREATE.S",
            {"name": "S", "subjects": ["s.>"], "max_age": 100_000_000, "sources": [{"name": "A"}]},
        )
    ]
    assert done.result.config.description == "kept"
    assert done.result.extra == {"did_create": True}


def test_a_name_is_enough_for_a_stream_that_has_nothing_else() -> None:
    create = ("$JS.API.STREAM.CREATE.S", {"name": "S"})
    assert _ask(API.create_stream("S"), _stream()).requests == [create]
    assert _ask(API.create_or_update_stream("S"), NO_STREAM, _stream()).requests[-1] == create


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        (lambda config: API.create_stream(config), "StreamConfig"),
        (lambda config: API.update_stream(config), "StreamConfig"),
        (lambda config: API.create_or_update_stream(config), "StreamConfig"),
        (lambda config: API.create_consumer("S", config), "ConsumerConfig"),
        (lambda config: API.update_consumer("S", config), "ConsumerConfig"),
        (lambda config: API.create_or_update_consumer("S", config), "ConsumerConfig"),
    ],
)
def test_what_is_no_configuration_is_refused_before_anything_is_asked(
    operation: Callable[[Any], Operation[Any]], kind: str
) -> None:
    for config in ({"name": "S"}, 5, None):
        with pytest.raises(ConfigError, match=f"expected a {kind}"):
            _refused(operation(config))()


def test_creating_what_exists_otherwise_raises() -> None:
    reply = _failed(400, 10058, "stream name already in use with a different configuration")
    with pytest.raises(StreamNameInUse):
        _ask(API.create_stream(StreamConfig(name="S")), reply)


def test_an_update_sends_the_present_configuration_with_the_changes_on_top() -> None:
    config = StreamConfig(name="S", max_messages=20, description="")
    done = _ask(API.update_stream(config), _stream(), _stream(max_msgs=20))
    assert done.requests == [
        ("$JS.API.STREAM.INFO.S", None),
        ("$JS.API.STREAM.UPDATE.S", STREAM_CONFIG | {"max_msgs": 20, "description": ""}),
    ]
    assert done.result.config.max_messages == 20


def test_an_update_that_mentions_nothing_changes_no_digit() -> None:
    done = _ask(API.update_stream(StreamConfig(name="S")), _stream(), _stream())
    assert done.requests[1] == ("$JS.API.STREAM.UPDATE.S", STREAM_CONFIG)


def test_an_update_of_a_nested_object_keeps_what_it_does_not_mention() -> None:
    config = StreamConfig(name="S", consumer_limits=ConsumerLimits(max_ack_pending=9))
    done = _ask(API.update_stream(config), _stream(), _stream())
    assert done.requests[1][1]["consumer_limits"] == {"inactive_threshold": 5_000_000_000, "max_ack_pending": 9}


def test_an_update_of_a_missing_stream_asks_once_and_raises() -> None:
    talk = Conversation(API.update_stream(StreamConfig(name="S")), NO_STREAM)
    with pytest.raises(StreamNotFound):
        talk.run()
    assert [subject for subject, _ in talk.requests] == ["$JS.API.STREAM.INFO.S"]


def test_an_update_the_server_refuses_raises_its_error() -> None:
    with pytest.raises(ServerError, match="can not change retention policy"):
        _ask(
            API.update_stream(StreamConfig(name="S", retention="workqueue")),
            _stream(),
            _failed(500, 10052, "stream configuration update can not change retention policy to/from workqueue"),
        )


def test_create_or_update_updates_what_exists() -> None:
    done = _ask(API.create_or_update_stream(StreamConfig(name="S", max_bytes=5)), _stream(), _stream())
    assert done.requests == [
        ("$JS.API.STREAM.INFO.S", None),
        ("$JS.API.STREAM.UPDATE.S", STREAM_CONFIG | {"max_bytes": 5}),
    ]


def test_create_or_update_creates_what_does_not_exist() -> None:
    done = _ask(API.create_or_update_stream(StreamConfig(name="S", max_bytes=5)), NO_STREAM, _stream())
    assert done.requests == [
        ("$JS.API.STREAM.INFO.S", None),
        ("$JS.API.STREAM.CREATE.S", {"name": "S", "max_bytes": 5}),
    ]
    assert done.result.config.name == "S"


def test_create_or_update_hides_no_other_error() -> None:
    with pytest.raises(JetStreamNotEnabled):
        _ask(
            API.create_or_update_stream(StreamConfig(name="S")),
            _failed(503, 10076, "JetStream not enabled"),
        )
    with pytest.raises(StreamNameInUse):
        _ask(
            API.create_or_update_stream(StreamConfig(name="S")),
            NO_STREAM,
            _failed(400, 10058, "stream name already in use with a different configuration"),
        )


def test_a_feature_the_server_lacks_is_refused_before_anything_is_asked() -> None:
    config = StreamConfig(name="S", allow_batched=True)
    older, newer = _api_of("2.12.3", 2), _api_of("2.14.0", 4)
    for name in ("create_stream", "update_stream", "create_or_update_stream"):
        with pytest.raises(FeatureUnavailable) as failure:
            next(getattr(older, name)(config))
        assert (failure.value.feature, failure.value.needed, failure.value.present) == (
            "allow_batched",
            "2.14",
            "2.12.3",
        )
        assert isinstance(next(getattr(newer, name)(config)), Request)
    with pytest.raises(FeatureUnavailable, match=r"allow_message_ttl needs nats-server 2\.11 .* this is 2\.10\.29"):
        next(_api_of("2.10.29", 0).create_stream(StreamConfig(name="S", allow_message_ttl=True)))
    with pytest.raises(FeatureUnavailable, match=r"priority_groups needs nats-server 2\.11"):
        next(_api_of("2.10.29", 0).create_consumer("S", ConsumerConfig(priority_groups=["g"])))


def test_stream_info_without_details_has_no_body() -> None:
    done = _ask(API.stream_info("S"), _stream())
    assert done.requests == [("$JS.API.STREAM.INFO.S", None)]
    assert done.result.cluster.leader == "n1"
    assert done.result.extra == {}


def test_stream_info_asks_for_the_details_it_was_told_to() -> None:
    done = _ask(API.stream_info("S", "s.>", True), _stream())
    assert done.requests == [("$JS.API.STREAM.INFO.S", {"deleted_details": True, "subjects_filter": "s.>"})]
    assert done.result.state.subjects == {}


def _page_of_subjects(total: int, subjects: dict[str, int]) -> dict[str, Any]:
    return _stream() | {"total": total, "limit": 100_000, "state": STATE | {"subjects": subjects}}


def test_subjects_are_asked_for_until_all_are_there() -> None:
    done = _ask(
        API.stream_info("S", ">"),
        _page_of_subjects(5, {"s.a": 1, "s.b": 2}),
        _page_of_subjects(5, {"s.c": 3, "s.d": 4}),
        _page_of_subjects(5, {"s.e": 5}),
    )
    assert done.requests == [
        ("$JS.API.STREAM.INFO.S", {"subjects_filter": ">"}),
        ("$JS.API.STREAM.INFO.S", {"subjects_filter": ">", "offset": 2}),
        ("$JS.API.STREAM.INFO.S", {"subjects_filter": ">", "offset": 4}),
    ]
    assert done.result.state.subjects == {"s.a": 1, "s.b": 2, "s.c": 3, "s.d": 4, "s.e": 5}


def test_pages_of_subjects_after_the_first_have_the_whole_time_out() -> None:
    asking = API.stream_info("S", ">")
    first = next(asking)
    second = asking.send(CoreMessage("", json.dumps(_page_of_subjects(3, {"s.a": 1})).encode(), None, None, None))
    assert isinstance(first, Request)
    assert isinstance(second, Request)
    assert (first.is_next_page, second.is_next_page) == (False, True)


def test_subjects_that_went_away_between_pages_end_the_asking() -> None:
    done = _ask(API.stream_info("S", ">"), _page_of_subjects(3, {"s.a": 1, "s.b": 2}), _page_of_subjects(2, {}))
    assert done.result.state.subjects == {"s.a": 1, "s.b": 2}


def test_subjects_that_come_again_do_not_keep_the_asking_up_for_ever() -> None:
    # Subjects made between two pages push known ones back; the second page may then bring nothing new.
    with pytest.raises(StopIteration) as finished:
        _answer_always(API.stream_info("S", ">"), _page_of_subjects(4, {"s.a": 1, "s.b": 2}))
    assert finished.value.value.state.subjects == {"s.a": 1, "s.b": 2}


def test_a_stream_is_deleted_by_name() -> None:
    done = _ask(API.delete_stream("S"), SUCCESS)
    assert done.requests == [("$JS.API.STREAM.DELETE.S", None)]
    assert done.result is None
    with pytest.raises(StreamNotFound):
        _ask(API.delete_stream("S"), NO_STREAM)


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        ({}, None),
        ({"subject": "s.a"}, {"filter": "s.a"}),
        ({"up_to_sequence": 7}, {"seq": 8}),
        ({"up_to_sequence": 0}, {"seq": 1}),
        ({"keep": 3}, {"keep": 3}),
        ({"subject": "s.*", "up_to_sequence": 7}, {"filter": "s.*", "seq": 8}),
        ({"subject": "s.>", "keep": 1}, {"filter": "s.>", "keep": 1}),
    ],
)
def test_a_purge_says_what_to_remove(arguments: dict[str, Any], body: Any) -> None:
    reply = {"type": "io.nats.jetstream.api.v1.stream_purge_response", "success": True, "purged": 4}
    done = _ask(API.purge_stream("S", **arguments), reply)
    assert done.requests == [("$JS.API.STREAM.PURGE.S", body)]
    assert done.result == 4


def test_a_purge_up_to_a_sequence_and_one_that_keeps_some_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"^up_to_sequence=0 with keep=0: expected one of the two$"):
        _refused(API.purge_stream("S", None, 0, 0))()
    with pytest.raises(InvalidSubject):
        _refused(API.purge_stream("S", "a..b"))()


def test_a_purge_that_removed_nothing_may_say_nothing_of_it() -> None:
    assert _ask(API.purge_stream("S"), {"success": True}).result == 0


def test_a_purge_goes_up_to_the_last_sequence_but_one_that_the_server_can_count() -> None:
    # The server is told the next one, which has to be a number for it, too.
    done = _ask(API.purge_stream("S", up_to_sequence=2**64 - 2), {"purged": 1})
    assert done.requests[0][1] == {"seq": 2**64 - 1}
    with pytest.raises(ConfigError, match="up_to_sequence=18446744073709551615"):
        _refused(API.purge_stream("S", up_to_sequence=2**64 - 1))()


@pytest.mark.parametrize("arguments", [{"up_to_sequence": -1}, {"up_to_sequence": -2}, {"keep": -1}])
def test_a_purge_never_sends_a_number_below_zero(arguments: dict[str, Any]) -> None:
    # "Up to -1" would become `{"seq":0}`, which the server takes for no limit: it removes every message.
    with pytest.raises(ConfigError, match="expected 0 or more"):
        _refused(API.purge_stream("S", **arguments))()


def test_a_leader_steps_down_for_a_placement_or_for_anyone() -> None:
    assert _ask(API.step_down_stream("S"), SUCCESS).requests == [("$JS.API.STREAM.LEADER.STEPDOWN.S", None)]
    placement = Placement(cluster="east", tags=["ssd"], preferred="n2")
    assert _ask(API.step_down_stream("S", placement), SUCCESS).requests == [
        (
            "$JS.API.STREAM.LEADER.STEPDOWN.S",
            {"placement": {"cluster": "east", "tags": ["ssd"], "preferred": "n2"}},
        )
    ]
    assert _ask(API.step_down_consumer("S", "c"), SUCCESS).requests == [("$JS.API.CONSUMER.LEADER.STEPDOWN.S.c", None)]


# ---- pages ---------------------------------------------------------------------------------------------------------


def test_a_page_of_streams_has_its_infos_and_the_total() -> None:
    reply = {
        "type": "io.nats.jetstream.api.v1.stream_list_response",
        "total": 258,
        "offset": 256,
        "limit": 256,
        "streams": [_stream(name="A"), _stream(name="B")],
    }
    done = _ask(API.stream_page(256, None), reply)
    assert done.requests == [("$JS.API.STREAM.LIST", {"offset": 256})]
    infos, total = done.result
    assert ([info.config.name for info in infos], total) == (["A", "B"], 258)
    done = _ask(API.stream_page(0, "s.*"), reply)
    assert done.requests == [("$JS.API.STREAM.LIST", {"offset": 0, "subject": "s.*"})]


def test_a_page_of_stream_names_has_the_names_and_the_total() -> None:
    reply = {"total": 3, "offset": 0, "limit": 1024, "streams": ["A", "B"]}
    done = _ask(API.stream_name_page(0, "s.>"), reply)
    assert done.requests == [("$JS.API.STREAM.NAMES", {"offset": 0, "subject": "s.>"})]
    assert done.result == (["A", "B"], 3)


def test_a_page_of_consumers_has_its_infos_and_the_total() -> None:
    reply = {"total": 1, "offset": 0, "limit": 256, "consumers": [_consumer()]}
    done = _ask(API.consumer_page("S", 0), reply)
    assert done.requests == [("$JS.API.CONSUMER.LIST.S", {"offset": 0})]
    infos, total = done.result
    assert ([info.name for info in infos], total) == (["c"], 1)
    done = _ask(API.consumer_name_page("S", 5), {"total": 7, "offset": 5, "limit": 1024, "consumers": ["x", "y"]})
    assert done.requests == [("$JS.API.CONSUMER.NAMES.S", {"offset": 5})]
    assert done.result == (["x", "y"], 7)


@pytest.mark.parametrize(
    "operation",
    [
        lambda: API.stream_page(0, None),
        lambda: API.stream_name_page(0, None),
        lambda: API.consumer_page("S", 0),
        lambda: API.consumer_name_page("S", 0),
    ],
)
def test_a_page_may_be_empty(operation: Callable[[], Any]) -> None:
    assert _ask(operation(), {"total": 0, "offset": 0, "limit": 256, "streams": None, "consumers": None}).result == (
        [],
        0,
    )
    assert _ask(operation(), {"total": 0, "offset": 0, "limit": 256}).result == ([], 0)


def test_a_subject_nobody_can_store_is_refused() -> None:
    for operation in (API.stream_page(0, "a..b"), API.stream_name_page(0, ""), API.stream_info("S", "a b")):
        with pytest.raises(InvalidSubject):
            _refused(operation)()


# ---- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        ({"sequence": 1}, {"seq": 1}),
        ({"sequence": 2**63}, {"seq": 2**63}),
        ({"last_for": "s.a"}, {"last_by_subj": "s.a"}),
        ({"last_for": "s.>"}, {"last_by_subj": "s.>"}),
        ({"next_for": "s.*"}, {"seq": 1, "next_by_subj": "s.*"}),
        ({"next_for": "s.*", "sequence": 7}, {"seq": 7, "next_by_subj": "s.*"}),
    ],
)
def test_a_query_names_one_message(arguments: dict[str, Any], body: dict[str, Any]) -> None:
    assert message_query(**arguments) == body


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "sequence=None: expected a whole number, 1 or more"),
        ({"sequence": 0}, "sequence=0: expected 1 or more"),
        ({"sequence": -1}, "sequence=-1: expected 1 or more"),
        ({"sequence": -1, "next_for": "a"}, "sequence=-1: expected 1 or more"),
        ({"sequence": 0, "next_for": "a"}, "sequence=0: expected 1 or more"),
        ({"sequence": 1, "last_for": "a"}, "last_for: expected neither sequence nor next_for beside it"),
        ({"next_for": "b", "last_for": "a"}, "last_for: expected neither sequence nor next_for beside it"),
        ({"last_for": "a..b"}, "subject 'a..b'"),
        ({"last_for": ""}, "subject ''"),
        ({"next_for": "a b"}, "subject 'a b'"),
    ],
)
def test_a_query_that_names_none_or_several_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        message_query(**arguments)


def test_a_message_is_asked_from_the_leader() -> None:
    reply = {
        "type": "io.nats.jetstream.api.v1.stream_msg_get_response",
        "message": {"subject": "s.1", "seq": 4, "data": base64.b64encode(b"x").decode(), "time": STAMP},
    }
    done = _ask(API.get_message("S", {"seq": 4}, direct=False), reply)
    assert done.requests == [("$JS.API.STREAM.MSG.GET.S", {"seq": 4})]
    assert (done.result.stream, done.result.subject, done.result.sequence) == ("S", "s.1", 4)
    with pytest.raises(MessageNotFound):
        _ask(API.get_message("S", {"seq": 4}, direct=False), _failed(404, 10037, "no message found"))


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"sequence": 7}, "sequence 7"),
        ({"last_for": "s.a"}, "the last one on 's.a'"),
        ({"next_for": "s.*", "sequence": 7}, r"the next one on 's.\*' from sequence 7 on"),
    ],
)
def test_a_message_that_is_not_there_is_named_as_it_was_asked_for(query: dict[str, Any], wanted: str) -> None:
    with pytest.raises(MessageNotFound, match=wanted) as missing:
        _ask(API.get_message("S", message_query(**query), direct=False), _failed(404, 10037, "no message found"))
    assert missing.value.stream == "S"


def test_a_message_is_asked_from_any_replica() -> None:
    reply = _direct(b"not { json", "A: 1\r\n")
    done = _ask(API.get_message("S", {"seq": 4}, direct=True), reply)
    assert done.requests == [("$JS.API.DIRECT.GET.S", {"seq": 4})]
    assert (done.result.data, done.result.headers) == (b"not { json", {"A": "1"})
    missing = CoreMessage("_INBOX.x.1", b"", None, b"NATS/1.0 404 Message Not Found\r\n\r\n", None)
    with pytest.raises(MessageNotFound):
        _ask(API.get_message("S", {"seq": 4}, direct=True), missing)


@pytest.mark.parametrize("subject", ["s.1", "$KV.b.a", "s.a*b", "s." + "x" * (MAX_SUBJECT_BYTES - 23)])
def test_the_last_message_of_a_subject_is_asked_for_on_a_subject_that_permissions_can_name(subject: str) -> None:
    asked = direct_get("$JS.API", "S", message_query(last_for=subject))
    assert (asked.subject, asked.data) == (f"$JS.API.DIRECT.GET.S.{subject}", b"")
    assert len(asked.subject) <= MAX_SUBJECT_BYTES


@pytest.mark.parametrize("subject", ["s.*", "s.>", ">", "s." + "x" * (MAX_SUBJECT_BYTES - 22)], ids=lambda s: s[:4])
def test_a_pattern_or_a_subject_that_is_too_long_for_it_is_asked_for_in_the_body(subject: str) -> None:
    asked = direct_get("$JS.API", "S", message_query(last_for=subject))
    assert (asked.subject, json.loads(asked.data)) == ("$JS.API.DIRECT.GET.S", {"last_by_subj": subject})


def test_a_message_is_deleted_and_erased_only_when_asked_to() -> None:
    subject = "$JS.API.STREAM.MSG.DELETE.S"
    assert _ask(API.delete_message("S", 4, erase=False), SUCCESS).requests == [(subject, {"seq": 4, "no_erase": True})]
    assert _ask(API.delete_message("S", 4, erase=True), SUCCESS).requests == [(subject, {"seq": 4})]


# ---- consumers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "subject", "fields"),
    [
        (ConsumerConfig(), "CONSUMER.CREATE.S", {}),
        (ConsumerConfig(filter_subject="s.a"), "CONSUMER.CREATE.S", {"filter_subject": "s.a"}),
        (ConsumerConfig(name="c"), "CONSUMER.CREATE.S.c", {"name": "c"}),
        (ConsumerConfig(durable_name="c"), "CONSUMER.CREATE.S.c", {"durable_name": "c"}),
        (
            ConsumerConfig(durable_name="c", filter_subject="s.*.>"),
            "CONSUMER.CREATE.S.c.s.*.>",
            {"durable_name": "c", "filter_subject": "s.*.>"},
        ),
        (
            ConsumerConfig(name="c", filter_subjects=["s.a"]),
            "CONSUMER.CREATE.S.c",
            {"name": "c", "filter_subjects": ["s.a"]},
        ),
        (
            ConsumerConfig(name="c", filter_subject="", filter_subjects=["s.a", "s.b"]),
            "CONSUMER.CREATE.S.c",
            {"name": "c", "filter_subject": "", "filter_subjects": ["s.a", "s.b"]},
        ),
        (
            ConsumerConfig(name="c", filter_subject="s.a", filter_subjects=[]),
            "CONSUMER.CREATE.S.c.s.a",
            {"name": "c", "filter_subject": "s.a", "filter_subjects": []},
        ),
    ],
)
def test_a_consumer_is_created_where_name_and_filter_say(
    config: ConsumerConfig, subject: str, fields: dict[str, Any]
) -> None:
    done = _ask(API.create_consumer("S", config), _consumer())
    assert done.requests == [
        (
            f"$JS.API.{subject}",
            {"stream_name": "S", "config": {"ack_policy": "explicit"} | fields, "action": "create"},
        )
    ]
    assert (done.result.name, done.result.pending) == ("c", 3)


def test_create_or_update_changes_only_what_is_mentioned_or_creates() -> None:
    """The server's own "either" would reset everything else."""
    present = _consumer()
    operation = API.create_or_update_consumer("S", ConsumerConfig(name="c", max_deliver=7))
    done = _ask(operation, present, present)
    assert done.requests[0][0] == "$JS.API.CONSUMER.INFO.S.c"
    assert done.requests[1][0].startswith("$JS.API.CONSUMER.CREATE.S.c")
    assert (done.requests[1][1]["action"], done.requests[1][1]["config"]["max_deliver"]) == ("update", 7)
    operation = API.create_or_update_consumer("S", ConsumerConfig(name="c", max_deliver=7))
    done = _ask(operation, NO_CONSUMER, present)
    assert done.requests[-1][1]["action"] == "create"


@pytest.mark.parametrize("policy", ["none", "all", "explicit"])
def test_an_ack_policy_that_is_mentioned_is_sent_as_it_is(policy: Any) -> None:
    config = ConsumerConfig(name="c", ack_policy=policy)
    done = _ask(API.create_consumer("S", config), _consumer())
    assert done.requests[0][1]["config"] == {"name": "c", "ack_policy": policy}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (ConsumerConfig(start_sequence=7), {"opt_start_seq": 7, "deliver_policy": "by_start_sequence"}),
        (
            ConsumerConfig(start_sequence=7, deliver_policy="by_start_sequence"),
            {"opt_start_seq": 7, "deliver_policy": "by_start_sequence"},
        ),
        (
            ConsumerConfig(start_time=datetime.datetime(2026, 1, 2, tzinfo=UTC)),
            {"opt_start_time": "2026-01-02T00:00:00Z", "deliver_policy": "by_start_time"},
        ),
        (ConsumerConfig(deliver_policy="new"), {"deliver_policy": "new"}),
        (ConsumerConfig(), {}),
    ],
)
def test_a_start_implies_its_deliver_policy(config: ConsumerConfig, fields: dict[str, Any]) -> None:
    done = _ask(API.create_consumer("S", config), _consumer())
    assert done.requests[0][1]["config"] == {"ack_policy": "explicit"} | fields


def test_creating_a_consumer_that_exists_otherwise_raises() -> None:
    with pytest.raises(ConsumerNameInUse):
        _ask(
            API.create_consumer("S", ConsumerConfig(name="c")),
            _failed(400, 10148, "consumer already exists"),
        )
    with pytest.raises(StreamNotFound):
        _ask(API.create_consumer("S", ConsumerConfig(name="c")), NO_STREAM)


def test_a_consumer_update_sends_the_present_configuration_with_the_changes_on_top() -> None:
    config = ConsumerConfig(durable_name="c", max_deliver=9)
    done = _ask(API.update_consumer("S", config), _consumer(), _consumer(max_deliver=9))
    (first, second) = done.requests
    assert first == ("$JS.API.CONSUMER.INFO.S.c", None)
    subject, body = second
    assert subject == "$JS.API.CONSUMER.CREATE.S.c.s.paid"
    assert body["action"] == "update"
    assert body["stream_name"] == "S"
    assert body["config"]["max_deliver"] == 9
    assert done.result.config.max_deliver == 9


def test_a_consumer_update_does_not_reset_how_messages_are_acknowledged() -> None:
    for policy in ("none", "all", "explicit"):
        present = _consumer(ack_policy=policy)
        done = _ask(API.update_consumer("S", ConsumerConfig(name="c", description="x")), present, present)
        assert done.requests[1][1]["config"]["ack_policy"] == policy


def test_a_consumer_update_changes_no_digit_of_what_it_does_not_mention() -> None:
    # nats-server 2.15.1 refuses a start time whose nanoseconds were cut off: "start time can not be updated" (10012).
    config = ConsumerConfig(durable_name="c", description="changed")
    done = _ask(API.update_consumer("S", config), _consumer(), _consumer())
    assert done.requests[1][1]["config"] == CONSUMER_CONFIG | {"description": "changed"}


def test_a_consumer_update_may_go_from_one_filter_to_several_and_back() -> None:
    several = ConsumerConfig(durable_name="c", filter_subjects=["s.a", "s.b"])
    done = _ask(API.update_consumer("S", several), _consumer(), _consumer())
    subject, body = done.requests[1]
    assert subject == "$JS.API.CONSUMER.CREATE.S.c"
    assert body["config"]["filter_subjects"] == ["s.a", "s.b"]
    assert not body["config"].get("filter_subject")

    present = _consumer(filter_subjects=["s.a", "s.b"])
    del present["config"]["filter_subject"]
    one = ConsumerConfig(durable_name="c", filter_subject="s.paid")
    done = _ask(API.update_consumer("S", one), present, _consumer())
    subject, body = done.requests[1]
    assert subject == "$JS.API.CONSUMER.CREATE.S.c.s.paid"
    assert body["config"]["filter_subject"] == "s.paid"
    assert not body["config"].get("filter_subjects")


def test_a_consumer_update_that_mentions_no_filter_keeps_those_it_has() -> None:
    present = _consumer(filter_subjects=["s.a", "s.b"])
    del present["config"]["filter_subject"]
    done = _ask(API.update_consumer("S", ConsumerConfig(durable_name="c", max_deliver=9)), present, present)
    assert done.requests[1][1]["config"] == present["config"] | {"max_deliver": 9}


def test_a_consumer_update_that_contradicts_the_start_is_not_the_peers_fault() -> None:
    config = ConsumerConfig(durable_name="c", start_sequence=5)
    refusal = _failed(500, 10012, "deliver policy can not be updated")
    with pytest.raises((ConfigError, ServerError)):
        _ask(API.update_consumer("S", config), _consumer(), refusal)


def test_a_consumer_update_needs_to_know_which_one() -> None:
    with pytest.raises(ConfigError, match=r"^update_consumer: expected name or durable_name to say which one$"):
        _refused(API.update_consumer("S", ConsumerConfig(max_deliver=3)))()


def test_an_update_of_a_missing_consumer_asks_once_and_raises() -> None:
    talk = Conversation(API.update_consumer("S", ConsumerConfig(name="c")), NO_CONSUMER)
    with pytest.raises(ConsumerNotFound):
        talk.run()
    assert talk.requests == [("$JS.API.CONSUMER.INFO.S.c", None)]


def test_an_update_of_a_consumer_with_a_feature_the_server_lacks_is_refused() -> None:
    config = ConsumerConfig(name="c", priority_groups=["g"], priority_policy="overflow")
    talk = Conversation(_api_of("2.10.29", 0).update_consumer("S", config), _consumer())
    with pytest.raises(FeatureUnavailable):
        talk.run()
    assert [subject for subject, _ in talk.requests] in ([], ["$JS.API.CONSUMER.INFO.S.c"])


def test_a_consumer_is_looked_up_and_deleted_by_name() -> None:
    done = _ask(API.consumer_info("S", "c"), _consumer())
    assert done.requests == [("$JS.API.CONSUMER.INFO.S.c", None)]
    assert done.result.config.filter_subject == "s.paid"
    assert _ask(API.delete_consumer("S", "c"), SUCCESS).requests == [("$JS.API.CONSUMER.DELETE.S.c", None)]
    with pytest.raises(ConsumerNotFound):
        _ask(API.delete_consumer("S", "c"), NO_CONSUMER)


PAUSED = {"type": "io.nats.jetstream.api.v1.consumer_pause_response", "paused": True, "pause_until": STAMP}


def test_a_consumer_is_paused_until_a_time_and_resumed_without_one() -> None:
    until = datetime.datetime(2099, 1, 1)  # taken for UTC
    info = ("$JS.API.CONSUMER.INFO.S.c", None)
    done = _ask(API.pause_consumer("S", "c", until, 1.0), PAUSED, _consumer(pause_until="2099-01-01T00:00:00Z"))
    assert done.requests == [("$JS.API.CONSUMER.PAUSE.S.c", {"pause_until": "2099-01-01T00:00:00Z"}), info]
    done = _ask(API.pause_consumer("S", "c", None, 1.0), PAUSED, _consumer())
    assert done.requests == [("$JS.API.CONSUMER.PAUSE.S.c", None), info]


def test_a_pause_that_was_only_proposed_is_waited_for() -> None:
    operation = API.pause_consumer("S", "c", datetime.datetime(2099, 1, 1, tzinfo=UTC), 1.0)
    next(operation)
    assert isinstance(operation.send(_message(PAUSED)), Request)
    assert isinstance(operation.send(_message(_consumer())), Sleep)
    assert isinstance(operation.send(_message(b"")), Request)
    with pytest.raises(StopIteration):
        operation.send(_message(_consumer(pause_until="2099-01-01T00:00:00Z")))


def test_a_pause_that_never_comes_about_ends_in_time() -> None:
    operation = API.pause_consumer("S", "c", datetime.datetime(2099, 1, 1, tzinfo=UTC), 1.0)
    waits_s: list[float] = []

    def converse() -> None:
        step = next(operation)
        while sum(waits_s) < 10:
            waits_s.append(step.seconds if isinstance(step, Sleep) else 0.0)
            step = operation.send(_message(_consumer()))

    with pytest.raises(RequestTimeout, match=r"pause of consumer 'c' of stream 'S': no answer within 1 s"):
        converse()
    assert sum(waits_s) == pytest.approx(1.0)


def test_a_consumer_is_reset_to_a_sequence_or_to_its_start() -> None:
    reply = _consumer() | {"reset_seq": 5}
    done = _ask(API.reset_consumer("S", "c", 5), reply)
    assert done.requests == [("$JS.API.CONSUMER.RESET.S.c", {"seq": 5})]
    assert (done.result.name, done.result.extra) == ("c", {"reset_seq": 5})
    assert _ask(API.reset_consumer("S", "c", None), reply).requests == [("$JS.API.CONSUMER.RESET.S.c", None)]


def test_a_group_of_a_consumer_is_unpinned() -> None:
    assert _ask(API.unpin_consumer("S", "c", "jobs"), SUCCESS).requests == [
        ("$JS.API.CONSUMER.UNPIN.S.c", {"group": "jobs"})
    ]


def test_a_group_is_a_text() -> None:
    with pytest.raises(ConfigError, match="group=5"):
        _refused(API.unpin_consumer("S", "c", 5))()  # type: ignore[arg-type]


# ---- everything ----------------------------------------------------------------------------------------------------

BAD = "a.b"
WITH_BAD_NAMES: list[Callable[[], Operation[Any]]] = [
    lambda: API.stream_info(BAD),
    lambda: API.delete_stream(BAD),
    lambda: API.purge_stream(BAD),
    lambda: API.step_down_stream(BAD),
    lambda: API.get_message(BAD, {"seq": 1}, direct=True),
    lambda: API.get_message(BAD, {"seq": 1}, direct=False),
    lambda: API.delete_message(BAD, 1, erase=False),
    lambda: API.create_consumer(BAD, ConsumerConfig()),
    lambda: API.update_consumer(BAD, ConsumerConfig(name="c")),
    lambda: API.consumer_info(BAD, "c"),
    lambda: API.consumer_info("S", BAD),
    lambda: API.delete_consumer(BAD, "c"),
    lambda: API.delete_consumer("S", BAD),
    lambda: API.pause_consumer(BAD, "c", None, 1.0),
    lambda: API.pause_consumer("S", BAD, None, 1.0),
    lambda: API.reset_consumer(BAD, "c", None),
    lambda: API.reset_consumer("S", BAD, None),
    lambda: API.unpin_consumer(BAD, "c", "g"),
    lambda: API.unpin_consumer("S", BAD, "g"),
    lambda: API.step_down_consumer(BAD, "c"),
    lambda: API.step_down_consumer("S", BAD),
    lambda: API.consumer_page(BAD, 0),
    lambda: API.consumer_name_page(BAD, 0),
]


@pytest.mark.parametrize("operation", WITH_BAD_NAMES)
def test_a_name_that_would_change_the_subject_is_refused_before_anything_is_asked(
    operation: Callable[[], Operation[Any]],
) -> None:
    with pytest.raises(ConfigError, match=r"'a\.b'"):
        next(operation())


OPERATIONS: dict[str, Callable[[], Operation[Any]]] = {
    "account_info": lambda: API.account_info(),
    "create_stream": lambda: API.create_stream(StreamConfig(name="S")),
    "update_stream": lambda: API.update_stream(StreamConfig(name="S")),
    "create_or_update_stream": lambda: API.create_or_update_stream(StreamConfig(name="S")),
    "stream_info": lambda: API.stream_info("S", ">"),
    "delete_stream": lambda: API.delete_stream("S"),
    "purge_stream": lambda: API.purge_stream("S"),
    "step_down_stream": lambda: API.step_down_stream("S"),
    "stream_page": lambda: API.stream_page(0, None),
    "stream_name_page": lambda: API.stream_name_page(0, None),
    "get_message": lambda: API.get_message("S", {"seq": 1}, direct=False),
    "get_message_direct": lambda: API.get_message("S", {"seq": 1}, direct=True),
    "delete_message": lambda: API.delete_message("S", 1, erase=False),
    "create_consumer": lambda: API.create_consumer("S", ConsumerConfig()),
    "create_or_update_consumer": lambda: API.create_or_update_consumer("S", ConsumerConfig()),
    "update_consumer": lambda: API.update_consumer("S", ConsumerConfig(name="c")),
    "get_or_create_stream": lambda: API.get_or_create_stream("S"),
    "get_or_create_consumer": lambda: API.get_or_create_consumer("S", ConsumerConfig(name="c")),
    "consumer_info": lambda: API.consumer_info("S", "c"),
    "delete_consumer": lambda: API.delete_consumer("S", "c"),
    "pause_consumer": lambda: API.pause_consumer("S", "c", None, 1.0),
    "reset_consumer": lambda: API.reset_consumer("S", "c", None),
    "unpin_consumer": lambda: API.unpin_consumer("S", "c", "g"),
    "step_down_consumer": lambda: API.step_down_consumer("S", "c"),
    "consumer_page": lambda: API.consumer_page("S", 0),
    "consumer_name_page": lambda: API.consumer_name_page("S", 0),
}


def test_every_operation_is_in_the_table() -> None:
    # What the server is, is asked about by whoever needs it.
    public = {name for name in vars(Api) if not name.startswith("_")}
    public -= {"prefix", "connection", "known", "facts", "require"}
    # It raises nothing: what the server says of a stream is noted in the deadline of a publish.
    public -= {"find_streams_of"}
    assert public <= OPERATIONS.keys()


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"get_message_direct"}))
def test_every_operation_raises_the_error_of_a_reply(name: str) -> None:
    with pytest.raises(ServerError, match=r"out of order \(code 503, err_code 99999\)$") as raised:
        _ask(OPERATIONS[name](), _failed(503, 99999, "out of order"))
    # It says what it is about, unless that is the account or all streams.
    is_about_one = name not in ("account_info", "stream_page", "stream_name_page")
    assert bool(raised.value.stream) == is_about_one
    names_consumer = "consumer" in name and "page" not in name and ("create" not in name or name.startswith("get"))
    assert bool(raised.value.consumer) == names_consumer


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_the_first_request_of_every_operation_is_no_further_page_whose_time_begins_anew(name: str) -> None:
    request = next(OPERATIONS[name]())
    assert isinstance(request, Request)
    assert not request.is_next_page


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_reply_that_is_no_object_is_a_protocol_error(name: str) -> None:
    for reply in (b"", b"null", b"[1]", b"not json", b"\xff"):
        with pytest.raises(ProtocolError):
            _answer_always(OPERATIONS[name](), reply)


WRONG_SHAPES: list[dict[str, Any]] = [
    {},
    {"config": None},
    {"config": 5},
    {"config": [], "state": {}},
    _stream() | {"state": None},
    _stream() | {"state": 5},
    _stream() | {"state": {"subjects": 5}},
    _stream() | {"state": {"subjects": ["s.a"]}},
    _stream() | {"total": "many", "state": {"subjects": {"s.a": 1}}},
    _stream() | {"total": None, "state": {"subjects": {"s.a": 1}}},
    {"streams": 5, "consumers": 5, "total": 1},
    {"streams": [5], "consumers": [5], "total": 1},
    {"streams": [None], "consumers": [None], "total": 1},
    {"streams": [{}], "consumers": [{}], "total": 1},
    {"streams": [], "consumers": [], "total": "many"},
    {"streams": [], "consumers": [], "total": None},
    {"purged": "many", "success": True},
    {"purged": None, "success": True},
    {"message": {"seq": "x", "time": STAMP}},
    {"message": {"seq": 1, "time": STAMP, "data": 5}},
    {"error": {"code": None}},
]


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_a_reply_of_the_wrong_shape_is_read_or_an_error_of_ours(name: str) -> None:
    raw: dict[str, str] = {}
    for reply in WRONG_SHAPES:
        try:
            _answer_always(OPERATIONS[name](), reply)
        except (StopIteration, ProtocolError, ServerError):
            pass
        except Exception as error:
            raw[json.dumps(reply)] = repr(error)
    assert raw == {}


def test_requests_are_compact_json() -> None:
    operation = API.create_stream(StreamConfig(name="S", subjects=["ä", "b"], max_messages=1))
    request = next(operation)
    assert isinstance(request, Request)
    assert b" " not in request.data
    assert json.loads(request.data) == {"name": "S", "subjects": ["ä", "b"], "max_msgs": 1}


# ---- what the server can do ------------------------------------------------------------------------------------------


def _api_of(version: str, level: int) -> Api:
    """As one that is connected to such a server has it."""
    return Api(connection=connected(version=version, jetstream=True, api_lvl=level))


@pytest.mark.parametrize(
    ("info", "facts"),
    [
        ({"version": "2.9.10", "jetstream": True}, (0, "2.9.10")),
        ({"version": "2.10.26", "jetstream": True}, (0, "2.10.26")),
        ({"version": "2.11.11", "jetstream": True}, (1, "2.11.11")),
        ({"version": "2.12.8", "jetstream": True, "api_lvl": 3}, (3, "2.12.8")),
        ({"version": "2.15.1", "jetstream": True, "api_lvl": 5}, (5, "2.15.1")),
        ({"version": "2.15.1", "api_lvl": 5}, (None, "")),  # a leaf node: JetStream is another server's
        ({"jetstream": True}, (None, "")),
    ],
)
def test_the_connected_server_speaks_for_its_own_jetstream(info: dict[str, Any], facts: tuple[Any, str]) -> None:
    assert Api(connection=connected(**info)).known() == facts


def test_another_servers_level_is_asked_for_once_in_a_session() -> None:
    connection = connected(version="2.15.1", jetstream=True, api_lvl=5)
    api = Api("$JS.hub.API", connection)
    assert api.known() == (None, "")
    asked = _ask(api.facts(), {"api": {"level": 3, "total": 1}})
    assert (asked.requests, asked.result) == ([("$JS.hub.API.INFO", None)], (3, ""))
    assert _told(api.facts()) == api.known() == (3, "")
    with pytest.raises(FeatureUnavailable, match=r"needs nats-server 2\.14 or newer, and this is of API level 3"):
        next(api.require(FAST_INGEST))
    connection.end("gone")
    connection.begin(Server("a", 4222))
    connection.receive_data(b'INFO {"version": "2.15.1", "jetstream": true, "api_lvl": 5}\r\n')
    connection.login(None)
    connection.receive_data(b"PONG\r\n")
    assert _ask(api.facts(), {"api": {"level": 5}}).result == (5, "")
    assert _told(api.require(FAST_INGEST)) is None
    assert len(api._heard) == 1, "what was said in earlier sessions is forgotten"
    assert api == Api("$JS.hub.API", connection)


def test_a_server_that_nobody_reaches_at_the_moment_is_asked_again() -> None:
    api = Api("$JS.hub.API", connected(version="2.15.1"))
    asking = api.facts()
    next(asking)
    with pytest.raises(StopIteration) as finished:
        asking.throw(JetStreamUnavailable("$JS.hub.API.INFO"))
    assert finished.value.value == (None, "")
    assert _ask(api.facts(), {"api": {"level": 4}}).result == (4, "")


@pytest.mark.parametrize("reply", [{"config": {}}, _failed(503, 10039, "no JetStream"), b"what?"])
def test_what_cannot_be_known_is_not_refused_and_not_asked_again(reply: Any) -> None:
    api = Api("$JS.hub.API", connected(version="2.9.10"))
    assert _ask(api.facts(), reply).result == (None, "")
    assert _told(api.require(FAST_INGEST)) is None


def _create(api: Api, config: StreamConfig | ConsumerConfig) -> Operation[Any]:
    return api.create_stream(config) if isinstance(config, StreamConfig) else api.create_consumer("S", config)


def test_before_levels_the_release_decides() -> None:
    for config in (
        ConsumerConfig(filter_subjects=["a"]),
        StreamConfig(name="S", compression="s2"),
        StreamConfig(name="S", metadata={"a": "b"}),
    ):
        with pytest.raises(FeatureUnavailable, match=r"needs nats-server 2\.10 or newer, and this is 2\.9\.10"):
            next(_create(_api_of("2.9.10", 0), config))
        assert isinstance(next(_create(_api_of("2.10.26", 0), config)), Request)


def _told(operation: Operation[Any]) -> Any:
    """The result of an operation that asks nothing."""
    with pytest.raises(StopIteration) as finished:
        next(operation)
    return finished.value.value


# ---- the time of an operation --------------------------------------------------------------------------------------

ASK = Request("a")


def test_the_requests_of_an_operation_share_one_deadline() -> None:
    deadline = Deadline(5.0)
    assert deadline.begin(ASK, 100.0) == 5.0
    assert deadline.begin(ASK, 103.0) == 2.0
    assert deadline.begin(ASK, 104.5) == 0.5
    with pytest.raises(RequestTimeout, match="request to 'a': no answer within 5 s"):
        deadline.begin(ASK, 105.0)


def test_the_first_request_is_sent_even_if_nobody_waits_for_its_answer() -> None:
    assert Deadline(0.0).begin(ASK, 100.1) == 0.0


def test_a_request_without_an_answer_is_sent_however_late() -> None:
    deadline = Deadline(5.0)
    deadline.begin(ASK, 100.0)
    assert deadline.begin(Request("a", is_silent=True), 107.0) == 0.0


def test_each_page_of_a_listing_has_the_whole_time() -> None:
    deadline = Deadline(5.0)
    page = Request("a", is_next_page=True)
    assert [deadline.begin(each, now) for each, now in [(ASK, 100.0), (page, 104.0), (page, 108.0)]] == [5.0] * 3
    assert deadline.begin(ASK, 110.0) == 3.0


def test_where_each_request_has_the_whole_time_there_is_no_deadline_of_all() -> None:
    deadline = Deadline(5.0, for_each=True)
    assert [deadline.begin(ASK, now) for now in (100.0, 104.0, 200.0)] == [5.0] * 3


def test_a_publish_nobody_answers_is_sent_again_while_there_is_time() -> None:
    request = Request("a", may_be_leaderless=True)
    deadline = Deadline(5.0)
    deadline.begin(request, 100.0)
    assert [deadline.retry_after_s(101.0) for _ in range(LEADERLESS_RETRIES + 1)] == [
        *[LEADERLESS_WAIT_S] * LEADERLESS_RETRIES,
        None,
    ]
    deadline.begin(request, 102.0)  # each request anew
    assert deadline.retry_after_s(102.0) == LEADERLESS_WAIT_S
    assert deadline.retry_after_s(105.0 - LEADERLESS_WAIT_S) is None
    assert (deadline.left_s(102.25), deadline.left_s(106.0)) == (2.75, 0.0)


def test_other_requests_nobody_answers_are_not_sent_again() -> None:
    deadline = Deadline(5.0)
    deadline.begin(ASK, 100.0)
    assert deadline.retry_after_s(100.0) is None


def test_a_time_out_names_the_time_the_caller_knows() -> None:
    deadline = Deadline(5.0)
    own = RequestTimeout("a", 5.0)
    assert deadline.of_all(own) is own
    for was_sent in (True, False):
        told = deadline.of_all(RequestTimeout("request to 'a'", 1.25, was_sent))
        assert (told.what, told.timeout_s, told.was_sent) == ("request to 'a'", 5.0, was_sent)
