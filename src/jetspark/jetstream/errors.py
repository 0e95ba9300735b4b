"""From the server's numbers to classes."""

from __future__ import annotations

from jetspark import errors
from jetspark.jetstream.codes import Code

__all__ = ["server_error"]

_BY_ERR_CODE: dict[int, type[errors.ServerError]] = {
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


def server_error(code: int, err_code: int, description: str) -> errors.ServerError:
    return _BY_ERR_CODE.get(err_code, errors.ServerError)(code, err_code, description)
