from __future__ import annotations

import datetime
import enum
import uuid
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app.contracts.tokens import MAX_KEY_BYTES, Template, escape, key_fault, text_of, unescape
from jetspark.core.subjects import matches, validate_subject
from jetspark.errors import ConfigError, InvalidSubject
from jetspark.jetstream.kv import check_key


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("o-1_A", "o-1_A"),
        ("a.b", "a=2Eb"),
        ("*", "=2A"),
        (">", "=3E"),
        ("a b", "a=20b"),
        ("a=b", "a=3Db"),
        ("a:b", "a=3Ab"),
        ("", "="),
        ("=", "=3D"),
        ("é", "=C3=A9"),
        ("\x00\r\n", "=00=0D=0A"),
    ],
)
def test_a_value_becomes_one_token(value: str, token: str) -> None:
    assert escape(value) == token
    assert unescape(token) == value


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_is_a_token_of_its_own_and_comes_back(value: str) -> None:
    token = escape(value)
    assert unescape(token) == value
    assert "." not in token
    assert validate_subject(token) == token
    check_key(token)


@given(st.text())
def test_what_is_no_escaped_value_is_refused_and_never_read_as_another(token: str) -> None:
    try:
        value = unescape(token)
    except ConfigError:
        return
    assert escape(value) == token


@pytest.mark.parametrize("token", ["", "a.b", "a=", "=2", "=2e", "=41", "=C3", "a b", "=00=", "=="])
def test_a_token_that_escape_does_not_make_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="is not an escaped value"):
        unescape(token)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ConfigError, match="lone surrogate"):
        escape("a\ud800")


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("", None),
        ("o-1", None),
        ("é", None),
        ("x" * MAX_KEY_BYTES, None),
        ("é" * (MAX_KEY_BYTES // 2), None),
        ("x" * (MAX_KEY_BYTES + 1), "its key has 1001 bytes: expected up to 1000"),
        ("é" * (MAX_KEY_BYTES // 2) + "x", "its key has 1001 bytes: expected up to 1000"),
        ("a\ud800", "its key has a lone surrogate, which UTF-8 has no bytes for"),
    ],
)
def test_a_key_has_a_bound_in_bytes_and_is_utf8(key: str, fault: str | None) -> None:
    assert key_fault(key) == fault


class Size(enum.Enum):
    SMALL = "small"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "a"),
        (7, "7"),
        (-7, "-7"),
        (True, "true"),
        (False, "false"),
        (Size.SMALL, "small"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (datetime.date(2026, 3, 31), "2026-03-31"),
    ],
)
def test_a_value_has_one_spelling(value: object, text: str) -> None:
    assert text_of(value) == text


@pytest.mark.parametrize("value", [None, 1.5, b"x", ["a"], datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)])
def test_a_value_without_one_spelling_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="cannot be part of a subject or key"):
        text_of(value)


def test_a_template_makes_subjects_and_reads_them_back() -> None:
    template = Template("orders.{order_id}.paid")
    subject = template.format(SimpleNamespace(order_id="o.1"))
    assert subject == "orders.o=2E1.paid"
    assert template.values_of(subject) == {"order_id": "o.1"}
    assert template.filter == "orders.*.paid"
    assert template.values_of("orders.o-1.placed") is None
    assert template.values_of("orders.a.b.paid") is None
    assert template.values_of("orders.=zz.paid") is None
    assert repr(template) == "Template('orders.{order_id}.paid')"


def test_a_field_need_not_be_text() -> None:
    at = SimpleNamespace(day=datetime.date(2026, 3, 31), size=Size.SMALL, number=7)
    assert Template("days.{day}").format(at) == "days.2026-03-31"
    assert Template("{size}.{number}").format(at) == "small.7"


def test_a_template_makes_keys_of_values() -> None:
    key = Template("{tenant}.session.{id}")
    assert key.fill(tenant="acme", id="a:b") == "acme.session.a=3Ab"
    check_key(key.fill(tenant="acme", id="a:b"))
    assert key.values_of("acme.session.a=3Ab") == {"tenant": "acme", "id": "a:b"}
    for wrong in ({"tenant": "acme"}, {"tenant": "acme", "id": "1", "more": "2"}, {"tenant": "acme", "id": None}):
        with pytest.raises(ConfigError):
            key.fill(**wrong)


def test_a_template_without_a_field_is_a_subject() -> None:
    template = Template("orders.paid")
    assert template.format(object()) == template.filter == "orders.paid"
    assert template.values_of("orders.paid") == {}


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers())
def test_every_value_comes_back_from_a_template_with_several_fields(name: str, number: int) -> None:
    template = Template("{name}.x.{number}")
    subject = template.format(SimpleNamespace(name=name, number=number))
    assert validate_subject(subject) == subject
    assert matches(template.filter, subject)
    assert template.values_of(subject) == {"name": name, "number": str(number)}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "may not be empty"),
        ("a..b", "two dots in a row"),
        ("a.*", "wildcard"),
        ("a.>", "wildcard"),
        ("a.x{id}", "fills a whole token"),
        ("a.{id", "fills a whole token"),
        ("a.{}", "names no field"),
        ("a.{1x}", "names no field"),
        ("{a}.{a}", "twice"),
        ("a b", "a space"),
    ],
)
def test_a_template_that_cannot_be_a_subject_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidSubject, match=reason):
        Template(text)
