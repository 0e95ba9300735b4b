"""Detects events that were removed from the front of a stream. Pure decisions, and one operation that asks the server.

If a stream has only events, its first sequence moves only when a limit or a purge removes events. Other streams also
lose messages without a loss of events: a new state of an entity replaces the old one, and a timer is removed when it
fires. The first sequence then moves although every event is still there, so sequences alone prove nothing.

An event proves more. Limits and purges remove from the front, so while an event exists they have removed nothing after
it. Readers save the sequences of the first event and of the last event read (*anchors*):

* the anchor exists: no later event was removed from the front;
* the anchor was removed: events were removed, and a gap may have been events;
* no anchor is known yet: a gap may have been events only if the stream has a limit that removes events.

Deletes of single messages and purges of one subject are not detected in any stream. In a stream with other messages a
purge before the first event was read is not detected either.
"""

from __future__ import annotations

from dataclasses import replace

from jetspark.errors import MessageNotFound
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.operations import Api, Operation, message_query
from jetspark.state.scan import Head, head_of

__all__ = ["first_ever", "front_of", "holds_passing_messages", "proves_loss", "removes_by_limits"]

# A limit for each subject that is never reached: clients of buckets require some limit.
NO_LIMIT_PER_SUBJECT = 1_000_000_000


def first_ever(config: StreamConfig) -> int:
    """The sequence of the first message that a stream ever had."""
    return max(1, config.first_sequence or 1)


def holds_passing_messages(config: StreamConfig) -> bool:
    """True if a stream removes messages without losing events: replaced states, and timers."""
    return bool(config.allow_rollup or config.allow_message_schedules)


def removes_by_limits(config: StreamConfig) -> bool:
    """True if a stream removes events by itself: by age or number, or after an acknowledgement."""
    limits = (config.max_age_s, config.max_messages, config.max_bytes)
    per_subject = config.max_messages_per_subject or 0
    return (
        any(limit is not None and limit > 0 for limit in limits)
        or 0 < per_subject < NO_LIMIT_PER_SUBJECT
        or config.retention not in (None, "limits")
    )


def proves_loss(config: StreamConfig, is_anchor_there: bool | None) -> bool:
    """True if events may have been removed from the front of a stream whose first sequence has moved.

    Args:
        is_anchor_there: True if an event from before the gap still exists; None if no such event is known.
    """
    if not holds_passing_messages(config):
        return True
    if is_anchor_there is None:
        return removes_by_limits(config)
    return not is_anchor_there


def front_of(api: Api, info: StreamInfo, anchor_sequence: int = 0) -> Operation[Head]:
    """The head of a stream, with ``whole_from``: the sequence from which no event is lost.

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
