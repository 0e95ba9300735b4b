"""Reply subjects that workers answer on: inboxes of callers, and nothing else. Pure, but for the log.

A worker may publish more than its callers may, and a caller chooses the reply subject of its request. So workers answer
only below prefixes that are known to be those of inboxes. Anything else could be a subject that a stream stores: of
this application, of another one, or of a bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from jetspark.core.arguments import texts
from jetspark.core.subjects import is_subject, matches, overlaps, validate_subject
from jetspark.errors import ConfigError, InvalidSubject

__all__ = ["INBOX_PREFIXES", "ReplyRule", "check_inbox_prefixes", "check_no_stream_stores"]

_logger = logging.getLogger("jetspark.app")

INBOX_PREFIXES = ("_INBOX", "_R_")
"""The prefixes of all official clients, and of the server: for a request from another account, through an export and an
import, the server replaces the reply subject with one of its own."""
LOG_EVERY_S = 60.0
"""Refused requests are logged at most this often: who sends them must not fill the log."""


def check_inbox_prefixes(prefixes: Iterable[str]) -> tuple[str, ...]:
    """The ``inbox_prefixes`` of an application, if workers may answer there.

    Raises:
        ConfigError: A prefix is not the beginning of a subject, or begins one of the server's subjects.
    """
    found = tuple(texts("inbox_prefixes", prefixes, 'a list of prefixes, such as ["_INBOX_shop"]'))
    for prefix in found:
        try:
            first = validate_subject(prefix).split(".")[0]
        except InvalidSubject as error:
            raise ConfigError(f"inbox_prefixes: {error}; expected one such as '_INBOX_shop'") from error
        if first.startswith("$") or first == "_GR_":
            raise ConfigError(f"inbox_prefixes: {prefix!r}: {first} is the server's; expected one like '_INBOX_x'")
    return found


def check_no_stream_stores(prefixes: Iterable[str], streams: Iterable[tuple[str, Collection[str]]]) -> None:
    """
    Args:
        streams: The names and the subjects of an application's streams.

    Raises:
        ConfigError: A stream would store replies.
    """
    for name, subjects in streams:
        for prefix in prefixes:
            stored = next((each for each in subjects if overlaps(each, f"{prefix}.>")), None)
            if stored is not None:
                raise ConfigError(
                    f"stream {name} stores {stored!r}, and callers get replies below {prefix!r}: they would be stored. "
                    "Expected other inboxes (inbox_prefix=, inbox_prefixes=), or narrower subjects"
                )


class ReplyRule:
    """Decides which requests a worker may answer; counts and logs the others."""

    def __init__(self, app: str, prefixes: Iterable[str]) -> None:
        self._app = app
        self.prefixes = tuple(dict.fromkeys((*INBOX_PREFIXES, *prefixes)))
        self._begin_with = tuple(f"{prefix}." for prefix in self.prefixes)
        self.refused = 0
        """Requests that are not answered, because of their reply subject."""
        self._log_at = 0.0

    def allows(self, reply: str, stored: Sequence[str] = ()) -> bool:
        """True if an answer to this subject reaches a caller and no stream; ``stored`` are the subjects of a stream."""
        return (
            reply.startswith(self._begin_with)
            and is_subject(reply)
            and not any(matches(each, reply) for each in stored)
        )

    def refuse(self, subject: str, reply: str, now: float) -> None:
        """Note that a request to ``subject`` is not answered; ``now`` is in seconds of any clock."""
        self.refused += 1
        if now >= self._log_at:
            self._log_at = now + LOG_EVERY_S
            _logger.warning(
                "app %s: request to %s refused: its reply subject %r is not below %s (refused so far: %d). If callers "
                "have inboxes there: App(..., inbox_prefixes=[...])",
                self._app,
                subject,
                reply,
                " or ".join(self.prefixes),
                self.refused,
            )
