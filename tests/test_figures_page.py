"""docs/figures.md names every figure and table that a report writes, and says which have no common window."""

import re
from pathlib import Path

from qkscope.lenses.registry import registered

PAGE = (Path(__file__).parent.parent / "docs/figures.md").read_text(encoding="utf-8")
NAMES = re.findall(r"`([^`\n]+)`", PAGE)


def test_every_figure_is_on_the_page():
    named = {re.sub(r"^(…|\d\d)_", "", name) for name in NAMES}
    assert {figure.name for lens in registered() for figure in lens.figures} <= named


def test_every_summary_is_on_the_page():
    assert {f"{summary.name}.csv" for lens in registered() for summary in lens.summaries} <= set(NAMES)


def test_the_tables_without_a_common_window_are_those_that_the_page_names():
    sentence = PAGE.partition("as `*_common.csv`, except ")[2].partition("\n\n")[0]
    without = {summary.name for lens in registered() for summary in lens.summaries if not summary.at_common_window}
    assert set(re.findall(r"`(\w+)\.csv`", sentence)) == without
