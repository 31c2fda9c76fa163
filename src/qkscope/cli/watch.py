"""`qkscope init` and `qkscope watch`: a study file for a folder of checkpoints, and following one as it grows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qkscope.cli.arguments import add_trust, positive
from qkscope.errors import InputError
from qkscope.results.folder import STUDY_YAML


def init_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope init`."""
    add = parser.add_argument
    add("target", metavar="FOLDER|MODEL", help="a folder of checkpoints, a model, or a Hub id")
    add("--out", metavar="FILE", default=STUDY_YAML, help="the study file (default: study.yaml)")
    add("--documents", metavar="GLOB", help="the documents (default: a placeholder to fill in)")
    add("--revision", metavar="REV", help="one revision of a model on the Hub")
    add("--overwrite", action="store_true", help="replace an existing study file")


def init(options: argparse.Namespace) -> int:
    """Write a study file for a folder of checkpoints, a model or a Hub repository.

    Write a commented study file for a folder that a trainer saves checkpoints to, for a model, or for a repository on
    the Hub whose branches are checkpoints. Context, RoPE base and tokenizer come from the configs. Nothing is measured.

    examples:
      qkscope init runs/a --documents "texts/*.txt"
      qkscope init HuggingFaceTB/SmolLM3-3B-checkpoints --out smollm3.yaml
    """
    from qkscope.cli.commands import quiet_libraries
    from qkscope.files import write_text
    from qkscope.run.propose import propose_study

    path = Path(options.out)
    if path.exists() and not options.overwrite:
        raise InputError(f"{path} already exists; choose another --out, or give --overwrite")
    quiet_libraries()
    text = propose_study(options.target, path.parent, documents=options.documents, revision=options.revision)
    write_text(path, text)
    print(text, end="")
    print(f"study: {path}")
    print(f"next: qkscope inspect {path}")
    return 0


def watch_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope watch`."""
    add = parser.add_argument
    add("target", metavar="RUN_DIR|STUDY", help="the folder that checkpoints are saved to, or a study file")
    add("--out", metavar="DIR", help="results folder (default: results/<study>)")
    add("--once", action="store_true", help="measure the checkpoints that are there, then exit")
    add("--every", type=float, default=30.0, metavar="S", help="seconds between scans (default: 30)")
    about = "seconds for which a checkpoint's files must not have changed before it is read (default: 5)"
    add("--settle", type=float, default=5.0, metavar="S", help=about)
    about = (
        "DELETE checkpoint folders from RUN_DIR once measured, except the newest N: training can then only resume "
        "from those; folders that changed since, or that involve a symbolic link, are kept"
    )
    add("--evict", type=positive, metavar="N", help=about)
    about = "measure checkpoints again whose weights changed, for instance after a restart under the same names"
    add("--overwrite", action="store_true", help=about)
    add("--figures", action="store_true", help="also redraw all figures each time (slow)")
    add("--no-page", action="store_true", help="do not write report.html")
    add("--skip-bad-documents", action="store_true", help="leave out documents that make a model fail")
    add_trust(parser)
    add = parser.add_argument_group("when RUN_DIR is a folder rather than a study file").add_argument
    add("--documents", metavar="GLOB", help="the documents: text, .jsonl or .parquet files")
    add("--context", type=positive, metavar="TOKENS", help="tokens per document")
    add("--tokenizer", metavar="MODEL", help="if the checkpoints have no tokenizer")


def watch(options: argparse.Namespace) -> int:
    """Follow a training run: measure each checkpoint as it is saved, keep tables and page up to date.

    Follow a training run by the folder that it saves checkpoints to, and keep tables and page up to date. Each
    checkpoint is measured once it is complete and its files have stopped changing. You can stop at any time; the next
    watch resumes, even if checkpoints have been deleted. Only the folder is needed, so the watch can run on a different
    machine.

    examples:
      qkscope watch runs/a --documents "texts/*.txt" --context 2048
      qkscope watch study.yaml                 a study whose checkpoints are a series of folders
      qkscope watch study.yaml --once          measure the checkpoints that are there and exit, for cron
      qkscope watch study.yaml --evict 3       DELETE checkpoint folders once measured, except the newest three
    """
    from qkscope.cli.commands import command_line, quiet_libraries
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.progress import progress
    from qkscope.run.watch import SeriesWatcher, WatchSettings

    settings, folder = watched(options)
    if not options.every > 0 or not options.settle >= 0:
        raise InputError("--every must be above 0 seconds, and --settle must not be below 0")
    quiet_libraries()
    capture = CaptureOptions(
        trust_remote_code=options.trust_remote_code,
        skip_bad_documents=options.skip_bad_documents,
        overwrite=options.overwrite,
    )
    how = WatchSettings(
        every=options.every,
        settle=options.settle,
        once=options.once,
        evict=options.evict,
        page=not options.no_page,
        figures=options.figures,
        capture=capture,
    )
    with progress() as events:
        following = SeriesWatcher(settings, folder, options.out, how, events, command_line())
        following.go()
    print(f"results: {following.out}/")
    return 0


def watched(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """What a study would say of the target, and the folder that its paths start from."""
    from qkscope.study.load import study_settings
    from qkscope.study.series import safe_name

    target = Path(options.target)
    own = [name for name in ("documents", "context", "tokenizer") if getattr(options, name) is not None]
    if target.suffix.lower() in (".yaml", ".yml"):
        if own:
            raise InputError(f"--{own[0]} only applies to a folder; set it in the study file")
        return study_settings(target), target.parent.resolve()
    if not target.is_dir():
        raise InputError(f"{target}: no such folder; start the watch once the training run has created it")
    missing = [name for name in ("documents", "context") if getattr(options, name) is None]
    if missing:
        raise InputError(
            f"--{missing[0]} is needed to watch a folder; or write a study with `qkscope init {target}` and watch that"
        )
    settings: dict[str, Any] = {
        "study": safe_name(target.resolve().name),
        "documents": {"files": str(Path(options.documents).absolute())},
        "context": options.context,
        "kind": "checkpoints",
        "checkpoints": [{"folder": f"{target.resolve()}/*"}],
    }
    if options.tokenizer is not None:
        here = Path(options.tokenizer).expanduser()
        settings["tokenizer"] = str(here.resolve()) if here.is_dir() else options.tokenizer
    return settings, Path.cwd()
