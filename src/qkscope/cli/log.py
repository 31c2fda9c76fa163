"""`qkscope log`: its options, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command

ABOUT = """\
Log a finished study to a tracker, next to the loss curves of its training run: means over heads, by layer type and
depth, and the share of each category, with standard errors, at each checkpoint's step. Keys: eval/qkscope/r_q_mean, ...
Install the tracker yourself. W&B honours WANDB_MODE (offline, online).
"""
EXAMPLES = """\
examples:
  qkscope log results/my_study --to tensorboard --dir runs
  qkscope log results/my_study --to wandb --project my-model
"""


def add_log(commands: Any) -> None:
    """The command and its options."""
    summary = "log a finished study to TensorBoard, Weights & Biases or trackio"
    parser = add_command(commands, "log", "qkscope.cli.log:log", summary, ABOUT, EXAMPLES)
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument("--to", required=True, choices=("tensorboard", "wandb", "trackio"), help="the tracker")
    parser.add_argument(
        "--dir",
        metavar="DIR",
        help="where the tracker keeps its files (default: runs for tensorboard, the tracker's own place for wandb)",
    )
    parser.add_argument(
        "--project", default="qkscope", metavar="NAME", help="project in wandb or trackio (default: qkscope)"
    )
    parser.add_argument("--name", metavar="NAME", help="the run's name (default: the study's title)")


def log(options: argparse.Namespace) -> int:
    """`qkscope log`."""
    from qkscope.share.trackers import log_results

    where = Path(options.dir) if options.dir else None
    for line in log_results(options.results, options.to, where=where, project=options.project, name=options.name):
        print(line)
    return 0
