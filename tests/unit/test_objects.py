from __future__ import annotations

import base64
import datetime
import hashlib
import io
import json
import math
from array import array
from typing import Any

import pytest

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.errors import (
    BatchInDoubt,
    ConfigError,
    Conflict,
    ConnectionLost,
    DigestMismatch,
    KeyExists,
    ObjectNotFound,
    ProtocolError,
    RequestTimeout,
    ServerError,
)
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.features import ServerFacts
from jetspark.jetstream.objects import (
    DEFAULT_CHUNK_BYTES,
    FAST_WINDOW_BYTES,
    MAX_LINKS,
    READ_AHEAD_BYTES,
    Download,
    ObjectInfo,
    ObjectLink,
    ObjectMeta,
    Objects,
    ObjectStoreConfig,
    Progress,
    Upload,
    create_bucket,
    fast_options,
    info_of_delivery,
    lag_pauses,
    link_to,
    meta_subject,
    next_link,
    resolve,
    steps,
    watch_options,
    write_chunks,
)
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.publish.fast_options import FastPublisherOptions

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
META = ObjectMeta(name="report.pdf")


def _info(**fields: Any) -> ObjectInfo:
    return ObjectInfo(**{"bucket": "files", "name": "report.pdf", "nuid": "N1"} | fields)


def test_the_stream_is_the_one_every_client_makes() -> None:
    config = ObjectStoreConfig(bucket="files", ttl_s=60.0, max_bytes=1000, replicas=3).to_stream()
    assert config.name == "OBJ_files"
    assert config.subjects == ["$O.files.C.>", "$O.files.M.>"]
    assert (config.allow_rollup, config.allow_direct, config.discard) == (True, True, "new")
    assert (config.max_age_s, config.duplicate_window_s, config.max_bytes, config.replicas) == (60.0, 60.0, 1000, 3)
    assert ObjectStoreConfig.of("files") == ObjectStoreConfig(bucket="files")
    with pytest.raises(ConfigError, match="bucket"):
        ObjectStoreConfig(bucket="a.b")


def test_a_new_bucket_allows_fast_ingest_where_the_server_has_it() -> None:
    config = ObjectStoreConfig(bucket="files")
    assert [config.to_stream(level).allow_batched for level in (0, 3, 4, 5)] == [None, None, True, True]


def test_the_chunks_in_flight_fit_into_a_window_whatever_their_size() -> None:
    config = StreamConfig(name="OBJ_files", allow_batched=True)
    for chunk_bytes in (1, 1000, 128 * 1024, 1 << 20, 8 << 20, 60 << 20):
        options = FastPublisherOptions(**fast_options(config, Upload("N1", chunk_bytes), 64 << 20, 60.0) or {})
        in_flight_bytes = options.flow * options.max_outstanding_acks * chunk_bytes
        assert in_flight_bytes <= max(FAST_WINDOW_BYTES, 2 * chunk_bytes)
        assert options.flow == 1 or options.flow * (chunk_bytes + 300) < options.max_pending_bytes
        assert (options.message_ids, options.id_prefix) == (True, "N1")
    assert fast_options(config, Upload("N1", 128 * 1024), 1 << 20, 60.0) == {
        "message_ids": True,
        "id_prefix": "N1",
        "max_pending_bytes": 16 << 20,
        "flow": 32,
        "patience_s": 60.0,
        "batch_timeout_s": 15.0,
        "wait_for_stream_s": 60.0,
    }


def test_a_put_gives_up_before_the_stream_forgets_its_ids() -> None:
    config = StreamConfig(name="OBJ_files", allow_batched=True, duplicate_window_s=10.0)
    options = fast_options(config, Upload("N1", 4), 1 << 20, 60.0)
    assert options is not None
    assert (options["patience_s"], options["batch_timeout_s"]) == (5.0, 2.5)


def test_a_put_gives_up_after_its_time_out() -> None:
    config = StreamConfig(name="OBJ_files", allow_batched=True)
    options = fast_options(config, Upload("N1", 4), 1 << 20, 3.0)
    assert options is not None
    assert (options["patience_s"], options["batch_timeout_s"]) == (3.0, 1.5)


def test_whatever_says_that_nothing_was_acknowledged_names_the_put() -> None:
    progress = Progress("files", "a", 3.0)
    assert progress.in_flight_wait_s(5.0) == 5.0
    with pytest.raises(ServerError, match="full"), progress.awaited():
        raise ServerError(503, 10047, "full")
    assert not progress.is_missed
    for error in (RequestTimeout("chunk", 1.0), BatchInDoubt("b", "no answer")):
        expected = "put of object 'a' into bucket 'files'.*within 3 s"
        with pytest.raises(RequestTimeout, match=expected) as caught, progress.awaited():
            raise error
        assert caught.value.__cause__ is error
    assert progress.in_flight_wait_s(5.0) == 0.0  # one who did not answer is not waited for much longer


def test_cleaning_up_takes_what_settling_left_and_never_much_longer() -> None:
    progress = Progress("files", "a", 3.0)
    assert [progress.clean_up_s(5.0, left_s) for left_s in (4.0, 0.5, -1.0)] == [4.0, 1.0, 1.0]
    assert progress.clean_up_s(0.2, -1.0) == 0.2


def test_chunks_go_the_plain_way_where_fast_ingest_or_an_id_is_impossible() -> None:
    batched = StreamConfig(name="OBJ_files", allow_batched=True)
    assert fast_options(StreamConfig(name="OBJ_files"), Upload("N1", 4), 1 << 20, 60.0) is None
    assert fast_options(batched, Upload("N1", 1 << 20), 1 << 20, 60.0) is None
    small = StreamConfig(name="OBJ_files", allow_batched=True, max_message_bytes=1000)
    assert fast_options(small, Upload("N1", 1000), 1 << 20, 60.0) is None
    assert fast_options(small, Upload("N1", 900), 1 << 20, 60.0) is not None


def test_a_name_is_base64_with_padding_in_the_subject() -> None:
    assert meta_subject("files", "a") == "$O.files.M.YQ=="
    assert meta_subject("files", "ÿ?>/x y") == "$O.files.M." + base64.urlsafe_b64encode("ÿ?>/x y".encode()).decode()
    with pytest.raises(ConfigError, match=r"name='a\\ud800': expected text .* has no '\\ud800'; decode"):
        ObjectMeta(name="a\ud800")
    with pytest.raises(ConfigError, match="name=''"):
        meta_subject("files", "")
    with pytest.raises(ConfigError, match="name=''"):
        ObjectMeta(name="")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": 5}, "name=5: expected the name of an object"),
        ({"description": 5}, "description=5"),
        ({"headers": {"A": "1\r\n2"}}, "header"),
        ({"metadata": {"a": 5}}, "metadata=.*: expected a dict of str to str"),
        ({"metadata": {5: "a"}}, "metadata=.*: expected a dict of str to str"),
        ({"metadata": "text"}, "metadata='text': expected a dict of str to str"),
    ],
)
def test_what_cannot_be_said_of_an_object_is_refused_where_it_is_written(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ObjectMeta(**{"name": "a"} | fields)


def test_a_chunk_is_as_large_as_every_client_makes_it() -> None:
    assert DEFAULT_CHUNK_BYTES == 131_072


def test_metadata_survives_the_wire() -> None:
    info = _info(
        description="yearly",
        headers=Headers({"A": ["1", "2"], "b": "3"}),
        metadata={"k": "v"},
        size_bytes=10,
        chunks=2,
        chunk_bytes=8,
        digest="SHA-256=abc=",
        mtime=NOW,
        sequence=7,
        extra={"future": 1},
    )
    written = json.loads(info.encode())
    assert written == {
        "name": "report.pdf",
        "description": "yearly",
        "headers": {"A": ["1", "2"], "b": ["3"]},
        "metadata": {"k": "v"},
        "options": {"max_chunk_size": 8},
        "bucket": "files",
        "nuid": "N1",
        "size": 10,
        "mtime": "2026-01-02T03:04:05Z",
        "chunks": 2,
        "digest": "SHA-256=abc=",
        "future": 1,
    }
    assert ObjectInfo.decode(info.encode(), NOW, 7) == info


def test_links_and_deletions_survive_the_wire() -> None:
    for link in (ObjectLink(bucket="other", name="x"), ObjectLink(bucket="other")):
        info = _info(link=link, mtime=NOW)
        assert (info.size_bytes, info.chunks) == (0, 0), "a link has no content"
        assert ObjectInfo.decode(info.encode(), NOW, 0) == info
    gone = _info(is_deleted=True)
    written = json.loads(gone.encode())
    assert written["deleted"] is True
    assert written["mtime"] == "0001-01-01T00:00:00Z"
    assert ObjectInfo.decode(gone.encode(), NOW, 3).is_deleted


def test_what_other_clients_leave_out_or_write_empty_is_read() -> None:
    theirs = {"name": "x", "bucket": "b", "nuid": "n", "mtime": "", "digest": "", "options": None, "headers": None}
    info = ObjectInfo.decode(json.dumps(theirs | {"headers": {"A": "1"}}).encode(), NOW, 1)
    assert (info.size_bytes, info.chunks, info.digest, info.mtime, dict(info.headers)) == (0, 0, "", NOW, {"A": "1"})


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{}", b'{"name":"x","bucket":"b","options":{"link":{"name":"y"}}}', b"\xff"]
)
def test_metadata_that_is_none_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="object metadata"):
        ObjectInfo.decode(data, NOW, 1)


@pytest.mark.parametrize("piece_bytes", [1, 3, 4, 5, 8, 1000])
@pytest.mark.parametrize("size_bytes", [0, 1, 3, 4, 5, 8, 41])
def test_pieces_of_any_size_become_chunks_of_one_size(size_bytes: int, piece_bytes: int) -> None:
    data = bytes(range(size_bytes))
    upload = Upload("N1", 4)
    pieces = [data[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
    chunks = [chunk for some in steps(upload, iter(pieces)) for chunk in some]
    assert chunks == [data[start : start + 4] for start in range(0, size_bytes, 4)]
    info = upload.info("files", META, NOW)
    assert (info.size_bytes, info.chunks, info.chunk_bytes, info.nuid) == (size_bytes, len(chunks), 4, "N1")
    assert info.digest == "SHA-256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode()
    download = Download(info)
    assert [download.feed(chunk) for chunk in chunks] == chunks
    download.finish()


@pytest.mark.parametrize(
    "source",
    [
        b"0123456789",
        bytearray(b"0123456789"),
        memoryview(b"0123456789"),
        io.BytesIO(b"0123456789"),
        [b"01234", b"56789"],
    ],
    ids=["bytes", "bytearray", "memoryview", "file", "list"],
)
def test_every_kind_of_source_gives_the_same_chunks(source: Any) -> None:
    chunks = [chunk for some in steps(Upload("N1", 4), source) for chunk in some]
    assert chunks == [b"0123", b"4567", b"89"]
    assert {type(chunk) for chunk in chunks} == {bytes}


def test_a_step_reads_no_more_than_a_block() -> None:
    upload = Upload("N1", 128 * 1024)
    assert upload.block_bytes == 1 << 20
    assert Upload("N1", 300_000).block_bytes == 900_000
    assert Upload("N1", 8 << 20).block_bytes == 8 << 20
    assert Upload("N1", 128 * 1024, 2 << 20).block_bytes == 2 << 20
    assert [len(some) for some in steps(upload, bytes(5 << 19))] == [8, 8, 4, 0]


def test_a_source_without_bytes_is_refused_with_what_would_do() -> None:
    class NonBlocking:
        def read(self, size: int) -> None:
            return None

    for source, message in (
        ("text", r"text\.encode"),
        (io.StringIO("text"), "binary mode"),
        (["text"], "gives str"),
        (NonBlocking(), "non-blocking"),
        (5, "source is int"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(steps(Upload("N1", 4), source))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunk_bytes=0"):
        Upload("N1", 0)


def _uploaded(*chunks: bytes) -> ObjectInfo:
    upload = Upload("N1", 4)
    assert [chunk for some in steps(upload, list(chunks)) for chunk in some] == list(chunks)
    return upload.info("files", META, NOW)


def _download(info: ObjectInfo, chunks: list[bytes]) -> None:
    download = Download(info)
    for chunk in chunks:
        download.feed(chunk)
    download.finish()


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([b"abcd"], "1 of 2 chunks"),
        ([b"abcd", b"e", b"x"], "more than 2 chunks"),
        ([b"abcd", b"efg"], "7 bytes instead of 5"),
        ([b"abcd", b"x"], "digest SHA-256=.* instead of SHA-256="),
        ([b"e", b"abcd"], "digest"),
    ],
)
def test_what_is_not_what_was_put_is_an_error(chunks: list[bytes], reason: str) -> None:
    with pytest.raises(DigestMismatch, match=reason):
        _download(_uploaded(b"abcd", b"e"), chunks)


def test_a_digest_may_lack_its_padding_or_be_missing_but_not_be_of_another_kind() -> None:
    info = _uploaded(b"abcd")
    for digest in (info.digest.rstrip("="), info.digest.replace("SHA", "sha"), ""):
        _download(_info(size_bytes=4, chunks=1, digest=digest), [b"abcd"])
    with pytest.raises(DigestMismatch, match="kind 'MD5'"):
        _download(_info(size_bytes=4, chunks=1, digest="MD5=abc"), [b"abcd"])


def test_a_download_asks_for_a_bounded_part_and_at_the_end_for_one_more() -> None:
    download = Download(_info(chunks=100, size_bytes=100 << 20, chunk_bytes=1 << 20))
    assert download.max_messages == READ_AHEAD_BYTES >> 20
    download = Download(_info(chunks=2, size_bytes=2))
    assert download.max_messages == 3
    download.feed(b"a")
    assert (download.max_messages, download.is_short) == (2, True)
    assert Download(_info(chunks=9, size_bytes=9 << 30, chunk_bytes=1 << 30)).max_messages == 1


def test_an_unbuffered_file_that_takes_a_part_gets_the_rest() -> None:
    taken = bytearray()

    class Slow:
        def write(self, data: bytes) -> int:
            taken.extend(data[:3])
            return min(3, len(data))

    write_chunks(Slow(), [b"0123456789", b"", b"ab"])
    assert taken == b"0123456789ab"


def test_only_replicas_can_be_behind() -> None:
    assert lag_pauses(StreamConfig(name="S", replicas=1)) == []
    assert lag_pauses(StreamConfig(name="S")) == []
    assert lag_pauses(StreamConfig(name="S", replicas=2)) == lag_pauses(StreamConfig(name="S", replicas=3)) != []


def test_a_watch_begins_with_the_present_or_with_the_next_change() -> None:
    assert watch_options("files").deliver_policy == "last_per_subject"
    assert watch_options("files", updates_only=True).deliver_policy == "new"
    assert watch_options("files").filter_subjects == ("$O.files.M.>",)


def test_links_lead_to_objects_that_are_there() -> None:
    assert link_to(_info()) == ObjectLink(bucket="files", name="report.pdf")
    for target in (_info(is_deleted=True), _info(link=ObjectLink(bucket="b", name="x"))):
        with pytest.raises(ConfigError, match="target"):
            link_to(target)
    assert next_link(_info(link=ObjectLink(bucket="b", name="x")), 0) == ("b", "x")
    with pytest.raises(ConfigError, match="link to bucket 'b'"):
        next_link(_info(link=ObjectLink(bucket="b")), 0)
    with pytest.raises(ConfigError, match="in a row"):
        next_link(_info(link=ObjectLink(bucket="b", name="x")), MAX_LINKS)


# ---- operations, with a server of a few lines ------------------------------------------------------------------------


class _Server:
    """Keeps the last message of each subject, and refuses a write that expects another."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, bytes]] = {}
        self.sequence = 0
        self.purged: list[Any] = []

    def run(self, operation: Operation[Any], *, before_write: Any = None, before_purge: Any = None) -> Any:
        try:
            request = next(operation)
            while True:
                assert isinstance(request, Request)
                if request.subject.startswith("$O.") and before_write:
                    before_write, action = None, before_write
                    action()
                if ".PURGE." in request.subject and before_purge:
                    before_purge, action = None, before_purge
                    action()
                request = operation.send(self._answer(request))
        except StopIteration as finished:
            return finished.value

    def store(self, subject: str, data: bytes) -> int:
        self.sequence += 1
        self.last[subject] = (self.sequence, data)
        return self.sequence

    def _answer(self, request: Request) -> CoreMessage:
        return CoreMessage("", json.dumps(self._reply(request)).encode(), None, None, None)

    def _reply(self, request: Request) -> dict[str, Any]:
        if request.subject.startswith("$O."):
            headers = Headers(request.headers)
            assert headers["Nats-Rollup"] == "sub"
            if int(headers["Nats-Expected-Last-Subject-Sequence"]) != self.last.get(request.subject, (0,))[0]:
                return {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence"}}
            return {"stream": "OBJ_files", "seq": self.store(request.subject, request.data)}
        body = json.loads(request.data)
        if ".PURGE." in request.subject:
            self.purged.append(body)
            is_there = self.last.get(body["filter"], (math.inf,))[0] < body["seq"]
            if is_there:
                del self.last[body["filter"]]
            return {"purged": int(is_there)}
        found = self.last.get(body["last_by_subj"])
        if found is None:
            return {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        data = base64.b64encode(found[1]).decode()
        return {"message": {"seq": found[0], "data": data, "subject": "s", "time": "2026-01-01T00:00:00Z"}}


@pytest.fixture
def objects() -> Objects:
    return Objects(Api(), StreamConfig(name="OBJ_files"))


def _put(server: _Server, objects: Objects, nuid: str, name: str = "a", **hooks: Any) -> Upload:
    upload = Upload(nuid, 4)
    server.run(objects.commit(upload, upload.info("files", ObjectMeta(name=name), NOW)), **hooks)
    return upload


def test_an_object_replaces_what_is_there_when_it_is_written_not_what_was_there_before(objects: Objects) -> None:
    server = _Server()
    assert _put(server, objects, "N1").replaced_nuid == ""
    upload = _put(server, objects, "N3", before_write=lambda: _put(server, objects, "N2"))
    assert upload.replaced_nuid == "N2"
    assert server.run(objects.info("a")).nuid == "N3"


def test_a_write_whose_acknowledgement_was_lost_is_found_when_it_is_repeated(objects: Objects) -> None:
    server = _Server()
    _put(server, objects, "N1")
    upload = Upload("N2", 4)
    info = upload.info("files", ObjectMeta(name="a"), NOW)
    stored = server.run(objects.commit(upload, info))
    again = server.run(objects.commit(upload, info))
    assert (again.sequence, again.nuid, upload.replaced_nuid) == (stored.sequence, "N2", "N1")
    assert server.sequence == 2


def test_deleting_leaves_a_mark_and_tells_whose_chunks_are_free(objects: Objects) -> None:
    server = _Server()
    _put(server, objects, "N1")
    assert server.run(objects.delete("a"), before_write=lambda: _put(server, objects, "N2")) == "N2"
    for operation in (objects.info("a"), objects.delete("a"), objects.info("never there")):
        with pytest.raises(ObjectNotFound):
            server.run(operation)
    assert server.run(objects.info("a", include_deleted=True)).is_deleted
    assert _put(server, objects, "N3").replaced_nuid == ""


def test_renaming_takes_a_free_name_and_removes_the_old_one_as_far_as_it_was_seen(objects: Objects) -> None:
    server = _Server()
    _put(server, objects, "N1")
    _put(server, objects, "N2", "taken")
    with pytest.raises(KeyExists):
        server.run(objects.update_meta("a", ObjectMeta(name="taken")))
    with pytest.raises(KeyExists):
        server.run(
            objects.update_meta("a", ObjectMeta(name="b")), before_write=lambda: _put(server, objects, "N4", "b")
        )
    assert not server.purged
    renamed = server.run(objects.update_meta("a", ObjectMeta(name="c", description="d")))
    assert (renamed.name, renamed.nuid, renamed.description) == ("c", "N1", "d")
    assert server.purged == [{"filter": meta_subject("files", "a"), "seq": 2}]


@pytest.mark.parametrize("meanwhile", ["replaced", "deleted", "described", "renamed"])
def test_renaming_what_somebody_else_changes_is_undone(objects: Objects, meanwhile: str) -> None:
    server = _Server()
    actions: dict[str, Any] = {
        "replaced": lambda: _put(server, objects, "N2"),
        "deleted": lambda: server.run(objects.delete("a")),
        "described": lambda: server.run(objects.update_meta("a", ObjectMeta(name="a", description="d"))),
        "renamed": lambda: server.run(objects.update_meta("a", ObjectMeta(name="c"))),
    }
    for moment in ("before_write", "before_purge"):
        server = _Server()
        _put(server, objects, "N1")
        with pytest.raises(Conflict, match="'a'"):
            server.run(objects.update_meta("a", ObjectMeta(name="b")), **{moment: actions[meanwhile]})
        assert server.last.keys() == {meta_subject("files", "c" if meanwhile == "renamed" else "a")}


def test_a_rename_that_was_interrupted_is_done_when_it_is_repeated(objects: Objects) -> None:
    def half_done() -> _Server:
        server = _Server()
        _put(server, objects, "N1")
        _put(server, objects, "N1", "b")
        return server

    def again() -> Operation[ObjectInfo]:
        return objects.update_meta("a", ObjectMeta(name="b", description="d"))

    server = half_done()
    assert (server.run(again()).nuid, server.run(objects.info("b")).description) == ("N1", "d")
    assert server.last.keys() == {meta_subject("files", "b")}
    server = half_done()  # two at once
    assert server.run(again(), before_purge=lambda: server.run(again())).nuid == "N1"
    assert server.last.keys() == {meta_subject("files", "b")}
    server = half_done()
    server.run(objects.finish_rename("a", "b"))
    assert server.last.keys() == {meta_subject("files", "b")}


def test_an_interrupted_rename_that_did_nothing_or_all_is_left_as_it_is(objects: Objects) -> None:
    server = _Server()
    _put(server, objects, "N1")
    server.run(objects.finish_rename("a", "b"))
    server.run(objects.finish_rename("b", "a"))
    _put(server, objects, "N2", "b")
    server.run(objects.finish_rename("a", "b"))
    server.run(objects.delete("b"))
    server.run(objects.finish_rename("a", "b"))
    assert not server.purged


class _Scripted:
    """Answers one request after the other."""

    def __init__(self, *replies: dict[str, Any]) -> None:
        self._replies = list(replies)
        self.asked: list[Request] = []

    def run(self, operation: Operation[Any]) -> Any:
        try:
            request = next(operation)
            while True:
                assert isinstance(request, Request)
                self.asked.append(request)
                reply = json.dumps(self._replies.pop(0)).encode()
                request = operation.send(CoreMessage("", reply, None, None, None))
        except StopIteration as finished:
            return finished.value


NO_MESSAGE = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
WRONG_SEQUENCE = {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 9"}}
NAME_IN_USE = {"error": {"code": 400, "err_code": 10058, "description": "stream name already in use"}}


def _described(name: str = "OBJ_files", subjects: dict[str, int] | None = None, **config: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"messages": 3, "bytes": 300, "first_seq": 1, "last_seq": 3, "consumer_count": 0}
    state |= {"first_ts": "2026-01-01T00:00:00Z", "last_ts": "2026-01-01T00:00:00Z"}
    state |= {} if subjects is None else {"subjects": subjects}
    return {"config": {"name": name} | config, "state": state, "created": "2026-01-01T00:00:00Z"}


def _metadata(sequence: int = 1, **fields: Any) -> dict[str, Any]:
    data = base64.b64encode(_info(**fields).encode()).decode()
    return {"message": {"seq": sequence, "data": data, "subject": "s", "time": "2026-01-01T00:00:00Z"}}


def test_metadata_of_a_watch_has_the_place_and_the_time_of_its_message() -> None:
    reply = b"$JS.ACK.OBJ_files.c.1.9.3.1767225600000000000.0"
    info = info_of_delivery(AckableMessage("$O.files.M.x", _info().encode(), reply, None, None))
    assert (info.nuid, info.sequence, info.mtime) == ("N1", 9, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))


def test_what_its_owner_says_about_an_object_can_be_taken_and_given_back() -> None:
    info = _info(description="d", headers=Headers({"A": "1"}), metadata={"m": "1"})
    assert info.meta == ObjectMeta(name="report.pdf", description="d", headers=Headers({"A": "1"}), metadata={"m": "1"})
    assert info.with_meta(info.meta) == info


def test_a_status_is_what_the_stream_says(objects: Objects) -> None:
    server = _Scripted(_described(max_age=60_000_000_000, sealed=True), _described())
    status = server.run(objects.status())
    assert (status.bucket, status.bytes, status.ttl_s, status.is_sealed) == ("files", 300, 60.0, True)
    status = server.run(objects.status())
    assert (status.ttl_s, status.is_sealed) == (0.0, False)


def test_a_store_that_another_client_made_is_as_good() -> None:
    class Known(Api):
        def known(self) -> ServerFacts:
            return ServerFacts(4, "2.14.0")

    server = _Scripted(NAME_IN_USE, _described())
    info = server.run(create_bucket(Known(), ObjectStoreConfig(bucket="files")))
    assert info.config.name == "OBJ_files"
    assert [json.loads(request.data).get("allow_batched") for request in server.asked] == [True, None]
    server = _Scripted(_described())
    assert server.run(create_bucket(Api(), ObjectStoreConfig(bucket="files"))).config.name == "OBJ_files"
    assert "allow_batched" not in json.loads(server.asked[0].data)


def test_links_are_followed_from_bucket_to_bucket(objects: Objects) -> None:
    server = _Scripted(_metadata())
    assert server.run(resolve(objects, "a")) == (None, _info(mtime=MTIME, sequence=1))
    here = _metadata(link=ObjectLink(bucket="files", name="b"))
    there = _metadata(link=ObjectLink(bucket="other", name="c"))
    server = _Scripted(here, there, _described("OBJ_other"), _metadata(5, bucket="other"))
    stream, info = server.run(resolve(objects, "a"))
    assert (stream.config.name, info.bucket, info.sequence) == ("OBJ_other", "other", 5)
    assert [request.subject for request in server.asked] == [
        "$JS.API.STREAM.MSG.GET.OBJ_files",
        "$JS.API.STREAM.MSG.GET.OBJ_files",
        "$JS.API.STREAM.INFO.OBJ_other",
        "$JS.API.STREAM.MSG.GET.OBJ_other",
    ]
    assert [json.loads(server.asked[number].data)["last_by_subj"] for number in (0, 1, 3)] == [
        meta_subject("files", "a"),
        meta_subject("files", "b"),
        meta_subject("other", "c"),
    ]
    server = _Scripted(*[here] * 8, _metadata())
    assert server.run(resolve(objects, "a"))[1].link is None
    server = _Scripted(*[here] * 9)
    with pytest.raises(ConfigError, match="more than 8 links in a row"):
        server.run(resolve(objects, "a"))


MTIME = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.mark.parametrize(("stored", "message"), [(3, "became 3 when"), (1, "became 1 before"), (0, "became 0 before")])
def test_chunks_are_counted_where_their_ids_may_be_forgotten(objects: Objects, stored: int, message: str) -> None:
    upload = Upload("N1", 4)
    upload.feed(b"12345678")
    subjects = {"$O.files.C.N1": stored} if stored else {}
    server = _Scripted(_described(subjects=subjects))
    with pytest.raises(ConnectionLost, match=f"2 chunks {message}"):
        server.run(objects.check_chunks(upload))
    assert json.loads(server.asked[0].data)["subjects_filter"] == "$O.files.C.N1"
    assert _Scripted(_described(subjects={"$O.files.C.N1": 2})).run(objects.check_chunks(upload)) is None


def test_whoever_never_wins_gives_up_after_twenty_attempts(objects: Objects) -> None:
    upload = Upload("N1", 4)
    info = upload.info("files", ObjectMeta(name="a"), NOW)
    server = _Scripted(*[NO_MESSAGE, WRONG_SEQUENCE] * 20)
    with pytest.raises(Conflict, match="'a'"):
        server.run(objects.commit(upload, info))
    assert len(server.asked) == 40
    server = _Scripted(*[_metadata(), WRONG_SEQUENCE] * 20)
    with pytest.raises(Conflict, match="'a'"):
        server.run(objects.delete("a"))
    assert len(server.asked) == 40


def test_a_deletion_leaves_nothing_of_the_content(objects: Objects) -> None:
    server = _Scripted(_metadata(size_bytes=9, chunks=2, digest="SHA-256=x"), {"stream": "OBJ_files", "seq": 2})
    assert server.run(objects.delete("a")) == "N1"
    written = json.loads(server.asked[1].data)
    assert (written["deleted"], written["size"], written["chunks"], "digest" in written) == (True, 0, 0, False)


def test_a_deletion_that_was_interrupted_is_finished(objects: Objects) -> None:
    gone = _metadata(is_deleted=True)
    assert _Scripted(gone, gone).run(objects.finish_delete("a")) == "N1"
    assert _Scripted(_metadata(nuid="N2"), {"stream": "S", "seq": 2}).run(objects.finish_delete("a")) == "N2"
    with pytest.raises(ObjectNotFound):
        _Scripted(NO_MESSAGE, NO_MESSAGE).run(objects.finish_delete("a"))


def test_metadata_that_somebody_else_changed_meanwhile_is_a_conflict(objects: Objects) -> None:
    server = _Scripted(_metadata(7, name="a"), {"stream": "OBJ_files", "seq": 8})
    changed = server.run(objects.update_meta("a", ObjectMeta(name="a", description="new")))
    assert (changed.description, changed.sequence) == ("new", 8)
    assert Headers(server.asked[1].headers)["Nats-Expected-Last-Subject-Sequence"] == "7"
    with pytest.raises(Conflict, match="'a'"):
        _Scripted(_metadata(), WRONG_SEQUENCE).run(objects.update_meta("a", ObjectMeta(name="a")))


def test_arguments_of_another_kind_are_refused_before_anything_is_asked(objects: Objects) -> None:
    with pytest.raises(ConfigError, match="include_deleted=1"):
        next(objects.info("a", include_deleted=1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="meta="):
        next(objects.update_meta("a", {"name": "b"}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"target='a': expected an ObjectInfo, as info\(\) returns it"):
        link_to("a")  # type: ignore[arg-type]


def test_a_link_is_put_where_no_object_is(objects: Objects) -> None:
    link = ObjectLink(bucket="other", name="x")
    acked = {"stream": "OBJ_files", "seq": 8}
    for present in (NO_MESSAGE, _metadata(is_deleted=True), _metadata(link=ObjectLink(bucket="old"))):
        made = _Scripted(present, acked).run(objects.add_link("a", "N9", link, NOW))
        assert (made.name, made.nuid, made.link, made.mtime, made.sequence) == ("a", "N9", link, NOW, 8)
    with pytest.raises(KeyExists):
        _Scripted(_metadata()).run(objects.add_link("a", "N9", link, NOW))
    # A rename does not replace a link.
    renaming = objects.update_meta("a", ObjectMeta(name="b"))
    with pytest.raises(KeyExists):
        _Scripted(_metadata(), _metadata(link=link)).run(renaming)


def test_the_chunks_of_a_version_are_purged_by_its_nuid(objects: Objects) -> None:
    server = _Scripted({"purged": 3})
    assert server.run(objects.purge_chunks("N1")) == 3
    [request] = server.asked
    assert (request.subject, json.loads(request.data)) == (
        "$JS.API.STREAM.PURGE.OBJ_files",
        {"filter": "$O.files.C.N1"},
    )


def test_an_upload_begins_empty() -> None:
    upload = Upload("N1", 4)
    assert (upload.size_bytes, upload.chunks, upload.replaced_nuid) == (0, 0, "")
    assert [Upload("N1", size, 10).block_bytes for size in (3, 10, 20)] == [9, 10, 20]


def test_a_view_of_larger_items_is_cut_by_its_bytes() -> None:
    upload = Upload("N1", 4)
    numbers = array("I", [1, 2, 3])
    assert b"".join(upload.feed(memoryview(numbers))) == numbers.tobytes()
    assert (upload.chunks, upload.size_bytes) == (12 // 4, 12)


@pytest.mark.parametrize(
    "fields",
    [
        {"description": 5},
        {"metadata": {"a": 1}},
        {"options": {"max_chunk_size": "x"}},
        {"options": {"link": {"bucket": "b", "name": 5}}},
    ],
)
def test_metadata_with_values_of_other_types_is_an_error(fields: dict[str, Any]) -> None:
    data = json.dumps(json.loads(_info().encode()) | fields).encode()
    with pytest.raises(ProtocolError, match="object metadata we cannot read"):
        ObjectInfo.decode(data, NOW, 1)


def test_a_stream_for_the_smallest_messages_takes_no_chunks_over_fast_ingest() -> None:
    config = StreamConfig(name="OBJ_files", allow_batched=True, max_message_bytes=1)
    assert fast_options(config, Upload("N1", 4), 1 << 20, 60.0) is None


def test_an_object_of_one_large_chunk_is_asked_for_alone() -> None:
    assert Download(_info(size_bytes=READ_AHEAD_BYTES, chunks=1)).max_messages == 1
    assert Download(_info(size_bytes=READ_AHEAD_BYTES // 2, chunks=1)).max_messages == 2


@pytest.mark.parametrize("error", [RequestTimeout("a chunk", 1.0), BatchInDoubt("id", "nobody answers")])
def test_a_put_that_gets_no_answer_tells_what_became_of_a_batch_and_nothing_of_a_chunk(error: Exception) -> None:
    progress = Progress("files", "a", 5.0)
    with pytest.raises(RequestTimeout) as raised, progress.awaited():
        raise error
    assert ("nobody answers" in str(raised.value)) == isinstance(error, BatchInDoubt)
    assert "a chunk" not in str(raised.value)
    assert progress.is_missed
