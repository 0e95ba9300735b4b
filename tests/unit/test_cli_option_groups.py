"""Groups of command options, and options that exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from jetspark.cli.option_groups import check_combination, with_groups
from jetspark.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    first: Annotated[int | None, typer.Option("--first", help="The first number.")] = None
    names: Annotated[list[str] | None, typer.Option("--name", help="A name.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sender:
    sender: Annotated[str, typer.Option("--from", help="The sender.")]


def send(target: str, *, loud: Annotated[bool, typer.Option("--loud")] = False, range: Range, sender: Sender) -> None:
    """Send a range."""
    typer.echo(f"{target} {loud} {range} {sender}")


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(with_groups(send))
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_each_field_of_a_group_is_an_option() -> None:
    code, output = run("here", "--first", "3", "--name", "a", "--name", "b", "--loud", "--from", "me")
    assert (code, output) == (0, "here True Range(first=3, names=['a', 'b']) Sender(sender='me')\n")


def test_a_field_without_a_default_is_required() -> None:
    assert run("here", "--from", "me") == (0, "here False Range(first=None, names=None) Sender(sender='me')\n")
    code, output = run("here")
    assert code == 2
    assert "--from" in output


def test_the_help_is_that_of_the_command_and_of_the_fields() -> None:
    code, output = run("--help")
    assert code == 0
    assert all(text in output for text in ("Send a range.", "The first number.", "--name", "--from"))
    assert "--range" not in output


def test_options_that_exclude_each_other_are_named() -> None:
    check_combination("--drop", {"--swap": False}, "it only removes a bucket")
    with pytest.raises(ConfigError) as caught:
        check_combination("--drop", {"--swap": True, "--rate": False, "--key": True}, "it only removes a bucket")
    assert str(caught.value) == "--drop cannot be combined with --swap, --key: it only removes a bucket"
