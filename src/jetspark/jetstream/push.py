"""Statuses of push consumers: heartbeats, and flow-control requests of the server."""

from __future__ import annotations

from jetspark.codes import Code
from jetspark.core.message import CoreMessage
from jetspark.errors import ConnectionClosed, ConsumerNotFound, JetSparkError, ServerError
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.operations import Api, Operation

__all__ = ["answer_to", "check_alive", "check_s", "check_status", "silence_s"]

# A busy server may take this long to report on a consumer, however short its heartbeat is.
MIN_CHECK_S = 1.0


def answer_to(message: CoreMessage) -> str | None:
    """The subject for the answer to a flow-control request; None for other messages.

    A request is a status 100 with a reply subject. Should our answer be lost, heartbeats name the subject again.
    """
    if message.raw_reply:
        return message.reply
    return message.headers.get("Nats-Consumer-Stalled")


def check_status(info: ConsumerInfo, code: int, description: str) -> None:
    """Raise for a status that is not a heartbeat.

    Raises:
        ConsumerNotFound: The consumer was deleted.
        ServerError: The status is unknown.
    """
    if code == 409 and "deleted" in description.lower():
        raise ConsumerNotFound(404, Code.CONSUMER_NOT_FOUND.value, "it was deleted", info.stream_name, info.name)
    if code != 409:  # 409 otherwise: its leader changed, and the new leader continues
        raise ServerError(code, 0, description, info.stream_name, info.name)


def check_alive(api: Api, info: ConsumerInfo) -> Operation[None]:
    """Check, after missing heartbeats, that the consumer exists. It counts as existing if no server can tell, or if
    the connection was closed, which ends its subscription too.

    Raises:
        ConsumerNotFound, StreamNotFound: The consumer or its stream was deleted.
    """
    try:
        yield from api.consumer_info(info.stream_name, info.name)
    except JetSparkError as error:
        if not (error.may_pass or isinstance(error, ConnectionClosed)):
            raise


def check_s(silence: float | None, timeout_s: float) -> float:
    """Longest time for that check: no longer than one heartbeat, because the consumer's messages wait for it."""
    return min(timeout_s, max(silence or 0.0, MIN_CHECK_S))


def silence_s(info: ConsumerInfo) -> float | None:
    """Seconds of silence after which to check the consumer; None without a heartbeat."""
    heartbeat_s = info.config.idle_heartbeat_s
    return 2.5 * heartbeat_s if heartbeat_s else None
