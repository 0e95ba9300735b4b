"""Extras of JetSpark that contenders need; the package's own metadata lists their contents."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

__all__ = ["LAKE", "SPARK", "Extra"]

_of_extra = re.compile(r"([A-Za-z0-9._-]+)[^;]*; *extra *== *['\"]([a-z]+)['\"]").fullmatch


@dataclass(frozen=True, slots=True)
class Extra:
    name: str

    def distributions(self) -> list[str]:
        """The packages that it installs."""
        found = map(_of_extra, metadata.requires("jetspark") or ())
        return sorted(each[1] for each in found if each is not None and each[2] == self.name)

    def versions(self) -> dict[str, str | None]:
        """The version of each package; None if it is not installed."""
        found: dict[str, str | None] = {}
        for distribution in self.distributions():
            try:
                found[distribution] = metadata.version(distribution)
            except metadata.PackageNotFoundError:
                found[distribution] = None
        return found

    def missing(self) -> list[str]:
        return [distribution for distribution, version in self.versions().items() if version is None]


SPARK, LAKE = Extra("spark"), Extra("lake")
