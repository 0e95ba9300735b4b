"""The numbers by which JetStream says why it refuses (``err_code``): those that decisions depend on.

They are nats-server 2.15's own (its ``errors.json``); older tables in circulation have other ones.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Code"]


class Code(IntEnum):
    """Named as the server names them, without its prefixes."""

    ACCOUNT_RESOURCES_EXCEEDED = 10002
    CONSUMER_NOT_FOUND = 10014
    INSUFFICIENT_RESOURCES = 10023
    MAXIMUM_CONSUMERS = 10026
    MAXIMUM_STREAMS = 10027
    MEMORY_EXCEEDED = 10028
    MESSAGE_NOT_FOUND = 10037
    NOT_ENABLED_FOR_ACCOUNT = 10039
    STORAGE_EXCEEDED = 10047
    MESSAGE_TOO_LARGE = 10054
    STREAM_NAME_IN_USE = 10058
    STREAM_NOT_FOUND = 10059
    WRONG_LAST_SEQUENCE = 10071
    NOT_ENABLED = 10076
    STREAM_SEALED = 10109
    CONSUMER_EXISTS = 10148
    DUPLICATE_IN_PROCESS = 10158
    """A message with this id is being replicated: it will be a duplicate soon."""
    WRONG_LAST_SEQUENCE_UNKNOWN = 10164
    """As ``WRONG_LAST_SEQUENCE``, by a leader that does not know the right one."""
    TTL_DISABLED = 10166
    TOO_MANY_REQUESTS = 10167
    ATOMIC_DISABLED = 10174
    ATOMIC_INCOMPLETE = 10176
    API_LEVEL_REQUIRED = 10185
    SCHEDULES_DISABLED = 10188
    SCHEDULE_PATTERN_INVALID = 10189
    ATOMIC_TOO_LARGE = 10199
    ATOMIC_DUPLICATE = 10201
    FAST_DISABLED = 10205
    FAST_PATTERN_INVALID = 10206
    FAST_ID_INVALID = 10207
    FAST_UNKNOWN = 10208
    ATOMIC_TOO_MANY = 10210
    FAST_TOO_MANY = 10211
    SCHEDULE_TIME_ZONE_INVALID = 10223
