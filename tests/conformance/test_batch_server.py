"""Batch publishing, written once and asked of both: the model in ``jetspark.testing`` and a real nats-server.

Each test is a bullet of the design of JetStream batch publishing (ADR-50), or of what the released server was measured
to do beyond it or against it, with the exact bytes of every reply. They are written out here rather than taken from the
model's own functions: otherwise the model could only ever agree with itself.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

import jetspark.blocking
from jetspark import RequestTimeout, ServerError, StreamConfig
from jetspark.server import NatsCluster, NatsServer
from jetspark.testing import BatchLimits, Delivery, ModelServer

pytestmark = pytest.mark.timeout(600)

Headers = Mapping[str, str]
Stored = tuple[int, str, bytes, dict[str, str]]

LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
GUARD = "Nats-Expected-Last-Subject-Sequence-Subject"
STREAM = "Nats-Expected-Stream"
LAST_ID = "Nats-Expected-Last-Msg-Id"
MSG_ID = "Nats-Msg-Id"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"
LEVEL = "Nats-Required-Api-Level"

ADVISORIES = "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED."

# How the server writes it.


def refused(err_code: int, code: int, description: str, stream: str = "S") -> str:
    words = description.replace('"', '\\"')
    return f'{{"error":{{"code":{code},"err_code":{err_code},"description":"{words}"}},"stream":"{stream}","seq":0}}'


def stored(sequence: int, batch: str = "", count: int = 0) -> str:
    end = f',"batch":"{batch}","count":{count}' if batch else ""
    return f'{{"stream":"S","seq":{sequence}{end}}}'


def ack(sequence: int, messages: int) -> str:
    return f'{{"type":"ack","seq":{sequence},"msgs":{messages}}}'


def gap(first_missing: int, received: int) -> str:
    return f'{{"type":"gap","last_seq":{first_missing},"seq":{received}}}'


def err(sequence: int, err_code: int, code: int, description: str) -> str:
    inner = f'{{"code":{code},"err_code":{err_code},"description":"{description}"}}'
    return f'{{"type":"err","seq":{sequence},"error":{inner}}}'


INCOMPLETE = refused(10176, 400, "atomic publish batch is incomplete")
ATOMIC_DISABLED = refused(10174, 400, "atomic publish is disabled")
FAST_DISABLED = refused(10205, 400, "batch publish is disabled")
PATTERN = refused(10206, 400, "batch publish pattern is invalid")
UNKNOWN = refused(10208, 400, "batch publish ID unknown")
WRONG_LEVEL = refused(10185, 412, "JetStream minimum api level required")
TOO_LARGE = refused(10054, 400, "message size exceeds maximum allowed")
SEALED = refused(10109, 400, "invalid operation on sealed stream")
SOMEHOW = refused(10164, 400, "wrong last sequence")
DUPLICATE_ID = refused(10201, 400, "atomic publish batch contains duplicate message id")
NOBODY = "503"


def wrong_sequence(sequence: int) -> str:
    return refused(10071, 400, f"wrong last sequence: {sequence}")


# Who is asked.


class Server(Protocol):
    """What the tests need of a server; replies come as text, a 503 as ``NOBODY``."""

    def create(self, name: str = "S", **fields: Any) -> None: ...
    def update(self, name: str = "S", **fields: Any) -> None: ...
    def delete(self, name: str = "S") -> None: ...
    def purge(self, name: str = "S") -> None: ...
    def restart(self) -> None: ...
    def wait(self, seconds: float) -> None: ...
    def stored(self, name: str = "S") -> list[Stored]: ...
    def send(
        self, subject: str, data: bytes = b"", *, reply: str | None = None, headers: Headers | None = None
    ) -> list[str]: ...
    def advisories(self, count: int = 0) -> list[dict[str, Any]]: ...


class Model:
    """The model, with a clock of its own."""

    def __init__(self, limits: BatchLimits | None = None) -> None:
        self.server = ModelServer(limits=limits)
        self.now = 1_000_000.0
        self._advisories: list[dict[str, Any]] = []

    def create(self, name: str = "S", **fields: Any) -> None:
        self.server.create_stream(_config(name, fields))

    def update(self, name: str = "S", **fields: Any) -> None:
        self.server.update_stream(_config(name, fields))

    def delete(self, name: str = "S") -> None:
        self.server.delete_stream(name)

    def purge(self, name: str = "S") -> None:
        self.server.purge_stream(name)

    def restart(self) -> None:
        self._keep(self.server.restart(self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._keep(self.server.on_time(self.now))

    def stored(self, name: str = "S") -> list[Stored]:
        return [
            (each.sequence, each.subject, each.data, dict(each.headers.multi_items()) if each.headers else {})
            for each in self.server.messages(name)
        ]

    def send(
        self, subject: str, data: bytes = b"", *, reply: str | None = None, headers: Headers | None = None
    ) -> list[str]:
        self.now += 0.001
        said = self._keep(self.server.publish(subject, data, reply=reply, headers=headers, now=self.now))
        assert all(each.subject == reply for each in said)
        return [str(each.status.code) if each.status else each.data.decode() for each in said]

    def advisories(self, count: int = 0) -> list[dict[str, Any]]:
        found, self._advisories = self._advisories, []
        return found

    def _keep(self, said: list[Delivery]) -> list[Delivery]:
        self._advisories += [json.loads(each.data) for each in said if each.subject.startswith(ADVISORIES)]
        return [each for each in said if not each.subject.startswith(ADVISORIES)]


class Real:
    """A nats-server. Replies to a message are what comes before the reply to one that is refused after it."""

    def __init__(self, store: Path, limits: str = "") -> None:
        config = f'jetstream {{ store_dir: "{store}"\n{limits} }}'
        self.server = NatsServer(jetstream=False, extra_config=config).start()
        self._fences = itertools.count()
        self._streams: set[str] = set()
        self._is_answered = True
        self._connect()

    def _connect(self) -> None:
        self.client = jetspark.blocking.connect(self.server.url)
        self.js = self.client.jetstream()
        self._replies = self.client.subscribe("_R.>")
        self._advised = self.client.subscribe(f"{ADVISORIES}>")
        self.client.flush()

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def reset(self) -> None:
        for name in list(self._streams):
            self.delete(name)
        while self.advisories():
            pass

    def create(self, name: str = "S", **fields: Any) -> None:
        self.js.create_stream(_config(name, fields))
        self._streams.add(name)
        self._is_answered = not fields.get("no_ack")

    def update(self, name: str = "S", **fields: Any) -> None:
        self.js.update_stream(_config(name, fields))

    def delete(self, name: str = "S") -> None:
        self.js.delete_stream(name)
        self._streams.discard(name)

    def purge(self, name: str = "S") -> None:
        self.js.stream(name).purge()

    def restart(self) -> None:
        self.client.close()
        self.server.kill()
        self.server.start()
        self._connect()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def stored(self, name: str = "S") -> list[Stored]:
        return [
            (each.sequence, each.subject, each.data, dict(each.headers.multi_items()))
            for each in self.js.stream(name).get_messages()
        ]

    def send(
        self, subject: str, data: bytes = b"", *, reply: str | None = None, headers: Headers | None = None
    ) -> list[str]:
        self.client.publish(subject, data, reply=reply or "", headers=dict(headers) if headers else None)
        fence = f"_R.fence.{next(self._fences)}"
        self.client.publish(subject, reply=fence, headers={STREAM: "none"})
        said: list[str] = []
        while True:
            try:
                message = self._replies.next(timeout=30 if self._is_answered else 0.5)
            except RequestTimeout:  # a stream without acks does not answer the fence either
                assert not self._is_answered
                return said
            if message.subject == fence:
                return said
            assert message.subject == reply
            said.append(str(message.status.code) if message.status else message.data.decode())

    def advisories(self, count: int = 0) -> list[dict[str, Any]]:
        """``count`` of them, and then what else there is."""
        found: list[dict[str, Any]] = []
        while True:
            try:
                found.append(json.loads(self._advised.next(timeout=30 if len(found) < count else 0.05).data))
            except RequestTimeout:
                return found


def _config(name: str, fields: dict[str, Any]) -> StreamConfig:
    # In memory, because an atomic batch on file costs some milliseconds, and nothing here depends on it.
    known: dict[str, Any] = {
        "subjects": [f"{name.lower()}.>"],
        "storage": "memory",
        "allow_atomic": True,
        "allow_batched": True,
        "allow_direct": True,
    }
    return StreamConfig(name=name, **{**known, **fields})


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    server = Real(tmp_path_factory.mktemp("batches"))
    yield server
    server.close()


@pytest.fixture(params=["model", "real"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "model":
        yield Model()
    else:
        real: Real = request.getfixturevalue("real_server")
        yield real
        real.reset()


@pytest.fixture(scope="module")
def small_real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    limits = "limits { batch { max_inflight_per_stream: 2, max_inflight_total: 3, max_msgs: 3, timeout: 1s } }"
    server = Real(tmp_path_factory.mktemp("small"), limits)
    yield server
    server.close()


@pytest.fixture(params=["model", "real"])
def small_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Two open batches of a kind for each stream, three for all, three messages, one second."""
    if request.param == "model":
        yield Model(
            BatchLimits(
                max_inflight_per_stream=2,
                max_inflight_total=3,
                max_fast_inflight_per_stream=2,
                max_fast_inflight_total=3,
                max_messages=3,
                timeout_s=1.0,
            )
        )
    else:
        real: Real = request.getfixturevalue("small_real_server")
        yield real
        real.reset()


def plain(server: Server, headers: Headers | None = None, *, subject: str = "s.a", data: bytes = b"") -> list[str]:
    return server.send(subject, data, reply="_R.plain", headers=headers)


def atomic(
    server: Server,
    id: str,
    sequence: int | str,
    headers: Headers | None = None,
    *,
    commit: str | None = None,
    subject: str = "s.a",
    data: bytes = b"",
    has_reply: bool = True,
) -> list[str]:
    batch = {"Nats-Batch-Id": id, "Nats-Batch-Sequence": str(sequence)}
    if commit is not None:
        batch["Nats-Batch-Commit"] = commit
    reply = "_R.atomic" if has_reply else None
    return server.send(subject, data, reply=reply, headers={**batch, **(headers or {})})


def commit_all(server: Server, messages: Sequence[tuple[str, Headers]], id: str = "B") -> str:
    """Stage the messages, commit with the last, and return the reply to it."""
    for sequence, (subject, headers) in enumerate(messages[:-1], 1):
        assert atomic(server, id, sequence, headers, subject=subject) == [""]
    subject, headers = messages[-1]
    [reply] = atomic(server, id, len(messages), headers, commit="1", subject=subject)
    return reply


def fast(
    server: Server,
    id: str,
    sequence: int | str,
    operation: int | str,
    headers: Headers | None = None,
    *,
    flow: int | str = 10,
    mode: str = "ok",
    subject: str = "s.a",
    data: bytes = b"",
) -> list[str]:
    reply = f"_R.{id}.{flow}.{mode}.{sequence}.{operation}.$FI"
    return server.send(subject, data, reply=reply, headers=headers)


# Atomic: what the client sends, what it gets


def test_a_start_and_what_follows_get_a_zero_byte_ack_and_the_commit_a_pub_ack(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 1, data=b"1") == [""]
    assert atomic(server, "B1", 2, data=b"2", subject="s.b") == [""]
    assert server.stored() == []
    assert atomic(server, "B1", 3, data=b"3", subject="s.c", commit="1") == [stored(3, "B1", 3)]
    assert [each[:3] for each in server.stored()] == [(1, "s.a", b"1"), (2, "s.b", b"2"), (3, "s.c", b"3")]


def test_a_reply_subject_is_optional_on_every_message(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 1, has_reply=False) == []
    assert atomic(server, "B1", 2, has_reply=False, commit="1") == []
    assert len(server.stored()) == 2


def test_an_end_of_batch_is_not_stored_and_not_counted_and_the_message_before_it_gets_the_commit(
    server: Server,
) -> None:
    server.create()
    atomic(server, "B1", 1)
    atomic(server, "B1", 2, {"own": "header"})
    assert atomic(server, "B1", 3, {LAST_ID: "x", STREAM: "x"}, data=b"lost", commit="eob") == [stored(2, "B1", 2)]
    assert server.stored() == [
        (1, "s.a", b"", {"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "1"}),
        (
            2,
            "s.a",
            b"",
            {"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "2", "own": "header", "Nats-Batch-Commit": "1"},
        ),
    ]


def test_batch_headers_stay_and_the_required_level_does_not(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 1, {LEVEL: "5", MSG_ID: "m"}, commit="1") == [stored(1, "B1", 1)]
    batch = {"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"}
    assert server.stored() == [(1, "s.a", b"", {**batch, MSG_ID: "m"})]


def test_an_id_is_free_again_after_its_commit(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 1, commit="1") == [stored(1, "B1", 1)]
    assert atomic(server, "B1", 1) == [""]
    assert atomic(server, "B1", 2, commit="1") == [stored(3, "B1", 2)]


@pytest.mark.parametrize("headers", [{"nats-batch-id": "B1"}, {"Nats-Batch-Id": ""}, {"Nats-Batch-Commit": "1"}])
def test_a_message_without_a_batch_id_in_its_exact_spelling_is_a_plain_publish(
    server: Server, headers: Headers
) -> None:
    server.create()
    assert plain(server, {"Nats-Batch-Sequence": "1", **headers}) == [stored(1)]


# Atomic: what is rejected


def test_an_id_has_at_most_64_characters(server: Server) -> None:
    server.create()
    assert atomic(server, "x" * 65, 1) == [refused(10179, 400, "atomic publish batch ID is invalid")]
    assert atomic(server, "x" * 64, 1, commit="1") == [stored(1, "x" * 64, 1)]


def test_a_message_of_an_unknown_batch_is_rejected_without_an_advisory(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 2) == [INCOMPLETE]
    assert atomic(server, "B1", 7, commit="1") == [INCOMPLETE]
    assert atomic(server, "B1", 0) == [INCOMPLETE]
    assert server.advisories() == []


@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_a_gap_or_a_repeated_sequence_rejects_the_batch_and_raises_an_advisory(server: Server, sequence: int) -> None:
    server.create()
    atomic(server, "B1", 1)
    atomic(server, "B1", 2)
    assert atomic(server, "B1", sequence) == [INCOMPLETE]
    [advisory] = server.advisories(1)
    assert advisory.pop("id")
    assert advisory.pop("timestamp").endswith("Z")
    assert advisory == {
        "type": "io.nats.jetstream.advisory.v1.stream_batch_abandoned",
        "stream": "S",
        "batch": "B1",
        "reason": "incomplete",
    }
    assert atomic(server, "B1", 3, commit="1") == [INCOMPLETE]
    assert server.stored() == []


def test_a_gap_in_a_message_without_a_reply_shows_at_the_commit(server: Server) -> None:
    server.create()
    atomic(server, "B1", 1)
    assert atomic(server, "B1", 3, has_reply=False) == []
    assert atomic(server, "B1", 4, commit="1") == [INCOMPLETE]
    assert [each["reason"] for each in server.advisories(1)] == ["incomplete"]


def test_a_batch_that_is_nothing_but_its_end_is_incomplete(server: Server) -> None:
    server.create()
    assert atomic(server, "B1", 1, commit="eob") == [INCOMPLETE]
    assert [each["reason"] for each in server.advisories(1)] == ["incomplete"]


@pytest.mark.parametrize("sequence", ["", "abc", "-1", "1.5", "99999999999999999999999"])
def test_a_sequence_that_is_no_number_is_missing(server: Server, sequence: str) -> None:
    server.create()
    assert atomic(server, "B1", sequence) == [refused(10175, 400, "atomic publish sequence is missing")]


@pytest.mark.parametrize("commit", ["", "2", "EOB"])
def test_an_unknown_commit_drops_the_batch_without_an_advisory(server: Server, commit: str) -> None:
    server.create()
    atomic(server, "B1", 1)
    assert atomic(server, "B1", 2, commit=commit) == [refused(10200, 400, "atomic publish batch commit is invalid")]
    assert atomic(server, "B1", 2, commit="1") == [INCOMPLETE]
    assert server.advisories() == []


@pytest.mark.parametrize("level", ["6", "junk"])
def test_a_required_level_is_checked_on_every_message(server: Server, level: str) -> None:
    server.create()
    atomic(server, "B1", 1, {LEVEL: "5"})
    assert atomic(server, "B1", 2, {LEVEL: level}) == [WRONG_LEVEL]
    assert [each["reason"] for each in server.advisories(1)] == ["unsupported"]
    assert atomic(server, "B1", 3) == [INCOMPLETE]
    assert plain(server, {LEVEL: level}) == [stored(1)]


def test_a_batch_on_a_stream_that_does_not_allow_it_is_rejected_before_anything_else(server: Server) -> None:
    server.create(allow_atomic=False)
    assert atomic(server, "B1", 1) == [ATOMIC_DISABLED]
    assert atomic(server, "x" * 65, "junk", {LEVEL: "9"}, commit="junk") == [ATOMIC_DISABLED]


def test_a_message_that_leads_to_another_stream_is_unknown_there(server: Server) -> None:
    server.create()
    server.create("T")
    atomic(server, "B1", 1)
    assert atomic(server, "B1", 2, subject="t.a") == [INCOMPLETE.replace('"S"', '"T"')]
    assert atomic(server, "B1", 2, commit="1") == [stored(2, "B1", 2)]


def test_a_message_that_is_too_large_is_refused_at_once_and_the_batch_stays(server: Server) -> None:
    server.create(max_message_bytes=100)
    assert atomic(server, "B1", 1) == [""]
    assert atomic(server, "B1", 2, data=b"x" * 101) == [TOO_LARGE]
    assert atomic(server, "B1", 2, commit="1") == [stored(2, "B1", 2)]


def test_a_sealed_stream_refuses_at_once(server: Server) -> None:
    server.create()
    atomic(server, "B1", 1)
    server.update(sealed=True)
    assert atomic(server, "B1", 2) == [SEALED]
    assert fast(server, "F1", 1, 0) == [SEALED]
    assert plain(server) == [SEALED]


def test_a_stream_without_acks_says_nothing_to_an_atomic_batch_and_stores_it(server: Server) -> None:
    server.create(no_ack=True)
    assert atomic(server, "B1", 1) == []
    assert atomic(server, "B1", 2, commit="1") == []
    assert atomic(server, "B1", 2, commit="1") == []
    assert len(server.stored()) == 2


# Atomic: checks, on the stream as it was before the batch

COMMITS: dict[str, tuple[list[tuple[str, Headers]], str]] = {
    "the stream's sequence on the first": ([("s.a", {LAST_SEQUENCE: "2"}), ("s.b", {})], stored(4, "B", 2)),
    "a wrong one": ([("s.a", {LAST_SEQUENCE: "1"}), ("s.b", {})], wrong_sequence(2)),
    "the stream's sequence later": ([("s.a", {}), ("s.b", {LAST_SEQUENCE: "2"})], wrong_sequence(3)),
    "the running sequence later": ([("s.a", {}), ("s.b", {LAST_SEQUENCE: "3"})], SOMEHOW),
    "a subject's sequence": ([("s.a", {LAST_SUBJECT_SEQUENCE: "1"}), ("s.b", {})], stored(4, "B", 2)),
    "a subject's sequence later": ([("s.b", {}), ("s.a", {LAST_SUBJECT_SEQUENCE: "1"})], stored(4, "B", 2)),
    "a subject that must be new": ([("s.new", {LAST_SUBJECT_SEQUENCE: "0"})], stored(3, "B", 1)),
    "a subject that is not new": ([("s.a", {LAST_SUBJECT_SEQUENCE: "0"})], wrong_sequence(1)),
    "a subject the batch has written": ([("s.a", {}), ("s.a", {LAST_SUBJECT_SEQUENCE: "1"})], SOMEHOW),
    "a subject written again after its check": (
        [("s.a", {LAST_SUBJECT_SEQUENCE: "1"}), ("s.a", {})],
        stored(4, "B", 2),
    ),
    "a guard on another subject": (
        [("s.x", {LAST_SUBJECT_SEQUENCE: "1", GUARD: "s.a"}), ("s.y", {LAST_SUBJECT_SEQUENCE: "1", GUARD: "s.a"})],
        stored(4, "B", 2),
    ),
    "two guards that cannot both hold": (
        [("s.x", {LAST_SUBJECT_SEQUENCE: "1", GUARD: "s.a"}), ("s.y", {LAST_SUBJECT_SEQUENCE: "0", GUARD: "s.a"})],
        wrong_sequence(1),
    ),
    "a guard with a wildcard": ([("s.x", {LAST_SUBJECT_SEQUENCE: "2", GUARD: "s.>"})], stored(3, "B", 1)),
    "a guard with a wildcard over what the batch wrote": (
        [("s.x", {}), ("s.y", {LAST_SUBJECT_SEQUENCE: "2", GUARD: "s.>"})],
        stored(4, "B", 2),
    ),
    "a guard on what the batch wrote": ([("s.x", {}), ("s.y", {LAST_SUBJECT_SEQUENCE: "0", GUARD: "s.x"})], SOMEHOW),
    "a guard without a sequence": (
        [("s.x", {GUARD: "s.a"})],
        refused(10193, 400, "missing sequence for expected last sequence per subject"),
    ),
    "another stream": ([("s.a", {}), ("s.a", {STREAM: "T"})], refused(10060, 400, "expected stream does not match")),
    "this stream": ([("s.a", {STREAM: "S"})], stored(3, "B", 1)),
    "the last message's id": (
        [("s.a", {LAST_ID: "m1"}), ("s.a", {})],
        refused(10177, 400, "atomic publish unsupported header used: Nats-Expected-Last-Msg-Id"),
    ),
    "the first refusal, not the gravest": (
        [("s.a", {LAST_SEQUENCE: "9"}), ("s.a", {LAST_ID: "m1"})],
        wrong_sequence(2),
    ),
    "an id twice": ([("s.a", {MSG_ID: "n"}), ("s.b", {MSG_ID: "n"})], DUPLICATE_ID),
    "an id of an earlier message": ([("s.a", {}), ("s.b", {MSG_ID: "m1"})], DUPLICATE_ID),
    "an earlier id before a wrong sequence": ([("s.a", {MSG_ID: "m1", LAST_SEQUENCE: "9"})], DUPLICATE_ID),
    "a time to live": ([("s.a", {TTL: "5s"})], refused(10166, 400, "per-message TTL is disabled")),
    "a rollup of a subject": ([("s.a", {ROLLUP: "sub"}), ("s.a", {})], stored(4, "B", 2)),
    "a rollup of a subject the batch wrote": (
        [("s.a", {}), ("s.a", {ROLLUP: "sub"})],
        refused(10111, 500, "batch rollup sub invalid"),
    ),
    "a rollup of everything": ([("s.a", {ROLLUP: "all"}), ("s.b", {})], stored(4, "B", 2)),
    "a rollup of everything later": (
        [("s.a", {}), ("s.b", {ROLLUP: "all"})],
        refused(10111, 500, "batch rollup all invalid"),
    ),
    "a rollup of something": ([("s.a", {ROLLUP: "zz"})], refused(10111, 500, 'rollup value invalid: "zz"')),
}


@pytest.mark.parametrize("case", COMMITS)
def test_a_commit_checks_every_message_under_one_lock_and_stores_all_or_none(server: Server, case: str) -> None:
    messages, expected = COMMITS[case]
    server.create(allow_rollup=True)
    plain(server, {MSG_ID: "m1"})
    plain(server, subject="s.b")
    assert commit_all(server, messages) == expected
    if "error" in expected:
        assert [each[0] for each in server.stored()] == [1, 2]
        assert server.advisories() == []
    else:
        assert [each[1] for each in server.stored()[-len(messages) :]] == [subject for subject, _ in messages]


def test_ids_of_a_refused_batch_stay_free_and_those_of_a_stored_one_do_not(server: Server) -> None:
    server.create()
    assert commit_all(server, [("s.a", {MSG_ID: "m1"}), ("s.a", {MSG_ID: "m1"})]) == DUPLICATE_ID
    assert commit_all(server, [("s.a", {MSG_ID: "m1"}), ("s.a", {MSG_ID: "m2"})]) == stored(2, "B", 2)
    assert plain(server, {MSG_ID: "m1"}) == ['{"stream":"S","seq":1,"duplicate": true}']


def test_a_rollup_in_a_batch_removes_what_was_there_before(server: Server) -> None:
    server.create(allow_rollup=True)
    for subject in ("s.a", "s.b", "s.a"):
        plain(server, subject=subject)
    commit_all(server, [("s.a", {ROLLUP: "sub"}), ("s.a", {})])
    assert [each[:2] for each in server.stored()] == [(2, "s.b"), (4, "s.a"), (5, "s.a")]
    commit_all(server, [("s.c", {ROLLUP: "all"}), ("s.d", {})])
    assert [each[:2] for each in server.stored()] == [(6, "s.c"), (7, "s.d")]


@pytest.mark.parametrize(
    ("limits", "subjects", "description"),
    [
        ({"max_messages": 3}, ["s.a", "s.b"], "maximum messages exceeded"),
        ({"max_bytes": 250}, ["s.a", "s.b", "s.c"], "maximum bytes exceeded"),
        (
            {"max_messages_per_subject": 1, "discard_new_per_subject": True},
            ["s.b", "s.a"],
            "maximum messages per subject exceeded",
        ),
        # A plain publish would take the place of its predecessor; a batch is not credited with what it replaces.
        ({"max_messages_per_subject": 1, "max_messages": 2}, ["s.a"], "maximum messages exceeded"),
    ],
)
def test_a_batch_that_a_full_stream_has_no_room_for_is_refused_whole(
    server: Server, limits: dict[str, Any], subjects: list[str], description: str
) -> None:
    server.create(discard="new", **limits)
    plain(server)
    plain(server, subject="s.z")
    assert commit_all(server, [(subject, {}) for subject in subjects]) == refused(10077, 503, description)
    assert len(server.stored()) == 2


def test_a_stream_that_discards_the_old_stores_a_batch_larger_than_itself_and_keeps_its_end(server: Server) -> None:
    server.create(max_messages=2)
    assert commit_all(server, [("s.a", {}), ("s.b", {}), ("s.c", {})]) == stored(3, "B", 3)
    assert [each[:2] for each in server.stored()] == [(2, "s.b"), (3, "s.c")]


# Atomic: life and limits


def test_each_stream_holds_50_batches_and_a_batch_1000_messages(server: Server) -> None:
    server.create()
    for number in range(50):
        assert atomic(server, f"B{number}", 1) == [""]
    too_many = refused(10210, 429, "atomic publish too many inflight")
    assert atomic(server, "one more", 1) == [too_many]
    assert atomic(server, "one more", 1, commit="1") == [too_many]
    for sequence in range(2, 1001):
        assert atomic(server, "B0", sequence) == [""]
    assert atomic(server, "B0", 1001, commit="eob") == [stored(1000, "B0", 1000)]
    assert atomic(server, "B0", 1001) == [refused(10199, 400, "atomic publish batch is too large: 1000")]


def test_streams_and_server_limit_the_open_batches_of_each_kind(small_server: Server) -> None:
    small_server.create()
    small_server.create("T")
    too_many = refused(10210, 429, "atomic publish too many inflight")
    too_many_fast = refused(10211, 429, "batch publish too many inflight")
    assert [atomic(small_server, id, 1) for id in "abc"] == [[""], [""], [too_many]]
    assert [atomic(small_server, id, 1, subject="t.a") for id in "abc"][:2] == [[""], [too_many.replace('"S"', '"T"')]]
    assert [fast(small_server, id, 1, 0)[0] for id in "abc"] == [ack(0, 10), ack(0, 1), too_many_fast]
    said = [fast(small_server, id, 1, 0, subject="t.a") for id in "ab"]
    assert said == [[ack(0, 10)], [too_many_fast.replace('"S"', '"T"')]]


def test_one_message_too_many_abandons_the_batch(small_server: Server) -> None:
    small_server.create()
    for sequence in (1, 2, 3):
        atomic(small_server, "B1", sequence)
    assert atomic(small_server, "B1", 4, commit="1") == [refused(10199, 400, "atomic publish batch is too large: 3")]
    assert [each["reason"] for each in small_server.advisories(1)] == ["large"]


def test_a_batch_without_messages_is_abandoned_with_an_advisory_and_no_reply(small_server: Server) -> None:
    small_server.create()
    atomic(small_server, "B1", 1)
    small_server.wait(0.6)
    atomic(small_server, "B1", 2)
    small_server.wait(0.6)
    assert atomic(small_server, "B1", 3, commit="1") == [stored(3, "B1", 3)]
    atomic(small_server, "B2", 1)
    small_server.wait(1.2)
    assert [(each["batch"], each["reason"]) for each in small_server.advisories(1)] == [("B2", "timeout")]
    assert atomic(small_server, "B2", 2) == [INCOMPLETE]


def test_disabling_atomic_batches_drops_what_is_staged(server: Server) -> None:
    server.create()
    atomic(server, "B1", 1)
    server.update(allow_atomic=False)
    assert atomic(server, "B1", 2) == [ATOMIC_DISABLED]
    server.update(allow_atomic=True)
    assert atomic(server, "B1", 3) == [INCOMPLETE]
    assert server.advisories() == []


def test_a_purge_and_another_update_leave_a_staged_batch_alone(server: Server) -> None:
    server.create()
    plain(server)
    atomic(server, "B1", 1)
    server.purge()
    server.update(description="changed", subjects=["s.>", "more.>"])
    assert atomic(server, "B1", 2, commit="1", subject="more.a") == [stored(3, "B1", 2)]


def test_a_deleted_stream_has_no_responders_and_a_new_one_does_not_know_the_batch(server: Server) -> None:
    server.create()
    atomic(server, "B1", 1)
    fast(server, "F1", 1, 0)
    server.delete()
    assert atomic(server, "B1", 2) == [NOBODY]
    assert fast(server, "F1", 2, 1) == [NOBODY]
    server.create()
    assert atomic(server, "B1", 2) == [INCOMPLETE]
    assert fast(server, "F1", 2, 1) == [UNKNOWN]


def test_atomic_batches_and_asynchronous_persistence_exclude_each_other(server: Server) -> None:
    with pytest.raises(ServerError, match="async persist mode is not supported with atomic batch publish"):
        server.create(persist_mode="async", storage="file")
    server.create(persist_mode="async", storage="file", allow_atomic=False)
    assert fast(server, "F1", 1, 2) == [stored(1, "F1", 1)]


def test_a_restart_forgets_every_batch_and_keeps_what_is_stored(server: Server) -> None:
    server.create(storage="file")
    atomic(server, "B1", 1)
    fast(server, "F1", 1, 0)
    fast(server, "F1", 2, 1, {MSG_ID: "m"})
    server.restart()
    assert atomic(server, "B1", 2) == [INCOMPLETE]
    assert fast(server, "F1", 3, 1) == [UNKNOWN]
    assert [each[0] for each in server.stored()] == [1, 2]
    assert plain(server, {MSG_ID: "m"}) == ['{"stream":"S","seq":2,"duplicate": true}']
    assert server.advisories() == []


# Fast ingest: the reply subject

Step = tuple[int | str, int | str, *tuple[Headers, ...]]


def course(server: Server, steps: Sequence[Step], *, mode: str, flow: int | str = 10) -> list[str]:
    """Everything the server says to the steps of one batch, in order."""
    return [each for step in steps for each in fast(server, "F", *step, mode=mode, flow=flow)]


def test_a_start_gets_a_flow_ack_and_a_commit_the_pub_ack(server: Server) -> None:
    server.create()
    assert fast(server, "F1", 1, 0, data=b"1") == [ack(0, 10)]
    assert fast(server, "F1", 2, 1, {"own": "header", LEVEL: "4"}, data=b"2", subject="s.b") == []
    assert fast(server, "F1", 3, 2, data=b"3") == [stored(3, "F1", 3)]
    assert server.stored() == [(1, "s.a", b"1", {}), (2, "s.b", b"2", {"own": "header"}), (3, "s.a", b"3", {})]
    assert fast(server, "F1", 4, 1) == [UNKNOWN]
    assert fast(server, "F1", 1, 0) == [ack(0, 10)]


def test_an_end_of_batch_stores_nothing(server: Server) -> None:
    server.create()
    assert course(server, [(1, 0), (2, 1), (3, 3, {LAST_SEQUENCE: "99", MSG_ID: "x"})], mode="fail") == [
        ack(0, 10),
        stored(2, "F", 2),
    ]
    assert len(server.stored()) == 2


def test_a_single_commit_gets_the_pub_ack_and_nothing_else(server: Server) -> None:
    server.create()
    assert fast(server, "F1", 1, 2) == [stored(1, "F1", 1)]


@pytest.mark.parametrize(
    ("sequence", "operation"),
    [(2, 0), (1, 1), (1, 3), (0, 1), (0, 4), (1, 5), (1, "x"), ("x", 1), ("-1", 1), ("9" * 20, 1)],
)
def test_an_operation_out_of_place_is_refused_and_an_open_batch_is_not_abandoned(
    server: Server, sequence: int | str, operation: int | str
) -> None:
    server.create()
    assert fast(server, "F1", sequence, operation) == [PATTERN]
    fast(server, "F1", 1, 0)
    assert fast(server, "F1", sequence, operation) == [PATTERN]
    assert fast(server, "F1", 2, 2) == [stored(2, "F1", 2)]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("_R.F1.10.OK.1.2.$FI", PATTERN),
        ("_R.F1.10.maybe.1.2.$FI", PATTERN),
        ("_R.10.ok.1.2.$FI", PATTERN),
        ("_R.x.$FI", PATTERN),
        ("_R.F1.10.ok.1.2.$fi", stored(1)),
        ("_R.F1.10.ok.1.2.$FI.x", stored(1)),
        ("_R.a.b.c.F1.10.ok.1.2.$FI", stored(1, "F1", 1)),
        ("_R.F1.10.ok.001.02.$FI", stored(1, "F1", 1)),
        (f"_R.{'x' * 64}.10.ok.1.2.$FI", stored(1, "x" * 64, 1)),
        (f"_R.{'x' * 65}.10.ok.1.2.$FI", refused(10207, 400, "batch publish ID is invalid")),
        (f"_R.{'x' * 65}.10.maybe.1.2.$FI", PATTERN),
    ],
)
def test_a_reply_subject_is_read_from_the_right(server: Server, reply: str, expected: str) -> None:
    server.create()
    assert server.send("s.a", reply=reply) == [expected]


def test_a_stream_that_does_not_allow_it_refuses_before_reading_on(server: Server) -> None:
    server.create(allow_batched=False)
    assert fast(server, "F1", 1, 0) == [FAST_DISABLED]
    assert fast(server, "x" * 65, "junk", 9, mode="maybe") == [FAST_DISABLED]


@pytest.mark.parametrize("operation", [1, 2, 3, 4])
def test_a_message_of_an_unknown_fast_batch_is_rejected(server: Server, operation: int) -> None:
    server.create()
    assert fast(server, "F1", 2, operation) == [UNKNOWN]
    assert fast(server, "F1", 1, 4) == [UNKNOWN]


def test_mode_and_flow_are_those_of_the_first_message_and_any_prefix_will_do(server: Server) -> None:
    server.create()
    assert fast(server, "F1", 1, 0, flow=2, mode="ok") == [ack(0, 2)]
    assert fast(server, "F1", 3, 1, flow=500, mode="fail") == [gap(2, 3), ack(2, 2)]
    assert server.send("s.a", reply="_R.elsewhere.F1.9.fail.4.2.$FI") == [stored(3, "F1", 4)]


# Fast ingest: flow


@pytest.mark.parametrize(
    ("flow", "messages"),
    [(1, 1), (100, 100), (501, 500), (70000, 500), (0, 10), (-5, 10), ("abc", 10), ("010", 10), ("9" * 23, 500)],
)
def test_a_lone_publisher_starts_at_the_flow_it_asks_for_and_500_at_most(
    server: Server, flow: int | str, messages: int
) -> None:
    server.create()
    assert fast(server, "F1", 1, 0, flow=flow)[0] == ack(0, messages)


def test_acks_come_every_so_many_messages(server: Server) -> None:
    server.create()
    said = course(server, [(1, 0), (2, 1), (3, 1), (4, 1), (5, 1), (6, 2)], mode="ok", flow=2)
    assert said == [ack(0, 2), ack(2, 2), ack(4, 2), stored(6, "F", 6)]


def test_at_flow_1_the_first_message_is_acknowledged_twice(server: Server) -> None:
    server.create()
    assert fast(server, "F1", 1, 0, flow=1) == [ack(0, 1), ack(1, 1)]


def test_a_second_publisher_starts_at_1_and_doubles_up_to_its_share(server: Server) -> None:
    server.create()
    fast(server, "other", 1, 0)
    said = []
    for n in range(1, 800):
        said += fast(server, "F1", n, 0 if n == 1 else 1, flow=1000)
        if n % 50 == 0:
            fast(server, "other", 1, 4)  # after ten seconds without a word it would be forgotten
    doubled = [ack(2**n - 1, 2**n) for n in range(8)]
    assert said == [*doubled, ack(255, 250), ack(505, 250), ack(755, 250)]


def test_shares_shrink_and_grow_with_the_next_ack(server: Server) -> None:
    server.create()
    sequence = 0
    others: list[str] = []

    def until_acked() -> str:
        nonlocal sequence
        while True:
            sequence += 1
            said = fast(server, "F1", sequence, 0 if sequence == 1 else 1, flow=1000)
            if said:
                return said[-1]
            if sequence % 50 == 0:
                for other in others:
                    fast(server, other, 1, 4)  # after ten seconds without a word it would be forgotten

    assert until_acked() == ack(0, 500)
    for number in range(9):
        fast(server, f"other{number}", 1, 0)
        others.append(f"other{number}")
    shrunk = [ack(500, 250), ack(750, 125), ack(875, 62), ack(937, 50), ack(987, 50)]
    assert [until_acked() for _ in shrunk] == shrunk
    for number in range(9):
        fast(server, f"other{number}", 2, 3)
    others.clear()
    grown = [ack(1037, 100), ack(1137, 200), ack(1337, 400), ack(1737, 500), ack(2237, 500)]
    assert [until_acked() for _ in grown] == grown


def test_a_share_is_never_less_than_1(server: Server) -> None:
    server.create()
    for number in range(520):
        fast(server, f"other{number}", 1, 0)
    assert [fast(server, "F1", n, 0 if n == 1 else 1)[-1] for n in (1, 2, 3)] == [ack(1, 1), ack(2, 1), ack(3, 1)]


# Fast ingest: gaps, pings, errors. Each course once in either mode.

WRONG = {LAST_SEQUENCE: "99"}
KNOWN = {MSG_ID: "known"}
LATE = {LAST_ID: "nobody's"}
FORBIDDEN_LEVEL = {LEVEL: "9"}


def err_wrong(sequence: int, found: int) -> str:
    return err(sequence, 10071, 400, f"wrong last sequence: {found}")


# Steps, then what comes in mode ok and in mode fail. One message is in the stream before, its id is "known".
COURSES: dict[str, tuple[list[Step], int, list[str], list[str]]] = {
    "a gap": (
        [(1, 0), (2, 1), (5, 1), (6, 2)],
        10,
        [ack(0, 10), gap(3, 5), stored(5, "F", 6)],
        [ack(0, 10), gap(3, 5), stored(3, "F", 2), UNKNOWN],
    ),
    "a gap over a boundary": (
        [(1, 0), (2, 1), (35, 1), (40, 1)],
        10,
        [ack(0, 10), gap(3, 35), ack(30, 10), gap(36, 40), ack(40, 10)],
        [ack(0, 10), gap(3, 35), stored(3, "F", 2), UNKNOWN],
    ),
    "a gap before the commit": (
        [(1, 0), (2, 1), (4, 2)],
        10,
        [ack(0, 10), gap(3, 4), stored(4, "F", 4)],
        [ack(0, 10), gap(3, 4), stored(3, "F", 2)],
    ),
    "a gap before the end": (
        [(1, 0), (2, 1), (4, 3)],
        10,
        [ack(0, 10), gap(3, 4), stored(3, "F", 3)],
        [ack(0, 10), gap(3, 4), stored(3, "F", 2)],
    ),
    "a sequence again": (
        [(1, 0), (2, 1), (3, 1), (2, 1), (4, 1)],
        10,
        [ack(0, 10), gap(4, 2), stored(4, "F", 3), UNKNOWN],
        [ack(0, 10), gap(4, 2), stored(4, "F", 3), UNKNOWN],
    ),
    "a lost sequence after all": (
        [(1, 0), (2, 1), (5, 1), (3, 1)],
        10,
        [ack(0, 10), gap(3, 5), gap(6, 3), stored(4, "F", 5)],
        [ack(0, 10), gap(3, 5), stored(3, "F", 2), UNKNOWN],
    ),
    "a start again": (
        [(1, 0), (1, 0)],
        10,
        [ack(0, 10), gap(2, 1), stored(2, "F", 1)],
        [ack(0, 10), gap(2, 1), stored(2, "F", 1)],
    ),
    "a ping repeats the last ack": (
        [(1, 0), (2, 1), (3, 1), (3, 4, WRONG), (1, 4), (4, 2)],
        2,
        [ack(0, 2), ack(2, 2), ack(2, 2), ack(2, 2), stored(5, "F", 4)],
        [ack(0, 2), ack(2, 2), ack(2, 2), ack(2, 2), stored(5, "F", 4)],
    ),
    "a ping finds what was lost at the end": (
        [(1, 0), (2, 1), (5, 4), (6, 2)],
        10,
        [ack(0, 10), gap(3, 6), ack(0, 10), stored(4, "F", 6)],
        [ack(0, 10), gap(3, 6), stored(3, "F", 2), UNKNOWN],
    ),
    "a ping over a boundary acknowledges what was lost": (
        [(1, 0), (2, 1), (25, 4), (25, 4)],
        10,
        [ack(0, 10), gap(3, 26), ack(20, 10), ack(20, 10)],
        [ack(0, 10), gap(3, 26), stored(3, "F", 2), UNKNOWN],
    ),
    "an error in the middle": (
        [(1, 0), (2, 1, WRONG), (3, 1), (4, 2)],
        10,
        [ack(0, 10), err_wrong(2, 2), stored(4, "F", 4)],
        [ack(0, 10), err_wrong(2, 2), stored(2, "F", 1), UNKNOWN, UNKNOWN],
    ),
    "an error acknowledges nothing": (
        [(1, 0), (2, 1, WRONG), (2, 4), (3, 1), (4, 2)],
        2,
        [ack(0, 2), err_wrong(2, 2), ack(0, 2), ack(2, 2), stored(4, "F", 4)],
        [ack(0, 2), err_wrong(2, 2), stored(2, "F", 1), UNKNOWN, UNKNOWN, UNKNOWN],
    ),
    "an error at the start": (
        [(1, 0, WRONG), (2, 2)],
        10,
        [ack(0, 10), err_wrong(1, 1), stored(2, "F", 2)],
        [ack(0, 10), wrong_sequence(1), UNKNOWN],
    ),
    "an error in a single commit": (
        [(1, 2, WRONG)],
        10,
        [err_wrong(1, 1), stored(0, "F", 0)],
        [wrong_sequence(1)],
    ),
    "an error in the commit": (
        [(1, 0), (2, 1), (3, 2, WRONG)],
        10,
        [ack(0, 10), err_wrong(3, 3), stored(3, "F", 2)],
        [ack(0, 10), err_wrong(3, 3), stored(3, "F", 2)],
    ),
    "an error before the end": (
        [(1, 0), (2, 1, WRONG), (3, 3)],
        10,
        [ack(0, 10), err_wrong(2, 2), stored(2, "F", 2)],
        [ack(0, 10), err_wrong(2, 2), stored(2, "F", 1), UNKNOWN],
    ),
    "an error after a gap": (
        [(1, 0), (4, 1, WRONG), (5, 2)],
        10,
        [ack(0, 10), gap(2, 4), err_wrong(4, 2), stored(3, "F", 5)],
        [ack(0, 10), gap(2, 4), stored(2, "F", 1), UNKNOWN],
    ),
    "another stream": (
        [(1, 0), (2, 1, {STREAM: "T"}), (3, 2)],
        10,
        [ack(0, 10), err(2, 10060, 400, "expected stream does not match"), stored(3, "F", 3)],
        [ack(0, 10), err(2, 10060, 400, "expected stream does not match"), stored(2, "F", 1), UNKNOWN],
    ),
    "a rollup, a time to live": (
        [(1, 0), (2, 1, {ROLLUP: "sub"}), (3, 1, {TTL: "5s"}), (4, 2)],
        10,
        [
            ack(0, 10),
            err(2, 10111, 500, "rollup not permitted"),
            err(3, 10166, 400, "per-message TTL is disabled"),
            stored(3, "F", 4),
        ],
        [ack(0, 10), err(2, 10111, 500, "rollup not permitted"), stored(2, "F", 1), UNKNOWN, UNKNOWN],
    ),
    "a level the server does not have": (
        [(1, 0), (2, 1, FORBIDDEN_LEVEL), (3, 1)],
        10,
        [ack(0, 10), WRONG_LEVEL, UNKNOWN],
        [ack(0, 10), WRONG_LEVEL, UNKNOWN],
    ),
    "a level the server does not have, at the start": (
        [(1, 0, FORBIDDEN_LEVEL), (2, 1)],
        10,
        [WRONG_LEVEL, UNKNOWN],
        [WRONG_LEVEL, UNKNOWN],
    ),
    "a duplicate in the middle": (
        [(1, 0), (2, 1, KNOWN), (3, 1), (4, 2)],
        2,
        [ack(0, 2), ack(2, 2), stored(4, "F", 4)],
        [ack(0, 2), ack(2, 2), stored(4, "F", 4)],
    ),
    "a duplicate as the commit, which an ack may precede": (
        [(1, 0), (2, 2, KNOWN)],
        2,
        [ack(0, 2), ack(2, 2), stored(2, "F", 2)],
        [ack(0, 2), ack(2, 2), stored(2, "F", 2)],
    ),
    "nothing but duplicates": (
        [(1, 0, KNOWN), (2, 1, KNOWN), (3, 3)],
        10,
        [ack(0, 10), stored(0, "F", 2)],
        [ack(0, 10), stored(0, "F", 2)],
    ),
    "a duplicate as the only message": (
        [(1, 2, KNOWN)],
        10,
        [stored(0, "F", 1)],
        ['{"stream":"S","seq":1,"duplicate": true,"batch":"F","count":1}'],
    ),
    "a duplicate before a wrong sequence": (
        [(1, 0), (2, 1, {**KNOWN, **WRONG}), (3, 2)],
        10,
        [ack(0, 10), stored(3, "F", 3)],
        [ack(0, 10), stored(3, "F", 3)],
    ),
    # The faults of the server that the model keeps: a refusal that comes too late leaves a hole in either mode...
    "the last message's id": (
        [(1, 0), (2, 1, LATE), (3, 1), (4, 2)],
        10,
        [ack(0, 10), refused(10070, 400, "wrong last msg ID: "), stored(4, "F", 4)],
        [ack(0, 10), refused(10070, 400, "wrong last msg ID: "), stored(4, "F", 4)],
    ),
    # ... and just before the end the batch ends never, answers only pings, and keeps its place.
    "the last message's id before the end": (
        [(1, 0), (2, 1, LATE), (3, 3), (3, 1), (2, 4)],
        10,
        [ack(0, 10), refused(10070, 400, "wrong last msg ID: "), ack(0, 10)],
        [ack(0, 10), refused(10070, 400, "wrong last msg ID: "), ack(0, 10)],
    ),
    "a sequence again after an error": (
        [(1, 0), (2, 1, WRONG), (2, 1), (3, 2), (2, 4)],
        10,
        [ack(0, 10), err_wrong(2, 2), gap(3, 2), ack(0, 10)],
        [ack(0, 10), err_wrong(2, 2), stored(2, "F", 1), UNKNOWN, UNKNOWN, UNKNOWN],
    ),
}


@pytest.mark.parametrize("mode", ["ok", "fail"])
@pytest.mark.parametrize("case", COURSES)
def test_a_course_of_events_goes_as_its_gap_mode_says(server: Server, case: str, mode: str) -> None:
    steps, flow, when_ok, when_fail = COURSES[case]
    server.create()
    plain(server, KNOWN)
    assert course(server, steps, mode=mode, flow=flow) == (when_ok if mode == "ok" else when_fail)


@pytest.mark.parametrize("mode", ["ok", "fail"])
def test_a_full_stream_that_refuses_the_new_is_an_error_like_any_other(server: Server, mode: str) -> None:
    server.create(discard="new", max_messages=2)
    full = err(3, 10077, 503, "maximum messages exceeded")
    said = course(server, [(1, 0), (2, 1), (3, 1), (4, 3)], mode=mode)
    expected = {"ok": [full, stored(2, "F", 3)], "fail": [full, stored(2, "F", 2), UNKNOWN]}
    assert said == [ack(0, 10), *expected[mode]]


@pytest.mark.parametrize("mode", ["ok", "fail"])
def test_a_message_that_is_too_large_shows_as_a_gap_with_the_next(server: Server, mode: str) -> None:
    server.create(max_message_bytes=100)
    fast(server, "F", 1, 0, mode=mode)
    assert fast(server, "F", 2, 1, mode=mode, data=b"x" * 101) == [TOO_LARGE]
    expected = {"ok": [gap(2, 3)], "fail": [gap(2, 3), stored(1, "F", 1)]}
    assert fast(server, "F", 3, 1, mode=mode) == expected[mode]


def test_rollups_work_inside_a_fast_batch(server: Server) -> None:
    server.create(allow_rollup=True)
    plain(server)
    plain(server, subject="s.b")
    steps: list[Step] = [(1, 0, {ROLLUP: "sub"}), (2, 1), (3, 2, {ROLLUP: "sub"})]
    assert course(server, steps, mode="fail") == [ack(0, 10), stored(5, "F", 3)]
    assert [each[:2] for each in server.stored()] == [(2, "s.b"), (5, "s.a")]


@pytest.mark.parametrize("mode", ["ok", "fail"])
def test_a_stream_without_acks_leaves_out_the_first_flow_ack_and_refusals_and_nothing_else(
    server: Server, mode: str
) -> None:
    server.create(no_ack=True)
    steps: list[Step] = [(1, 0), (2, 1), (3, 1), (3, 4), (4, 1, WRONG), (5, 2)]
    expected = {"ok": [stored(4, "F", 5)], "fail": [stored(3, "F", 3)]}
    said = course(server, steps, mode=mode, flow=2)
    assert said == [ack(2, 2), ack(2, 2), err_wrong(4, 3), *expected[mode]]
    assert fast(server, "F", 9, 1) == []


def test_user_headers_of_an_atomic_batch_mean_nothing_on_a_fast_message(server: Server) -> None:
    server.create()
    headers = {"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "7"}
    assert fast(server, "F1", 1, 2, headers) == [stored(1, "F1", 1)]
    assert server.stored() == [(1, "s.a", b"", headers)]


# Fast ingest: life


def test_a_fast_batch_without_messages_is_forgotten_without_a_word_and_a_ping_is_a_message(
    small_server: Server,
) -> None:
    small_server.create()
    fast(small_server, "F1", 1, 0)
    small_server.wait(0.6)
    assert fast(small_server, "F1", 1, 4) == [ack(0, 10)]
    small_server.wait(0.6)
    assert fast(small_server, "F1", 2, 1) == []
    small_server.wait(1.2)
    assert fast(small_server, "F1", 2, 4) == [UNKNOWN]
    assert small_server.advisories() == []


def test_disabling_fast_ingest_drops_its_batches_and_a_purge_does_not(server: Server) -> None:
    server.create()
    fast(server, "F1", 1, 0)
    server.purge()
    assert fast(server, "F1", 2, 1) == []
    server.update(allow_batched=False)
    assert fast(server, "F1", 3, 1) == [FAST_DISABLED]
    server.update(allow_batched=True)
    assert fast(server, "F1", 3, 1) == [UNKNOWN]


def test_a_refused_atomic_batch_leaves_fast_ingest_with_a_wrong_idea_of_the_last_sequence(server: Server) -> None:
    # A fault of nats-server 2.15.1: what the batch counted up to its refusal is not taken back.
    server.create()
    plain(server)
    commit_all(server, [("s.a", {}), ("s.a", {}), ("s.a", {STREAM: "T"})])
    assert plain(server, {LAST_SEQUENCE: "1"}) == [stored(2)]
    assert fast(server, "F1", 1, 0, {LAST_SEQUENCE: "2"})[1:] == [err_wrong(1, 3)]
    assert commit_all(server, [("s.a", {LAST_SEQUENCE: "2"})]) == stored(3, "B", 1)
    assert fast(server, "F1", 2, 1, {LAST_SEQUENCE: "3"}) == []


# Plain publishes, which batches share their stream with

PLAIN: dict[str, tuple[Headers, str]] = {
    "nothing": ({}, stored(3)),
    "the stream's sequence": ({LAST_SEQUENCE: "2"}, stored(3)),
    "a wrong one": ({LAST_SEQUENCE: "1"}, wrong_sequence(2)),
    "no number": ({LAST_SEQUENCE: "x"}, wrong_sequence(2)),
    "no value": ({LAST_SEQUENCE: ""}, stored(3)),
    "the subject's sequence before the stream's": ({LAST_SEQUENCE: "9", LAST_SUBJECT_SEQUENCE: "9"}, wrong_sequence(1)),
    "a guard": ({LAST_SUBJECT_SEQUENCE: "2", GUARD: "s.*"}, stored(3)),
    "a guard alone": ({GUARD: "s.b"}, refused(10193, 400, "missing sequence for expected last sequence per subject")),
    "another stream": ({STREAM: "T", LAST_SEQUENCE: "9"}, refused(10060, 400, "expected stream does not match")),
    "a duplicate": ({MSG_ID: "m1"}, '{"stream":"S","seq":1,"duplicate": true}'),
    "a duplicate with a wrong sequence": ({MSG_ID: "m1", LAST_SEQUENCE: "9"}, wrong_sequence(2)),
    "a duplicate with a rollup": ({MSG_ID: "m1", ROLLUP: "sub"}, '{"stream":"S","seq":1,"duplicate": true}'),
    "the last message's id": ({LAST_ID: "m1"}, refused(10070, 400, "wrong last msg ID: ")),
    "a time to live": ({TTL: "5s"}, refused(10166, 400, "per-message TTL is disabled")),
    "a time to live that is none": ({TTL: "soon"}, refused(10165, 400, "invalid per-message TTL")),
    "a rollup": ({ROLLUP: "sub"}, refused(10111, 500, "rollup not permitted")),
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_plain_publish_is_checked_in_this_order(server: Server, case: str) -> None:
    headers, expected = PLAIN[case]
    server.create()
    plain(server, {MSG_ID: "m1"})
    plain(server, subject="s.b")
    assert plain(server, headers) == [expected]


def test_nobody_answers_on_a_subject_without_a_stream(server: Server) -> None:
    server.create()
    assert plain(server, subject="t.a") == [NOBODY]


def test_a_full_stream_lets_a_plain_publish_take_the_place_of_its_predecessor(server: Server) -> None:
    server.create(discard="new", max_messages=2, max_messages_per_subject=1)
    plain(server)
    plain(server, subject="s.b")
    assert plain(server, subject="s.c") == [refused(10077, 503, "maximum messages exceeded")]
    assert plain(server) == [stored(3)]
    assert [each[:2] for each in server.stored()] == [(2, "s.b"), (3, "s.a")]


def test_a_smaller_limit_evicts_at_once(server: Server) -> None:
    server.create(max_messages_per_subject=5)
    for _ in range(4):
        plain(server)
    server.update(max_messages_per_subject=3)
    assert [each[0] for each in server.stored()] == [2, 3, 4]
    server.update(max_messages=1)
    assert [each[0] for each in server.stored()] == [4]


@pytest.mark.parametrize(("storage", "size_bytes"), [("memory", 16 + 3 + 10), ("file", 30 + 3 + 10)])
def test_a_limit_of_bytes_counts_what_the_store_writes(server: Server, storage: str, size_bytes: int) -> None:
    server.create(storage=storage, discard="new", max_bytes=2 * size_bytes)
    said = [plain(server, data=b"0123456789") for _ in range(3)]
    assert said == [[stored(1)], [stored(2)], [refused(10077, 503, "maximum bytes exceeded")]]


# Whatever else may happen


class Chance:
    """A random publisher: three kinds of publishes, mostly in order, mostly with sensible headers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._last: dict[str, int] = {}
        self._modes: dict[str, tuple[int, str]] = {}

    def stream(self) -> dict[str, Any]:
        chance = self._random
        fields: dict[str, Any] = {"allow_rollup": chance.random() < 0.6}
        if chance.random() < 0.3:
            fields["max_messages"] = chance.randint(2, 8)
        if chance.random() < 0.2:
            fields["max_bytes"] = chance.randint(200, 600)
        if chance.random() < 0.3:
            fields["max_messages_per_subject"] = chance.randint(1, 2)
        if len(fields) > 1 and chance.random() < 0.5:
            fields["discard"] = "new"
            fields["discard_new_per_subject"] = "max_messages_per_subject" in fields and chance.random() < 0.5
        return fields

    def message(self, last: int) -> tuple[str, bytes, str | None, dict[str, str]]:
        chance = self._random
        headers = self._headers(last) if chance.random() < 0.6 else {}
        kind = chance.choice(["plain", "atomic", "fast", "fast"])
        reply: str | None = "_R.plain"
        if kind == "atomic":
            reply = self._atomic(headers)
        elif kind == "fast":
            reply = self._fast()
        data = b"x" * chance.choice([0, 1, 10, 50])
        return f"s.{chance.choice('abc')}", data, reply, headers

    def forget(self, reply: str | None) -> None:
        for id in list(self._last):
            if reply and f".{id}." in reply:
                del self._last[id]

    def _headers(self, last: int) -> dict[str, str]:
        chance = self._random
        headers = {}
        for probability, name, values in (
            (0.12, LAST_SEQUENCE, [last, last, last + 1, 0, "x", ""]),
            (0.12, LAST_SUBJECT_SEQUENCE, [0, 0, last, 1, 2, 3]),
            (0.06, GUARD, ["s.a", "s.b", "s.>", "s.*", "s.none"]),
            (0.2, MSG_ID, list("abcdefgh")),
            (0.05, STREAM, ["S", "T"]),
            (0.04, ROLLUP, ["sub", "all", "zz", "SUB"]),
            (0.03, TTL, ["5s", "zz", "never"]),
            (0.03, LEVEL, [5, 9]),
            (0.03, "own", ["header"]),
        ):
            if chance.random() < probability:
                headers[name] = str(chance.choice(values))
        return headers

    def _atomic(self, headers: dict[str, str]) -> str | None:
        chance = self._random
        id = chance.choice(["A1", "A2", "A3"])
        sequence = chance.choices([self._last.get(id, 0) + 1, 1, 3], [8, 1, 1])[0]
        headers |= {"Nats-Batch-Id": id, "Nats-Batch-Sequence": str(sequence)}
        self._last[id] = sequence
        if chance.random() < 0.3:
            headers["Nats-Batch-Commit"] = chance.choice(["1", "1", "eob", "eob", "zz"])
            del self._last[id]
        return f"_R.atomic.{id}.x" if chance.random() < 0.9 else None

    def _fast(self) -> str:
        chance = self._random
        id = chance.choice(["F1", "F2", "F3"])
        following = self._last.get(id, 0) + 1
        if following == 1:
            self._modes[id] = (chance.choice([1, 2, 3, 10]), chance.choice(["ok", "fail"]))
        flow, mode = self._modes[id]
        usual = 0 if following == 1 else 1
        sequence, operation = chance.choices(
            [(following, usual), (following + 2, 1), (1, usual), (following, 2), (following, 3), (following, 4)],
            [60, 6, 3, 10, 6, 3],
        )[0]
        if operation == 4 and chance.random() < 0.7:
            sequence = max(1, following - 1)
        if operation < 2:
            self._last[id] = sequence
        elif operation < 4:
            self._last.pop(id, None)
        return f"_R.fast.{id}.{flow}.{mode}.{sequence}.{operation}.$FI"


@pytest.mark.parametrize("seed", range(40))
def test_model_and_server_answer_a_random_publisher_alike(real_server: Real, seed: int) -> None:
    chance = Chance(seed)
    model = Model()
    fields = chance.stream()
    model.create(**fields)
    real_server.create(**fields)
    try:
        for step in range(30):
            subject, data, reply, headers = chance.message(model.server.last_sequence("S"))
            expected = real_server.send(subject, data, reply=reply, headers=headers)
            said = model.send(subject, data, reply=reply, headers=headers)
            assert said == expected, f"seed {seed}, step {step}: {subject} {len(data)} bytes {reply} {headers}"
            if any("10176" in each or "10208" in each or '"batch"' in each for each in said):
                chance.forget(reply)
        assert model.stored() == real_server.stored()
    finally:
        real_server.reset()


# Three replicas: leaders come and go


class Replicated(Protocol):
    """A stream ``S`` with three replicas."""

    def send(self, subject: str, *, reply: str | None = None, headers: Headers | None = None) -> None: ...
    def replies(self, count: int) -> list[tuple[str, str]]:
        """``count`` replies and then what else there is, sorted: replicas finish in their own order."""
        ...

    def change_leader(self) -> None: ...
    def stored_count(self) -> int: ...
    def advisories(self) -> list[dict[str, Any]]: ...


class ReplicatedModel:
    def __init__(self) -> None:
        self._model = Model()
        self._model.create(replicas=3)
        self._said: list[tuple[str, str]] = []

    def send(self, subject: str, *, reply: str | None = None, headers: Headers | None = None) -> None:
        self._said += [(reply or "", each) for each in self._model.send(subject, reply=reply, headers=headers)]

    def replies(self, count: int) -> list[tuple[str, str]]:
        said, self._said = self._said, []
        return sorted(said)

    def change_leader(self) -> None:
        self._model.server.lose_leader("S", self._model.now)
        said = self._model.server.elect_leader("S", self._model.now)
        self._said += [(each.subject, each.data.decode()) for each in said]

    def stored_count(self) -> int:
        return len(self._model.stored())

    def advisories(self) -> list[dict[str, Any]]:
        return self._model.advisories()


class ReplicatedReal:
    _numbers = itertools.count()

    def __init__(self, cluster: NatsCluster) -> None:
        # A deleted stream may go on listening for a moment on one of the nodes: no two tests share a subject.
        self._prefix = f"s{next(self._numbers)}"
        self._client = jetspark.blocking.connect(cluster.urls)
        self._js = self._client.jetstream(timeout=2)
        self._js.create_stream(_config("S", {"replicas": 3, "subjects": [f"{self._prefix}.>"]}))
        self._replies = self._client.subscribe("_R.>")
        self._advised = self._client.subscribe(f"{ADVISORIES}>")
        self._client.flush()

    def close(self) -> None:
        self._js.delete_stream("S")
        self._client.close()

    def send(self, subject: str, *, reply: str | None = None, headers: Headers | None = None) -> None:
        own = f"{self._prefix}{subject.removeprefix('s')}"
        self._client.publish(own, reply=reply or "", headers=dict(headers) if headers else None)

    def replies(self, count: int) -> list[tuple[str, str]]:
        said: list[tuple[str, str]] = []
        while True:
            try:
                message = self._replies.next(timeout=20 if len(said) < count else 0.3)
            except RequestTimeout:
                return sorted(said)
            said.append((message.subject, str(message.status.code) if message.status else message.data.decode()))

    def change_leader(self) -> None:
        stream = self._js.stream("S")
        stream.step_down()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                info = stream.info()
                if info.cluster is not None and info.cluster.leader:
                    return
            except (ServerError, RequestTimeout, jetspark.JetStreamUnavailable):
                pass
            time.sleep(0.05)
        raise TimeoutError("the stream has no leader")

    def stored_count(self) -> int:
        return self._js.stream("S").info().state.messages

    def advisories(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(self._advised.next(timeout=0.3).data)]
        except RequestTimeout:
            return []


@pytest.fixture(params=["model", pytest.param("real", marks=pytest.mark.slow)])
def replicated(request: pytest.FixtureRequest) -> Iterator[Replicated]:
    if request.param == "model":
        yield ReplicatedModel()
    else:
        real = ReplicatedReal(request.getfixturevalue("cluster"))
        yield real
        real.close()


def reply_subject(id: str, sequence: int, operation: int, mode: str = "ok") -> str:
    return f"_R.{id}.10.{mode}.{sequence}.{operation}.$FI"


def fast_to(
    server: Replicated, id: str, sequence: int, operation: int, headers: Headers | None = None, *, mode: str = "ok"
) -> str:
    reply = reply_subject(id, sequence, operation, mode)
    server.send("s.a", reply=reply, headers=headers)
    return reply


def test_a_new_leader_does_not_know_what_the_old_one_had_staged(replicated: Replicated) -> None:
    replicated.send("s.a", reply="_R.1", headers={"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "1"})
    assert replicated.replies(1) == [("_R.1", "")]
    replicated.change_leader()
    commit = {"Nats-Batch-Id": "B1", "Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
    replicated.send("s.a", reply="_R.2", headers=commit)
    assert replicated.replies(1) == [("_R.2", INCOMPLETE)]
    assert replicated.stored_count() == 0
    assert replicated.advisories() == []


@pytest.mark.parametrize("mode", ["ok", "fail"])
def test_a_new_leader_says_unasked_how_far_a_fast_batch_is_stored_and_it_goes_on(
    replicated: Replicated, mode: str
) -> None:
    start = fast_to(replicated, "F1", 1, 0, mode=mode)
    assert replicated.replies(1) == [(start, ack(0, 10))]
    for sequence in (2, 3):
        newest = fast_to(replicated, "F1", sequence, 1, mode=mode)
    assert replicated.replies(0) == []
    replicated.change_leader()
    assert replicated.replies(1) == [(newest, ack(3, 10))]
    fast_to(replicated, "F1", 4, 1, mode=mode)
    commit = fast_to(replicated, "F1", 5, 2, mode=mode)
    assert replicated.replies(1) == [(commit, stored(5, "F1", 5))]


def test_with_several_batches_a_new_leader_starts_each_at_1(replicated: Replicated) -> None:
    first = fast_to(replicated, "F1", 1, 0)
    assert replicated.replies(1) == [(first, ack(0, 10))]
    second = fast_to(replicated, "F2", 1, 0)
    assert replicated.replies(2) == [(second, ack(0, 1)), (second, ack(1, 2))]
    replicated.change_leader()
    assert replicated.replies(2) == sorted([(first, ack(1, 1)), (second, ack(1, 1))])


def test_a_new_leader_takes_what_was_refused_for_lost(replicated: Replicated) -> None:
    fast_to(replicated, "F1", 1, 0)
    replicated.replies(1)
    wrong = fast_to(replicated, "F1", 2, 1, {STREAM: "T"})
    assert replicated.replies(1) == [(wrong, err(2, 10060, 400, "expected stream does not match"))]
    replicated.change_leader()
    assert replicated.replies(1) == [(reply_subject("F1", 1, 0), ack(1, 10))]
    following = fast_to(replicated, "F1", 3, 1)
    assert replicated.replies(1) == [(following, gap(2, 3))]


def test_a_batch_that_was_ended_without_a_commit_is_open_again_under_a_new_leader(replicated: Replicated) -> None:
    start = fast_to(replicated, "F1", 1, 0)
    replicated.replies(1)
    end = fast_to(replicated, "F1", 2, 3)
    [(subject, final)] = replicated.replies(1)
    assert subject in (start, end)
    assert final == stored(1, "F1", 1)
    replicated.change_leader()
    assert replicated.replies(1) == [(start, ack(1, 10))]
    commit = fast_to(replicated, "F1", 2, 2)
    assert replicated.replies(1) == [(commit, stored(2, "F1", 2))]
    replicated.change_leader()
    assert replicated.replies(0) == []
    unknown = fast_to(replicated, "F1", 3, 1)
    assert replicated.replies(1) == [(unknown, UNKNOWN)]


def test_a_replicated_stream_checks_plain_publishes_in_the_order_of_batches(replicated: Replicated) -> None:
    replicated.send("s.a", reply="_R.1", headers={MSG_ID: "m1"})
    assert replicated.replies(1) == [("_R.1", stored(1))]
    replicated.send("s.a", reply="_R.2", headers={MSG_ID: "m1", LAST_SEQUENCE: "9"})
    assert replicated.replies(1) == [("_R.2", '{"stream":"S","seq":1,"duplicate": true}')]
    replicated.send("s.b", reply="_R.3", headers={LAST_SEQUENCE: "9", LAST_SUBJECT_SEQUENCE: "9"})
    assert replicated.replies(1) == [("_R.3", wrong_sequence(1))]
