"""The NATS client protocol, incoming: chunks of bytes in, messages and control frames out.

Theory of operation. A chunk holds some complete frames and perhaps the beginning of one more. Four readers share it.
Each reads frames where the reader before it stopped, up to the first frame of a kind that it does not read:

* ``_read_run`` reads the usual messages of a stream's consumer: one subscription, subject and size, but different
  payloads and reply subjects. It also reads many answers to one inbox, which differ in payload and in the last token of
  their subject. One regular expression, compiled for exactly these messages, finds them all in one C call.
* ``_read_columns`` reads messages of one subscription that have reply subjects, or many different subjects. A few C
  calls cut them into columns: subjects, reply subjects, sizes, payloads.
* ``_read_lines`` is for plain ``MSG`` frames whose payload has no line break: the chunk is cut at every CRLF by one
  C call, and the pieces are pairs of control line and payload. It stops at the first pair that is anything else (a
  payload of another length than announced, ``HMSG``, a control frame).
* ``_read_frames`` reads every frame and is always correct. It reads to the end of the chunk, so that the loops do not
  cut any byte twice.

A run is expected after ``RUN_AFTER_MESSAGES`` in chunks that began and ended in messages of one kind. The expectation
affects only speed: the expression matches a frame completely, with the announced size and the line break in its place,
or not at all, and the loops read the rest. So a wrong expectation costs next to nothing. A few messages with headers in
between, such as statuses, are read one by one. The expectation survives a ``PING`` or an answer to another request; it
ends when a loop has read a good part of a chunk, and when a subscription is removed. Columns are expected after a chunk
of such messages, until a chunk has other ones.

Messages go to the ``arrived`` list of their subscription and the subscription to ``touched``; all other frames go to
``control``. Both keep the order of the wire; a control frame may overtake messages of its own chunk. A subscription
with ``answer_runs`` gets a run of answers there, in one piece and without message objects; these may overtake answers
of their chunk that were not read as a run.

Until a session is established, :class:`HandshakeReader` reads instead: one frame at a time, and only the five kinds
that a server may send before login. Until then the peer is not authenticated.

Invariants: the division of the stream into chunks never changes the result; bytes that are not NATS raise
:class:`ProtocolError` at most ``MAX_LINE_BYTES`` later; at most one incomplete frame is buffered.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import length_hint
from typing import Any, NamedTuple, Protocol, TypeAlias

from jetspark.core.message import AnswerRun, CoreMessage
from jetspark.errors import ProtocolError

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_MESSAGE_BYTES",
    "Control",
    "Err",
    "HandshakeReader",
    "Info",
    "Parser",
    "Ping",
    "Pong",
    "Route",
]

# INFO is the longest line a server sends: a few hundred bytes, plus some 30 for each of the cluster's addresses.
MAX_LINE_BYTES = 1 << 17
# nats-server refuses a max_payload above 64 MiB; headers count as payload, so nothing larger is a message.
MAX_MESSAGE_BYTES = (64 << 20) + MAX_LINE_BYTES

# Control lines of plain messages repeat: few subjects, few sizes. Remembering what a line means took 128-byte
# messages from 0.83 us to 0.41 us each. Lines with a reply subject are unique, but begin alike.
MAX_KNOWN_LINES = 1024
MAX_KNOWN_SUBJECTS = 1024

# After the fast loop met something it cannot read, this many chunks go straight to the careful one; doubled each time.
MAX_SKIPPED_CHUNKS = 64

# Compiling the expression for a run takes as long as reading a hundred messages without it: runs that end just when
# they are expected cost a fifth more at worst. Chunks of a few messages do not predict the next chunk, except where
# answers are taken in runs, which arrive one by one while the server is not busy.
RUN_AFTER_MESSAGES = 500
MIN_CHUNK_MESSAGES = 16
# Frames that interrupt a run are read one by one, and the run continues behind them: a status after each pull request,
# say. Each interruption copies the rest of the chunk, so it has to stay an exception.
MAX_INTERRUPTIONS = 8
# Few messages in a chunk that could have held more are large, and nothing is saved by reading them together.
LARGE_MESSAGE_BYTES = 4 << 10
# Trying to read columns in vain takes half as long as reading lines; so it is tried less and less often.
MAX_CHUNKS_WITHOUT_COLUMNS = 63


# Not [^\r\n]: excluding one byte takes half the time of excluding two.
_MSG_LINES = re.compile(rb"\r\nMSG ([^\r]+)\r\n")


@dataclass(frozen=True, slots=True)
class Info:
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Err:
    text: str


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Pong:
    pass


Control: TypeAlias = Info | Err | Ping | Pong


class Route(Protocol):
    """Where the messages of one subscription id go."""

    arrived: list[CoreMessage]
    is_inbox: bool
    """Every message has a different subject, so that caching its line is useless."""
    answer_runs: deque[AnswerRun] | None
    """Destination of answers that are read as a run; None if they are read as messages."""
    message_class: type[CoreMessage] | None
    """The class of its messages; None for the connection's."""
    counted_messages: int
    """Number of messages with a reply subject, a known size and no headers."""
    counted_bytes: int
    """Their total size: subjects, reply subjects and data, as a server counts for a pull request."""


class _Kind(NamedTuple):
    """The common part of the control lines of a run."""

    before: bytes
    """The beginning of the line, before the variable part."""
    after: bytes
    subject: str
    """The subject of all messages; or the common beginning of their subjects, before the variable part."""
    route: Route
    has_replies: bool
    """True if the variable part is the reply subject."""


@dataclass(frozen=True, slots=True)
class _Run:
    """An expected run of messages of one kind."""

    kind: _Kind
    frames: re.Pattern[bytes]
    """Matches consecutive messages, and then the rest. The groups are the variable part of the line, payload, rest."""
    uncounted_bytes: int
    """Bytes of each frame that are neither subject, reply subject nor data."""


class _Sizes(dict[bytes, int]):
    """Payload sizes by their text; -1 for an invalid text. A few sizes occur in most messages."""

    def __missing__(self, text: bytes) -> int:
        try:
            size = _size(text)
        except ValueError:
            return -1
        if len(self) >= MAX_KNOWN_LINES:
            self.clear()
        self[text] = size
        return size


class Parser:
    """Reads the byte stream of one connection. Make a new parser for each connection."""

    def __init__(
        self,
        routes: Mapping[bytes, Route],
        message_class: type[CoreMessage] = CoreMessage,
        client: Any = None,
    ) -> None:
        self.control: list[Control] = []
        self.touched: list[Any] = []
        self.chunk_bytes = 0
        """Size of the last chunk read; no message in it is larger."""
        self._routes = routes
        self._message_class = message_class
        self._client = client
        self._tail: list[bytes] = []
        self._missing_bytes = 0
        self._known_lines: dict[bytes, tuple[str, bytes | None, int, Route | None]] = {}
        self._known_beginnings: dict[bytes, tuple[str, Route]] = {}
        self._known_subjects: dict[bytes, str] = {}
        self._skip_chunks = 0
        self._next_skip = 1
        self._run: _Run | None = None
        self._last_kind: _Kind | None = None
        self._alike_messages = 0
        self._known_sizes = _Sizes()
        self._learned = 0
        self._expects_columns = False
        self._column_sid = b""
        """The subscription of the last messages that were read in columns."""
        self._chunks_until_columns = self._next_wait = 0

    def forget_routes(self) -> None:
        """Drop cached lines; required after a subscription id is removed from ``routes``."""
        self._known_lines.clear()
        self._known_beginnings.clear()
        self._run = None

    def receive_data(self, data: bytes) -> None:
        """Read a chunk; its complete frames are added to ``touched`` and ``control``.

        Raises:
            ProtocolError: The peer does not speak NATS. The connection is of no further use.
        """
        tail = b""
        if self._tail:
            # A large message arrives in many chunks: joining them at each arrival would copy it many times.
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                self._tail.append(data)
                return
            tail = b"".join(self._tail)
            self._tail.clear()
            if self._skip_chunks or tail[-1] == 13:  # a line break that lies half in the one, half in the other
                tail, data = b"", tail + data
        self.chunk_bytes = len(tail) + len(data)
        run = self._run
        # Looks at the first bytes before it joins the two parts, because joining copies the chunk. A chunk that begins
        # with another kind of frame is left to the other readers.
        if run is not None and (tail + data[: len(run.kind.before)]).startswith(run.kind.before):
            tail, data = b"", self._read_runs(run, tail + data)
        elif self._expects_columns:
            tail, data = b"", self._read_all_columns(tail + data)
        if self._skip_chunks:
            self._skip_chunks -= 1
            position = 0
        elif (tail or data)[:1] == b"H":  # headers: cutting the chunk at line breaks would be wasted
            position = 0
        else:
            position = self._read_lines(tail, data)
        if position < len(tail) + len(data):
            # The frames that the fast readers left, including the incomplete one at the end: the careful reader either
            # reads them, or keeps them, or raises because they are not NATS.
            rest = data[position - len(tail) :] if position >= len(tail) else tail[position:] + data
            position = self._read_frames(rest)
            if position < len(rest):
                self._tail.append(rest[position:])

    def _read_runs(self, run: _Run, data: bytes) -> bytes:
        """Read messages of an expected run and the few with headers between them; returns what follows."""
        data = self._read_run(run, data)
        for _ in range(MAX_INTERRUPTIONS):
            if not data.startswith(b"HMSG "):
                break
            position = self._read_frames(data, max_frames=1)
            # A status that ends a request is mostly followed by more messages of the run. Where it is not, looking for
            # them would copy the rest of the chunk for nothing.
            if not data.startswith(run.kind.before, position):
                return data[position:]
            data = self._read_run(run, data[position:])
        return data

    def _read_run(self, run: _Run, data: bytes) -> bytes:
        """Read messages of an expected run from the start of ``data``; returns what follows them."""
        # With nothing between the matches, splitting gives their groups as columns, of which messages are made without
        # a loop in Python. An expression that leaves the size open, to be compared afterwards, took 1.4 times as long.
        pieces = run.frames.split(data)  # b"", part, payload, None, b"", part, ...; at the end None, None, rest, b""
        rest = pieces[-2]
        if rest is not None:
            del pieces[-4:]
        rest = rest or b""
        parts, payloads, kind = pieces[1::4], pieces[2::4], run.kind
        if payloads:
            route = kind.route
            if kind.has_replies:
                route.counted_messages += len(payloads)
                route.counted_bytes += len(data) - len(rest) - len(payloads) * run.uncounted_bytes
            self.touched.append(route)
            if route.answer_runs is not None and not kind.has_replies:
                route.answer_runs.append(AnswerRun(kind.subject, parts, payloads))
                return rest
            subjects: Iterable[str] = repeat(kind.subject)
            replies: Iterable[bytes | None] = parts
            if not kind.has_replies:
                # One call decodes all of them; a part has no space in it.
                tokens = b" ".join(parts).decode(errors="surrogateescape").split(" ")
                subjects, replies = map(kind.subject.__add__, tokens), repeat(None)
            route.arrived += map(
                route.message_class or self._message_class,
                subjects,
                payloads,
                replies,
                repeat(None),
                repeat(self._client),
            )
        return rest

    def _read_all_columns(self, data: bytes) -> bytes:
        """Read messages of one subscription and the few others before and between them; returns what follows."""
        for _ in range(MAX_INTERRUPTIONS):
            # Without this test the whole chunk would be cut, only to show that its first frame is of another kind.
            if not self._begins_other(data):
                data = self._read_columns(data)
            if not self._expects_columns or not data.startswith((b"HMSG ", b"MSG ")):
                return data
            position = self._read_frames(data, max_frames=1)
            if not position:
                return data
            data = data[position:]
        return self._read_columns(data)

    def _begins_other(self, data: bytes) -> bool:
        """True if the first frame has headers, or is an answer between the messages of columns."""
        if data.startswith(b"HMSG "):
            return True
        words = data[: data.find(b"\r\n")].split(b" ", 3)
        if len(words) < 4 or words[2] == self._column_sid:
            return False
        route = self._routes.get(words[2])
        return route is not None and route.is_inbox and words[0] == b"MSG"

    def _read_columns(self, data: bytes) -> bytes:
        """Read messages of one subscription, whatever their subjects and sizes; returns what follows them."""
        pieces = _MSG_LINES.split(b"\r\n" + data)  # b"", line, payload, line, ..., payload and what follows it
        lines, payloads = pieces[1::2], pieces[2::2]
        if pieces[0] or len(lines) < MIN_CHUNK_MESSAGES:
            # Few messages in a large chunk are large ones, which gain nothing. Few in a small chunk say nothing about
            # the next chunk: the expectation stays.
            self._expects_columns = len(data) < MIN_CHUNK_MESSAGES * LARGE_MESSAGE_BYTES
            return data
        raw_subjects, sid, replies, sizes = self._columns(lines)
        # Up to the first payload that is not as long as announced: a frame other than a plain message follows it.
        lengths = list(map(len, payloads))
        count = min(len(sizes), len(lines) - 1)
        if lengths[:count] != sizes[:count]:
            count = next(place for place, size in enumerate(sizes) if size != lengths[place])
        if count < MIN_CHUNK_MESSAGES:
            self._expects_columns = False
            self._chunks_until_columns = self._next_wait = min(2 * self._next_wait + 1, MAX_CHUNKS_WITHOUT_COLUMNS)
            return data
        self._next_wait = 0
        self._column_sid = sid
        # The last payload has everything behind it in it, since no further line of a plain message cut it off. If it
        # begins with as many bytes as announced and a line break, the message is complete and the rest another frame.
        rest_bytes = -2
        if count < len(sizes) and sizes[count] >= 0 and payloads[count][sizes[count] :][:2] == b"\r\n":
            rest_bytes = lengths[count] - sizes[count] - 2
            payloads[count] = payloads[count][: sizes[count]]
            count += 1
        rest_bytes += sum([len(b"MSG \r\n\r\n") + len(line) for line in lines[count:]]) + sum(lengths[count:])
        if raw_subjects[0] == raw_subjects[count - 1]:  # probably all: then a run may follow, which is faster
            self._learn(b"MSG " + lines[count - 1])
        self._watch_for_run(b"MSG " + lines[0], b"MSG " + lines[count - 1], count)
        self._deliver_columns(raw_subjects[:count], self._routes.get(sid), replies[:count], payloads[:count])
        return data[len(data) - rest_bytes :] if rest_bytes else b""

    def _columns(self, lines: list[bytes]) -> tuple[list[bytes], bytes, list[bytes], list[int]]:
        """Subjects, subscription, reply subjects and sizes of the leading lines of equal form."""
        # A line contains no CR, so that a CR as a separate word marks the end of a line.
        words = b" \r ".join(lines).split(b" ")
        width = words.index(b"\r") + 1
        sids = words[1::width]
        if (
            width not in (4, 5)
            or len(words) != width * len(lines) - 1
            or words[width - 1 :: width].count(b"\r") != len(lines) - 1
            or sids.count(sids[0]) != len(lines)
            or max(map(len, lines)) > MAX_LINE_BYTES - len(b"MSG ")
        ):
            alike = _alike(lines)
            return self._columns(lines[:alike]) if MIN_CHUNK_MESSAGES <= alike < len(lines) else ([], b"", [], [])
        replies = words[2::width] if width == 5 else []
        return words[::width], sids[0], replies, list(map(self._known_sizes.__getitem__, words[width - 2 :: width]))

    def _deliver_columns(
        self, raw_subjects: list[bytes], route: Route | None, replies: list[bytes], payloads: list[bytes]
    ) -> None:
        if route is None:
            return  # unsubscribed while this was under way
        subjects = b" ".join(raw_subjects)  # one call decodes all of them
        if replies:
            route.counted_messages += len(payloads)
            subject_bytes = len(subjects) - len(payloads) + 1
            route.counted_bytes += subject_bytes + len(b"".join(replies)) + sum(map(len, payloads))
        self.touched.append(route)
        route.arrived += map(
            route.message_class or self._message_class,
            subjects.decode(errors="surrogateescape").split(" "),
            payloads,
            replies or repeat(None),
            repeat(None),
            repeat(self._client),
        )

    def _watch_for_run(self, first_line: bytes, last_line: bytes, messages: int) -> None:
        """Expect a run if enough messages of one kind came in a row; ``messages`` were just read without one."""
        self._run = None
        kind = self._kind(last_line)
        if kind is None:
            return
        # Only the ends of the chunk are compared: a difference in between costs only a run that is given up at once,
        # and comparing every line would cost as much as the run saves.
        if not kind == self._last_kind == self._kind(first_line):
            self._last_kind = kind
            self._alike_messages = 0
            return
        self._alike_messages += messages
        max_part_bytes = MAX_LINE_BYTES - len(kind.before) - len(kind.after)
        if self._alike_messages >= RUN_AFTER_MESSAGES and max_part_bytes > 0:
            # No space and no line break is in the part, or a match could begin in a line and end in a payload.
            line = rb"%b([!-\xff]{1,%d})%b\r\n" % (re.escape(kind.before), max_part_bytes, kind.after)
            frame = line + rb"(.{%b})\r\n" % kind.after.rpartition(b" ")[2]
            subject_bytes = len(kind.subject.encode(errors="surrogateescape"))
            uncounted_bytes = len(kind.before) + len(kind.after) + len(b"\r\n\r\n") - subject_bytes
            self._run = _Run(kind, re.compile(frame + b"|(.+)", re.DOTALL), uncounted_bytes)

    def _watch_for_columns(self, last_line: bytes, messages: int, learned: int) -> None:
        """Expect columns if many of a chunk's lines were not in the cache: ``learned`` of them."""
        # Lines with a reply subject are never cached as a whole; and if a quarter of the lines is new, the cache helps
        # little.
        if last_line.count(b" ") == 4 or 4 * learned > messages:
            self._expects_columns = not self._chunks_until_columns
            self._chunks_until_columns = max(self._chunks_until_columns - 1, 0)

    def _kind(self, line: bytes) -> _Kind | None:
        """The kind of run that this line would belong to; None if it belongs to no run."""
        beginning, last, size_text = line.rsplit(b" ", 2)
        known = self._known_beginnings.get(beginning)
        if known is not None:
            return _Kind(beginning + b" ", b" " + size_text, *known, has_replies=True)
        route = self._routes.get(last)
        # Other lines without a reply subject repeat as a whole, and are cached as such.
        if route is None or not route.is_inbox or beginning.count(b" ") != 1:
            return None
        before = beginning[: beginning.rfind(b".") + 1]
        subject = before[len(b"MSG ") :].decode(errors="surrogateescape")
        return _Kind(before, b" %b %b" % (last, size_text), subject, route, has_replies=False) if subject else None

    def _read_lines(self, tail: bytes, data: bytes) -> int:
        """Read plain messages from the start of ``tail + data``; returns where they end."""
        pieces = data.split(b"\r\n")
        if tail:
            # The pieces of tail + data, without copying a whole chunk for the sake of its first message.
            completed = tail.split(b"\r\n")
            completed[-1] += pieces[0]
            pieces[:1] = completed
        rest = pieces.pop()  # what follows the last CRLF is never complete
        known_lines, known_beginnings = self._known_lines, self._known_beginnings
        message_class, client = self._message_class, self._client
        route: Route | None = None
        last_size_text, last_size = b"", -1
        learned_before = self._learned
        unread = iter(pieces)
        for line, payload in zip(unread, unread, strict=False):
            known = known_lines.get(line)
            if known is not None:
                subject, reply, size, destination = known
            else:
                beginning, reply, size_text = line.rsplit(b" ", 2) if line.count(b" ") == 4 else (b"", None, b"")
                known_beginning = known_beginnings.get(beginning)
                if known_beginning is not None:
                    subject, destination = known_beginning
                    if size_text != last_size_text:  # most are as large as the one before
                        last_size = len(payload) if b"%d" % len(payload) == size_text else -1
                        last_size_text = size_text
                    size = last_size
                else:
                    if line[:4] != b"MSG ":
                        break
                    subject, reply, size, destination = self._learn(line)
            if size != len(payload):
                break
            if destination is not route:
                route = destination
                if route is None:  # unsubscribed while this was under way
                    continue
                self.touched.append(route)
                arrived = route.arrived
                message_class = route.message_class or self._message_class
            elif route is None:
                continue
            arrived.append(message_class(subject, payload, reply, None, client))
        else:
            self._next_skip = 1
            whole = len(pieces) & ~1
            if whole >= 2 * MIN_CHUNK_MESSAGES or (whole and route is not None and route.answer_runs is not None):
                self._watch_for_run(pieces[0], pieces[whole - 2], whole // 2)
                self._watch_for_columns(pieces[whole - 2], whole // 2, self._learned - learned_before)
            unpaired = len(pieces[-1]) + 2 if len(pieces) > whole else 0
            return len(tail) + len(data) - len(rest) - unpaired
        read = len(pieces) - length_hint(unread) - 2  # without the pair that ended the loop
        if read >= 2 * MIN_CHUNK_MESSAGES and line.startswith(b"HMSG "):  # a status among messages that are alike
            self._watch_for_run(pieces[0], pieces[read - 2], read // 2)
            self._watch_for_columns(pieces[read - 2], read // 2, self._learned - learned_before)
        else:
            # A payload with a line break in it, or messages with headers: the careful reader repeats the work of
            # cutting such chunks at every CRLF. So the next chunks go to that one, more of them each time.
            self._skip_chunks = self._next_skip
            self._next_skip = min(self._next_skip * 2, MAX_SKIPPED_CHUNKS)
        return sum(map(len, pieces[:read])) + 2 * read

    def _learn(self, line: bytes) -> tuple[str, bytes | None, int, Route | None]:
        """Parse and cache a ``MSG`` line: subject, reply, payload size, destination."""
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line of over {MAX_LINE_BYTES} bytes: {_show(line)}")
        arguments = line.split(b" ")
        try:
            if len(arguments) == 4:
                _, raw_subject, sid, size_text = arguments
                reply = None
            else:
                _, raw_subject, sid, reply, size_text = arguments
            size = _size(size_text)
        except ValueError:
            raise ProtocolError(f"not a MSG line: {_show(line)}") from None
        destination = self._routes.get(sid)
        known = (self._subject(raw_subject), reply, size, destination)
        if destination is None or destination.is_inbox:
            return known  # unlikely to repeat
        self._learned += 1
        if reply is None:
            # Cleared when full: keeping the most recent lines would cost every hit more than this costs now and then.
            if len(self._known_lines) >= MAX_KNOWN_LINES:
                self._known_lines.clear()
            self._known_lines[line] = known
        else:
            if len(self._known_beginnings) >= MAX_KNOWN_LINES:
                self._known_beginnings.clear()
            self._known_beginnings[b"MSG %b %b" % (raw_subject, sid)] = (known[0], destination)
        return known

    def _subject(self, raw: bytes) -> str:
        subject = self._known_subjects.get(raw)
        if subject is None:
            if len(self._known_subjects) >= MAX_KNOWN_SUBJECTS:
                self._known_subjects.clear()
            # A subject is UTF-8 by convention only; a subject of other bytes must still reach its subscriber.
            subject = self._known_subjects[raw] = raw.decode(errors="surrogateescape")
        return subject

    def _read_frames(self, data: bytes, max_frames: int = -1) -> int:
        """Read every complete frame, or the first ones; returns where the next one begins."""
        position = 0
        length = len(data)
        find = data.find
        while position < length and max_frames:
            max_frames -= 1
            end_of_line = find(b"\r\n", position)
            if end_of_line < 0:
                # A CR at the end may be the first half of the line break.
                if length - position - (data[-1] == 13) > MAX_LINE_BYTES:
                    raise ProtocolError(f"a line of over {MAX_LINE_BYTES} bytes: {_show(data[position:])}")
                if data[position] not in _FIRST_BYTES:
                    raise ProtocolError(f"unknown operation: {_show(data[position:])}")
                self._missing_bytes = 1
                break
            if end_of_line - position > MAX_LINE_BYTES:
                raise ProtocolError(f"a line of over {MAX_LINE_BYTES} bytes: {_show(data[position:])}")
            kind = data[position]
            if kind == 77:  # M
                line = data[position:end_of_line]
                if line[:4] != b"MSG ":
                    raise ProtocolError(f"unknown operation: {_show(line)}")
                subject, reply, size, route = self._known_lines.get(line) or self._learn(line)
                header_size = 0
            elif kind == 72:  # H
                line = data[position:end_of_line]
                subject, reply, header_size, size, route = self._parse_hmsg(line)
            else:
                frame = _control_frame(data[position:end_of_line])
                if frame is not None:
                    self.control.append(frame)
                position = end_of_line + 2
                continue
            start = end_of_line + 2
            end = start + size
            if end + 2 > length:
                # The exact number, so that the chunks of a large message are kept and joined once, when it is complete.
                self._missing_bytes = end + 2 - length
                break
            if data[end : end + 2] != b"\r\n":
                raise ProtocolError(f"no line break after the {size} bytes of: {_show(line)}")
            if route is not None:
                headers = data[start : start + header_size] if header_size else None
                self.touched.append(route)
                message_class = route.message_class or self._message_class
                route.arrived.append(
                    message_class(subject, data[start + header_size : end], reply, headers, self._client)
                )
            position = end + 2
        return position

    def _parse_hmsg(self, line: bytes) -> tuple[str, bytes | None, int, int, Route | None]:
        arguments = line.split(b" ")
        try:
            if len(arguments) == 5:
                operation, raw_subject, sid, header_text, size_text = arguments
                reply = None
            else:
                operation, raw_subject, sid, reply, header_text, size_text = arguments
            header_size, size = _size(header_text), _size(size_text)
        except ValueError:
            raise ProtocolError(f"not an HMSG line: {_show(line)}") from None
        if operation != b"HMSG" or header_size > size:
            raise ProtocolError(f"not an HMSG line: {_show(line)}")
        return self._subject(raw_subject), reply, header_size, size, self._routes.get(sid)


class HandshakeReader:
    """Reads what a peer may send before the session is established: INFO, PING, PONG, +OK and -ERR."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._is_greeted = False

    def receive_data(self, data: bytes) -> None:
        self._unread += data

    @property
    def has_more(self) -> bool:
        """True if bytes follow the frame last returned."""
        return bool(self._unread)

    def next_frame(self) -> Control | None:
        """The next frame, or None when none is complete.

        Raises:
            ProtocolError: The peer sends a message, or does not speak NATS.
        """
        try:
            return self._next_frame()
        except ProtocolError as error:
            beginning = bytes(self._unread[:80])
            if self._is_greeted or beginning.startswith((b"MSG ", b"HMSG ")):
                raise
            raise ProtocolError(f"not a NATS server: {_stranger(beginning)}") from error

    def _next_frame(self) -> Control | None:
        while self._unread:
            end_of_line = self._unread.find(b"\r\n", 0, MAX_LINE_BYTES + 2)
            line = bytes(self._unread[: MAX_LINE_BYTES if end_of_line < 0 else end_of_line])
            if line.startswith((b"MSG ", b"HMSG ")):
                raise ProtocolError(f"a message before the session is established: {_show(line)}")
            if end_of_line < 0 and any(known.startswith(line) for known in (b"MSG ", b"HMSG ", b"HTTP/")):
                return None  # or something else that begins alike
            if line[:1] not in (b"P", b"I", b"+", b"-"):
                raise ProtocolError(f"unknown operation: {_show(line)}")
            if end_of_line < 0:
                if len(self._unread) > MAX_LINE_BYTES + 1:
                    raise ProtocolError(f"a line of over {MAX_LINE_BYTES} bytes: {_show(line)}")
                return None
            frame = _control_frame(line)
            self._is_greeted = True
            del self._unread[: end_of_line + 2]
            if frame is not None:
                return frame
        return None

    def take_rest(self) -> bytes:
        """The bytes behind the frame last returned; they belong to another reader."""
        rest = bytes(self._unread)
        self._unread.clear()
        return rest


def _stranger(beginning: bytes) -> str:
    """A guess at the peer's protocol from its first bytes, with a remedy."""
    shown = _show(beginning.partition(b"\r\n")[0])
    # A record of TLS has its type, 20 to 23, in the first byte: an alert, most likely, because of what we did not send.
    if 20 <= beginning[0] <= 23:
        return (
            f"it speaks TLS from the first byte ({shown}); if it is one after all, its setting is handshake_first: "
            "pass tls=TLSConfig(handshake_first=True)"
        )
    if beginning.startswith(b"HTTP/"):
        return (
            f"it speaks HTTP ({shown}), as a web server or a monitoring port does; clients of NATS use 4222 by default"
        )
    return f"it begins with {shown}; check host and port, which is 4222 by default"


def _control_frame(line: bytes) -> Control | None:
    """The frame of a line without a payload; None for a line without meaning.

    ProtocolError: The line is not one of the protocol.
        ProtocolError: No server sends such a line.
    """
    if line == b"PING":
        return Ping()
    if line == b"PONG":
        return Pong()
    if line == b"+OK":
        return None  # only with `verbose`, which we never ask for; harmless
    if line[:5] == b"INFO ":
        try:
            fields = json.loads(line[5:])
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise ProtocolError(f"INFO without a JSON object: {_show(line)}")
        return Info(fields)
    if line[:5] == b"-ERR ":
        return Err(line[5:].decode(errors="replace").strip().strip("'"))
    raise ProtocolError(f"unknown operation: {_show(line)}")


_FIRST_BYTES = frozenset(b"MHPI+-")


def _size(text: bytes) -> int:
    # int() alone would accept b"+1", b"1_0" and b" 1".
    if not text.isdigit() or len(text) > 9 or (size := int(text)) > MAX_MESSAGE_BYTES:
        raise ValueError(text)
    return size


def _alike(lines: list[bytes]) -> int:
    """The number of leading lines with the same subscription and number of words."""
    words = lines[0].split(b" ")
    sid, width = words[1:2], len(words)  # none where the line has one word: it is no message, and others say so
    for place, line in enumerate(lines):
        words = line.split(b" ")
        if len(words) != width or words[1:2] != sid or len(line) > MAX_LINE_BYTES - len(b"MSG "):
            return place
    return len(lines)


def _show(data: bytes) -> str:
    return repr(data[:80]) + ("..." if len(data) > 80 else "")
