"""A real nats-server that many tests share, each of them in an account of its own.

Starting a server takes some 100 ms, a test on one often five. Accounts separate tests as well as servers do: streams,
buckets, consumers and subjects of one account do not exist in another, and deletions do not affect it. They share the
process: a test that stops, kills or reloads its server starts its own.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Unpack

from jetspark.server import NatsServer, ServerConfig
from jetspark.server.config import ServerOptions, with_options

__all__ = ["SharedNatsServer"]

# nats-server starts a millisecond later for each; further accounts need a reload, which takes a few milliseconds.
ACCOUNTS_AT_A_TIME = 50


class SharedNatsServer(NatsServer):
    """A nats-server with JetStream that gives every test an account of its own::

        with SharedNatsServer() as server:
            server.new_account_url()  # nats://test1:test@127.0.0.1:40123

    ``url`` leads into one account that all tests share.

    Args:
        options: As :class:`~jetspark.server.NatsServer` takes them, without users and tokens: those are the accounts'.
    """

    def __init__(self, config: ServerConfig | None = None, **options: Unpack[ServerOptions]) -> None:
        self._own_config = with_options(config, options)
        self._account_lock = threading.Lock()
        self._accounts, self._taken = ACCOUNTS_AT_A_TIME, 0
        super().__init__(replace(self._own_config, extra_config=self._with_accounts()))

    def new_account_url(self) -> str:
        """The server's address for a client in an empty account that no other caller gets."""
        with self._account_lock:
            if self._taken == self._accounts:
                self._accounts += ACCOUNTS_AT_A_TIME
                self.reload(extra_config=self._with_accounts())
            self._taken += 1
            return self.url.replace("://", f"://test{self._taken}:test@")

    def _with_accounts(self) -> str:
        names = ["shared", *(f"test{number}" for number in range(1, self._accounts + 1))]
        jetstream = "jetstream: enabled, " if self._own_config.jetstream else ""
        accounts = [f"{name} {{ {jetstream}users: [ {{ user: {name}, password: test }} ] }}" for name in names]
        lines = [self._own_config.extra_config, "no_auth_user: shared", "accounts {", *accounts, "}"]
        return "\n".join(lines)
