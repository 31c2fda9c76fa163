"""`qkscope export` and `qkscope push`: their options, and what they do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command
from qkscope.text import visible

EXPORT = """\
Write the parts of a results folder that others need: tables, the page, figures with their cards, and provenance. The
export is itself a results folder: report, compare and load_results read it, as a folder or as an archive. Moments,
token ids, vectors and document text are not included, and absolute paths are shortened.
"""
PUSH = """\
Upload a results folder to the Hub: what `qkscope export --parquet` writes as a dataset, the page as a static Space of
the same name. Set HF_TOKEN to authenticate. With --dry-run, nothing leaves this machine.
"""
WITH_TEXT = "also include tables with document text (tokens.csv), and show that text on the page"


def add_export(commands: Any) -> None:
    """The command and its options."""
    summary = "package results for others: tables, page, figures with cards, provenance"
    epilog = "examples:\n  qkscope export results/my_study --zip\n  qkscope export results/my_study --out shared"
    parser = add_command(commands, "export", "qkscope.cli.export:export", summary, EXPORT, epilog)
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument("--zip", action="store_true", help="write a single archive")
    parser.add_argument(
        "--parquet", action="store_true", help="also write every table as Parquet (data/), as push does"
    )
    parser.add_argument("--with-text", action="store_true", help=WITH_TEXT)
    parser.add_argument(
        "--out", metavar="PATH", help="where to write it (default: <RESULTS>-export, or <RESULTS>-export.zip)"
    )


def add_push(commands: Any) -> None:
    """The command and its options."""
    summary = "upload results to the Hub, as a dataset and a static Space"
    epilog = "examples:\n  qkscope push results/my_study my-org/my-study-heads --dry-run\n" \
             "  qkscope push results/my_study my-org/my-study-heads --private"  # fmt: skip
    parser = add_command(commands, "push", "qkscope.cli.export:push", summary, PUSH, epilog)
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument("repo", metavar="REPO", help="owner/name on the Hub; created if missing")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be uploaded")
    parser.add_argument("--private", action="store_true", help="create private repositories")
    parser.add_argument("--no-space", action="store_true", help="upload only the dataset")
    parser.add_argument("--with-text", action="store_true", help=WITH_TEXT)
    parser.add_argument(
        "--message", default="Results of qkscope", metavar="TEXT", help="commit message (default: Results of qkscope)"
    )


def export(options: argparse.Namespace) -> int:
    """`qkscope export`."""
    from qkscope.share.export import export_results

    name = Path(options.results).resolve().name
    out = Path(options.out) if options.out else Path(f"{name}-export{'.zip' if options.zip else ''}")
    _tell("writing tables and page ...")
    written = export_results(
        options.results, out, archive=options.zip, with_text=options.with_text, parquet=options.parquet, report=_tell
    )
    print(f"export: {written}")
    return 0


def _tell(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)


def push(options: argparse.Namespace) -> int:
    """`qkscope push`."""
    from qkscope.share.push import push_results

    addresses = push_results(
        options.results,
        options.repo,
        space=not options.no_space,
        private=options.private,
        message=options.message,
        with_text=options.with_text,
        dry_run=options.dry_run,
        report=_tell,
    )
    for address in addresses:
        print(f"uploaded: {address}")
    return 0
