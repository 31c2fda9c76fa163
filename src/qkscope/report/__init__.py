"""The report: summary, figures with cards, page. `qkscope.report("results/my_study")` writes one."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path
from types import ModuleType


class _Report(ModuleType):
    """A module that can be called."""

    def __call__(
        self,
        folder: str | PathLike[str],
        *,
        figures: bool = True,
        page: bool = True,
        out: str | PathLike[str] | None = None,
    ) -> list[Path]:
        """Write the tables, figures with cards, and page of a results folder; returns the files that were written."""
        from qkscope.files import as_path
        from qkscope.report.write import write_report

        place = None if out is None else as_path(out, "out")
        return write_report(as_path(folder, "the results folder"), figures=figures, page=page, out=place)


sys.modules[__name__].__class__ = _Report
