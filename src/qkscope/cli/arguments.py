"""Every command, its options, and help that teaches. Nothing heavy is imported here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from qkscope._version import __version__
from qkscope.cli.command import Parser
from qkscope.cli.command import add_command as _command
from qkscope.cli.options import add_capture_options, add_shard_options, add_study, add_trust

DESCRIPTION = """\
See how the attention heads of a language model learn position.

A study file lists checkpoints and documents. qkscope runs each checkpoint over the documents, sums
second moments of every head's queries and keys while the model runs, and writes tables: how closely
each head's queries (r_q) and keys (r_k) track token position. From the tables come a summary, figures
with cards, and an interactive page.
"""

GROUPS = {
    "getting started": ("demo", "init", "run", "report"),
    "studies": ("inspect", "watch", "status", "capture", "ablate"),
    "decisions": ("rope",),
    "analysis": ("analyze", "predict", "compare", "among", "join", "collage"),
    "sharing": ("export", "push", "log"),
    "clusters": ("plan", "shard"),
    "help": ("docs",),
}
# The function that adds each command; those of other modules are imported when they are needed.
ADDED_BY = {
    "run": "_add_run",
    "status": "_add_status",
    "report": "_add_report",
    "compare": "_add_compare",
    "inspect": "_add_inspect",
    "plan": "_add_plan",
    "shard": "_add_shard",
    "capture": "_add_capture",
    "analyze": "analyze:add_analyze",
    "predict": "predict:add_predict",
    "ablate": "ablate:add_ablate",
    "join": "join:add_join",
    "among": "join:add_join",  # with join
    "collage": "collage:add_collage",
    "init": "init:add_init",
    "watch": "watch:add_watch",
    "log": "log:add_log",
    "export": "export:add_export",
    "push": "export:add_push",
    "demo": "_add_demo",
    "docs": "docs:add_docs",
    "rope": "rope:add_rope",
}
FOOTER = "`qkscope COMMAND --help` explains a command and shows an example."


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The parser with all commands; with a command's name, only with that one, which is all that it needs."""
    parser = Parser(
        prog="qkscope",
        usage="qkscope [-h] [-V] COMMAND ...",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-V", "--version", action="version", version=f"qkscope {__version__}")
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS, prog="qkscope")
    for place in [ADDED_BY[command]] if command in ADDED_BY else dict.fromkeys(ADDED_BY.values()):
        module, _, function = place.rpartition(":")
        add = getattr(import_module(f"qkscope.cli.{module}"), function) if module else globals()[function]
        add(commands)
    if command not in ADDED_BY:
        parser.epilog = _overview(commands.choices)
    return parser


def _overview(commands: Mapping[str, Parser]) -> str:
    """Every command with its summary, by group; a command in no group is a mistake that a test finds."""
    lines = []
    for group, names in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<9}  {commands[name].summary}" for name in names), ""]
    return "\n".join([*lines, FOOTER])


def _add_run(commands: Any) -> None:
    parser = _command(
        commands,
        "run",
        "run",
        "measure every checkpoint of a study and write its tables",
        "Run every checkpoint of a study over its documents, and write all tables (qk.csv, heads.csv and others)\n"
        "and provenance.json. If it is stopped or killed, run it again to continue: finished work is not repeated.\n"
        "Tables are byte-identical with any engine and any number of workers.",
        "examples:\n  qkscope run studies/smollm3_training_progress.yaml --out results/smollm3\n"
        "  qkscope run study.yaml --workers 8                       # eight processes, one per GPU\n"
        "  qkscope run study.yaml --engine ray --ray-address auto   # on the Ray cluster that this machine is part of",
    )
    add_study(parser)
    add_capture_options(parser)


def _add_status(commands: Any) -> None:
    parser = _command(
        commands,
        "status",
        "status",
        "show the progress of a run: shards done, running, and left, and the time left",
        "Show how far along a run is, from its results folder alone: while it runs, after it was killed, and for\n"
        "shards that run elsewhere on a shared disk.",
        "example:\n  qkscope status results/smollm3",
    )
    parser.add_argument("results", metavar="RESULTS", help="the results folder of a run that has started")


def _add_plan(commands: Any) -> None:
    parser = _command(
        commands,
        "plan",
        "plan",
        "print the shards of a study as commands, for a batch system",
        "Print one `qkscope shard` command per shard, passing on the options below. Run them in any order, any number\n"
        "at a time, on any machine that can access the results folder; then `qkscope run` makes the tables.\n"
        "With --estimate, print what the study would cost on a cluster instead.",
        "examples:\n  qkscope plan study.yaml | xargs -P 8 -I{} sh -c '{}' && qkscope run study.yaml\n"
        "  qkscope plan study.yaml --estimate --devices 8\n"
        "  sbatch --array=0-$(($(qkscope plan study.yaml --count) - 1)) job.sh   # runs: qkscope shard study.yaml "
        "$SLURM_ARRAY_TASK_ID",
    )
    add_study(parser)
    parser.add_argument("--count", action="store_true", help="print only the number of shards")
    parser.add_argument("--left", action="store_true", help="list only shards that are not finished")
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="instead of commands, print device hours, memory, disk, network and wall time on a cluster, and the "
        "bottleneck",
    )
    add_shard_options(parser)
    from qkscope.cli.estimate import add_cluster_options

    add_cluster_options(parser)


def _add_shard(commands: Any) -> None:
    parser = _command(
        commands,
        "shard",
        "shard",
        "run exactly one shard of a study",
        "Run one shard of the plan and write its moments. A checkpoint's last shard also adds up its moments.\n"
        "A finished shard is not run again. `qkscope plan` lists the shards; `qkscope run` makes the tables.",
        "example:\n  qkscope shard study.yaml 12 --out results/smollm3",
    )
    add_study(parser)
    parser.add_argument("number", metavar="K", type=int, help="the shard's number in the plan, from 0")
    add_shard_options(parser)


def _add_report(commands: Any) -> None:
    parser = _command(
        commands,
        "report",
        "report",
        "summarize results: findings, figures with cards, claims, and an interactive page",
        "Print the summary, and write RESULTS/report.html (the interactive page: one file, no network),\n"
        "RESULTS/figures/ (each figure as PNG and SVG with a card, README.md), RESULTS/claims.md, and the tables of\n"
        "means and changes behind them (RESULTS/tables/).",
        "examples:\n  qkscope report results/demo\n  qkscope report results/demo --serve --no-figures",
    )
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="write here and leave RESULTS unchanged (default: RESULTS)",
    )
    parser.add_argument("--no-figures", action="store_true", help="do not draw figures")
    parser.add_argument("--no-page", action="store_true", help="do not write report.html")
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=8737,
        metavar="PORT",
        help="then serve the report, on this machine only (127.0.0.1), and open the page (default port: 8737)",
    )


def _add_compare(commands: Any) -> None:
    parser = _command(
        commands,
        "compare",
        "compare",
        "check whether results reproduce published numbers or another results folder",
        "Compare a results folder, number by number, with published values that ship with qkscope, or with another\n"
        "results folder (then head by head). Writes a table, a figure and a card into RESULTS/comparison/.\n"
        "Exit code 0: reproduced within the stated tolerances; 1: not reproduced; 2: nothing to compare.",
        "examples:\n  qkscope compare results/smollm3_training_progress --with published:smollm3-3b\n"
        "  qkscope compare results/today --with results/yesterday --tolerance 1e-4",
    )
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument(
        "--with",
        dest="reference",
        metavar="REFERENCE",
        required=True,
        help="published:NAME, a results folder, or an exported .zip",
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="largest difference that still counts as reproduced"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="where to write the comparison (default: RESULTS/comparison/<reference>)"
    )


def _add_capture(commands: Any) -> None:
    parser = _command(
        commands,
        "capture",
        "capture",
        "run the models and write moments only, no tables",
        "Run the checkpoints of a study over its documents and write their moments, one file per checkpoint.\n"
        "`qkscope analyze` makes the tables from them.",
        "example:\n  qkscope capture study.yaml --checkpoint stage1-step-40000",
    )
    add_study(parser)
    parser.add_argument(
        "--checkpoint", metavar="NAME", action="append", default=[], help="only this checkpoint; may be repeated"
    )
    add_capture_options(parser)


def _add_inspect(commands: Any) -> None:
    parser = _command(
        commands,
        "inspect",
        "inspect",
        "show a model's attention layers, or check a study and show its cost",
        "Show a model's attention layers (heads, widths, NoPE layers, windows) from its config alone, without loading\n"
        "weights. Or check a whole study, and show how many tokens and how much memory and disk it needs, before\n"
        "anything runs.",
        "examples:\n  qkscope inspect HuggingFaceTB/SmolLM2-135M --context 8192 --documents 100\n"
        "  qkscope inspect studies/smollm3_training_progress.yaml",
    )
    parser.add_argument("target", metavar="MODEL|STUDY", help="Hub id, model directory, .gguf file, or study file")
    parser.add_argument("--revision", metavar="REV", help="the revision of a model on the Hub")
    parser.add_argument("--out", metavar="DIR", help="the study's results folder (default: results/<study>)")
    parser.add_argument(
        "--context", type=int, metavar="TOKENS", help="tokens per document (default: the model's maximum)"
    )
    parser.add_argument("--documents", type=int, default=100, metavar="N", help="number of documents (default: 100)")
    add_trust(parser)


def _add_demo(commands: Any) -> None:
    parser = _command(
        commands,
        "demo",
        "demo",
        "train ten small checkpoints and run everything on them (three minutes, no network)",
        "Train a small SmolLM3 on the source code of Python's standard library, through pretraining and two\n"
        "long-context phases; save ten checkpoints, and run an ordinary study on them. A second run reuses the\n"
        "checkpoints.",
        "examples:\n  qkscope demo\n  qkscope demo --steps 0.25 --out quick-demo",
    )
    parser.add_argument("--out", metavar="DIR", default="results/demo", help="results folder (default: results/demo)")
    parser.add_argument(
        "--steps",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="train for FACTOR times as many steps as usual (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for weights and data order (default: 0)")
