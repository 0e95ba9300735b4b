"""What it proves that a stream begins later than it once did. Pure decisions, and one operation that asks the server.

A stream of nothing but events begins later when a limit or a purge has removed events. A stream that holds more loses
other messages as well: a state of an entity replaces the one before it, and a timer goes when it has fired. Then the
first sequence moves although every event is there. The sequences alone do not tell the two apart.

An event does. Limits and purges remove from the front, so as long as an event is there, everything behind it was not
removed by them. Readers note the first event of a stream and the last one they have read (*witnesses*):

* the witness is there: no event behind it was removed from the front;
* the witness is gone: events were removed, and a gap may have been events;
* there is no witness yet: a gap may have been events only where the stream has a limit that removes events.

What is never seen, in any stream: single messages that are deleted, and purges of one subject. In a stream that holds
more than events neither is a purge before the first event was read, because nothing is left that says so.
"""

from __future__ import annotations

from dataclasses import replace

from jetspark.errors import MessageNotFound
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.operations import Api, Operation, message_query
from jetspark.state.scan import Head, head_of

__all__ = ["first_ever", "front_of", "holds_passing_messages", "proves_loss", "removes_by_limits"]

# A limit for each subject that is no limit: clients of buckets expect that there is one.
NO_LIMIT_PER_SUBJECT = 1_000_000_000


def first_ever(config: StreamConfig) -> int:
    """The sequence of the first message that a stream ever had."""
    return max(1, config.first_sequence or 1)


def holds_passing_messages(config: StreamConfig) -> bool:
    """Whether messages of a stream go though nothing is lost: states that replace each other, and timers."""
    return bool(config.allow_rollup or config.allow_message_schedules)


def removes_by_limits(config: StreamConfig) -> bool:
    """Whether a stream removes events by itself: by their age or number, or because they were acknowledged."""
    limits = (config.max_age_s, config.max_messages, config.max_bytes)
    per_subject = config.max_messages_per_subject or 0
    return (
        any(limit is not None and limit > 0 for limit in limits)
        or 0 < per_subject < NO_LIMIT_PER_SUBJECT
        or config.retention not in (None, "limits")
    )


def proves_loss(config: StreamConfig, is_anchor_there: bool | None) -> bool:
    """Whether events may be gone from the front of a stream that begins later than it once did.

    Args:
        is_anchor_there: Whether an event from before the gap is still there; None if none is known.
    """
    if not holds_passing_messages(config):
        return True
    if is_anchor_there is None:
        return removes_by_limits(config)
    return not is_anchor_there


def front_of(api: Api, info: StreamInfo, anchor_sequence: int = 0) -> Operation[Head]:
    """Where a stream begins, and from where on nothing is lost: ``whole_from``.

    Args:
        anchor_sequence: The sequence of an event that the stream had: at or before the next event to read, or the
            first event ever; 0 if unknown.
    """
    head, config = head_of(info), info.config
    if not holds_passing_messages(config):
        return head
    whole = replace(head, kept_from=first_ever(config))
    if head.first <= first_ever(config):
        return whole
    is_there = None
    if anchor_sequence:
        query = message_query(sequence=anchor_sequence)
        try:
            yield from api.get_message(config.name, query, direct=False)
            is_there = True
        except MessageNotFound:
            is_there = False
    return head if proves_loss(config, is_there) else whole
