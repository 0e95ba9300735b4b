"""Contexts of the ``nats`` command line: which server, and how to connect to it.

Each setting of a context is used, or refused by name. An ignored setting could connect to another server, or with fewer
checks, than the user expects.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.options import TLSConfig
from jetspark.errors import ConfigError

__all__ = ["context_options"]

# Settings of the nats command line itself.
_IGNORED = {"description", "color_scheme"}
# Settings with the same name in a connection's options.
_SAME = {"inbox_prefix", "jetstream_domain"}
_CONNECTION = {"url"} | _SAME
_TLS = {"ca": "ca_file", "cert": "cert_file", "key": "key_file"}
_TLS_FIRST = "tls_first"
_LOGINS = {
    "creds": {"creds"},
    "nkey": {"nkey"},
    "token": {"token"},
    "user": {"user", "password"},
    "user_jwt": {"user_jwt", "user_seed"},
}
_KNOWN = _IGNORED | _CONNECTION | set(_TLS) | {_TLS_FIRST} | set[str]().union(*_LOGINS.values())


def context_options() -> dict[str, Any]:
    """The arguments for ``connect`` of the context that ``NATS_CONTEXT`` names, or that is selected; empty without one.

    Raises:
        ConfigError: The context cannot be read, or has a setting that cannot be used.
    """
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nats"
    name = os.environ.get("NATS_CONTEXT", "").strip() or _selected(folder)
    if not name:
        return {}
    path = folder / "context" / f"{name}.json"
    try:
        context = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(context, dict):
            raise ConfigError("expected a JSON object")
        return _options({key: value for key, value in context.items() if value})
    except (OSError, ValueError) as error:  # ConfigError is a ValueError
        raise ConfigError(f"nats context {name!r} in {path} cannot be used: {error}; give --servers") from error


def _selected(folder: Path) -> str:
    try:
        return (folder / "context.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _options(context: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(context) - _KNOWN)
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: not supported by JetSpark")
    wrong = sorted(key for key, value in context.items() if not isinstance(value, bool if key == _TLS_FIRST else str))
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: expected a text")
    if "url" not in context:
        raise ConfigError("it has no url")
    options: dict[str, Any] = {"servers": [each.strip() for each in context["url"].split(",") if each.strip()]}
    options |= {key: context[key] for key in sorted(_SAME & context.keys())}
    files: dict[str, Any] = {field: _path(context[key]) for key, field in _TLS.items() if key in context}
    if files or context.get(_TLS_FIRST):
        options["tls"] = TLSConfig(**files, handshake_first=bool(context.get(_TLS_FIRST)))
    if (auth := _auth(context)) is not None:
        options["auth"] = auth
    return options


def _auth(context: dict[str, Any]) -> Auth | None:
    ways = sorted(way for way, keys in _LOGINS.items() if not keys.isdisjoint(context))
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(ways)}: expected one way to log in")
    match ways:
        case ["creds"]:
            return Credentials(_path(context["creds"]))
        case ["nkey"]:
            return NKey(_path(context["nkey"]).read_text(encoding="utf-8").strip())
        case ["token"]:
            return Token(context["token"])
        case ["user"]:
            return UserPassword(context.get("user", ""), context.get("password", ""))
        case ["user_jwt"]:
            return Credentials(text=_credentials(context))
    return None


def _credentials(context: dict[str, Any]) -> str:
    missing = sorted(_LOGINS["user_jwt"] - set(context))
    if missing:
        raise ConfigError(f"{missing[0]} is missing: user_jwt and user_seed belong together")
    return (
        f"-----BEGIN NATS USER JWT-----\n{context['user_jwt']}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{context['user_seed']}\n------END USER NKEY SEED------\n"
    )


def _path(text: str) -> Path:
    return Path(text).expanduser()
