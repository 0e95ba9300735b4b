"""Stores: a folder, and what is refused before anything is read or written."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("obstore")

from support.archived import IDENTITY

from jetspark.errors import ConfigError, MissingExtra, StoreRefused, StoreUnavailable
from jetspark.lake.archive import FORMATS, find_tables, open_table
from jetspark.lake.cloud_store import CloudStore, store_error, without_secrets
from jetspark.lake.folder_store import FolderStore
from jetspark.lake.store import open_store, require_conditional_writes


def test_a_file_is_created_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "not" / "there")
    assert store.create("a/b", b"first")
    assert not store.create("a/b", b"second")
    assert not store.create("a/b", b"first")
    assert store.get("a/b") == b"first"
    store.put("a/b", b"third")
    assert store.get("a/b") == b"third"
    assert store.get("a/c") is None
    assert store.get("a/b/c") is None


def test_files_are_listed_in_order_and_from_a_path_on(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for path in ("b/2", "a", "b/10", "b.x", "c/d/e"):
        store.put(path, path.encode())
    assert [(each.path, each.size_bytes) for each in store.files()] == [
        ("a", 1),
        ("b.x", 3),
        ("b/10", 4),
        ("b/2", 3),
        ("c/d/e", 5),
    ]
    assert [each.path for each in store.files(after="b.x")] == ["b/10", "b/2", "c/d/e"]
    assert [each.path for each in store.files("b", after="b/10")] == ["b/2"]
    assert [each.path for each in store.below("c").files()] == ["d/e"]
    assert list(store.files("nowhere")) == []
    assert (store.folders(), store.folders("c"), store.folders("nowhere")) == (["b", "c"], ["d"], [])
    store.delete(["a", "nowhere"])
    assert store.get("a") is None


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.put("a/file", b"x")
    with pytest.raises(StoreRefused):
        store.put("a", b"y")
    with pytest.raises(StoreRefused):
        store.put("a/file/below", b"y")
    assert [each.path for each in store.files()] == ["a/file"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, format: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreRefused, match=r"file/ORDERS.*give a folder that this user may write"):
        open_table(str(tmp_path / "file"), IDENTITY, format=format)
    with pytest.raises(StoreRefused, match=r"Not a directory"):
        find_tables(str(tmp_path / "file"))
    table = open_table(str(tmp_path / "lake"), IDENTITY, format=format)
    (tmp_path / "lake").write_bytes(b"")
    with pytest.raises(StoreRefused, match=r"give a folder that this user may write"):
        table.open_for_writing(1, epoch=1)


@pytest.mark.parametrize(
    "uri", ["", "  ", "ftp://host/x", "http://host/x", "file://host/x", "s4://lake", "memory:///x", "a\0b"]
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"archive URI .*: expected a folder, file:///folder, or s3, "):
        open_store(uri)


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3://b//x", "s3://b/a b", "s3://b/%20", "s3://b/x?y=1", "s3://b/x#y", "s3://u:p@b/x"]
)
def test_uris_with_anything_but_names_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"expected one such as s3://bucket/folder"):
        open_store(uri)


def test_folders_have_three_spellings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = str(tmp_path / "lake")
    assert [open_store(each).uri for each in (expected, f"file://{expected}", "lake", "~/lake")] == [expected] * 4
    with pytest.raises(ConfigError, match="option 'aws_region': the folder 'lake' has no options"):
        open_store("lake", {"aws_region": "x"})


def test_options_are_those_of_the_object_store() -> None:
    options = {"AWS_REGION": "eu-west-1", "aws_access_key_id": "a", "aws_secret_access_key": "b", "timeout": "5s"}
    store = open_store("s3://lake/x/", options | {"aws_endpoint": "http://127.0.0.1:9"})
    assert store.uri == "s3://lake/x"
    assert store.storage_options["aws_region"] == "eu-west-1"
    # An endpoint without TLS was asked for by name.
    assert store.storage_options["allow_http"] == "true"
    assert store.below("y").location("z") == "s3://lake/x/y/z"
    with pytest.raises(ConfigError, match=r"'nonsense' is not valid.*keys of object_store, such as aws_endpoint"):
        open_store("s3://lake", options | {"nonsense": "1"})
    with pytest.raises(ConfigError, match="option 'aws_region': expected text"):
        open_store("s3://lake", {"aws_region": 5})  # type: ignore[dict-item]


def test_a_catalogue_is_of_iceberg_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"option 'iceberg.uri': the format 'delta' has no catalogue"):
        open_table(str(tmp_path), IDENTITY, options={"iceberg.uri": "sqlite://"})


@pytest.mark.parametrize(
    ("library", "format", "root", "extra"),
    [
        ("deltalake", "delta", "", "lake"),
        ("pyiceberg.catalog", "iceberg", "", "iceberg"),
        ("obstore.exceptions", "parquet", "s3://lake/x", "lake"),
    ],
)
def test_a_missing_library_names_its_extra(
    library: str, format: str, root: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'jetspark\[{extra}\]'"):
        open_table(root or str(tmp_path), IDENTITY, format=format).open_for_writing(1, epoch=1)


def test_the_format_parquet_needs_pyarrow_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("deltalake", "obstore", "pyiceberg"):
        monkeypatch.setitem(sys.modules, library, None)
    open_table(str(tmp_path), IDENTITY, format="parquet").open_for_writing(1, epoch=1)
    assert [each.format for each in find_tables(str(tmp_path))] == ["parquet"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_system_without_hard_links_is_refused(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ConfigError, match=r"no hard links.*use a folder on another one"):
        open_table(str(tmp_path), IDENTITY, format=format).open_for_writing(1, epoch=1)
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


class Careless(FolderStore):
    """A file system whose exclusive creation is none."""

    def create(self, path: str, data: bytes) -> bool:
        self.put(path, data)
        return True


def test_a_store_that_creates_a_file_twice_is_refused(tmp_path: Path) -> None:
    require_conditional_writes(FolderStore(tmp_path))
    with pytest.raises(ConfigError, match="does not honour conditional writes"):
        require_conditional_writes(Careless(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_errors_of_libraries_say_who_has_to_act() -> None:
    def error(text: str, uri: str = "s3://lake") -> Exception:
        return store_error(uri, RuntimeError(text), {"aws_secret_access_key": "very-secret", "aws_region": "eu-west-1"})

    for status in ("403 Forbidden", "404 Not Found", "400 Bad Request"):
        assert isinstance(error(f"PUT x - Server returned non-2xx status code: {status}: <xml"), StoreRefused)
    for status in ("503 Slow Down", "500 Internal", "429 Too Many", "408 Timeout"):
        assert isinstance(error(f"PUT x - Server returned non-2xx status code: {status}"), StoreUnavailable)
    assert isinstance(error("error sending request"), StoreUnavailable)
    assert isinstance(error("Permission denied (os error 13)", "/lake"), StoreRefused)
    shown = str(error("GET https://lake/x?X-Amz-Signature=abc in 3ms very-secret eu-west-1\n\nDebug source: more"))
    assert "https://lake/x?… in 3ms *** eu-west-1" in shown
    assert "abc" not in shown
    assert "Debug" not in shown
    assert without_secrets("a b", {"key": "a"}) == "a b"  # too short to be a secret, and would hide all text


def test_a_store_shows_its_uri_only() -> None:
    options = {"aws_region": "x", "aws_access_key_id": "very", "aws_secret_access_key": "secret"}
    assert repr(CloudStore("s3://lake/x", options)) == "<CloudStore s3://lake/x>"
