from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.core.subjects import (
    MAX_LINE_BYTES,
    MAX_SUBJECT_BYTES,
    check_line,
    common_filter,
    is_subset,
    matches,
    on_one_of,
    overlaps,
    reading_filters,
    validate_filter,
    validate_queue,
    validate_subject,
)
from jetspark.errors import ConfigError, InvalidSubject

BLANKS = "\x00\t\n\f\r "

# Few letters, so that random subjects and filters meet often.
TOKENS = st.sampled_from(["a", "b", "a*", ">b"])
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(".".join)
FILTERS = st.builds(
    lambda body, tail: ".".join(body + tail),
    st.lists(st.sampled_from(["a", "b", "*", "a*", ">b"]), min_size=1, max_size=3),
    st.sampled_from([[], [">"]]),
) | st.just(">")


def reference_matches(wanted: list[str], tokens: list[str]) -> bool:
    """The definition, by recursion."""
    if wanted == [">"]:
        return len(tokens) >= 1
    if not wanted or not tokens:
        return wanted == tokens
    return wanted[0] in ("*", tokens[0]) and reference_matches(wanted[1:], tokens[1:])


def server_accepts(subject: str, *, wildcards: bool) -> bool:
    """nats-server's rule, token by token."""
    if not subject or any(blank in subject for blank in BLANKS):
        return False
    tokens = subject.split(".")
    if not all(tokens):
        return False
    if wildcards:
        return ">" not in tokens[:-1]
    return ">" not in tokens and "*" not in tokens


@pytest.mark.parametrize(
    "subject",
    [
        "a",
        "orders.created",
        "$JS.API.INFO",
        "_INBOX.x.1",
        "a*b",
        "a>",
        "*a.>b",
        "**",
        "é.日本.🚀",
        "a\x01b",
        "a" * 9999,
    ],
)
def test_a_literal_subject_is_returned_unchanged_by_every_validator(subject: str) -> None:
    assert validate_subject(subject) is subject
    assert validate_filter(subject) is subject
    assert validate_queue(subject) is subject


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "*.*.>", "a.*.b", "a*.>", ">b.*"])
def test_wildcard_tokens_are_for_filters(subject: str) -> None:
    assert validate_filter(subject) is subject


@pytest.mark.parametrize("subject", ["*", ">", "a.*", "a.>", "*.a", "a.*.b"])
def test_a_wildcard_token_cannot_be_published_to(subject: str) -> None:
    with pytest.raises(InvalidSubject, match=r"wildcard .* is for subscribing") as caught:
        validate_subject(subject)
    assert caught.value.subject == subject


@pytest.mark.parametrize("validate", [validate_subject, validate_filter])
@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("", "may not be empty"),
        (".", "names between its dots"),
        (".a", "starts with a dot.*did you mean 'a'"),
        ("a.", "ends with a dot.*did you mean 'a'"),
        ("a..b", "two dots in a row.*did you mean 'a.b'"),
        ("a b", r"a space; replace or remove it \(position 1\)"),
        ("a\tb", "a tab"),
        ("a\r\nPUB b", "a carriage return"),
        ("a\n", "a line feed"),
        ("a\f", "a form feed"),
        ("a\x00", "a NUL"),
        ("a.\udc80", "UTF-8"),
    ],
)
def test_a_malformed_subject_is_refused_with_the_remedy(
    validate: Callable[[str], str], subject: str, reason: str
) -> None:
    with pytest.raises(InvalidSubject, match=reason) as caught:
        validate(subject)
    assert isinstance(caught.value, ConfigError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_full_wildcard_in_the_middle_is_refused_and_the_star_is_proposed() -> None:
    with pytest.raises(InvalidSubject, match="may only be the last token") as caught:
        validate_filter("billing.>.invoice.>")
    assert "'billing.*.invoice.>'" in caught.value.reason
    assert validate_filter("billing.*.invoice.>")


@pytest.mark.parametrize("name", ["", "a b", "a\r\n", "\x00"])
def test_a_queue_name_is_one_word(name: str) -> None:
    with pytest.raises(InvalidSubject, match="queue group name"):
        validate_queue(name)


@pytest.mark.parametrize("name", ["workers", "team.workers", "a..b", "*", ">"])
def test_dots_and_wildcards_mean_nothing_in_a_queue_name(name: str) -> None:
    assert validate_queue(name) == name


@pytest.mark.parametrize("validate", [validate_subject, validate_filter, validate_queue])
def test_bytes_are_refused_in_words(validate: Callable[[object], str]) -> None:
    with pytest.raises(InvalidSubject, match="must be a str, not bytes"):
        validate(b"a")


@given(st.text(alphabet="ab.*> \r\x00é", max_size=8))
def test_validation_agrees_with_the_server_on_any_text(text: str) -> None:
    for validate, wildcards in ((validate_subject, False), (validate_filter, True)):
        if server_accepts(text, wildcards=wildcards):
            assert validate(text) == text
        else:
            with pytest.raises(InvalidSubject):
                validate(text)


@given(st.text(max_size=20))
def test_what_passes_can_be_sent_in_one_frame_field(text: str) -> None:
    try:
        validate_filter(text)
    except InvalidSubject:
        return
    assert text.encode().split(b" ") == [text.encode()]


@pytest.mark.parametrize(
    ("filter", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a", "a.b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.>", "a", False),
        ("a*", "ab", False),
        ("a*", "a*", True),
        ("A", "a", False),
    ],
)
def test_matching_goes_token_by_token(filter: str, subject: str, expected: bool) -> None:
    assert matches(filter, subject) is expected


@given(FILTERS, SUBJECTS)
def test_matches_agrees_with_the_definition(filter: str, subject: str) -> None:
    assert matches(filter, subject) == reference_matches(filter.split("."), subject.split("."))


def _universe(filters: list[str]) -> list[str]:
    """Every subject up to one token longer than the longest filter, over their letters and one more."""
    letters = {token for filter in filters for token in filter.split(".")} - {"*", ">"} | {"z"}
    longest = max(filter.count(".") + 1 for filter in filters) + 1
    return [
        ".".join(tokens)
        for length in range(1, longest + 1)
        for tokens in itertools.product(sorted(letters), repeat=length)
    ]


SMALL_FILTERS = [
    ".".join(tokens)
    for length in (1, 2, 3)
    for tokens in itertools.product(["a", "b", "*", ">"], repeat=length)
    if ">" not in tokens[:-1]
]


def test_overlaps_and_subset_agree_with_trying_every_subject() -> None:
    universe = _universe(SMALL_FILTERS)
    matched = {
        filter: frozenset(subject for subject in universe if reference_matches(filter.split("."), subject.split(".")))
        for filter in SMALL_FILTERS
    }
    for a, b in itertools.product(SMALL_FILTERS, repeat=2):
        assert overlaps(a, b) == (not matched[a].isdisjoint(matched[b])), (a, b)
        assert is_subset(a, b) == (matched[a] <= matched[b]), (a, b)


@given(FILTERS, FILTERS, SUBJECTS)
def test_a_common_subject_proves_an_overlap(a: str, b: str, subject: str) -> None:
    assert overlaps(a, b) == overlaps(b, a)
    if matches(a, subject) and matches(b, subject):
        assert overlaps(a, b)
    if is_subset(a, b) and matches(a, subject):
        assert matches(b, subject)


@given(st.lists(FILTERS, min_size=1, max_size=4), SUBJECTS)
def test_whatever_is_on_one_of_some_filters_is_read_and_told_from_the_rest(filters: list[str], subject: str) -> None:
    is_wanted = any(matches(each, subject) for each in filters)
    assert bool(on_one_of(filters)(subject)) == is_wanted
    for wider in ([common_filter(filters)], reading_filters(filters)):
        assert not is_wanted or any(matches(each, subject) for each in wider)
        assert not any(overlaps(*pair) for pair in itertools.combinations(wider, 2))


def test_several_filters_are_read_as_they_are_only_where_they_have_no_wildcards() -> None:
    assert reading_filters([]) == []
    assert reading_filters(["orders.*.paid", "orders.*.paid"]) == ["orders.*.paid"]
    assert reading_filters(["orders.*.paid", "orders.>"]) == ["orders.>"]
    assert reading_filters(["orders.paid", "orders.placed"]) == ["orders.paid", "orders.placed"]
    assert reading_filters(["orders.*.paid", "orders.*.placed"]) == ["orders.*.*"]
    assert reading_filters(["orders.*.paid", "orders.c.*"]) == ["orders.*.*"]
    assert reading_filters(["orders.paid", "orders.*.placed"]) == ["orders.>"]
    assert reading_filters(["a", "a.*"]) == [">"]
    assert reading_filters(["a.b.>", "a.*.c.d"]) == ["a.*.>"]


def test_filters_with_wildcards_are_none_where_everything_may_be_read() -> None:
    assert reading_filters(["orders.*.paid"], may_read_all=True) == []
    assert reading_filters(["orders.paid.>", "orders.placed.>"], may_read_all=True) == []
    assert reading_filters(["orders.paid", "orders.placed"], may_read_all=True) == ["orders.paid", "orders.placed"]


def test_a_line_that_is_too_long_for_the_protocol_is_refused() -> None:
    for character in ("a", "ü", "😀"):
        size = len(character.encode())
        longest = character * (MAX_SUBJECT_BYTES // size)
        check_line(longest, MAX_SUBJECT_BYTES)
        with pytest.raises(InvalidSubject, match=f"it has [0-9]+ bytes, and {MAX_SUBJECT_BYTES} are the most"):
            check_line(longest + character, MAX_SUBJECT_BYTES)
    check_line("a" * MAX_LINE_BYTES)
    with pytest.raises(InvalidSubject, match=f"it has {MAX_LINE_BYTES + 1} bytes, and {MAX_LINE_BYTES} are the most"):
        check_line("a" * (MAX_LINE_BYTES + 1))
