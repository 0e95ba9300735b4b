"""What a kind of entity is: its name, the type of its state, and the bytes that stand for it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from jetspark.app.topology.names import check_app_name, escape_token
from jetspark.errors import ConfigError, InvalidEvent

__all__ = ["EntitySpec", "bucket_of", "state_subjects"]

MANY = 1_000_000_000
"""Messages a subject may have: no limit to us, and a limit to clients that expect one of a bucket."""


def bucket_of(stream: str) -> str:
    """The bucket whose stream this is.

    Raises:
        ConfigError: It is no bucket's.
    """
    kind, _, bucket = stream.partition("_")
    if kind != "KV" or not bucket:
        raise ConfigError(
            f"entities with stream={stream!r}: their states and events are stored together, so the app's stream has to "
            f"be that of a bucket: App(stream='KV_{stream.lower()}'), and other clients read bucket {stream.lower()!r}"
        )
    return bucket


def state_subjects(stream: str) -> str:
    """Where the states are."""
    return f"$KV.{bucket_of(stream)}.>"


class EntitySpec:
    """One kind of entity of an application: ``app.entities(name, state=...)``."""

    def __init__(self, name: str, state: Any, stream: str) -> None:
        self.name = check_app_name(name)
        self.state = state
        self.bucket = bucket_of(stream)
        try:
            self._decoder = msgspec.json.Decoder(state)
        except (TypeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"entities {name!r}: state={state!r}: expected a type that msgspec decodes, such as a Struct or a "
                f"dataclass: {error}"
            ) from error
        self._encode = msgspec.json.Encoder(order="sorted").encode

    def key_of(self, key: str) -> str:
        """The key in the bucket. Different entities have different ones."""
        if not isinstance(key, str) or not key:
            raise ConfigError(f"entity key={key!r}: expected a text that is not empty")
        return f"{self.name}.{escape_token(key)}"

    def subject_of(self, key: str) -> str:
        return f"$KV.{self.bucket}.{self.key_of(key)}"

    def encode(self, state: Any) -> bytes:
        """A state as it is stored: canonical JSON, which can be read back.

        Raises:
            InvalidEvent: It is no state of this kind.
        """
        try:
            data = self._encode(state)
            self._decoder.decode(data)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise InvalidEvent(f"state of {self.name}", 1, "", str(error)) from error
        return data

    def decode(self, data: bytes) -> Any:
        """
        Raises:
            ConfigError: What is stored is no state of this kind: the type has changed, or somebody else wrote it.
        """
        try:
            return self._decoder.decode(data)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"entities {self.name!r}: a state in bucket {self.bucket!r} is no {self.state!r}: {error}. Give fields "
                "that are new a default"
            ) from error
