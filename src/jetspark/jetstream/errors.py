"""From the server's numbers to classes."""

from __future__ import annotations

from jetspark import errors

__all__ = ["server_error"]

# Numbers of nats-server 2.15 (its errors.json), not those of older tables in circulation.
_BY_ERR_CODE: dict[int, type[errors.ServerError]] = {
    10014: errors.ConsumerNotFound,
    10037: errors.MessageNotFound,
    10039: errors.JetStreamNotEnabled,  # for this account
    10058: errors.StreamNameInUse,
    10059: errors.StreamNotFound,
    10071: errors.WrongLastSequence,
    10076: errors.JetStreamNotEnabled,  # on this server
    10164: errors.WrongLastSequence,  # without the number
    10148: errors.ConsumerNameInUse,
    10174: errors.AtomicPublishDisabled,
    10176: errors.BatchIncomplete,
    10199: errors.BatchTooLarge,
    10201: errors.DuplicateMessageId,
    10210: errors.TooManyBatches,  # atomic
    10211: errors.TooManyBatches,  # fast
    10205: errors.BatchPublishDisabled,
    10208: errors.BatchUnknown,
}


def server_error(code: int, err_code: int, description: str) -> errors.ServerError:
    return _BY_ERR_CODE.get(err_code, errors.ServerError)(code, err_code, description)
