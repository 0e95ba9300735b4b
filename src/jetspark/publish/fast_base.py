"""What both drivers' batches and publishers have in common: facts, and telling of losses; nothing that waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jetspark.errors import UsageError
from jetspark.jetstream.info import PubAck
from jetspark.publish.fast import FastMachine
from jetspark.publish.fast_options import Refusal
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.outgoing import Item

__all__ = ["FastBatchBase", "FastPublisherBase"]


class FastBatchBase:
    """The facts of a fast batch."""

    _batch: FastMachine
    _logger: logging.Logger

    @property
    def id(self) -> str:
        """Empty before the first message, unless the caller gave one."""
        return self._batch.id

    @property
    def sequence(self) -> int:
        """How many were added."""
        return self._batch.messages

    @property
    def acknowledged(self) -> int:
        """The server is done with all up to here; in mode ``"fail"`` they are stored."""
        return self._batch.acknowledged

    @property
    def stored(self) -> int:
        """How many are stored for sure; in mode ``"ok"`` known at the end only, and without those in ``doubts``.

        There the server's own count, ``ack.batch_size``, is one of messages sent.
        """
        return self._batch.stored

    @property
    def flow(self) -> int:
        """The server's present pace: messages for each acknowledgement."""
        return self._batch.msgs_per_ack

    @property
    def gaps(self) -> list[range]:
        """Sequences that were lost on the way, each once; counted from 1, in the order of adding."""
        return list(self._batch.gaps)

    @property
    def errors(self) -> list[Refusal]:
        """Messages the server refused, each once; none of them is in ``gaps``, too."""
        return list(self._batch.errors)

    @property
    def doubts(self) -> list[range]:
        """Mode ``"ok"``: sequences of which nobody knows whether they are stored; most of them are.

        Empty unless the connection was lost while messages were under way. The server reports a loss or a refusal once,
        and what it said into the lost connection is not said again. So these are the messages that were sent and not
        acknowledged at that moment, without those that ``gaps`` and ``errors`` have reported since. Publish them again
        with the message ids they had, and each is stored once; without ids, choose between missing and doubled.
        """
        return list(self._batch.doubts)

    @property
    def ack(self) -> PubAck:
        """The final acknowledgement, however the batch ended.

        Raises:
            UsageError: There is none: the batch is still open, nothing was added, or the server did not answer.
        """
        if self._batch.ack is None:
            raise UsageError("the batch has no final acknowledgement: it is open, empty, or was not answered")
        return self._batch.ack

    @property
    def last_sequence(self) -> int:
        """The stream sequence of the last message stored, by the final acknowledgement; 0 while there is none."""
        return self._batch.ack.sequence if self._batch.ack is not None else 0

    def _tell(self, news: list[range | Refusal]) -> None:
        for entry in news:
            if isinstance(entry, range):
                _call(self._batch.options.on_gap, entry, self._logger)
            else:
                _call(self._batch.options.on_error, entry, self._logger)


class FastPublisherBase:
    """The facts of a fast publisher."""

    _publisher: FastPublisherMachine
    _logger: logging.Logger

    def published(self) -> int:
        """Everything up to this position is stored (or was handed to ``on_refused``); it never goes back."""
        return self._publisher.published

    @property
    def accepted(self) -> int:
        """Position of the last message accepted, counted from 1."""
        return self._publisher.accepted

    @property
    def failure(self) -> Exception | None:
        """Why it gave up; None while it works."""
        return self._publisher.failure

    @property
    def pending(self) -> int:
        """Accepted, and not known to be stored."""
        return self._publisher.pending

    @property
    def possibly_doubled(self) -> int:
        """Messages sent again of which nobody knew whether they were stored, without ids to be recognised by."""
        return self._publisher.possibly_doubled

    @property
    def batches(self) -> int:
        """How many it took so far."""
        return self._publisher.batches

    def unpublished(self) -> list[Item]:
        """What is accepted and not known to be stored, in order: after a failure, what to save.

        Once the publisher gave up or was left, this stays as it is: nothing is sent any more. The first ones may be
        stored all the same, because they were on their way.
        """
        return self._publisher.unpublished()

    def _tell(self) -> None:
        machine = self._publisher
        news, machine.news = machine.news, []
        doubled, machine.doubled_news = machine.doubled_news, 0
        for entry in news:
            _call(machine.options.on_refused, entry, self._logger)
        if doubled:
            self._logger.warning(
                "sent %d messages again that may be stored already; message_ids=True avoids it", doubled
            )


def _call(callback: Callable[[Any], None] | None, entry: object, logger: logging.Logger) -> None:
    if callback is None:
        return
    try:
        callback(entry)
    except Exception:
        logger.exception("a callback raised for %r", entry)
