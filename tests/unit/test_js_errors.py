"""What the server's numbers and its silence are made of."""

from __future__ import annotations

import pickle

import pytest

from jetspark import errors
from jetspark.core.handshake import ServerInfo
from jetspark.jetstream.errors import server_error, unavailable

ALONE = ServerInfo(name="alone", has_jetstream=True)
CLUSTERED = ServerInfo(name="n1", cluster="C", has_jetstream=True)
OFF = ServerInfo(name="off")
OFF_CLUSTERED = ServerInfo(name="off", cluster="C")


@pytest.mark.parametrize(
    ("subject", "info", "said"),
    [
        ("$JS.API.INFO", OFF, "JetStream is off on server 'off'; start it with -js"),
        (
            "$JS.API.STREAM.INFO.S",
            OFF_CLUSTERED,
            "JetStream is off on server 'off', and no other of its cluster answers",
        ),
        ("orders.created", OFF, "JetStream is off on server 'off'; start it with -js"),
        ("orders.created", ServerInfo(), "JetStream is off on this server"),
        ("orders.created", ALONE, "no stream of this account stores it; make one with js.create_stream("),
        ("orders.created", CLUSTERED, "no stream of this account stores it, or its leader is being elected, which"),
        ("$JS.API.INFO", ALONE, "JetStream of this server does not answer"),
        ("$JS.hub.API.STREAM.INFO.S", OFF, "no JetStream is reached over '$JS.hub.API'; check domain='hub'"),
        ("from.ops.API.INFO", ALONE, "no JetStream is reached over 'from.ops.API'; check prefix='from.ops.API'"),
        ("$JS.API.CONSUMER.MSG.NEXT.S.c", ALONE, "consumer 'c' of stream 'S' is gone"),
        ("$JS.API.CONSUMER.MSG.NEXT.S.c", None, "consumer 'c' of stream 'S' is gone, or its leader is being"),
        ("$JS.API.DIRECT.GET.S", ALONE, "stream 'S' is gone, or does not allow direct gets (allow_direct=True)"),
        ("$JS.API.DIRECT.GET.S.a.b", ALONE, "stream 'S' is gone, or does not allow direct gets (allow_direct=True)"),
        ("$KV.state.order.1", ALONE, "bucket 'state' is gone"),
        ("$JS.hub.API.$KV.state.order.1", ALONE, "bucket 'state' is gone"),
        ("$O.files.C.abc", ALONE, "bucket 'files' is gone"),
        (
            "orders.created",
            None,
            "JetStream is not enabled, no stream stores this subject, or a leader is being elected",
        ),
    ],
)
def test_silence_has_the_reason_that_what_is_known_leaves(subject: str, info: ServerInfo | None, said: str) -> None:
    error = unavailable(subject, info)
    assert str(error).startswith(f"no answer on {subject!r}: {said}")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("subject", ["a", "$JS.API.INFO", "$JS.API.DIRECT.GET.S", "$JS.API.CONSUMER.MSG.NEXT.S.c"])
def test_a_server_on_its_own_elects_nobody(subject: str) -> None:
    assert "leader" not in str(unavailable(subject, ALONE))


def test_names_are_said_once_and_kept_apart_from_what_the_server_said() -> None:
    error = server_error(404, 10059, "stream not found", "ORDERS")
    assert isinstance(error, errors.StreamNotFound)
    assert str(error) == "there is no stream 'ORDERS': stream not found (code 404, err_code 10059)"
    assert (error.stream, error.bucket, error.description) == ("ORDERS", "", "stream not found")
    assert str(server_error(404, 10059, "stream not found")) == "stream not found (code 404, err_code 10059)"


@pytest.mark.parametrize(("stream", "what"), [("KV_state", "bucket 'state'"), ("OBJ_files", "object store 'files'")])
def test_a_stream_behind_a_bucket_is_told_by_the_buckets_name(stream: str, what: str) -> None:
    error = server_error(404, 10059, "stream not found", stream)
    assert isinstance(error, errors.StreamNotFound)
    assert str(error).startswith(f"there is no {what}, which is the stream {stream!r}: ")
    assert error.bucket == stream.partition("_")[2]


def test_a_consumer_is_named_with_its_stream_where_that_is_known() -> None:
    assert str(server_error(404, 10014, "consumer not found", "S", "c")).startswith("consumer 'c' of stream 'S': ")
    assert str(server_error(404, 10014, "consumer not found", "", "c")).startswith("consumer 'c': consumer not found")


@pytest.mark.parametrize(
    ("err_code", "limit"),
    [
        (10002, "account's streams.*max_store"),
        (10023, "max_file_store or max_memory_store"),
        (10026, "max_consumers"),
        (10027, "max_streams"),
        (10028, "max_bytes.*max_memory_store"),
        (10047, "max_bytes.*max_file_store"),
    ],
)
def test_a_limit_that_is_reached_is_named_with_what_helps(err_code: int, limit: str) -> None:
    error = server_error(500, err_code, "no more", "S")
    assert isinstance(error, errors.InsufficientResources)
    with pytest.raises(errors.InsufficientResources, match=rf"^stream 'S': no more \(code.*\); .*{limit}"):
        raise error


@pytest.mark.parametrize(("err_code", "remedy"), [(10039, "jetstream: enabled"), (10076, "-js")])
def test_jetstream_that_is_off_comes_with_the_setting_that_turns_it_on(err_code: int, remedy: str) -> None:
    error = server_error(503, err_code, "JetStream not enabled")
    assert isinstance(error, errors.JetStreamNotEnabled)
    assert remedy in str(error)
