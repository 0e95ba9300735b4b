"""What a server says of itself."""

from __future__ import annotations

from jetspark.core.handshake import ServerInfo


def test_a_server_that_says_nothing_has_the_defaults() -> None:
    found = ServerInfo.of({})
    assert found == ServerInfo()
    assert (found.client_id, found.has_jetstream, found.max_payload_bytes, found.nonce) == (0, False, 1 << 20, None)


def test_only_what_has_a_name_of_its_own_is_in_the_repr() -> None:
    shown = repr(ServerInfo.of({"server_name": "n1", "xkey": "XAB"}))
    assert "name='n1'" in shown
    assert "xkey" not in shown
