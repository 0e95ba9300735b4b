"""The retention that streams with timers and entity states need. Pure."""

from __future__ import annotations

from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig

__all__ = ["check_retention", "retention_config"]


def retention_config(*, survives_age: bool) -> dict[str, object]:
    """The configuration of a stream that must keep everything.

    :func:`check_retention` refuses other values in a declaration; on the server they are a difference.
    """
    fields = {"max_messages": -1, "max_bytes": -1, "retention": "limits"}
    return fields if survives_age else fields | {"max_age_s": 0}


def check_retention(config: StreamConfig, declared: str, kept: str, *, survives_age: bool = False) -> None:
    """
    Args:
        declared: What the application declares, in its own words, for the error.
        kept: What the stream has to keep.
        survives_age: A limit of age does not concern it.

    Raises:
        ConfigError: The stream would drop it in silence.
    """
    limits: dict[str, float | None] = {"max_messages": config.max_messages, "max_bytes": config.max_bytes}
    remedy = f"Limit its age instead, which {kept} are exempt from"
    if not survives_age:
        limits["max_age_s"] = config.max_age_s
        remedy = "A stream of entities has no such limit: keep what may go in another stream"
    for field, limit in limits.items():
        if limit is not None and limit > 0:
            raise ConfigError(
                f"{declared} with {field}={limit}: at its limit the stream drops {kept} in silence. {remedy}"
            )
    if config.retention not in (None, "limits"):
        raise ConfigError(
            f"{declared} with retention={config.retention!r}: a stream that forgets what was acknowledged forgets "
            f"{kept}. Expected retention='limits'"
        )
