from __future__ import annotations

import base64
import pickle
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from jetspark.core import auth as auth_module
from jetspark.core.auth import (
    Auth,
    Credentials,
    NKey,
    Role,
    Token,
    UserPassword,
    connect_fields,
    create_seed,
    public_key,
    sign,
)
from jetspark.errors import ConfigError, MissingExtra

BASE32 = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
RAW = bytes(range(32))
SEED = create_seed("user", RAW)
JWT = "eyJ0eXAiOiJKV1QifQ.eyJzdWIiOiJVIn0.c2ln-_x"
CREDS = f"""-----BEGIN NATS USER JWT-----
{JWT}
------END NATS USER JWT------

************************* IMPORTANT *************************
NKEY Seed printed below can be used to sign and prove identity.

-----BEGIN USER NKEY SEED-----
{SEED}
------END USER NKEY SEED------

*************************************************************
"""
SECRETS: list[tuple[Auth, str]] = [
    (UserPassword("ada", "hunter2"), "hunter2"),
    (Token("t0ps3cret"), "t0ps3cret"),
    (NKey(SEED), SEED),
    (Credentials(text=CREDS), SEED),
]


def _crc16(data: bytes) -> int:
    """CRC-16/XMODEM, bit by bit."""
    crc = 0
    for byte in data:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc


def _with_checksum(payload: bytes) -> str:
    return base64.b32encode(payload + _crc16(payload).to_bytes(2, "little")).decode().rstrip("=")


def _verified(signature: str, nonce: str) -> bool:
    raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    Ed25519PrivateKey.from_private_bytes(RAW).public_key().verify(raw, nonce.encode())
    return True


def test_no_auth_adds_nothing_to_connect() -> None:
    assert connect_fields(None, None) == connect_fields(None, "nonce") == {}


def test_a_user_and_password_are_sent_under_the_names_of_the_server() -> None:
    assert connect_fields(UserPassword("ada", "hunter2"), None) == {"user": "ada", "pass": "hunter2"}


def test_a_token_is_sent_as_auth_token() -> None:
    assert connect_fields(Token("t"), "nonce") == {"auth_token": "t"}


def test_an_nkey_sends_its_public_key_and_the_signed_nonce() -> None:
    fields = connect_fields(NKey(SEED), "a-nonce")
    assert set(fields) == {"nkey", "sig"}
    assert fields["nkey"] == public_key(SEED)
    assert _verified(fields["sig"], "a-nonce")
    assert "=" not in fields["sig"]


def test_credentials_send_the_jwt_and_the_signed_nonce() -> None:
    fields = connect_fields(Credentials(text=CREDS), "a-nonce")
    assert set(fields) == {"jwt", "sig"}
    assert fields["jwt"] == JWT
    assert _verified(fields["sig"], "a-nonce")


@pytest.mark.parametrize("auth", [NKey(SEED), Credentials(text=CREDS)], ids=["nkey", "credentials"])
@pytest.mark.parametrize("nonce", [None, ""])
def test_a_key_without_a_nonce_to_sign_is_a_configuration_error(auth: Auth, nonce: str | None) -> None:
    with pytest.raises(ConfigError, match="sent no nonce"):
        connect_fields(auth, nonce)


def test_something_else_is_refused_by_type_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="auth of type str") as caught:
        connect_fields("t0ps3cret", None)  # type: ignore[arg-type]
    assert "t0ps3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: UserPassword(b"t0ps3cret", "p"), "user of type bytes"),  # type: ignore[arg-type]
        (lambda: UserPassword("ada", b"t0ps3cret"), "password of type bytes"),  # type: ignore[arg-type]
        (lambda: Token(b"t0ps3cret"), "token of type bytes"),  # type: ignore[arg-type]
        (lambda: NKey(b"t0ps3cret"), "seed of type bytes"),  # type: ignore[arg-type]
        (lambda: Credentials(text=b"t0ps3cret"), "text of type bytes"),  # type: ignore[arg-type]
    ],
)
def test_a_secret_of_another_type_is_refused_by_its_type_and_not_shown(make: Callable[[], Auth], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}: expected a str$"):
        make()


def test_a_path_of_another_type_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match=r"^path=5: expected"):
        Credentials(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("auth", "secret"), SECRETS, ids=lambda value: type(value).__name__)
def test_a_secret_stays_out_of_the_repr_and_survives_pickle(auth: Auth, secret: str) -> None:
    assert secret not in repr(auth)
    assert pickle.loads(pickle.dumps(auth)) == auth


def test_the_user_name_and_the_path_are_no_secrets() -> None:
    assert repr(UserPassword("ada", "hunter2")) == "UserPassword(user='ada')"
    assert repr(Credentials("app.creds")) == "Credentials(path='app.creds')"


@pytest.mark.parametrize(
    ("role", "letter"),
    [("user", "U"), ("account", "A"), ("operator", "O"), ("server", "N"), ("cluster", "C")],
)
def test_seed_and_public_key_name_the_role(role: Role, letter: str) -> None:
    seed = create_seed(role, RAW)
    assert seed.startswith("S" + letter)
    assert len(seed) == 58
    assert public_key(seed).startswith(letter)
    assert len(public_key(seed)) == 56
    # The prefix byte is the letter's five bits alone: a server reads the other three as part of the role.
    assert base64.b32decode(public_key(seed))[0] == BASE32.index(letter) << 3


@given(st.sampled_from(get_args(Role)), st.binary(min_size=32, max_size=32))
def test_public_key_and_signature_agree_with_ed25519(role: Role, raw: bytes) -> None:
    seed = create_seed(role, raw)
    encoded = public_key(seed)
    decoded = base64.b32decode(encoded)
    expected = Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw()
    assert decoded[1:-2] == expected
    assert int.from_bytes(decoded[-2:], "little") == _crc16(decoded[:-2])
    Ed25519PublicKey.from_public_bytes(expected).verify(sign(seed, b"data"), b"data")


def test_blanks_around_a_seed_do_not_matter() -> None:
    assert connect_fields(NKey(f" {SEED}\n"), "n") == connect_fields(NKey(SEED), "n")


@pytest.mark.parametrize(
    ("seed", "reason"),
    [
        ("", "0 characters, expected 58"),
        (SEED[:-8], "expected 58"),
        (SEED[:-1] + "!", "not base32"),
        (SEED.lower(), "not base32"),
        (SEED[:20] + ("A" if SEED[20] != "A" else "B") + SEED[21:], "checksum"),
        (public_key(SEED), "expected 58"),
        (create_seed("account", RAW), "role 'account', and only a user's"),
        (create_seed("operator", RAW), "role 'operator', and only a user's"),
        (_with_checksum(b"\xa0\x00" + RAW), "not the seed of a signing key"),
        (_with_checksum(bytes((18 << 3 | 5, 0xC0)) + RAW), "not the seed of a signing key"),
    ],
    ids=[
        "empty",
        "cut",
        "not base32",
        "lower case",
        "typo",
        "public",
        "account",
        "operator",
        "no seed",
        "curve",
    ],
)
def test_a_seed_that_cannot_log_in_is_refused_at_once_and_never_shown(seed: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        NKey(seed)
    assert not seed or seed not in str(caught.value)
    assert caught.value.__cause__ is None


@given(st.integers(0, 57), st.sampled_from(BASE32))
def test_one_wrong_character_is_always_noticed(position: int, letter: str) -> None:
    typo = SEED[:position] + letter + SEED[position + 1 :]
    # The last character carries three bits of the key and two of padding, which decoding ignores.
    if base64.b32decode(typo + "=" * 6) == base64.b32decode(SEED + "=" * 6):
        return
    with pytest.raises(ConfigError):
        NKey(typo)


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_seed_is_made_of_exactly_32_bytes(length: int) -> None:
    with pytest.raises(ConfigError, match=f"{length} bytes: expected 32"):
        create_seed("user", bytes(length))


def test_a_seed_is_made_for_a_known_role() -> None:
    with pytest.raises(ConfigError, match="role 'admin': expected one of user, account"):
        create_seed("admin", RAW)  # type: ignore[arg-type]


def test_credentials_need_exactly_one_source() -> None:
    with pytest.raises(ConfigError, match="exactly one of path and text"):
        Credentials()
    with pytest.raises(ConfigError, match="exactly one of path and text"):
        Credentials("a.creds", CREDS)


@pytest.mark.parametrize(
    "text",
    [CREDS, CREDS.replace("\n", "\r\n"), CREDS.replace("------END", "-----END")],
    ids=["lf", "crlf", "dashes"],
)
def test_credentials_are_read_in_every_common_form(text: str) -> None:
    assert Credentials(text=text).load() == (JWT, SEED)


def test_a_credentials_file_is_read_at_every_login(tmp_path: Path) -> None:
    path = tmp_path / "app.creds"
    auth = Credentials(path)
    path.write_text(CREDS)
    assert connect_fields(auth, "n")["jwt"] == JWT
    path.write_text(CREDS.replace(JWT, "rotated"))
    assert connect_fields(auth, "n")["jwt"] == "rotated"


def test_a_missing_credentials_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nope.creds"
    with pytest.raises(ConfigError, match=r"nope\.creds.* cannot be read: No such file"):
        connect_fields(Credentials(str(path)), "n")


def test_a_credentials_file_that_is_no_text_is_named_without_its_content(tmp_path: Path) -> None:
    path = tmp_path / "app.creds"
    path.write_bytes(CREDS.encode() + b"\xff")
    with pytest.raises(ConfigError, match=r"app\.creds.* is not UTF-8 text") as caught:
        Credentials(path).load()
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", "NATS USER JWT"),
        (CREDS[: CREDS.index("**")], "USER NKEY SEED"),
        (CREDS[CREDS.index("**") :], "NATS USER JWT"),
        (CREDS[: CREDS.index("------END USER")], "USER NKEY SEED"),
    ],
    ids=["empty", "no seed", "no jwt", "cut"],
)
def test_a_missing_section_is_named_with_the_path(tmp_path: Path, text: str, missing: str) -> None:
    path = tmp_path / "app.creds"
    path.write_text(text)
    with pytest.raises(ConfigError, match=missing) as caught:
        Credentials(path).load()
    assert str(path) in str(caught.value)
    assert SEED not in str(caught.value)
    with pytest.raises(ConfigError, match=missing):
        Credentials(text=text)


def test_a_damaged_seed_in_a_file_is_refused_with_the_path_and_without_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "app.creds"
    account = create_seed("account", RAW)
    path.write_text(CREDS.replace(SEED, account))
    with pytest.raises(ConfigError, match=r"app\.creds.* role 'account'") as caught:
        Credentials(path).load()
    assert account not in str(caught.value)


def test_without_cryptography_the_extra_is_named_and_passwords_still_work(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert connect_fields(UserPassword("a", "b"), None)
    with pytest.raises(MissingExtra) as caught:
        connect_fields(NKey(SEED), "n")
    assert caught.value.extra == "security"


def test_the_module_can_be_imported_without_cryptography(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    assert "NKey" in runpy.run_path(auth_module.__file__)
