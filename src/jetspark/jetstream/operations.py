"""Every request to the JetStream API, written once as generators that both drivers run.

:mod:`jetspark.core.step_runner` states the contract between a generator and its driver.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from jetspark.core.arguments import flag, instance, text
from jetspark.core.connection import Connection
from jetspark.core.handshake import ServerInfo
from jetspark.core.headers import HeadersLike
from jetspark.core.message import CoreMessage
from jetspark.core.numbers import UINT64, whole
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import MAX_SUBJECT_BYTES, ApiSubject, is_subject, validate_filter, validate_subject
from jetspark.errors import (
    ConfigError,
    ConsumerNameInUse,
    ConsumerNotFound,
    JetSparkError,
    JetStreamUnavailable,
    MessageNotFound,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    StreamNameInUse,
    StreamNotFound,
)
from jetspark.jetstream import features, wire
from jetspark.jetstream.checks import check_config, check_name
from jetspark.jetstream.config import ConsumerConfig, Placement, StreamConfig
from jetspark.jetstream.features import Feature, ServerFacts
from jetspark.jetstream.info import AccountInfo, ConsumerInfo, StoredMessage, StreamInfo

__all__ = [
    "DEFAULT_PREFIX",
    "LEADERLESS_RETRIES",
    "LEADERLESS_WAIT_S",
    "Api",
    "Deadline",
    "Operation",
    "Request",
    "api_prefix",
    "direct_get",
    "message_query",
]

T = TypeVar("T")

# "No responders" to a publish means that no stream received it, so nothing was stored and a second request cannot store
# it twice. The cause is a stream without a leader, or a missing stream, hence few retries. After a timeout the request
# is never repeated: the message may have been stored.
LEADERLESS_RETRIES = 3
LEADERLESS_WAIT_S = 0.25
# After that a cluster is asked whether any stream stores the subject: if so, the election is waited for. The server
# that knows may be the one that died, so no answer within this time counts as an election, too.
ELECTION_CHECK_S = 1.0

# Pause between checks whether a cluster has applied a request; it takes milliseconds.
APPLIED_PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Request:
    """Send ``data`` to ``subject`` (complete, prefix included); the answer is the reply."""

    subject: str
    data: bytes = b""
    headers: HeadersLike | None = None
    may_be_leaderless: bool = False
    """"No responders" may mean that a leader is being elected: repeat the request for a short while."""
    is_silent: bool = False
    """The request is sent without waiting; the answer is meaningless."""
    is_next_page: bool = False
    """The request for a later page of a listing of unknown length: the time of the operation starts again."""


# Steps, with the type of the only answer that an operation uses.
Operation: TypeAlias = Generator[Request | Sleep, CoreMessage, T]


class Deadline:
    """The time limit of one operation, shared by all of its requests.

    With ``for_each`` every request has the whole time: for operations of unknown length, which have other bounds.
    """

    __slots__ = ("_at", "_for_each", "_is_electing", "_is_new", "_retries", "stream", "timeout_s")

    # Set by begin().
    _at: float
    _retries: int

    def __init__(self, timeout_s: float, *, for_each: bool = False) -> None:
        self.timeout_s, self._for_each = timeout_s, for_each
        self._is_new = True
        self._is_electing = False
        self.stream: str | None = None
        """The stream whose leader is being elected; None if it is unknown, or was not looked up."""

    def begin(self, request: Request, now: float) -> float:
        """Seconds that this request may take.

        Raises:
            RequestTimeout: No time is left, so the request must not be sent.
        """
        self._retries = LEADERLESS_RETRIES if request.may_be_leaderless else 0
        if self._is_new or self._for_each or request.is_next_page:
            self._is_new = False
            self._at = now + self.timeout_s
            return self.timeout_s  # 0 is valid: the caller sends a request without waiting for the answer
        if now < self._at or request.is_silent:
            return max(self._at - now, 0.0)
        raise RequestTimeout(f"request to {request.subject!r}", self.timeout_s)

    def retry_after_s(self, now: float) -> float | None:
        """Seconds to wait before a request without responders is repeated; None if it must not be repeated."""
        if now + LEADERLESS_WAIT_S >= self._at or (not self._retries and not self._is_electing):
            return None
        self._retries = max(0, self._retries - 1)
        return LEADERLESS_WAIT_S

    def election_check_s(self, request: Request, now: float, info: ServerInfo) -> float | None:
        """Seconds for :meth:`Api.find_streams_of` after a request without responders; None if it is useless or too
        early.

        A server without a cluster holds no elections.
        """
        left_s = self._at - now - LEADERLESS_WAIT_S
        may_be_electing = bool(info.cluster) and request.may_be_leaderless and not self._is_electing
        return min(left_s, ELECTION_CHECK_S) if may_be_electing and not self._retries and left_s > 0 else None

    def set_streams(self, names: list[str] | None) -> None:
        """Record the streams that store the subject of the request; None if they are unknown."""
        self._is_electing = names is None or bool(names)
        self.stream = names[0] if names else None

    def left_s(self, now: float) -> float:
        """Seconds left for the same request, sent again."""
        return max(self._at - now, 0.0)

    def of_all(self, error: RequestTimeout) -> RequestTimeout:
        """The timeout of one request as a timeout of the operation, whose limit is known to the caller."""
        if error.timeout_s == self.timeout_s:
            return error
        return RequestTimeout(error.what, self.timeout_s, error.was_sent)


def api_prefix(domain: str | None, prefix: str | None, default_domain: str | None = None) -> str:
    """The prefix of API subjects: the default, a domain's, or the one of an import."""
    if prefix is None and domain is None:
        domain = default_domain
    if domain is not None and prefix is not None:
        raise ConfigError(f"domain={domain!r} with prefix={prefix!r}: expected one of the two")
    if domain is not None:
        return f"$JS.{check_name('domain', domain)}.API"
    if prefix is not None:
        return validate_subject(text("prefix", prefix).rstrip("."))
    return "$JS.API"


DEFAULT_PREFIX = "$JS.API"


@dataclass(frozen=True, slots=True)
class Api:
    """The requests of one API prefix."""

    prefix: str = DEFAULT_PREFIX
    connection: Connection | None = None
    """The connection whose server is asked; without it the server is unknown."""
    _heard: dict[int, ServerFacts] = dataclasses.field(default_factory=dict, compare=False)
    """By session of the connection: the facts in the server's answer, for the last session only."""

    # ---- the server --------------------------------------------------------------------------------------------

    def known(self) -> ServerFacts:
        """The facts about the server that need no request."""
        connection = self.connection
        if connection is None:
            return features.UNKNOWN
        if self.prefix == DEFAULT_PREFIX and connection.info.has_jetstream:
            return features.facts_of(connection.info)
        return self._heard.get(connection.sessions, features.UNKNOWN)

    def facts(self) -> Operation[ServerFacts]:
        """The facts about the server; requested once in a session, and only if unknown."""
        facts = self.known()
        connection = self.connection
        if connection is None or facts.level is not None or connection.sessions in self._heard:
            return facts
        session = connection.sessions
        try:
            reply = yield from self._ask("INFO")
            facts = ServerFacts(features.level_in(reply), "")
        except JetStreamUnavailable:
            return facts  # not remembered, so that the next call asks again
        except (PermissionDenied, ServerError, ProtocolError):
            pass  # continue without: a real fault shows in the request that needs the facts
        self._heard.clear()
        self._heard[session] = facts
        return facts

    def require(self, feature: Feature) -> Operation[None]:
        """Raises:
        FeatureUnavailable: The server is too old for it.
        """
        feature.check((yield from self.facts()))

    def _check_config(self, config: StreamConfig | ConsumerConfig) -> Operation[None]:
        mentioned = wire.required(config)
        if mentioned:
            features.check_config(mentioned, (yield from self.facts()))

    # ---- the account -------------------------------------------------------------------------------------------

    def account_info(self) -> Operation[AccountInfo]:
        # Some descriptions say ACCOUNT.INFO; nats-server answers on INFO, and not at all on anything unknown.
        reply = yield from self._ask("INFO")
        return wire.decode(AccountInfo, _untyped(reply))

    # ---- streams -----------------------------------------------------------------------------------------------

    def create_stream(self, config: StreamConfig | str) -> Operation[StreamInfo]:
        config = check_config(StreamConfig, config, name="name")
        yield from self._check_config(config)
        reply = yield from self._ask_stream("CREATE", config.name, wire.encode(config))
        return _stream_info(reply)

    def update_stream(self, config: StreamConfig) -> Operation[StreamInfo]:
        """Change the fields set in ``config``; all others stay as they are."""
        check_config(StreamConfig, config)
        yield from self._check_config(config)
        present = yield from self._ask_stream("INFO", config.name)
        changed = _merged(_object(present, "config"), wire.encode(config))
        reply = yield from self._ask_stream("UPDATE", config.name, changed)
        return _stream_info(reply)

    def create_or_update_stream(self, config: StreamConfig | str) -> Operation[StreamInfo]:
        config = check_config(StreamConfig, config, name="name")
        try:
            return (yield from self.update_stream(config))
        except StreamNotFound:
            return (yield from self.create_stream(config))

    def get_or_create_stream(self, config: StreamConfig | str) -> Operation[StreamInfo]:
        """The stream as it is; created if it does not exist."""
        config = check_config(StreamConfig, config, name="name")
        try:
            return (yield from self.stream_info(config.name))
        except StreamNotFound:
            pass
        try:
            return (yield from self.create_stream(config))
        except StreamNameInUse:  # created by another client since
            return (yield from self.stream_info(config.name))

    def stream_info(
        self, name: str, subjects_filter: str | None = None, deleted_details: bool = False
    ) -> Operation[StreamInfo]:
        body: dict[str, Any] = {}
        if flag("deleted_details", deleted_details):
            body["deleted_details"] = True
        if subjects_filter is not None:
            body["subjects_filter"] = validate_filter(text("subjects_filter", subjects_filter))
        subjects: dict[str, int] = {}
        while True:
            # Subjects come in pages of 100,000; the rest of the reply is the same each time.
            page = {"offset": len(subjects)} if subjects else {}
            reply = yield from self._ask_stream("INFO", name, body | page, is_next_page=bool(subjects))
            state = _object(reply, "state")
            known = len(subjects)
            subjects |= _object(state, "subjects") if state.get("subjects") else {}
            if len(subjects) == known or len(subjects) >= _number(reply, "total"):
                break
        if subjects:
            state["subjects"] = subjects
        return _stream_info(reply)

    def delete_stream(self, name: str) -> Operation[None]:
        yield from self._ask_stream("DELETE", name)

    def purge_stream(
        self, name: str, subject: str | None = None, up_to_sequence: int | None = None, keep: int | None = None
    ) -> Operation[int]:
        if up_to_sequence is not None and keep is not None:
            raise ConfigError(f"up_to_sequence={up_to_sequence} with keep={keep}: expected one of the two")
        body: dict[str, Any] = {"filter": validate_filter(subject)} if subject is not None else {}
        if up_to_sequence is not None:
            # The server purges *below* its `seq`; our parameter is inclusive.
            body["seq"] = whole("up_to_sequence", up_to_sequence, low=0, high=UINT64 - 1) + 1
        if keep is not None:
            body["keep"] = whole("keep", keep, low=0)
        reply = yield from self._ask_stream("PURGE", name, body)
        return _number(reply, "purged")

    def step_down_stream(self, name: str, placement: Placement | None = None) -> Operation[None]:
        body = {}
        if placement is not None:
            body["placement"] = wire.encode(instance("placement", placement, Placement))
        yield from self._ask_stream("LEADER.STEPDOWN", name, body)

    def stream_page(self, offset: int, subject: str | None) -> Operation[tuple[list[StreamInfo], int]]:
        """Infos from ``offset`` on, and the total number."""
        reply = yield from self._ask("STREAM.LIST", _page(offset, subject))
        return [_stream_info(each) for each in _list(reply, "streams")], _number(reply, "total")

    def stream_name_page(self, offset: int, subject: str | None) -> Operation[tuple[list[str], int]]:
        reply = yield from self._ask("STREAM.NAMES", _page(offset, subject))
        return _names(reply, "streams"), _number(reply, "total")

    def find_streams_of(self, subject: str, deadline: Deadline) -> Operation[None]:
        """Find the streams that store a subject, to tell an election from a missing stream; recorded in the
        deadline."""
        try:
            names, _ = yield from self.stream_name_page(0, subject)
        except JetSparkError:  # the cluster has no leader, or this user may not ask
            deadline.set_streams(None)
        else:
            deadline.set_streams(names)

    # ---- messages ----------------------------------------------------------------------------------------------

    def get_message(self, stream: str, body: Mapping[str, Any], *, direct: bool) -> Operation[StoredMessage]:
        """One message; ``direct`` may be answered by any replica, and needs ``allow_direct``.

        The last message of one subject is asked for on a subject that ends with it (:func:`direct_get`), so that a
        user's permissions can name the subjects it may read.
        """
        check_name("stream", stream)
        try:
            if direct:
                return StoredMessage.from_direct((yield direct_get(self.prefix, stream, body)))
            reply = yield from self._ask_stream("MSG.GET", stream, body)
            return StoredMessage.from_reply(stream, reply)
        except MessageNotFound as error:
            wanted = _wanted(body)
            raise MessageNotFound(error.code, error.err_code, error.description, stream, wanted=wanted) from None

    def delete_message(self, stream: str, sequence: int, *, erase: bool) -> Operation[None]:
        body = {"seq": whole("sequence", sequence, high=UINT64)} | ({} if flag("erase", erase) else {"no_erase": True})
        yield from self._ask_stream("MSG.DELETE", check_name("stream", stream), body)

    # ---- consumers ---------------------------------------------------------------------------------------------

    def create_consumer(self, stream: str, config: ConsumerConfig) -> Operation[ConsumerInfo]:
        check_name("stream", stream)
        check_config(ConsumerConfig, config)
        yield from self._check_config(config)
        name = config.name or config.durable_name
        if config.ack_policy is None:
            # The server's own default is "none", which loses messages; that has to be chosen explicitly.
            config = dataclasses.replace(config, ack_policy="explicit")
        body = {"stream_name": stream, "config": _consumer_fields(config), "action": "create"}
        if name is None:
            reply = yield from self._ask(f"CONSUMER.CREATE.{stream}", body, stream=stream)
        else:
            reply = yield from self._ask(
                _consumer_subject(stream, name, config.filter_subject), body, stream=stream, consumer=name
            )
        return _consumer_info(reply)

    def update_consumer(self, stream: str, config: ConsumerConfig) -> Operation[ConsumerInfo]:
        """Change the fields set in ``config``; all others stay as they are."""
        check_config(ConsumerConfig, config)
        name = config.name or config.durable_name
        if name is None:
            raise ConfigError("update_consumer: expected name or durable_name to say which one")
        yield from self._check_config(config)
        present = yield from self._ask_consumer("INFO", stream, name)
        # Merged as the server wrote it: our own types would cut nanoseconds off a start time it refuses to change.
        fields = _merged(_object(present, "config"), _consumer_fields(config))
        if config.filter_subject and not config.filter_subjects:
            fields.pop("filter_subjects", None)
        elif config.filter_subjects:
            fields.pop("filter_subject", None)
        body = {"stream_name": stream, "config": fields, "action": "update"}
        reply = yield from self._ask(
            _consumer_subject(stream, name, fields.get("filter_subject")), body, stream=stream, consumer=name
        )
        return _consumer_info(reply)

    def create_or_update_consumer(self, stream: str, config: ConsumerConfig) -> Operation[ConsumerInfo]:
        check_config(ConsumerConfig, config)
        # Not the server's own "either": that resets everything the configuration does not mention.
        if config.name is not None or config.durable_name is not None:
            try:
                return (yield from self.update_consumer(stream, config))
            except ConsumerNotFound:
                pass
        return (yield from self.create_consumer(stream, config))

    def get_or_create_consumer(self, stream: str, config: ConsumerConfig) -> Operation[ConsumerInfo]:
        """The consumer as it is; created if it does not exist."""
        check_config(ConsumerConfig, config)
        name = config.name or config.durable_name
        if name is None:
            raise ConfigError("get_or_create_consumer: name or durable_name must say which consumer")
        try:
            return (yield from self.consumer_info(stream, name))
        except ConsumerNotFound:
            pass
        try:
            return (yield from self.create_consumer(stream, config))
        except ConsumerNameInUse:  # created by another client since
            return (yield from self.consumer_info(stream, name))

    def consumer_info(self, stream: str, name: str) -> Operation[ConsumerInfo]:
        reply = yield from self._ask_consumer("INFO", stream, name)
        return _consumer_info(reply)

    def delete_consumer(self, stream: str, name: str) -> Operation[None]:
        yield from self._ask_consumer("DELETE", stream, name)

    def pause_consumer(
        self, stream: str, name: str, until: datetime.datetime | None, timeout_s: float
    ) -> Operation[None]:
        """Pause until this moment, or resume; returns when the consumer's own configuration shows it.

        Raises:
            RequestTimeout: It does not show within ``timeout_s``.
        """
        yield from self.require(features.CONSUMER_PAUSE)
        moment = wire.time_text(until) if until is not None else None
        yield from self._ask_consumer("PAUSE", stream, name, {"pause_until": moment} if moment is not None else {})
        # In a cluster the answer confirms only the proposal, which is lost if the other servers miss it (2.15.1).
        expected, waited_s = wire.parse_time(moment) if moment is not None else None, 0.0
        while (yield from self.consumer_info(stream, name)).config.pause_until != expected:
            if waited_s >= timeout_s:
                raise RequestTimeout(f"pause of consumer {name!r} of stream {stream!r}", timeout_s)
            yield Sleep(APPLIED_PAUSE_S)
            waited_s += APPLIED_PAUSE_S

    def reset_consumer(self, stream: str, name: str, sequence: int | None) -> Operation[ConsumerInfo]:
        body = {"seq": whole("sequence", sequence, high=UINT64)} if sequence is not None else {}
        yield from self.require(features.CONSUMER_RESET)
        reply = yield from self._ask_consumer("RESET", stream, name, body)
        return _consumer_info(reply)

    def unpin_consumer(self, stream: str, name: str, group: str) -> Operation[None]:
        text("group", group)
        yield from self.require(features.CONSUMER_UNPIN)
        yield from self._ask_consumer("UNPIN", stream, name, {"group": group})

    def step_down_consumer(self, stream: str, name: str) -> Operation[None]:
        yield from self._ask_consumer("LEADER.STEPDOWN", stream, name)

    def consumer_page(self, stream: str, offset: int) -> Operation[tuple[list[ConsumerInfo], int]]:
        reply = yield from self._ask(f"CONSUMER.LIST.{check_name('stream', stream)}", {"offset": offset}, stream=stream)
        return [_consumer_info(each) for each in _list(reply, "consumers")], _number(reply, "total")

    def consumer_name_page(self, stream: str, offset: int) -> Operation[tuple[list[str], int]]:
        reply = yield from self._ask(
            f"CONSUMER.NAMES.{check_name('stream', stream)}", {"offset": offset}, stream=stream
        )
        return _names(reply, "consumers"), _number(reply, "total")

    # ---- small steps -------------------------------------------------------------------------------------------

    def _ask_stream(
        self, what: str, name: str, body: Mapping[str, Any] | None = None, *, is_next_page: bool = False
    ) -> Operation[dict[str, Any]]:
        subject = f"STREAM.{what}.{check_name('name', name)}"
        return self._ask(subject, body, stream=name, is_next_page=is_next_page)

    def _ask_consumer(
        self, what: str, stream: str, name: str, body: Mapping[str, Any] | None = None
    ) -> Operation[dict[str, Any]]:
        subject = f"CONSUMER.{what}.{check_name('stream', stream)}.{check_name('name', name)}"
        return self._ask(subject, body, stream=stream, consumer=name)

    def _ask(
        self,
        what: str,
        body: Mapping[str, Any] | None = None,
        *,
        stream: str = "",
        consumer: str = "",
        is_next_page: bool = False,
    ) -> Operation[dict[str, Any]]:
        subject = f"{self.prefix}.{what}"
        if isinstance(what, ApiSubject):
            subject = ApiSubject(subject)
        message = yield Request(subject, _json(body) if body else b"", is_next_page=is_next_page)
        return wire.read_reply(message.data, stream, consumer)


def _consumer_subject(stream: str, name: str, filter_subject: str | None) -> str:
    # The filter in the subject lets permissions say who may consume what.
    if filter_subject:
        return ApiSubject(f"CONSUMER.CREATE.{stream}.{name}.{filter_subject}")
    return f"CONSUMER.CREATE.{stream}.{name}"


def message_query(
    *, sequence: int | None = None, last_for: str | None = None, next_for: str | None = None
) -> dict[str, Any]:
    """The body that names one message: by sequence, the last on a subject, or the next on a filter from a sequence."""
    if last_for is not None:
        if sequence is not None or next_for is not None:
            raise ConfigError("last_for: expected neither sequence nor next_for beside it")
        return {"last_by_subj": validate_filter(text("last_for", last_for))}
    if next_for is not None:
        first = 1 if sequence is None else whole("sequence", sequence, high=UINT64)
        return {"seq": first, "next_by_subj": validate_filter(text("next_for", next_for))}
    return {"seq": whole("sequence", sequence, high=UINT64, instead="or last_for or next_for instead")}


def direct_get(prefix: str, stream: str, query: Mapping[str, Any]) -> Request:
    """Ask any replica for the message that ``query`` (of :func:`message_query`) names.

    The request for the last message of one subject has the subject at its end: ``DIRECT.GET.<stream>.<subject>``. A
    user who may publish to that can read this subject and no other. All other queries are in the body of a request to
    ``DIRECT.GET.<stream>``, which opens the whole stream.
    """
    subject = f"{prefix}.DIRECT.GET.{stream}"
    if query.keys() == {"last_by_subj"}:
        narrow = f"{subject}.{query['last_by_subj']}"
        # The server takes wildcards and longer subjects only in the body.
        if is_subject(query["last_by_subj"]) and len(narrow.encode()) <= MAX_SUBJECT_BYTES:
            return Request(narrow)
    return Request(subject, _json(query))


def _wanted(query: Mapping[str, Any]) -> str:
    """The message of a query, in words."""
    if "last_by_subj" in query:
        return f"the last one on {query['last_by_subj']!r}"
    if "next_by_subj" in query:
        return f"the next one on {query['next_by_subj']!r} from sequence {query.get('seq')} on"
    return f"sequence {query.get('seq')}"


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def _page(offset: int, subject: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"offset": offset}
    if subject is not None:
        body["subject"] = validate_filter(subject)
    return body


def _object(reply: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = reply.get(name)
    if not isinstance(value, dict):
        raise ProtocolError(f"a reply without {name}: {str(reply)[:80]}")
    return value


def _list(reply: Mapping[str, Any], name: str) -> list[Any]:
    value = reply.get(name) or []
    if not isinstance(value, list):
        raise ProtocolError(f"a reply without a list of {name}: {str(reply)[:80]}")
    return value


def _names(reply: Mapping[str, Any], name: str) -> list[str]:
    names = _list(reply, name)
    if not all(isinstance(each, str) for each in names):
        raise ProtocolError(f"a reply without names of {name}: {str(reply)[:80]}")
    return list(names)


def _number(reply: Mapping[str, Any], name: str) -> int:
    value = reply.get(name, 0)
    if type(value) is not int:
        raise ProtocolError(f"a reply without a number for {name}: {str(reply)[:80]}")
    return value


def _merged(present: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = present | changes
    for name in ("consumer_limits", "placement"):
        if isinstance(changes.get(name), dict) and isinstance(present.get(name), dict):
            result[name] = present[name] | changes[name]
    return result


def _untyped(reply: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise ProtocolError(f"not an object: {str(reply)[:80]}")
    return {name: value for name, value in reply.items() if name not in ("type", "total", "offset", "limit")}


def _stream_info(reply: dict[str, Any]) -> StreamInfo:
    return wire.decode(StreamInfo, _untyped(reply))


def _consumer_info(reply: dict[str, Any]) -> ConsumerInfo:
    return wire.decode(ConsumerInfo, _untyped(reply))


def _consumer_fields(config: ConsumerConfig) -> dict[str, Any]:
    """The fields of a configuration, with the implied ones: the policy of a given start."""
    if config.deliver_policy is None and config.start_sequence is not None:
        config = dataclasses.replace(config, deliver_policy="by_start_sequence")
    elif config.deliver_policy is None and config.start_time is not None:
        config = dataclasses.replace(config, deliver_policy="by_start_time")
    return wire.encode(config)
