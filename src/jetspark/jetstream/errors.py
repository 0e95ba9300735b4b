"""Maps the server's error numbers to exception classes, and a missing answer to a reason."""

from __future__ import annotations

import re

from jetspark import errors
from jetspark.codes import Code
from jetspark.core.handshake import ServerInfo

__all__ = ["server_error", "unavailable"]

_BY_ERR_CODE: dict[int, type[errors.ServerError]] = {
    Code.ACCOUNT_RESOURCES_EXCEEDED: errors.InsufficientResources,
    Code.INSUFFICIENT_RESOURCES: errors.InsufficientResources,
    Code.MAXIMUM_CONSUMERS: errors.InsufficientResources,
    Code.MAXIMUM_STREAMS: errors.InsufficientResources,
    Code.MEMORY_EXCEEDED: errors.InsufficientResources,
    Code.STORAGE_EXCEEDED: errors.InsufficientResources,
    Code.CONSUMER_NOT_FOUND: errors.ConsumerNotFound,
    Code.MESSAGE_NOT_FOUND: errors.MessageNotFound,
    Code.NOT_ENABLED_FOR_ACCOUNT: errors.JetStreamNotEnabled,
    Code.STREAM_NAME_IN_USE: errors.StreamNameInUse,
    Code.STREAM_NOT_FOUND: errors.StreamNotFound,
    Code.WRONG_LAST_SEQUENCE: errors.WrongLastSequence,
    Code.NOT_ENABLED: errors.JetStreamNotEnabled,
    Code.WRONG_LAST_SEQUENCE_UNKNOWN: errors.WrongLastSequence,
    Code.CONSUMER_EXISTS: errors.ConsumerNameInUse,
    Code.ATOMIC_DISABLED: errors.AtomicPublishDisabled,
    Code.ATOMIC_INCOMPLETE: errors.BatchIncomplete,
    Code.ATOMIC_TOO_LARGE: errors.BatchTooLarge,
    Code.ATOMIC_DUPLICATE: errors.DuplicateMessageId,
    Code.ATOMIC_TOO_MANY: errors.TooManyBatches,
    Code.FAST_TOO_MANY: errors.TooManyBatches,
    Code.FAST_DISABLED: errors.BatchPublishDisabled,
    Code.FAST_UNKNOWN: errors.BatchUnknown,
}


# Requests that a consumer, or a stream that allows direct gets, answers itself.
_PULL = re.compile(r".+\.CONSUMER\.MSG\.NEXT\.([^.]+)\.([^.]+)")
_DIRECT = re.compile(r".+\.DIRECT\.GET\.([^.]+)(?:\..+)?")
# Requests that JetStream answers, whatever exists.
_API = re.compile(r"((?:.+\.)?API)\.(?:INFO|(?:STREAM|CONSUMER)\..+)")
# Keys, and chunks and names of objects.
_BUCKET = re.compile(r"(?:.+\.)?\$(?:KV|O)\.([^.]+)\..+")
_DOMAIN = re.compile(r"\$JS\.([^.]+)\.API")


def server_error(
    code: int, err_code: int, description: str, stream: str = "", consumer: str = ""
) -> errors.ServerError:
    return _BY_ERR_CODE.get(err_code, errors.ServerError)(code, err_code, description, stream, consumer)


def unavailable(subject: str, info: ServerInfo | None = None, stream: str | None = None) -> errors.JetStreamUnavailable:
    """The error for a JetStream API subject, or a subject that a stream was to store, that has no subscriber.

    ``info`` is the INFO of the connected server; without it the reason is less specific. ``stream`` is the stream that
    stores the subject, if known.
    """
    if stream is not None:
        reason = (
            f"stream {stream!r} stores it and has no leader, so nothing was stored. One is being elected, which passes "
            "within seconds, unless too few of its servers run"
        )
        return errors.JetStreamUnavailable(subject, reason)
    # A server without a cluster holds no elections.
    electing = ", or its leader is being elected, which passes" if info is None or info.cluster else ""
    if info is not None and not info.has_jetstream and not _is_elsewhere(subject):
        reason = _is_off(info)
    elif found := _PULL.fullmatch(subject):
        reason = f"consumer {found[2]!r} of stream {found[1]!r} is gone{electing}"
    elif found := _DIRECT.fullmatch(subject):
        reason = f"stream {found[1]!r} is gone, or does not allow direct gets (allow_direct=True){electing}"
    elif found := _API.fullmatch(subject):
        reason = _is_unreached(found[1])
    elif found := _BUCKET.fullmatch(subject):
        reason = f"bucket {found[1]!r} is gone{electing}"
    elif info is None:
        reason = ""
    else:
        reason = (
            f"no stream of this account stores it{electing}; make one with "
            f"js.create_stream(StreamConfig(name=..., subjects=[{subject!r}]))"
        )
    return errors.JetStreamUnavailable(subject, reason)


def _is_elsewhere(subject: str) -> bool:
    """True for the API of a domain or of another account: the connected server does not answer it itself."""
    found = _API.fullmatch(subject)
    return found is not None and found[1] != "$JS.API"


def _is_off(info: ServerInfo) -> str:
    others = ", and no other of its cluster answers" if info.cluster else ""
    where = f"server {info.name!r}" if info.name else "this server"
    return f"JetStream is off on {where}{others}; start it with -js, or put `jetstream {{}}` into its configuration"


def _is_unreached(prefix: str) -> str:
    if prefix == "$JS.API":
        return "JetStream of this server does not answer: it is starting, or was shut down by a fault; see its log"
    domain = _DOMAIN.fullmatch(prefix)
    which = f"domain={domain[1]!r}" if domain else f"prefix={prefix!r}"
    return f"no JetStream is reached over {prefix!r}; check {which}, and that this account may use it"
