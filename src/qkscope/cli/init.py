"""`qkscope init`: its options, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command
from qkscope.errors import InputError
from qkscope.results.folder import STUDY_YAML

ABOUT = """\
Write a commented study file for a folder that a trainer saves checkpoints to, for a model, or for a repository on the
Hub whose branches are checkpoints. Context, RoPE base and tokenizer come from the configs. Nothing is measured.
"""
EXAMPLES = """\
examples:
  qkscope init runs/a --documents "texts/*.txt"
  qkscope init HuggingFaceTB/SmolLM3-3B-checkpoints --out smollm3.yaml
"""


def add_init(commands: Any) -> None:
    """The command and its options."""
    summary = "write a study file for a folder of checkpoints, a model or a Hub repository"
    parser = add_command(commands, "init", "qkscope.cli.init:init", summary, ABOUT, EXAMPLES)
    parser.add_argument("target", metavar="FOLDER|MODEL", help="a folder of checkpoints, a model, or a Hub id")
    parser.add_argument("--out", metavar="FILE", default=STUDY_YAML, help="the study file (default: study.yaml)")
    parser.add_argument("--documents", metavar="GLOB", help="the documents (default: a placeholder to fill in)")
    parser.add_argument("--revision", metavar="REV", help="one revision of a model on the Hub")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing study file")


def init(options: argparse.Namespace) -> int:
    """`qkscope init`."""
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
