"""Servers that tests of batches need."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from jetspark.server import NatsServer


def server_with_batch_limits(store: Path, limits: str) -> NatsServer:
    """One with its own limits of batches, for which the server has settings and :class:`NatsServer` has no options."""
    batch = f"limits {{ batch {{ {limits} }} }}"
    return NatsServer(jetstream=False, extra_config=f'jetstream {{ store_dir: "{store}"\n{batch} }}')


def domain_config(domain: str, store: Path, hub: NatsServer | None = None) -> str:
    """Of a server with JetStream in a domain of its own, which takes leaf nodes or, with ``hub``, is one."""
    place = "host: 127.0.0.1, port: -1"
    if hub is not None:
        with urllib.request.urlopen(f"{hub.monitoring_url}/varz", timeout=10) as page:
            port = json.load(page)["leaf"]["port"]
        place = f'remotes: [ {{ url: "nats-leaf://127.0.0.1:{port}" }} ]'
    return f'jetstream {{ domain: {domain}, store_dir: "{store}" }}\nleafnodes {{ {place} }}'
