"""What a push consumer says besides messages: heartbeats, and questions whether we keep up."""

from __future__ import annotations

from jetspark.codes import Code
from jetspark.core.message import CoreMessage
from jetspark.errors import ConnectionClosed, ConsumerNotFound, JetSparkError, ServerError
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.operations import Api, Operation

__all__ = ["answer_to", "check_alive", "check_s", "check_status", "silence_s"]

# A busy server may take this long to say whether a consumer is there, however short its heartbeat is.
MIN_CHECK_S = 1.0


def answer_to(message: CoreMessage) -> str | None:
    """Where the server waits to hear that we have come this far; None when it does not.

    It asks by a status 100 with a reply subject. Should our answer be lost, its heartbeats name the subject again.
    """
    if message.raw_reply:
        return message.reply
    return message.headers.get("Nats-Consumer-Stalled")


def check_status(info: ConsumerInfo, code: int, description: str) -> None:
    """A status that is not a heartbeat.

    Raises:
        ConsumerNotFound: The consumer was deleted.
        ServerError: Something we do not know.
    """
    if code == 409 and "deleted" in description.lower():
        raise ConsumerNotFound(404, Code.CONSUMER_NOT_FOUND.value, "it was deleted", info.stream_name, info.name)
    if code != 409:  # 409 otherwise: its leader changed, and the new one goes on
        raise ServerError(code, 0, description, info.stream_name, info.name)


def check_alive(api: Api, info: ConsumerInfo) -> Operation[None]:
    """No heartbeat: whether the consumer is there. If nobody can tell, or the connection was closed, which ends its
    subscription too, it counts as there.

    Raises:
        ConsumerNotFound, StreamNotFound: It is gone.
    """
    try:
        yield from api.consumer_info(info.stream_name, info.name)
    except JetSparkError as error:
        if not (error.may_pass or isinstance(error, ConnectionClosed)):
            raise


def check_s(silence: float | None, timeout_s: float) -> float:
    """How long that may take: what the consumer sends meanwhile waits, so not longer than for the next heartbeat."""
    return min(timeout_s, max(silence or 0.0, MIN_CHECK_S))


def silence_s(info: ConsumerInfo) -> float | None:
    """Seconds of silence after which something is wrong; None when the consumer has no heartbeat."""
    heartbeat_s = info.config.idle_heartbeat_s
    return 2.5 * heartbeat_s if heartbeat_s else None
