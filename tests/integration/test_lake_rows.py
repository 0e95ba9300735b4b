"""Messages of a real server as rows: what a consumer delivers, and what direct gets do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import pytest

pytest.importorskip("pyarrow")

from support.archived import contents
from support.header_blocks import BLOCKS, publish_block

from jetspark.blocking import JetStream, connect
from jetspark.blocking.steps import ProcedureRunner
from jetspark.core.headers import readable
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.rows import messages_of, rows_of
from jetspark.server import NatsServer
from jetspark.state.scan import Range, RangeScan, head_of


@pytest.fixture(scope="module")
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        yield client.jetstream()


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_rows_have_what_was_published_byte_for_byte(
    server: NatsServer, js: JetStream, retention: Literal["limits", "workqueue"]
) -> None:
    name = f"ROWS_{retention}"
    config = StreamConfig(name=name, subjects=[f"{name}.>"], retention=retention, allow_direct=True)
    stream = js.create_stream(config)
    published: list[tuple[str, bytes | None, bytes]] = []
    for subject, block in BLOCKS.items():
        published.append((f"{name}.{subject}", block, subject.encode()))
    published.append((f"{name}.\udcff\udcfe", b"NATS/1.0\r\nA: 1\r\nB: 2\r\nA: 3\r\n\r\n", b"\x00\xff"))
    for subject, written, data in published:
        publish_block(server.port, subject, written or b"", data)
    published.append((f"{name}.plain", None, b""))
    js.publish(f"{name}.plain", b"")
    head = head_of(stream.info())
    assert (head.first, head.next) == (1, len(published) + 1)
    scan = RangeScan(Range(name, head.created, 1, head.next))
    rows = [rows_of(name, piece) for piece in ProcedureRunner(js).pieces(scan)]
    found = [message for each in rows for message in messages_of(each)]
    # nats-server stores no block without a header, such as a status alone.
    stored = [(subject, block if block and b":" in block else None, data) for subject, block, data in published]
    assert [(each.subject, each.raw_headers, each.data) for each in found] == stored
    assert [each.sequence for each in found] == list(range(1, head.next))
    assert all(each.headers == readable(each.raw_headers) for each in found)
    now_ns = time.time_ns()
    times_ns = [each.time_ns for each in found if each.time_ns is not None]
    assert len(times_ns) == len(found)
    assert times_ns == sorted(times_ns)
    assert now_ns - 60_000_000_000 < times_ns[0] < times_ns[-1] < now_ns + 1_000_000_000
    # A clock with nanoseconds: not all of them are whole microseconds.
    assert any(each % 1000 for each in times_ns)
    # The server's own answer for one message, which has its time, too.
    asked = [stream.get_message(each.sequence) for each in found]
    assert all(isinstance(each, StoredMessage) for each in asked)
    assert contents(asked) == contents(found)
