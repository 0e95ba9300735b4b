"""The headers for which a publish may be refused, in the server's order of checks.

There are two orders, and a message that breaks two rules shows which one it met. A plain publish to an unreplicated
stream is checked while it is stored: the subject's sequence before the stream's, both before the message id, a rollup
after everything. Batches, and every publish to a replicated stream, are checked before they are proposed to the
replicas: the message id first, then the stream's sequence, then the subject's.

The second kind sees the stream as it is *before* the batch, together with what the batch itself has written so far,
which is what `Staged` keeps: a check that the batch's own writes would falsify cannot be made, and is refused with
10164, "wrong last sequence" without a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from jetspark.codes import Code
from jetspark.jetstream.config import StreamConfig
from jetspark.testing.model.replies import ApiError
from jetspark.testing.model.store import Incoming, Store

__all__ = [
    "EXPECTED_LAST_MSG_ID",
    "IN_PROCESS",
    "MSG_ID",
    "REQUIRED_API_LEVEL",
    "ROLLUP",
    "Staged",
    "is_level_supported",
    "number",
    "refuse_last_id",
    "refuse_plain",
    "refuse_proposal",
]

MSG_ID = "Nats-Msg-Id"
ROLLUP = "Nats-Rollup"
REQUIRED_API_LEVEL = "Nats-Required-Api-Level"
EXPECTED_LAST_MSG_ID = "Nats-Expected-Last-Msg-Id"
_EXPECTED_STREAM = "Nats-Expected-Stream"
_EXPECTED_SEQUENCE = "Nats-Expected-Last-Sequence"
_EXPECTED_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
_EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
_TTL = "Nats-TTL"
_INCREMENT = "Nats-Incr"

# Longer texts are not numbers for the server, which reads 64 bits.
_MAX_DIGITS = 19

# The level that nats-server 2.15 reports.
_API_LEVEL = 5

IN_PROCESS = ApiError(409, Code.DUPLICATE_IN_PROCESS, "duplicate message id is in process")
_STREAM_MISMATCH = ApiError(400, Code.STREAM_MISMATCH, "expected stream does not match")
_WRONG_SEQUENCE_SOMEHOW = ApiError(400, Code.WRONG_LAST_SEQUENCE_UNKNOWN, "wrong last sequence")
_SUBJECT_WITHOUT_SEQUENCE = ApiError(
    400, Code.SUBJECT_WITHOUT_SEQUENCE, "missing sequence for expected last sequence per subject"
)
_TTL_INVALID = ApiError(400, Code.TTL_INVALID, "invalid per-message TTL")
_TTL_DISABLED = ApiError(400, Code.TTL_DISABLED, "per-message TTL is disabled")
_COUNTERS_DISABLED = ApiError(400, Code.COUNTERS_DISABLED, "message counters is disabled")
_ROLLUP_NOT_PERMITTED = ApiError(500, Code.ROLLUP_FAILED, "rollup not permitted")
_ROLLUP_SUBJECT_INVALID = ApiError(500, Code.ROLLUP_FAILED, "batch rollup sub invalid")
_ROLLUP_ALL_INVALID = ApiError(500, Code.ROLLUP_FAILED, "batch rollup all invalid")

# Seconds, or a Go duration of a second or more. Which of these it is matters only to streams that allow TTLs.
_is_ttl = re.compile(r"never|0*[1-9]\d*|(?=.*[1-9])(?:\d+h)?(?:\d+m)?(?:\d+s)?").fullmatch


@dataclass(slots=True)
class Staged:
    """The messages and comparisons of a batch so far, none of them stored yet."""

    of_subject: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    count: int = 0
    size_bytes: int = 0


def is_level_supported(fields: dict[str, str]) -> bool:
    level = fields.get(REQUIRED_API_LEVEL, "")
    return not level or (number(level) is not None and int(level) <= _API_LEVEL)


def refuse_plain(store: Store, message: Incoming, now: float) -> ApiError | int:
    """An error if a plain publish to an unreplicated stream is refused, its original's sequence if a duplicate, or
    0."""
    fields = message.fields
    if fields:
        if (stream := fields.get(_EXPECTED_STREAM)) and stream != store.config.name:
            return _STREAM_MISMATCH
        if (ttl := fields.get(_TTL)) and store.config.allow_message_ttl:
            if not _is_ttl(ttl):
                return _TTL_INVALID
            ttl = None
        if ttl and _is_ttl(ttl):
            return _TTL_DISABLED
        if fields.get(_INCREMENT):
            return _COUNTERS_DISABLED
        if wanted := fields.get(_EXPECTED_SUBJECT_SEQUENCE):
            found = store.last_of(fields.get(_EXPECTED_SUBJECT) or message.subject)
            if found != number(wanted):
                return _wrong_sequence(found)
        elif fields.get(_EXPECTED_SUBJECT):
            return _SUBJECT_WITHOUT_SEQUENCE
        if (wanted := fields.get(_EXPECTED_SEQUENCE)) and store.last_sequence != number(wanted):
            return _wrong_sequence(store.last_sequence)
        if (msg_id := fields.get(MSG_ID)) and (earlier := store.sequence_of(msg_id, now)):
            return earlier
        if (refused := refuse_last_id(store, fields)) is not None:
            return refused
        if (rollup := fields.get(ROLLUP)) and (refused := _refuse_rollup(store.config, rollup)) is not None:
            return refused
        if ttl:
            return _TTL_INVALID
    return store.refuse_one(message, is_rollup=bool(fields.get(ROLLUP))) or 0


def refuse_proposal(store: Store, message: Incoming, staged: Staged, now: float) -> ApiError | int:
    """An error if the next message of a batch is refused, its original's sequence if a duplicate, or 0 once it is
    staged.

    A duplicate of a message that is not stored yet (of the same batch, or proposed by a leader that is cut off) has no
    sequence, and gives -1.

    The stream's sequence may be compared with a wrong one. The server counts proposals, and does not subtract those of
    an atomic batch that was refused; until as many messages are stored, or the next atomic batch is committed, fast
    ingest is compared with that count. Measured on 2.15.1.
    """
    fields, subject = message.fields, message.subject
    if fields:
        if fields.get(_INCREMENT):
            return _COUNTERS_DISABLED
        if (stream := fields.get(_EXPECTED_STREAM)) and stream != store.config.name:
            return _STREAM_MISMATCH
        if ttl := fields.get(_TTL):
            if not store.config.allow_message_ttl:
                return _TTL_DISABLED
            if not _is_ttl(ttl):
                return _TTL_INVALID
        if msg_id := fields.get(MSG_ID):
            if msg_id in staged.ids or msg_id in store.proposed_ids:
                return -1
            if earlier := store.sequence_of(msg_id, now):
                return earlier
            staged.ids.add(msg_id)
        refused = _refuse_sequence(store, fields, staged)
        if refused is None:
            refused = _refuse_subject_sequence(store, message, staged)
        if refused is None and (rollup := fields.get(ROLLUP)):
            refused = _refuse_rollup(store.config, rollup) or _refuse_late_rollup(rollup, subject, staged)
        if refused is not None:
            return refused
    staged.count += 1
    staged.size_bytes += store.size_of(subject, message.data, message.headers)
    of_subject = staged.of_subject[subject] = staged.of_subject.get(subject, 0) + 1
    is_rollup = bool(fields.get(ROLLUP))
    return store.refuse_more(subject, of_subject, staged.count, staged.size_bytes, is_rollup=is_rollup) or 0


def refuse_last_id(store: Store, fields: dict[str, str]) -> ApiError | None:
    """Compare the last message id, which the server does while it stores; in a batch that is too late to be
    reported."""
    if (wanted := fields.get(EXPECTED_LAST_MSG_ID)) and wanted != store.last_id:
        return ApiError(400, Code.WRONG_LAST_MESSAGE_ID, f"wrong last msg ID: {store.last_id}")
    return None


def _refuse_sequence(store: Store, fields: dict[str, str], staged: Staged) -> ApiError | None:
    if not (wanted := fields.get(_EXPECTED_SEQUENCE)):
        return None
    # Only the first message of a batch may have this condition. The refusal of a later one names a sequence that
    # includes the batch's own messages, though none is stored.
    running = max(store.last_sequence + store.proposed_messages, store.proposed_sequence) + staged.count
    if running != number(wanted):
        return _wrong_sequence(running)
    return _WRONG_SEQUENCE_SOMEHOW if staged.count else None


def _refuse_subject_sequence(store: Store, message: Incoming, staged: Staged) -> ApiError | None:
    other = message.fields.get(_EXPECTED_SUBJECT)
    if not (wanted := message.fields.get(_EXPECTED_SUBJECT_SEQUENCE)):
        return _SUBJECT_WITHOUT_SEQUENCE if other else None
    subject = other or message.subject
    # Compared by name: a wildcard that covers the batch's messages is compared with the stream before, and may pass.
    if subject in staged.of_subject:
        return _WRONG_SEQUENCE_SOMEHOW
    found = staged.expected.get(subject)
    if found is None:
        found = store.last_of(subject)
    if found != number(wanted):
        return _wrong_sequence(found)
    staged.expected[subject] = found
    return None


def _refuse_rollup(config: StreamConfig, value: str) -> ApiError | None:
    is_implied = config.allow_message_schedules or config.subject_delete_marker_ttl_s
    if not (config.allow_rollup or is_implied) or config.deny_purge:
        return _ROLLUP_NOT_PERMITTED
    if value.lower() not in ("sub", "all"):
        return ApiError(500, Code.ROLLUP_FAILED, f'rollup value invalid: "{value}"')
    return None


def _refuse_late_rollup(value: str, subject: str, staged: Staged) -> ApiError | None:
    if value.lower() == "all":
        return _ROLLUP_ALL_INVALID if staged.count else None
    return _ROLLUP_SUBJECT_INVALID if subject in staged.of_subject else None


def _wrong_sequence(found: int) -> ApiError:
    return ApiError(400, Code.WRONG_LAST_SEQUENCE, f"wrong last sequence: {found}")


def number(text: str) -> int | None:
    """A sequence as the server reads it: digits only, leading zeros included; None for other texts."""
    return int(text) if text.isdigit() and text.isascii() and len(text) <= _MAX_DIGITS else None
