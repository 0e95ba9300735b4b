"""Servers that tests of batches need."""

from __future__ import annotations

from pathlib import Path

from jetspark.server import NatsServer


def server_with_batch_limits(store: Path, limits: str) -> NatsServer:
    """One with its own limits of batches, for which the server has settings and :class:`NatsServer` has no options."""
    batch = f"limits {{ batch {{ {limits} }} }}"
    return NatsServer(jetstream=False, extra_config=f'jetstream {{ store_dir: "{store}"\n{batch} }}')
