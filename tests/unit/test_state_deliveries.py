"""Where a message was, as its reply subject says."""

from __future__ import annotations

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError
from jetspark.state.deliveries import StreamOffset, count_up_to, delivery, sequences_of, token_shift

SHORT = "$JS.ACK.S.c.1.22.333.4444.5"
LONG = "$JS.ACK.domain.account.S.c.1.22.333.4444.5"


def message(reply: str | None) -> CoreMessage:
    return CoreMessage("s", b"", None if reply is None else reply.encode(), None, None)


@pytest.mark.parametrize("reply", [SHORT, LONG, LONG + ".token", LONG + ".token.of.later.servers"])
def test_the_place_of_a_message_is_read_from_each_form_of_the_reply_subject(reply: str) -> None:
    assert delivery(message(reply)) == StreamOffset(sequence=22, consumer_sequence=333, time_ns=4444, pending=5)


@pytest.mark.parametrize(
    "reply", [None, "", "_INBOX.a", SHORT.rpartition(".")[0], SHORT + ".more", "$JS.ACK.S.c.1.a.b.c.d"]
)
def test_any_other_reply_subject_is_a_protocol_error_that_shows_it(reply: str | None) -> None:
    with pytest.raises(ProtocolError, match="not the reply subject of a JetStream message") as caught:
        delivery(message(reply))
    assert repr((reply or "").encode()) in str(caught.value)


def test_a_long_reply_subject_is_not_shown_whole() -> None:
    with pytest.raises(ProtocolError) as caught:
        delivery(message("x" * 201))
    assert str(caught.value).count("x") == 200


def test_the_numbers_of_the_long_form_are_two_tokens_behind() -> None:
    assert [token_shift(tokens, b"") for tokens in (9, 11, 12, 20)] == [0, 2, 2, 2]


@pytest.mark.parametrize("count", range(6))
def test_messages_are_counted_up_to_a_sequence_wherever_it_is(count: int) -> None:
    messages = [message(f"$JS.ACK.S.c.1.{2 * number}.{number}.0.0") for number in range(1, count + 1)]
    for last in range(2 * count + 3):
        assert count_up_to(messages, last) == min(last // 2, count)


@pytest.mark.parametrize("sequences", [[], [7], [7, 8, 9], [7, 9], [7, 9, 10], [7, 9, 11], [8, 9, 11, 12], [9, 99]])
@pytest.mark.parametrize("before", ["", "domain.account."])
def test_the_sequences_of_messages_in_order_are_told_with_and_without_gaps(sequences: list[int], before: str) -> None:
    messages = [message(f"$JS.ACK.{before}S.c.1.{each}.{number}.0.0") for number, each in enumerate(sequences, 1)]
    assert list(sequences_of(messages)) == sequences


def test_the_sequences_of_other_messages_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        sequences_of([message("$JS.ACK.S.c.1.1.1.0.0"), message("_INBOX.a"), message("$JS.ACK.S.c.1.9.2.0.0")])
