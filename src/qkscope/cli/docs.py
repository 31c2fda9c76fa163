"""`qkscope docs`: the documentation that is installed with the package."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command
from qkscope.errors import InputError

INSTALLED = Path(__file__).parents[1] / "docs"  # in a wheel
CHECKOUT = Path(__file__).parents[3] / "docs"  # in a clone


def add_docs(commands: Any) -> None:
    """The command and its options."""
    about = "List the pages of the documentation, or print one. Pages are Markdown files, and need no network."
    example = "examples:\n  qkscope docs\n  qkscope docs study-files"
    parser = add_command(commands, "docs", "qkscope.cli.docs:docs", "list or print documentation pages", about, example)
    parser.add_argument("page", metavar="PAGE", nargs="?", help="a page from the list, such as study-files")


def docs(options: argparse.Namespace) -> int:
    """`qkscope docs`."""
    folder = INSTALLED if INSTALLED.is_dir() else CHECKOUT
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
    if options.page is None:
        for name, path in pages.items():
            print(f"{name:<20}  {_title(path)}")
        print(f"\npages: {folder}/")
        return 0
    if options.page not in pages:
        close = difflib.get_close_matches(options.page, pages, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "`qkscope docs` lists the pages"
        raise InputError(f"there is no page {options.page!r}; {hint}")
    print(pages[options.page].read_text(encoding="utf-8"), end="")
    return 0


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[:1]
    return first[0].lstrip("# ") if first else ""
