from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from jetspark.core.options import TLSConfig
from jetspark.core.tls import OUR_CERTIFICATE, describe_error, is_name_mismatch, tls_context
from jetspark.errors import ConfigError


@pytest.mark.parametrize("config", [None, TLSConfig(), TLSConfig(hostname="a", handshake_first=True)])
def test_the_default_verifies_certificate_and_name(config: TLSConfig | None) -> None:
    context = tls_context(config)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_context_of_ones_own_is_used_as_it_is() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert tls_context(TLSConfig(context=context)) is context


def test_a_context_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context='context': expected an ssl\.SSLContext"):
        TLSConfig(context="context")


@pytest.mark.parametrize("option", ["ca_file", "cert_file"])
@pytest.mark.parametrize("as_type", [str, Path])
def test_a_missing_file_is_named(option: str, as_type: type, tmp_path: Path) -> None:
    missing = as_type(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=r"TLS files .*missing\.pem: .*No such file") as failure:
        tls_context(TLSConfig(**{option: missing}))
    assert isinstance(failure.value.__cause__, OSError)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("")
    with pytest.raises(ConfigError, match=r"cert\.pem, .*key\.pem: "):
        tls_context(TLSConfig(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem"))


@pytest.mark.parametrize("option", ["ca_file", "cert_file"])
def test_a_file_that_is_no_certificate_is_named(option: str, tmp_path: Path) -> None:
    path = tmp_path / "readme.pem"
    path.write_text("hello")
    files: dict[str, Any] = {option: path}
    with pytest.raises(ConfigError, match=r"TLS files .*readme\.pem: "):
        tls_context(TLSConfig(**files))


def ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}] {reason.lower()} (_ssl.c:2580)")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(111, "Connect call failed"), "connection refused"),
        (OSError("no route"), "no route"),
        (TimeoutError(), "TimeoutError"),
        (ssl_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), OUR_CERTIFICATE),
        (
            ssl_error("TLSV1_ALERT_UNKNOWN_CA"),
            "the server did not accept our certificate (unknown ca): check cert_file and key_file of TLSConfig",
        ),
        (
            ssl_error("SSLV3_ALERT_BAD_CERTIFICATE"),
            "the server did not accept our certificate (bad certificate): check cert_file and key_file of TLSConfig",
        ),
        (ssl_error("WRONG_VERSION_NUMBER"), "it answered in plain text, where TLS must begin"),
        (ssl_error("NO_SHARED_CIPHER"), "TLS failed: no shared cipher"),
    ],
)
def test_an_error_is_told_in_words(error: Exception, words: str) -> None:
    assert describe_error(error) == words


@pytest.mark.parametrize(("code", "is_mismatch"), [(62, True), (64, True), (20, False)])
def test_a_certificate_for_another_name_is_told_from_a_bad_one(code: int, is_mismatch: bool) -> None:
    error = ssl.SSLCertVerificationError(1, "no")
    error.verify_code, error.verify_message = code, "Hostname mismatch"
    assert is_name_mismatch(error) is is_mismatch
    assert describe_error(error) == "its certificate was not accepted: Hostname mismatch"
