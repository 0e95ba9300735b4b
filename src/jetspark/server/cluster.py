"""Several nats-servers as one cluster, ready for replicated streams, with nodes that can be killed and cut off."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from jetspark.core.arguments import flag, path, text
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.errors import ConfigError, EmbeddedServerError, UsageError
from jetspark.server.config import ClusterRoutes, ServerConfig, ServerOptions, with_options
from jetspark.server.links import Links
from jetspark.server.process import NatsServer, finish_in_thread

__all__ = ["NatsCluster"]

POLL_S = 0.05

# Below the range Linux gives to outgoing connections (32768 up), so that no client of ours can sit on a
# node's port while the node is down.
ROUTE_PORTS = range(20_000, 32_000)


class NatsCluster:
    """``size`` nats-servers on this machine that form one JetStream cluster.

    ``start()`` returns when the cluster has a leader and every node has caught up with it, so that a stream
    with ``size`` replicas can be created at once. Each of ``nodes`` is a ``NatsServer`` to be stopped,
    killed, paused and restarted on its own; the guarantees of ``NatsServer`` about ports, stores and the end
    of the program hold for each.

    Args:
        size: Number of nodes; an odd number survives the loss of the smaller half.
        config: The configuration of every node, without ``server_name`` and ``cluster``, which the cluster sets.
        name: The cluster's name; nodes are ``<name>-0``, ``<name>-1``, ...
        store_dir: Folder with one store per node; temporary when absent.
        partitionable: Lead the traffic between nodes through this program, so that ``partition()`` can cut it. Every
            replicated byte then passes through a thread that shares the interpreter with the rest of the program:
            leave it off where speed is measured.
        start_timeout_s: Longest time for the whole cluster to become ready.
        options: Fields of ``ServerConfig``, in place of those in ``config``.
    """

    def __init__(
        self,
        size: int = 3,
        config: ServerConfig | None = None,
        *,
        name: str = "jetspark",
        store_dir: Path | str | None = None,
        partitionable: bool = False,
        start_timeout_s: float = 60.0,
        **options: Unpack[ServerOptions],
    ) -> None:
        whole("size", size, low=2, instead="nodes; NatsServer is one")
        self._config = with_options(config, options)
        for owned in ("server_name", "cluster"):
            if getattr(self._config, owned) is not None:
                raise ConfigError(f"{owned}={getattr(self._config, owned)!r}: NatsCluster sets this for each node")
        self._size, self._name = size, text("name", name)
        self._store_dir = None if store_dir is None else Path(path("store_dir", store_dir)).absolute()
        self._start_timeout_s = seconds_above_0("start_timeout_s", start_timeout_s)
        self._partitionable = flag("partitionable", partitionable)
        self._links: Links | None = None
        self._partitioned: set[int] = set()
        self._nodes: tuple[NatsServer, ...] = ()

    @property
    def nodes(self) -> Sequence[NatsServer]:
        """The servers, in order; empty before ``start()`` and after ``close()``."""
        return self._nodes

    @property
    def urls(self) -> list[str]:
        """Where clients connect, one address per node."""
        return [node.url for node in self._nodes]

    @property
    def leader(self) -> int | None:
        """Index of the node that leads JetStream's meta group, or ``None`` without a leader.

        This leader places streams; each stream has a leader of its own.
        """
        names = [node.config.server_name for node in self._nodes]
        for node in self._nodes:
            named = _meta_group(node).get("leader")
            if named in names:
                return names.index(named)
        return None

    def start(self) -> Self:
        """Start all nodes and wait until the cluster is ready; nodes that already run are left alone.

        Raises:
            EmbeddedServerError: It was not ready in time, or a node did not start; ``log`` has the end of its log.
        """
        try:
            if not self._nodes:
                self._make_nodes()
            for node in self._nodes:
                node.start()
            self.wait_until_ready(self._start_timeout_s)
        except BaseException:
            self.close()
            raise
        return self

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until there is a leader and every running, reachable node has caught up with it.

        Useful after a node was restarted: ``NatsServer.start()`` returns when the node accepts clients, which is before
        it has caught up.
        """
        deadline = time.monotonic() + timeout
        while not self._is_ready():
            if time.monotonic() > deadline:
                behind = next((node for node in self._nodes if not node.is_healthy()), self._nodes[0])
                raise EmbeddedServerError(
                    f"the cluster was not ready within {timeout:g} s; node {behind.config.server_name} says:",
                    behind.log()[-4000:],
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop all nodes in order; ports and stores are kept for ``start()``."""
        for node in self._nodes:
            node.stop()

    def close(self) -> None:
        """Stop all nodes and remove everything temporary."""
        with contextlib.ExitStack() as all_of_them:  # One that fails must not keep the others alive.
            if self._links is not None:
                all_of_them.callback(self._links.close)
            for node in self._nodes:
                all_of_them.callback(node.close)
        self._nodes, self._links, self._partitioned = (), None, set()

    def partition(self, index: int) -> None:
        """Cut node ``index`` off from all others, in both directions; clients still reach it.

        Returns when every connection is closed and none can be made. Takes ``partitionable=True``.
        """
        links = self._links_or_error()
        links.cut(self._index(index))
        self._partitioned.add(index)

    def heal(self, index: int) -> None:
        """Let node ``index`` reach the others again, except nodes that are cut off themselves.

        Nodes retry their connections about once a second; ``wait_until_ready()`` waits until they are back.
        """
        links = self._links_or_error()
        self._partitioned.discard(self._index(index))
        links.heal(index, set(range(self._size)) - self._partitioned)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await finish_in_thread(self.start)
        except asyncio.CancelledError:
            await finish_in_thread(self.close)  # __aexit__ will not be called.
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish_in_thread(self.close)

    def __repr__(self) -> str:
        return f"<NatsCluster {self._name!r} of {self._size}: {list(self._nodes)}>"

    def _make_nodes(self) -> None:
        ports = _free_ports(self._size)
        if self._partitionable:
            self._links = Links(ports)
            self._links.open()
        self._nodes = tuple(
            NatsServer(
                replace(self._config, server_name=f"{self._name}-{index}", cluster=self._routes(index, ports)),
                store_dir=None if self._store_dir is None else self._store_dir / f"{self._name}-{index}",
                start_timeout_s=self._start_timeout_s,
            )
            for index in range(self._size)
        )

    def _routes(self, index: int, ports: list[int]) -> ClusterRoutes:
        others = [other for other in range(self._size) if other != index]
        if self._links is None:
            routes = [f"127.0.0.1:{ports[other]}" for other in others]
            return ClusterRoutes(name=self._name, port=ports[index], routes=routes)
        # Nodes announce further nodes to each other and then connect directly, past our links. The announced address is
        # the advertised one, so it leads nowhere: only the configured routes can succeed.
        return ClusterRoutes(
            name=self._name,
            port=ports[index],
            routes=[self._links.address(index, other) for other in others],
            advertise=self._links.nowhere,
        )

    def _is_ready(self) -> bool:
        reachable = [
            node for index, node in enumerate(self._nodes) if node.is_running and index not in self._partitioned
        ]
        if not all(node.is_healthy() for node in reachable):
            return False
        if not self._config.jetstream:
            return True
        return _agree_on_leader(reachable) and _have_caught_up(reachable)

    def _links_or_error(self) -> Links:
        if self._links is None:
            raise UsageError(
                "partition() and heal() take a running NatsCluster(..., partitionable=True): "
                "otherwise the nodes are connected directly"
            )
        return self._links

    def _index(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise ConfigError(f"index={index!r}: expected 0 to {self._size - 1}")
        return index


def _agree_on_leader(nodes: list[NatsServer]) -> bool:
    """True if all nodes name the same leader of the meta group, and that leader, as the only judge, sees all of them.

    Healthy only means "current with a leader", and a leader that was cut off still acts as leader for some seconds.
    """
    groups = {_name(node): _meta_group(node) for node in nodes}
    leaders = {group.get("leader", "") for group in groups.values()}
    if len(leaders) != 1:
        return False
    replicas = groups.get(leaders.pop(), {}).get("replicas", ())
    current = {peer["name"] for peer in replicas if peer["current"] and not peer.get("offline")}
    return len(current & groups.keys()) == len(nodes) - 1


def _have_caught_up(nodes: list[NatsServer]) -> bool:
    """True if all nodes agree on each stream's leader, and every copy has the messages of that leader's first answer.

    ``/healthz`` does not show it: in 2.15.1 a node that returned 3,000 messages behind, with no leader of the stream
    in sight yet, called itself healthy during the whole observation (0.7 s).
    """
    names = {_name(node) for node in nodes}
    sequences: dict[str, int] = {}
    for node in nodes:
        for stream, detail in _streams(node).items():
            if detail["cluster"].get("leader") == _name(node):
                sequences[stream] = detail["state"]["last_seq"]
                replicas = detail["cluster"].get("replicas", ())
                if not all(peer["current"] for peer in replicas if peer["name"] in names):
                    return False
    leaders: dict[str, set[str]] = {}
    for node in nodes:
        for stream, detail in _streams(node).items():
            leaders.setdefault(stream, set()).add(detail["cluster"].get("leader", ""))
            if detail["state"]["last_seq"] < sequences.get(stream, 0):
                return False
    return all(len(named) == 1 and named <= names for named in leaders.values())


def _streams(node: NatsServer) -> dict[str, dict[str, Any]]:
    """The streams with a copy on ``node``, by account and name, from its monitoring."""
    return {
        f"{account['name']}/{stream['name']}": {"cluster": {}, **stream}
        for account in _ask(node, "/jsz?accounts=true&streams=true").get("account_details", ())
        for stream in account.get("stream_detail") or ()
    }


def _meta_group(node: NatsServer) -> dict[str, Any]:
    """The meta group of JetStream as ``node`` sees it; empty if the node does not answer."""
    group = _ask(node, "/jsz").get("meta_cluster")
    return group if isinstance(group, dict) else {}


def _ask(node: NatsServer, page: str) -> dict[str, Any]:
    if not node.is_running:
        return {}
    try:
        answer = json.loads(node.monitor(page)[1])
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _name(node: NatsServer) -> str:
    assert node.config.server_name is not None
    return node.config.server_name


def _free_ports(count: int) -> list[int]:
    """Free ports, held together during the choice so that all differ.

    Nodes must know each other's ports before any of them runs, so the server cannot choose. Another program
    may take one before the node does; the random choice out of 12,000 makes that rare, and the node's error
    names the port.
    """
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for candidate in random.Random().sample(ROUTE_PORTS, len(ROUTE_PORTS)):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", candidate))
            except OSError:
                continue
            ports.append(candidate)
            if len(ports) == count:
                return ports
    raise EmbeddedServerError(f"no {count} free ports between {ROUTE_PORTS.start} and {ROUTE_PORTS.stop}")
