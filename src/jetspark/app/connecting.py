"""The arguments of ``jetspark.connect``, as methods of an application pass them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetspark.core.options import ConnectKeywords

if TYPE_CHECKING:
    from jetspark.aio.transport import DriverAuth
    from jetspark.core.events import OnEvent
    from jetspark.core.options import ConnectOptions, TLSConfig

__all__ = ["ConnectArguments"]


class ConnectArguments(ConnectKeywords, total=False):
    """All but the servers, for type checkers."""

    auth: DriverAuth
    tls: TLSConfig | None
    on_event: OnEvent | None
    options: ConnectOptions | None
