"""The JetStream API of the model: JSON requests on ``$JS.API``, answered as nats-server 2.15.1 answers them.

It covers streams, messages, direct gets, and pull consumers with all their requests. An unknown request is refused by
name, with code 501: the server stays silent, which in a test would look like a lost answer.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jetspark.codes import Code
from jetspark.core.headers import Headers, Status, encode
from jetspark.core.subjects import matches, overlaps
from jetspark.errors import ConfigError, ProtocolError, ServerError
from jetspark.jetstream import wire
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.errors import server_error
from jetspark.testing.model.consumers import (
    DEFAULT_ACK_WAIT_S,
    DEFAULT_INACTIVE_S,
    DEFAULT_MAX_ACK_PENDING,
    DEFAULT_MAX_WAITING,
    ModelConsumer,
)
from jetspark.testing.model.replies import Delivery, time_text
from jetspark.testing.model.store import ModelMessage, Store
from jetspark.testing.model.stream import ModelStream

if TYPE_CHECKING:
    from jetspark.testing.model.server import ModelServer

__all__ = ["ACK_PREFIX", "API_PREFIX", "ModelApi"]

API_PREFIX, ACK_PREFIX = "$JS.API.", "$JS.ACK."
# Number of names or infos in one page of a list.
_NAMES_PAGE, _INFOS_PAGE = 1024, 256
# The server's limit for the keys of one request.
_MAX_LAST_KEYS = 1024

_NO_MESSAGE = server_error(404, Code.MESSAGE_NOT_FOUND, "no message found")
_NO_CONSUMER = server_error(404, Code.CONSUMER_NOT_FOUND, "consumer not found")

# The server's values for fields that a stream or a consumer does not set.
_STREAM_DEFAULTS: dict[str, Any] = {
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
    "allow_direct": False,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
}

_Answer = dict[str, Any]


class ModelApi:
    """Answers requests of clients, and has its server carry them out."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._made = 0
        """Number of generated names of consumers and pins; the server's are random."""

    # ---- the way in --------------------------------------------------------------------------------------------

    def answer(self, subject: str, data: bytes, reply: str | None, now: float) -> list[Delivery]:
        """The server's answer to a request, and the deliveries it causes."""
        tokens = subject.removeprefix(API_PREFIX).split(".")
        if tokens[:2] == ["DIRECT", "GET"]:
            return self._direct_get(tokens[2:], data, reply, now)
        if tokens[:3] == ["CONSUMER", "MSG", "NEXT"]:
            return self._next(tokens[3:], data, reply, now)
        try:
            body = json.loads(data) if data.strip() else {}
            kind, answer, said = self._dispatch(tokens, body, now)
        except ServerError as error:
            kind, said = _kind_of(tokens), []
            answer = {"error": {"code": error.code, "err_code": error.err_code, "description": error.description}}
        except (ConfigError, ProtocolError, ValueError) as error:
            kind, said = _kind_of(tokens), []
            answer = {"error": {"code": 501, "err_code": 0, "description": f"not in the model: {error}"}}
        if reply:
            fields = {"type": f"io.nats.jetstream.api.v1.{kind}_response", **answer}
            said = [Delivery(reply, json.dumps(fields, separators=(",", ":")).encode()), *said]
        return said

    def ack(self, subject: str, data: bytes, reply: str | None, now: float) -> list[Delivery]:
        stream, name, *tokens = subject.removeprefix(ACK_PREFIX).split(".")
        consumer = self._server.consumer(stream, name)
        return consumer.ack(tokens, data, reply, now) if consumer is not None and len(tokens) >= 3 else []

    def _dispatch(self, tokens: list[str], body: dict[str, Any], now: float) -> tuple[str, _Answer, list[Delivery]]:
        match tokens:
            case ["INFO"]:
                return "account_info", self._account(), []
            case ["STREAM", "CREATE", name]:
                return "stream_create", self._create_stream(name, body, now), []
            case ["STREAM", "UPDATE", name]:
                return "stream_update", self._update_stream(name, body, now), []
            case ["STREAM", "INFO", name]:
                return "stream_info", self._stream_info(self._server.stream(name), body, now), []
            case ["STREAM", "DELETE", name]:
                said = self._server.delete_stream(name)
                return "stream_delete", {"success": True}, said
            case ["STREAM", "PURGE", name]:
                purged = self._server.stream(name).purge(body.get("filter"), body.get("seq"), body.get("keep", 0))
                return "stream_purge", {"success": True, "purged": purged}, []
            case ["STREAM", "NAMES"]:
                return "stream_names", self._stream_names(body), []
            case ["STREAM", "LIST"]:
                return "stream_list", self._stream_list(body, now), []
            case ["STREAM", "MSG", "GET", name]:
                message = _find(self._server.stream(name).store, body)
                return "stream_msg_get", {"message": _stored(message)}, []
            case ["STREAM", "MSG", "DELETE", name]:
                return "stream_msg_delete", {"success": True}, self._delete_message(name, body["seq"], now)
            case ["CONSUMER", "CREATE", stream, *rest]:
                return "consumer_create", self._create_consumer(stream, rest, body, now), []
            case ["CONSUMER", "NAMES", stream]:
                return "consumer_names", self._consumer_names(stream, body), []
            case ["CONSUMER", "LIST", stream]:
                return "consumer_list", self._consumer_list(stream, body, now), []
            case ["CONSUMER", verb, stream, name]:
                return self._to_consumer(verb, stream, name, body, now)
        raise ConfigError(f"{'.'.join(tokens)}; use a real server")

    # ---- streams -----------------------------------------------------------------------------------------------

    def _account(self) -> _Answer:
        streams = list(self._server.streams())
        return {
            "memory": 0,
            "storage": sum(each.store.size_bytes for each in streams),
            "streams": len(streams),
            "consumers": sum(len(each.consumers) for each in streams),
            "limits": {"max_memory": -1, "max_storage": -1, "max_streams": -1, "max_consumers": -1},
            "api": {"level": 5, "total": 0, "errors": 0},
        }

    def _create_stream(self, name: str, body: dict[str, Any], now: float) -> _Answer:
        config = _config(StreamConfig, body, name)
        is_new = self._server.find_stream(name) is None
        self._server.create_stream(config, now=now)
        answer = self._stream_info(self._server.stream(name), {}, now)
        return answer | {"did_create": True} if is_new else answer

    def _update_stream(self, name: str, body: dict[str, Any], now: float) -> _Answer:
        self._server.update_stream(_config(StreamConfig, body, name))
        return self._stream_info(self._server.stream(name), {}, now)

    def _stream_info(self, stream: ModelStream, body: Mapping[str, Any], now: float) -> _Answer:
        store = stream.store
        subjects = store.subjects()
        first = store.get(store.first_sequence)
        state: dict[str, Any] = {
            "messages": len(store),
            "bytes": store.size_bytes,
            "first_seq": store.first_sequence if store.last_sequence else 0,
            "first_ts": time_text(first.time) if first is not None else "0001-01-01T00:00:00Z",
            "last_seq": store.last_sequence,
            "last_ts": time_text(store.last_time) if store.last_time else "0001-01-01T00:00:00Z",
            "consumer_count": len(stream.consumers),
        }
        if subjects:
            state["num_subjects"] = len(subjects)
        if (deleted := store.last_sequence - store.first_sequence + 1 - len(store)) > 0:
            state["num_deleted"] = deleted
        answer: _Answer = {}
        if (wanted := body.get("subjects_filter")) is not None:
            found = {each: count for each, count in subjects.items() if matches(wanted, each)}
            offset = body.get("offset", 0)
            state["subjects"] = dict(list(found.items())[offset : offset + 100_000])
            answer |= {"total": len(found), "offset": offset, "limit": 100_000}
        if body.get("deleted_details"):
            state["deleted"] = [
                each for each in range(store.first_sequence, store.last_sequence + 1) if store.get(each) is None
            ]
        return answer | {
            "config": _STREAM_DEFAULTS | {"consumer_limits": {}} | wire.encode(stream.config),
            "created": time_text(stream.created_at),
            "state": state,
            "ts": time_text(now),
        }

    def _listed(self, body: Mapping[str, Any]) -> list[ModelStream]:
        wanted = body.get("subject")
        found = sorted(self._server.streams(), key=lambda each: each.config.name)
        if not wanted:
            return found
        return [each for each in found if any(overlaps(wanted, subject) for subject in each.config.subjects or ())]

    def _stream_names(self, body: Mapping[str, Any]) -> _Answer:
        return _page("streams", [each.config.name for each in self._listed(body)], body, _NAMES_PAGE)

    def _stream_list(self, body: Mapping[str, Any], now: float) -> _Answer:
        infos = [self._stream_info(each, {}, now) for each in self._listed(body)]
        return _page("streams", infos, body, _INFOS_PAGE)

    def _delete_message(self, name: str, sequence: int, now: float) -> list[Delivery]:
        stream = self._server.stream(name)
        waiting_for_room = [each for each in stream.consumers.values() if sequence in each.pending]
        if stream.config.deny_delete:
            raise server_error(400, Code.MESSAGE_DELETE_FAILED, "message delete not permitted")
        if not stream.store.delete(sequence):
            raise server_error(400, Code.SEQUENCE_NOT_FOUND, f"sequence {sequence} not found")
        return [said for each in waiting_for_room for said in each.serve(now)]

    # ---- direct gets -------------------------------------------------------------------------------------------

    def _direct_get(self, tokens: list[str], data: bytes, reply: str | None, now: float) -> list[Delivery]:
        stream = self._server.find_stream(tokens[0])
        if reply is None:
            return []
        if stream is None or not stream.config.allow_direct:
            return [Delivery(reply, b"", None, Status(503))]
        if len(tokens) > 1:
            body: dict[str, Any] = {"last_by_subj": ".".join(tokens[1:])}
        elif not data.strip():
            return [Delivery(reply, b"", None, Status(408, "Empty Request"))]
        else:
            try:
                body = json.loads(data)
            except ValueError:
                return [Delivery(reply, b"", None, Status(408, "Malformed Request"))]
        store = stream.answering()
        if "multi_last" in body or "batch" in body:
            return list(self._direct_batch(stream.config.name, store, body, reply))
        try:
            message = _find(store, body)
        except ServerError:
            return [Delivery(reply, b"", None, Status(404, "Message Not Found"))]
        return [_direct(stream.config.name, message, reply)]

    def _direct_batch(self, name: str, store: Store, body: Mapping[str, Any], reply: str) -> Iterator[Delivery]:
        is_multi = "multi_last" in body
        up_to = body.get("up_to_seq") or None  # 0 is no limit
        if is_multi:
            if up_to is not None and "up_to_time" in body:
                yield Delivery(reply, b"", None, Status(408, "Bad Request"))
                return
            if "up_to_time" in body:
                moment = wire.parse_time(body["up_to_time"])
                assert moment is not None
                up_to = store.sequence_at(moment.timestamp()) - 1
            found = sorted(store.last_of_each(list(body["multi_last"]), up_to))
            if not found or (up_to is not None and up_to > store.last_sequence):
                yield Delivery(reply, b"", None, Status(404, "No Results"))
                return
            if len(found) > _MAX_LAST_KEYS:
                yield Delivery(reply, b"", None, Status(413, "Too Many Results"))
                return
            messages = [
                each for each in map(store.get, found) if each is not None and each.sequence >= body.get("seq", 0)
            ]
        elif "seq" not in body and "start_time" not in body:
            yield Delivery(reply, b"", None, Status(408, "Empty Request"))
            return
        else:
            messages = list(_following(store, body))
            if not messages:
                yield Delivery(reply, b"", None, Status(404, "Message Not Found"))
                return
        yield from self._batch_of(name, messages, body, reply, up_to or store.last_sequence if is_multi else None)

    def _batch_of(
        self, stream: str, messages: list[ModelMessage], body: Mapping[str, Any], reply: str, up_to: int | None
    ) -> Iterator[Delivery]:
        count = min(body.get("batch") or len(messages), len(messages))
        room = body.get("max_bytes") or 64 << 20
        previous = sent = 0
        for message in messages[:count]:
            extra = {"Nats-Num-Pending": str(len(messages) - sent - 1), "Nats-Last-Sequence": str(previous)}
            yield _direct(stream, message, reply, extra)
            previous, sent = message.sequence, sent + 1
            room -= len(message.data) + len(message.subject)
            if room <= 0:
                break
        ending = Headers()
        ending.add("Nats-Num-Pending", str(len(messages) - sent))
        ending.add("Nats-Last-Sequence", str(previous))
        if up_to is not None:
            ending.add("Nats-UpTo-Sequence", str(up_to))
        yield Delivery(reply, b"", ending, Status(204, "EOB"))

    # ---- consumers ---------------------------------------------------------------------------------------------

    def _create_consumer(self, stream_name: str, rest: list[str], body: dict[str, Any], now: float) -> _Answer:
        stream = self._server.stream(stream_name)
        fields = body.get("config", {})
        name = rest[0] if rest else fields.get("name") or fields.get("durable_name")
        config = _consumer_config(fields)
        known = stream.consumers.get(name) if name else None
        action = body.get("action", "")
        if known is not None:
            if action == "create" and _without_metadata(known.config) != _without_metadata(config):
                raise server_error(400, Code.CONSUMER_EXISTS, "consumer already exists")
            if action != "create":
                _check_update(known.config, config)
                known.update(config)
            return self._consumer_info(known, now)
        if action == "update":
            raise server_error(400, Code.CONSUMER_DOES_NOT_EXIST, "consumer does not exist")
        _check_start(config)
        if name is None:
            name = self._made_up("C")
        consumer = ModelConsumer(
            name,
            stream_name,
            config,
            stream.store,
            now,
            has_interest=self._server.has_interest,
            new_pin=lambda: self._made_up("P"),
        )
        stream.add_consumer(consumer)
        return self._consumer_info(consumer, now)

    def _made_up(self, kind: str) -> str:
        self._made += 1
        return f"{kind}{self._made:07d}"

    def _consumer(self, stream: str, name: str) -> ModelConsumer:
        consumer = self._server.stream(stream).consumers.get(name)
        if consumer is None:
            raise _NO_CONSUMER
        return consumer

    def _to_consumer(
        self, verb: str, stream: str, name: str, body: Mapping[str, Any], now: float
    ) -> tuple[str, _Answer, list[Delivery]]:
        consumer = self._consumer(stream, name)
        match verb:
            case "INFO":
                return "consumer_info", self._consumer_info(consumer, now), []
            case "DELETE":
                said = self._server.stream(stream).remove_consumer(name)
                return "consumer_delete", {"success": True}, said
            case "PAUSE":
                until = wire.parse_time(body["pause_until"]) if body.get("pause_until") else None
                consumer.pause(until)
                return "consumer_pause", _paused(consumer, until, now), []
            case "RESET":
                sequence, said = consumer.reset(body.get("seq"), now)
                return "consumer_reset", self._consumer_info(consumer, now) | {"reset_seq": sequence}, said
            case "UNPIN":
                if body.get("group") not in (consumer.config.priority_groups or ()):
                    raise server_error(
                        400, Code.PRIORITY_GROUP_INVALID, "Provided priority group does not exist for this consumer"
                    )
                consumer.unpin()
                return "consumer_unpin", {}, consumer.serve(now)
        raise ConfigError(f"CONSUMER.{verb}; use a real server")

    def _consumer_info(self, consumer: ModelConsumer, now: float) -> _Answer:
        answer = {
            "stream_name": consumer.stream,
            "name": consumer.name,
            "created": time_text(consumer.created_at),
            "config": wire.encode(consumer.config) | {"num_replicas": consumer.config.replicas or 0},
            **consumer.state(),
            "ts": time_text(now),
        }
        if consumer.paused_until > now:
            answer |= {"paused": True, "pause_remaining": round((consumer.paused_until - now) * 1e9)}
        return answer

    def _consumer_names(self, stream: str, body: Mapping[str, Any]) -> _Answer:
        return _page("consumers", sorted(self._server.stream(stream).consumers), body, _NAMES_PAGE)

    def _consumer_list(self, stream: str, body: Mapping[str, Any], now: float) -> _Answer:
        consumers = sorted(self._server.stream(stream).consumers.items())
        return _page("consumers", [self._consumer_info(each, now) for _, each in consumers], body, _INFOS_PAGE)

    def _next(self, tokens: list[str], data: bytes, reply: str | None, now: float) -> list[Delivery]:
        if reply is None:
            return []
        consumer = self._server.consumer(tokens[0], tokens[1]) if len(tokens) == 2 else None
        if consumer is None:
            missing = Headers()
            missing.add("Nats-Subject", ".".join([API_PREFIX + "CONSUMER.MSG.NEXT", *tokens]))
            return [Delivery(reply, b"", missing, Status(503))]
        return consumer.request(data, reply, now)


# ---- small steps -----------------------------------------------------------------------------------------------------


def _kind_of(tokens: list[str]) -> str:
    """The name of an answer's type, for a request that failed."""
    words = [token.lower() for token in tokens[: 3 if tokens[1:2] == ["MSG"] else 2]]
    return "_".join(words) if len(words) > 1 else "account_info"


def _config(kind: type[StreamConfig], body: dict[str, Any], name: str) -> StreamConfig:
    config = wire.decode(kind, {"name": name, **body})
    if config.extra:
        raise ConfigError(f"{', '.join(config.extra)}: fields that this project does not know")
    own = {key: value for key, value in (config.metadata or {}).items() if not key.startswith("_nats.")}
    return dataclasses.replace(config, metadata=own or None)


def _consumer_config(fields: Mapping[str, Any]) -> ConsumerConfig:
    config = wire.decode(ConsumerConfig, fields)
    own = {key: value for key, value in (config.metadata or {}).items() if not key.startswith("_nats.")}
    filled: dict[str, Any] = {"metadata": own or None}
    filled["deliver_policy"] = config.deliver_policy or "all"
    filled["ack_policy"] = config.ack_policy or "none"
    filled["replay_policy"] = config.replay_policy or "instant"
    filled["max_deliver"] = config.max_deliver or -1
    filled["max_waiting"] = config.max_waiting or DEFAULT_MAX_WAITING
    if filled["ack_policy"] != "none":
        filled["ack_wait_s"] = config.backoff_s[0] if config.backoff_s else config.ack_wait_s or DEFAULT_ACK_WAIT_S
        filled["max_ack_pending"] = config.max_ack_pending or DEFAULT_MAX_ACK_PENDING
    if config.durable_name is None and not config.inactive_threshold_s:
        filled["inactive_threshold_s"] = DEFAULT_INACTIVE_S
    return dataclasses.replace(config, **filled)


def _without_metadata(config: ConsumerConfig) -> ConsumerConfig:
    return dataclasses.replace(config, metadata=None, pause_until=None)


def _check_start(config: ConsumerConfig) -> None:
    if config.deliver_policy == "by_start_sequence" and not config.start_sequence:
        raise server_error(
            400,
            Code.CONSUMER_INVALID_POLICY,
            "consumer delivery policy is deliver by start sequence, but optional start sequence is not set",
        )
    if config.deliver_policy == "by_start_time" and config.start_time is None:
        raise server_error(
            400,
            Code.CONSUMER_INVALID_POLICY,
            "consumer delivery policy is deliver by start time, but optional start time is not set",
        )
    if config.deliver_policy == "last_per_subject" and not (config.filter_subject or config.filter_subjects):
        raise server_error(
            400,
            Code.CONSUMER_INVALID_POLICY,
            "consumer delivery policy is deliver last per subject, but optional filter subject is not set",
        )


def _check_update(present: ConsumerConfig, changed: ConsumerConfig) -> None:
    for field, words in (
        ("deliver_policy", "deliver policy can not be updated"),
        ("start_sequence", "start sequence can not be updated"),
        ("start_time", "start time can not be updated"),
        ("ack_policy", "ack policy can not be updated"),
        ("replay_policy", "replay policy can not be updated"),
    ):
        if getattr(present, field) != getattr(changed, field):
            raise server_error(400, Code.CONSUMER_CREATE_FAILED, words)


def _paused(consumer: ModelConsumer, until: datetime.datetime | None, now: float) -> _Answer:
    is_paused = consumer.paused_until > now
    answer: _Answer = {"paused": is_paused}
    answer["pause_until"] = wire.time_text(until) if until is not None else "0001-01-01T00:00:00Z"
    if is_paused:
        answer["pause_remaining"] = round((consumer.paused_until - now) * 1e9)
    return answer


def _page(name: str, entries: list[Any], body: Mapping[str, Any], limit: int) -> _Answer:
    offset = body.get("offset", 0)
    return {"total": len(entries), "offset": offset, "limit": limit, name: entries[offset : offset + limit]}


def _following(store: Store, body: Mapping[str, Any]) -> Iterable[ModelMessage]:
    """The messages that a query matches, oldest first."""
    wanted = body.get("next_by_subj", ">")
    first = body.get("seq", 0)
    if "start_time" in body:
        moment = wire.parse_time(body["start_time"])
        first = max(first, store.sequence_at(moment.timestamp()) if moment is not None else 0)
    return (each for each in store.messages_from(first) if matches(wanted, each.subject))


def _find(store: Store, body: Mapping[str, Any]) -> ModelMessage:
    """
    Raises:
        MessageNotFound: The stream has no such message.
    """
    found: ModelMessage | None
    if "last_by_subj" in body:
        found = store.get(store.last_of(body["last_by_subj"]))
    elif "next_by_subj" in body or "start_time" in body:
        found = next(iter(_following(store, body)), None)
    else:
        found = store.get(body.get("seq", 0))
    if found is None:
        raise _NO_MESSAGE
    return found


def _stored(message: ModelMessage) -> dict[str, Any]:
    fields = {"subject": message.subject, "seq": message.sequence}
    if message.headers is not None:
        fields["hdrs"] = base64.b64encode(encode(message.headers)).decode()
    if message.data:
        fields["data"] = base64.b64encode(message.data).decode()
    return fields | {"time": time_text(message.time)}


def _direct(stream: str, message: ModelMessage, reply: str, extra: Mapping[str, str] | None = None) -> Delivery:
    headers = Headers(message.headers)
    headers.add("Nats-Stream", stream)
    headers.add("Nats-Subject", message.subject)
    headers.add("Nats-Sequence", str(message.sequence))
    headers.add("Nats-Time-Stamp", time_text(message.time))
    for name, value in (extra or {}).items():
        headers.add(name, value)
    return Delivery(reply, message.data, headers)
