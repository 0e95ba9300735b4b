"""The declaration of a kind of entity: its name, the type of its state, and the state's encoding. Pure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from jetspark.app.contracts.faults import error_text, user_errors
from jetspark.app.contracts.field_rules import check_sets
from jetspark.app.contracts.tokens import escape, unescape
from jetspark.app.finite_json import check_finite
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.topology.names import check_app_name, escape_token, is_hash
from jetspark.errors import ConfigError, InvalidEvent

__all__ = ["EntityFold", "EntitySpec", "StateSubjects", "Truth"]

Truth: TypeAlias = Literal["state", "events"]

KEY_HEADER = "JetSpark-Key"
"""The entity's key, where the key in the bucket is a hash of it."""
MANY = 1_000_000_000
"""Messages a subject may have: no limit to us, and a limit to clients that expect one of a bucket."""


class StateSubjects(NamedTuple):
    """The subjects of an application's states: in its stream, beside the events."""

    prefix: str
    """The prefix of the states' subjects."""
    bucket: str | None
    """The bucket that they are, if the stream is called as that of one. Others cannot be read as a bucket."""

    @classmethod
    def of(cls, app: str, stream: str) -> StateSubjects:
        kind, _, bucket = stream.partition("_")
        if kind == "KV" and bucket:
            return cls(f"$KV.{bucket}.", bucket)
        # Not $KV here: no client would find these, and a bucket of that name could no longer be made.
        return cls(f"states.{app}.", None)


class EntityFold:
    """The fold of an entity's events: a class with ``key`` and ``apply``, as for a projection.

    Its optional ``correct(key, folded, state)`` returns the events that lead from the folded state of an entity to its
    stored one.
    """

    def __init__(self, name: str, kind: type[object], events: Sequence[type[object]]) -> None:
        try:
            # A projection needs a bucket's name; this one is never created, since only the fold is used.
            self.spec = ProjectionSpec(name, kind, ProjectionArguments(events=events, bucket="none"))
        except ConfigError as error:
            raise ConfigError(str(error).replace("projection", "entities, fold of", 1)) from error
        correct = getattr(kind(), "correct", None)
        if correct is not None and (not callable(correct) or inspect.iscoroutinefunction(correct)):
            raise ConfigError(f"entities {name!r}: expected `def correct(self, key, folded, state)`, without I/O")
        self.correct: Callable[[str, Any, Any], Iterable[Any]] | None = correct

    @property
    def events(self) -> tuple[type[object], ...]:
        return self.spec.events

    def tokens_of(self, event: object) -> tuple[tuple[str, str], ...]:
        """The entities that an event concerns: each as the last part of its key in the bucket, and its key."""
        found = []
        for token in self.spec.keys_of(event):
            key = unescape(token)
            found.append((escape_token(key), key))
        return tuple(found)


class EntitySpec:
    """One kind of entity of an application: ``app.entities(name, state=...)``."""

    def __init__(
        self,
        name: str,
        state: object,
        state_subjects: StateSubjects,
        *,
        truth: Truth = "state",
        events: Sequence[type[object]] = (),
        fold: type[object] | None = None,
    ) -> None:
        self.name = check_app_name(name)
        self.state = state
        if truth not in ("state", "events"):
            raise ConfigError(f"entities {name!r}: truth={truth!r}: expected 'state' or 'events'")
        if (fold is None) != (not events) or (truth == "events" and fold is None):
            raise ConfigError(
                f"entities {name!r}: truth={truth!r}, events={[each.__name__ for each in events]}, fold={fold!r}: "
                "expected events= together with fold=, a class with key(event) and apply(state, event); where the "
                "events are the truth both are needed"
            )
        self.truth: Truth = truth
        """Which of state and events counts where they differ."""
        self.fold = None if fold is None else EntityFold(name, fold, events)
        self.state_subjects = state_subjects
        try:
            self._decoder = msgspec.json.Decoder(state)
        except (TypeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"entities {name!r}: state={state!r}: expected a type that msgspec decodes, such as a Struct or a "
                f"dataclass: {error}"
            ) from error
        check_sets(state, f"entities {name!r}: state")
        self._encode = msgspec.json.Encoder(order="sorted").encode

    @property
    def filter(self) -> str:
        """The subjects of all states."""
        return f"{self.state_subjects.prefix}{self.name}.*"

    def key_of(self, key: str) -> str:
        """The key in the bucket, or what would be it. Different entities have different ones."""
        if not isinstance(key, str) or not key:
            raise ConfigError(f"entity key={key!r}: expected a text that is not empty")
        return f"{self.name}.{escape_token(key)}"

    def subject_of(self, key: str) -> str:
        return f"{self.state_subjects.prefix}{self.key_of(key)}"

    def key_headers(self, key: str) -> dict[str, str]:
        """The header with the entity's key; empty unless the key in the bucket is a hash of it."""
        return {KEY_HEADER: escape(key)} if is_hash(escape_token(key)) else {}

    def key_in(self, subject: str, headers: Mapping[str, str]) -> str | None:
        """The key of the entity whose state has this subject and these headers; None if another program wrote it."""
        token = subject.rpartition(".")[2]
        if not is_hash(token):
            return unescape(token)
        said = headers.get(KEY_HEADER)
        return None if said is None else unescape(said)

    def encode(self, state: object) -> bytes:
        """A state as it is stored: canonical JSON, which can be read back.

        Raises:
            InvalidEvent: The state does not match this kind of entity.
        """
        try:
            data = self._encode(state)
            check_finite("the state", state, data)
            self._decoder.decode(data)
        except user_errors() as error:  # also of the class's own code, such as its ``__post_init__``
            raise InvalidEvent(f"state of {self.name}", 1, "", error_text(error)) from error
        return data

    def decode(self, data: bytes, key: str | None = None) -> Any:
        """A state as it was stored; ``key`` is for the error.

        Raises:
            ConfigError: The stored value does not match this kind: the type has changed, or another program wrote it.
        """
        try:
            return self._decoder.decode(data)
        except user_errors() as error:  # also of the class's own code, such as its ``__post_init__``
            raise ConfigError(
                f"entities {self.name!r}: {'a state' if key is None else f'the state of {key!r}'} is not a "
                f"{self.state!r}: {error_text(error)}. Give new fields a default. A broken state "
                + (
                    "is rebuilt from its events by jetspark reconcile --repair"
                    if self.truth == "events"
                    else "has to be written or deleted where it is stored"
                )
            ) from error
