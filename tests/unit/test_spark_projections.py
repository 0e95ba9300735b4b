"""Projections on Spark, as far as no Spark is needed: what a write covers, and where an application is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from support import projected

from jetspark.app import App
from jetspark.app.projections.positions import FoldPosition
from jetspark.errors import ConfigError, UsageError
from jetspark.spark.engine.app_files import AppLocation, load_app, load_same_app, locate_app, outline_of
from jetspark.spark.engine.coverage import Covered, advance, check_reach, merge
from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.engine.projections import _names
from jetspark.spark.engine.replay_engine import source_filters
from jetspark.spark.engine.rows import Readings
from jetspark.spark.options import read_options

AT_100 = FoldPosition("BANK", "then", 100)


def test_ranges_are_one_part_only_if_nothing_between_them_is_missing() -> None:
    parts = [Covered(51, 101), Covered(1, 51, is_earliest=True), Covered(101, 120)]
    assert merge(parts) == Covered(1, 120, is_earliest=True)
    assert merge([Covered(1, 51), Covered(52, 60)]) is None
    assert merge([]) is None


def test_a_position_advances_over_what_is_next_to_it_and_never_goes_back() -> None:
    assert advance(AT_100, AT_100, Covered(101, 151)) == FoldPosition("BANK", "then", 150)
    assert advance(AT_100, AT_100, Covered(90, 151)) == FoldPosition("BANK", "then", 150)
    assert advance(AT_100, AT_100, Covered(102, 151)) is None
    assert advance(AT_100, AT_100, Covered(1, 51)) is None
    # Nothing was before the first message of the stream.
    begin = FoldPosition("BANK", "then", 0)
    assert advance(begin, begin, Covered(40, 51, is_earliest=True)) == FoldPosition("BANK", "then", 50)


def test_a_position_that_a_repair_has_moved_back_stays_there() -> None:
    assert advance(AT_100, AT_100.repaired(70), Covered(1, 151, is_earliest=True)) is None


def test_a_bucket_that_lacks_what_comes_before_is_refused() -> None:
    check_reach("totals", AT_100, 101, is_earliest=False)
    check_reach("totals", FoldPosition("BANK", "then", 0), 300, is_earliest=True)
    with pytest.raises(UsageError, match="leave out 101 to 299"):
        check_reach("totals", AT_100, 300, is_earliest=True)  # the stream has removed them before they were folded
    with pytest.raises(UsageError, match=r"up to sequence 100, and this begins at 102: .* leave out 101 to 101"):
        check_reach("totals", AT_100, 102, is_earliest=False)


def test_filters_that_overlap_are_read_as_the_wider_one_or_as_everything() -> None:
    assert source_filters(["a.*.b", "a.*.c"]) == ["a.*.b", "a.*.c"]
    assert source_filters(["a.*.b", "a.>"]) == ["a.>"]
    assert source_filters(["a.*.b", "a.c.*"]) == []


def test_a_projection_that_is_not_there_is_named_with_those_that_are() -> None:
    assert _names(projected.app, (), {}) == ["accounts", "totals", "recent"]
    with pytest.raises(
        ConfigError, match="projection 'total': bank has none of this name; it has accounts, totals, recent"
    ):
        _names(projected.app, ["total"], {})


def test_every_version_that_can_be_read_is_read_by_its_number_as_the_newest_class() -> None:
    found = Readings(projected.app)
    read = found.readers[found.numbers["account.opened", 1]]
    assert read(b'{"account":"a","name":"ann lee"}') == projected.Opened(account="a", owner="Ann Lee")
    read = found.readers[found.numbers["account.opened", 2]]
    assert read(b'{"account":"a","owner":"Ann"}') == projected.Opened(account="a", owner="Ann")


# ---- where an application is -----------------------------------------------------------------------------------------


def test_an_application_is_found_in_its_module_and_loaded_from_there() -> None:
    place = locate_app(projected.app)
    assert place == AppLocation("support.projected:app", str(Path(__file__).parents[1]))
    assert locate_app("support.projected:app") == place
    assert load_app(*place) is projected.app


def test_an_application_that_nobody_can_import_is_refused() -> None:
    with pytest.raises(ConfigError, match="a global name of a module"):
        locate_app(App("hidden", stream="HIDDEN"))
    with pytest.raises(ConfigError, match=r"has no application of the name 'Totals'"):
        load_app("support.projected:Totals")
    with pytest.raises(ConfigError, match=r"install it where workers run, or ship it with spark.addArtifact"):
        load_app("no_such_module:app")


def test_a_program_that_runs_is_imported_by_the_name_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from jetspark.app import App\n"
        "app = App('shop', stream='SHOP')\n"
        "if __name__ == '__main__':\n"
        "    from jetspark.spark.engine.app_files import locate_app\n"
        "    print(*locate_app(app), sep='\\n')\n"
    )
    shown = subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["shop:app", str(tmp_path.resolve())]


def test_options_without_an_application_say_who_sets_them() -> None:
    with pytest.raises(ConfigError, match=r"option 'app' is missing; jetspark.spark.run sets it"):
        read_options(ProjectionOptions, FORMAT, {"servers": "nats://x", "stream": "S"})
    given = {"servers": "nats://x", "stream": "S", "app": "a:b", "projections": "one,two", "buckets": "one"}
    with pytest.raises(ConfigError, match="expected one for each of 'one,two'"):
        read_options(ProjectionOptions, FORMAT, given)


def test_a_module_that_cannot_be_executed_is_an_error_with_its_name_and_what_it_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_a_variable.py").write_text("import os\napp = os.environ['NO_SUCH_VARIABLE']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"app='needs_a_variable:app': importing .* raised KeyError: 'NO_SUCH_VARIABLE'"
    ):
        load_app("needs_a_variable:app")


def test_other_code_on_a_worker_than_on_the_driver_is_noticed() -> None:
    names = ["accounts", "totals"]
    outline = outline_of(projected.app, names)
    assert load_same_app("support.projected:app", "", names, outline) is projected.app
    assert outline != outline_of(projected.app, ["accounts"])
    with pytest.raises(ConfigError, match=r"app='support.projected:app': the driver's code .* from .*projected.py"):
        load_same_app("support.projected:app", "", names, outline_of(App("bank", stream="BANK"), names))


def test_the_outline_is_the_same_in_another_process_whatever_was_published() -> None:
    folder = Path(__file__).parents[2] / "examples"
    program = (
        "from jetspark.spark.engine.app_files import load_app, outline_of\n"
        f"app = load_app('orders.app:app', {str(folder)!r})\n"
        "print(outline_of(app, list(app.projections)))\n"
    )

    def outline(before: str) -> str:
        command = [sys.executable, "-c", before + program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    other = f"import sys\nsys.path.append({str(folder)!r})\nimport orders.release2, orders.traffic\n"
    assert outline("") == outline(other) != ""


def test_a_checkpoint_that_nobody_asked_for_goes_when_the_process_ends() -> None:
    program = """
from pathlib import Path
from jetspark.spark.engine.projections import passing_folder
made = passing_folder("jetspark-till-")
assert made.startswith("file:///")
assert Path(made.removeprefix("file://")).is_dir()
print(made.removeprefix("file://"))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not Path(shown.strip()).exists()
