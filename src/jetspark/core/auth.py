"""Ways to log in, and the CONNECT fields each turns into.

Four kinds: a user and password, a token, an nkey (an Ed25519 key whose public half the server knows), and a
credentials file (a user JWT the account signed, with the nkey it was issued to). The last two prove
possession of a key by signing the nonce in the server's INFO, so the secret never leaves the process.

An nkey is text: base32 without padding over a role prefix, 32 bytes of key and a CRC-16. A *seed* is the
private form; its two prefix bytes hold ``S`` and the role, so a user's seed reads ``SU...`` and its public
key ``U...``. Seeds are checked when given, without Ed25519; only signing needs the extra ``security``.

No secret appears in a ``repr`` or in an error message.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from jetspark.core.arguments import path
from jetspark.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "Auth",
    "Credentials",
    "NKey",
    "Role",
    "Token",
    "UserPassword",
    "connect_fields",
    "create_seed",
    "public_key",
    "sign",
]

Role: TypeAlias = Literal["user", "account", "operator", "server", "cluster"]
"""The owner of a key; a server lets in only users."""

# The top five bits become the first character of the encoded key: U, A, O, N, C; and S for a seed.
_PREFIXES: dict[Role, int] = {
    "user": 20 << 3,
    "account": 0,
    "operator": 14 << 3,
    "server": 13 << 3,
    "cluster": 2 << 3,
}
_ROLES: dict[int, Role] = {prefix: role for role, prefix in _PREFIXES.items()}
_SEED_PREFIX = 18 << 3
_SEED_BYTES = 32
_CHECKSUM_BYTES = 2


@dataclass(frozen=True, slots=True)
class UserPassword:
    """A name and password from the server's configuration. Both are sent in the clear unless TLS is on."""

    user: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_secret("user", self.user)
        _check_secret("password", self.password)


@dataclass(frozen=True, slots=True)
class Token:
    """The one token a server shares with all its clients. It is sent in the clear unless TLS is on."""

    token: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_secret("token", self.token)


@dataclass(frozen=True, slots=True)
class NKey:
    """A user's nkey seed (``SU...``); the server's configuration lists its public key.

    Raises:
        ConfigError: The seed is damaged, or belongs to something other than a user.
    """

    seed: str = field(repr=False)

    def __post_init__(self) -> None:
        _check_secret("seed", self.seed)
        _check_user_seed(self.seed, "nkey seed")


@dataclass(frozen=True, slots=True)
class Credentials:
    """A credentials file, as ``nsc`` writes it: its ``path``, or its ``text`` if it comes from elsewhere.

    The file is read at every login, so replacing it rotates the credentials at the next reconnect. Nothing is
    read before; a ``text`` is checked at once.

    Raises:
        ConfigError: Both or neither were given, or the text lacks a section.
    """

    path: str | Path | None = None
    text: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.text is None):
            raise ConfigError("Credentials needs exactly one of path and text")
        if self.path is not None:
            path("path", self.path)
        else:
            _check_secret("text", self.text)
            self.load()

    def load(self) -> tuple[str, str]:
        """The user JWT and the seed, read now.

        Raises:
            ConfigError: The file cannot be read, or a section is missing or damaged; it names the path.
        """
        source = "credentials text"
        text = self.text
        if self.path is not None:
            source = f"credentials file {str(self.path)!r}"
            try:
                text = Path(self.path).read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
            except UnicodeDecodeError:
                # Not chained: the decoder's error carries the file's content.
                raise ConfigError(f"{source} is not UTF-8 text") from None
        assert text is not None, "__post_init__ lets only one be None"
        jwt = _section(text, "NATS USER JWT", source)
        seed = _section(text, "USER NKEY SEED", source)
        _check_user_seed(seed, f"seed in {source}")
        return jwt, seed


Auth: TypeAlias = UserPassword | Token | NKey | Credentials


def connect_fields(auth: Auth | None, nonce: str | None) -> dict[str, str]:
    """The fields ``auth`` adds to CONNECT, given the ``nonce`` of the server's INFO (None if it sent none).

    Raises:
        ConfigError: A key was given and the server sent no nonce, so it does not check keys at all: it is
            open, or wants a password or token. Going on would mean trusting a server that is not the one the
            key is for, or a refusal that does not say why. Also when a credentials file cannot be used.
        MissingExtra: Signing needs ``cryptography``, which is not installed.
    """
    match auth:
        case None:
            return {}
        case UserPassword():
            return {"user": auth.user, "pass": auth.password}
        case Token():
            return {"auth_token": auth.token}
        case NKey():
            return {"nkey": public_key(auth.seed), "sig": _signature(auth.seed, nonce, "NKey")}
        case Credentials():
            jwt, seed = auth.load()
            # The JWT names its public key, so `nkey` stays out: the server takes it as another way to log in.
            return {"jwt": jwt, "sig": _signature(seed, nonce, "Credentials")}
    raise ConfigError(f"auth of type {type(auth).__name__}: expected UserPassword, Token, NKey or Credentials")


def _check_secret(what: str, value: object) -> None:
    """Shows no more of a wrong value than its type."""
    if not isinstance(value, str):
        raise ConfigError(f"{what} of type {type(value).__name__}: expected a str")


def create_seed(role: Role, raw: bytes) -> str:
    """The seed for a role from 32 random bytes, which the caller draws from a source fit for secrets."""
    if role not in _PREFIXES:
        raise ConfigError(f"role {role!r}: expected one of {', '.join(get_args(Role))}")
    if len(raw) != _SEED_BYTES:
        raise ConfigError(f"a seed of {len(raw)} bytes: expected {_SEED_BYTES}")
    prefix = _PREFIXES[role]
    # The role moves right by the five bits of the `S`, to become the second character.
    return _encode(bytes((_SEED_PREFIX | prefix >> 5, (prefix & 31) << 3)) + raw)


def public_key(seed: str) -> str:
    """The public key of a seed of any role, as servers and accounts list it (``U...`` for a user).

    Raises:
        ConfigError: The seed is damaged.
        MissingExtra: ``cryptography`` is not installed.
    """
    role, raw = _decode_seed(seed, "nkey seed")
    return _encode(bytes((_PREFIXES[role],)) + _private_key(raw).public_key().public_bytes_raw())


def sign(seed: str, data: bytes) -> bytes:
    """The 64-byte Ed25519 signature of ``data``; raises as `public_key` does."""
    _, raw = _decode_seed(seed, "nkey seed")
    return _private_key(raw).sign(data)


def _signature(seed: str, nonce: str | None, kind: str) -> str:
    if not nonce:
        raise ConfigError(
            f"{kind} authentication: the server sent no nonce, so it does not check keys; connect without "
            "auth or by UserPassword or Token, or configure nkeys or an operator on the server"
        )
    # Unpadded URL-safe base64 is what the server tries first.
    return base64.urlsafe_b64encode(sign(seed, nonce.encode())).rstrip(b"=").decode()


def _private_key(raw: bytes) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise MissingExtra("nkey and credentials authentication", "security") from error
    return Ed25519PrivateKey.from_private_bytes(raw)


def _encode(payload: bytes) -> str:
    checksum = binascii.crc_hqx(payload, 0).to_bytes(_CHECKSUM_BYTES, "little")
    return base64.b32encode(payload + checksum).rstrip(b"=").decode()


def _check_user_seed(seed: str, what: str) -> None:
    role, _ = _decode_seed(seed, what)
    if role != "user":
        raise ConfigError(f"{what}: it belongs to a key of role {role!r}, and only a user's ('SU...') can log in")


def _decode_seed(seed: str, what: str) -> tuple[Role, bytes]:
    """Role and raw key. Errors describe the fault without any part of the seed."""
    text = seed.strip()
    try:
        decoded = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError:
        raise ConfigError(f"{what}: it is not base32; expected 58 characters A-Z and 2-7") from None
    payload, checksum = decoded[:-_CHECKSUM_BYTES], decoded[-_CHECKSUM_BYTES:]
    if len(payload) != 2 + _SEED_BYTES:
        raise ConfigError(f"{what}: it has {len(text)} characters, expected 58; was it cut or a public key?")
    if binascii.crc_hqx(payload, 0).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
        raise ConfigError(f"{what}: its checksum does not match, so a character is wrong; copy it again")
    role = _ROLES.get((payload[0] & 7) << 5 | payload[1] >> 3)
    if payload[0] & 0xF8 != _SEED_PREFIX or role is None:
        raise ConfigError(f"{what}: it is not the seed of a signing key; expected one that starts 'SU'")
    return role, payload[2:]


def _section(text: str, label: str, source: str) -> str:
    """The one line between a section's markers; tools differ in the number of dashes."""
    found = re.search(rf"-{{3,}} ?BEGIN {label} ?-{{3,}}\s+([\w.=-]+)\s+-{{3,}} ?END {label}", text)
    if found is None:
        raise ConfigError(
            f"{source} has no complete section '-----BEGIN {label}-----'; expected a JWT and a seed, as "
            "written by `nsc generate creds`"
        )
    return found[1]
