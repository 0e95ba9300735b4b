"""Where messages were, one by one and many at once."""

from __future__ import annotations

import pytest

from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.errors import ProtocolError

pytest.importorskip("pyarrow")

from jetspark.lake.reply_subjects import stream_offsets
from jetspark.state.deliveries import delivery

SHORT = "$JS.ACK.S.c.1.{0}.3.1774001670123456789.4"
LONG = "$JS.ACK.hub.ACCT.S.c.1.{0}.3.1774001670123456789.4"


def message(reply: str | None, sequence: int = 7) -> JetStreamMessage:
    return JetStreamMessage("s.a", b"", None if reply is None else reply.format(sequence).encode(), None, None)


@pytest.mark.parametrize(
    "reply", [SHORT, LONG, LONG.replace("hub", "_"), LONG + ".random", SHORT.replace(".S.", '."S.')]
)
def test_a_place_is_what_the_metadata_say(reply: str) -> None:
    found = delivery(message(reply))
    assert found == (7, 3, 1774001670123456789, 4)
    metadata = message(reply).metadata
    assert found[:2] == (metadata.stream_sequence, metadata.consumer_sequence)
    assert found.pending == metadata.pending
    many = stream_offsets([message(reply, sequence) for sequence in range(7, 30_007)])
    assert many.sequences.to_pylist() == list(range(7, 30_007))
    assert set(many.times_us.to_pylist()) == {1774001670123456}


@pytest.mark.parametrize(
    "reply", [None, "", "somewhere.else", "$JS.ACK.S.c.1.7.3.1774001670123456789", "1.2.3.4.5.6.7.8.9.10"]
)
def test_a_message_that_does_not_say_its_place_is_an_error(reply: str | None) -> None:
    with pytest.raises(ProtocolError, match="reply subject"):
        delivery(message(reply))
    for messages in ([message(reply)], [message(SHORT), message(reply)]):
        with pytest.raises(ProtocolError, match="reply subject"):
            stream_offsets(messages)


def test_a_place_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="reply subject"):
        delivery(message(SHORT.replace("{0}", "x")))
    with pytest.raises(ProtocolError, match="reply subject"):
        stream_offsets([message(SHORT.replace("{0}", ""))])
