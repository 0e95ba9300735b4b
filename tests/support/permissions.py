"""What a call publishes and subscribes to, and users who may do exactly that.

A test records a call through a :class:`RecordingProxy`, gives the :class:`Rights` it has seen to a user of an
:class:`ExactServer`, and takes them away one by one::

    with ExactServer() as server:
        account = server.new_account()
        async with RecordingProxy(server.port) as proxy:
            await call(through(proxy.url, account))     # as a user who may do everything
        rights = proxy.rights(names={"S", "d"})
        exact, *others = server.new_users(account, [rights, *(each.rest for each in rights.each_removed())])
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jetspark.server import NatsServer
from support.peers import Proxy

__all__ = ["ExactServer", "RecordingProxy", "Removed", "Rights", "general", "through"]

_INBOX = re.compile(r"_INBOX\..+")
_CHUNK = re.compile(r"(\$O\.[^.]+\.C)\..+")
_ACK = re.compile(r"\$JS\.ACK\.([^.]+)\.([^.]+)\..+")
_CONSUMER = re.compile(r"(\$JS\.API\.CONSUMER\.(?:CREATE|DELETE|INFO|MSG\.NEXT)\.[^.]+)\.([^.]+)(.*)")


@dataclass(frozen=True)
class Rights:
    """Subjects that a user may publish and subscribe to, and no others."""

    publish: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()

    def each_removed(self) -> Iterator[Removed]:
        """Each single subject, with the rights that remain without it."""
        for subject in self.publish:
            rest = tuple(each for each in self.publish if each != subject)
            yield Removed("publish", subject, replace(self, publish=rest))
        for subject in self.subscribe:
            rest = tuple(each for each in self.subscribe if each != subject)
            yield Removed("subscribe", subject, replace(self, subscribe=rest))

    def config(self) -> dict[str, Any]:
        """The permissions of a user in the server's configuration."""
        # The server reads an empty list as "everything".
        return {
            verb: {"allow": list(subjects)} if subjects else {"deny": [">"]}
            for verb, subjects in (("publish", self.publish), ("subscribe", self.subscribe))
        }


@dataclass(frozen=True)
class Removed:
    """One right of several that a user does not have."""

    operation: Literal["publish", "subscribe"]
    subject: str
    rest: Rights


class RecordingProxy(Proxy):
    """Records what clients publish and subscribe to."""

    def __init__(self, target_port: int) -> None:
        super().__init__(target_port)
        self.published: list[str] = []
        self.subscribed: list[str] = []

    def clear(self) -> None:
        """Forget what was recorded, such as what a test's preparation has used."""
        self.published.clear()
        self.subscribed.clear()

    def rights(self, names: Collection[str] = ()) -> Rights:
        """What a user needs who does what was recorded; see :func:`general`."""
        published = dict.fromkeys(general(each, names) for each in self.published)
        subscribed = dict.fromkeys(general(each, names) for each in self.subscribed)
        return Rights(tuple(published), tuple(subscribed))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        unread = bytearray()
        try:
            while data := await reader.read(65536):
                if not is_to_client:
                    unread += data
                    self._record(unread)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass

    def _record(self, unread: bytearray) -> None:
        while (end := unread.find(b"\r\n")) >= 0:
            verb, *words = unread[:end].decode().split(" ")
            size = end + 2
            if verb in ("PUB", "HPUB"):
                size += int(words[-1]) + 2
                if len(unread) < size:
                    return
                self.published.append(words[0])
            elif verb == "SUB":
                self.subscribed.append(words[0])
            del unread[:size]


def general(subject: str, names: Collection[str] = ()) -> str:
    """A recorded subject as a permission: without the random parts that another run would have others of.

    ``names`` are the consumers that have a name of their own; every other consumer's name becomes ``*``.
    """
    if _INBOX.fullmatch(subject):
        return "_INBOX.>"
    if found := _CHUNK.fullmatch(subject):
        return f"{found[1]}.*"
    if found := _ACK.fullmatch(subject):
        return f"$JS.ACK.{found[1]}.{found[2] if found[2] in names else '*'}.>"
    if (found := _CONSUMER.fullmatch(subject)) and found[2] not in names:
        return f"{found[1]}.*{found[3]}"
    return subject


class ExactServer(NatsServer):
    """A server with JetStream whose accounts and users tests add while it runs; every password is ``test``."""

    ACCOUNTS_AT_A_TIME = 50

    def __init__(self) -> None:
        self._accounts: dict[str, dict[str, Rights | None]] = {}
        self._unused: list[str] = []
        self._users = 0
        self._add_accounts()
        super().__init__(extra_config=self._text())

    def new_account(self) -> str:
        """The name of an empty account and of its user who may do everything."""
        if not self._unused:
            self._add_accounts()
            self.reload(extra_config=self._text())
        return self._unused.pop(0)

    def new_users(self, account: str, rights: Sequence[Rights | None]) -> list[str]:
        """Add a user to the account for each of these rights; None may do everything. Returns their names."""
        names = [f"user{self._users + index}" for index, _ in enumerate(rights, 1)]
        self._users += len(names)
        self._accounts[account] |= dict(zip(names, rights, strict=True))
        self.reload(extra_config=self._text())
        return names

    def change_user(self, user: str, rights: Rights | None) -> None:
        """Give a user other rights, while it is connected."""
        [account] = [each for each in self._accounts.values() if user in each]
        account[user] = rights
        self.reload(extra_config=self._text())

    def url_of(self, user: str) -> str:
        """The address of the server for this user."""
        return through(self.url, user)

    def _add_accounts(self) -> None:
        first = len(self._accounts) + 1
        names = [f"account{number}" for number in range(first, first + self.ACCOUNTS_AT_A_TIME)]
        self._accounts |= {name: {name: None} for name in names}
        self._unused += names

    def _text(self) -> str:
        accounts = {
            name: {"jetstream": "enabled", "users": [_user(user, rights) for user, rights in users.items()]}
            for name, users in self._accounts.items()
        }
        return f"accounts: {json.dumps(accounts)}"


def through(url: str, user: str) -> str:
    """An address (of a proxy, for instance) for this user."""
    return url.replace("://", f"://{user}:test@")


def _user(name: str, rights: Rights | None) -> dict[str, Any]:
    return {"user": name, "password": "test"} | ({} if rights is None else {"permissions": rights.config()})
