from __future__ import annotations

import logging

import pytest

from jetspark.core.events import (
    Closed,
    Connected,
    ConnectionEvent,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ReconnectFailed,
    ServersDiscovered,
    SlowConsumer,
    log_event,
)
from jetspark.errors import ConnectionLost, PermissionDenied

LOGGER = logging.getLogger("jetspark.test")


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (Connected("nats://a:1"), logging.DEBUG, "connected to nats://a:1"),
        (Reconnected("nats://a:1"), logging.INFO, "reconnected to nats://a:1"),
        (
            Disconnected("nats://a:1", "reset", 3, 4, 9),
            logging.WARNING,
            "connection to nats://a:1 lost: reset (3 messages unconfirmed, 4 buffered)",
        ),
        (
            ReconnectFailed("nats://a:1", ConnectionLost("no route"), 4),
            logging.WARNING,
            "attempt 4 to reconnect to nats://a:1 failed: no route",
        ),
        (SlowConsumer("a.b", 5), logging.WARNING, "slow consumer on 'a.b': 5 messages dropped"),
        (
            ErrorReported(PermissionDenied("publish", "a")),
            logging.ERROR,
            "permission denied: this user may not publish to 'a'",
        ),
        (
            ErrorReported(PermissionDenied("publish", "a"), is_raised=True),
            logging.DEBUG,
            "permission denied: this user may not publish to 'a'",
        ),
        (LameDuck("nats://a:1"), logging.INFO, "nats://a:1 announced its shutdown (lame duck mode)"),
        (ServersDiscovered(("nats://b:1",)), logging.DEBUG, "ServersDiscovered(servers=('nats://b:1',))"),
        (Closed(None), logging.DEBUG, "Closed(error=None, unsent_messages=0)"),
        (
            Closed(ConnectionLost("100% gone")),
            logging.ERROR,
            "connection closed: 100% gone (0 messages never sent)",
        ),
        (Closed(None, 3), logging.ERROR, "connection closed: by the program (3 messages never sent)"),
    ],
)
def test_each_event_has_its_level_and_words(
    event: ConnectionEvent, level: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        log_event(LOGGER, event)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, text)]
    assert not caplog.records[0].exc_info


def test_an_error_that_was_raised_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise KeyError("in a callback")
    except KeyError as error:
        raised = error
    log_event(LOGGER, ErrorReported(raised))
    assert "test_events.py" in caplog.text
    assert "KeyError" in caplog.text
