"""The parser: every command by group, how one is added, and the options that several share.

Nothing heavy is imported here, nor at the top of a module with commands: `--help` is instant.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from importlib import import_module
from inspect import getdoc
from typing import Any, NoReturn

from qkscope._version import __version__

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
# The module of each command: NAME_options adds its options; NAME does its work, and its docstring is its help.
MODULES = {
    "run": "commands", "capture": "commands", "status": "commands", "plan": "commands", "shard": "commands",
    "inspect": "commands", "report": "commands", "demo": "demo", "ablate": "ablate", "init": "watch", "watch": "watch",
    "analyze": "analyze", "predict": "analyze",
    "compare": "results", "among": "results", "join": "results", "collage": "results", "export": "results",
    "push": "results", "log": "results", "docs": "results", "rope": "rope",
}  # fmt: skip
FOOTER = "`qkscope COMMAND --help` explains a command and shows an example."
PER_DOUBLING = 16  # tokens of a log-uniform sample each time that the position doubles


class Parser(argparse.ArgumentParser):
    """A parser whose commands have a one-line summary, and which suggests the command that was probably meant."""

    summary = ""

    def error(self, message: str) -> NoReturn:
        """Name the closest command instead of listing all of them."""
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            known = re.findall(r"[a-z]+", unknown[2])
            close = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
            hint = f"did you mean `qkscope {close[0]}`?" if close else "`qkscope --help` lists the commands"
            self.exit(2, f"qkscope: there is no command {unknown[1]!r}; {hint}\n")
        super().error(message)


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
    for name in [command] if command in MODULES else MODULES:
        module = import_module(f"qkscope.cli.{MODULES[name]}")
        getattr(module, f"{name}_options")(add_command(commands, name, getattr(module, name)))
    if command not in MODULES:  # a command in no group is a mistake that a test finds
        summaries = {name: each.summary for name, each in commands.choices.items()}
        lines = []
        for group, names in GROUPS.items():
            lines += [f"{group}:", *(f"  {name:<9}  {summaries[name]}" for name in names), ""]
        parser.epilog = "\n".join([*lines, FOOTER])
    return parser


def add_command(commands: Any, name: str, work: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """A command: the docstring of its function is its summary, its description, and its examples."""
    summary, _, text = (getdoc(work) or "").partition("\n\n")
    about, mark, examples = text.partition("\nexample")
    parser: Parser = commands.add_parser(
        name,
        description=about,
        epilog=f"{mark.strip()}{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.summary = f"{summary[:1].lower()}{summary[1:].removesuffix('.')}"
    parser.add_argument("-v", "--verbose", action="store_true", help="list every file that is written")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    parser.set_defaults(command=work)
    return parser


# --- options that several commands share ------------------------------------------------------------


def add_results(parser: argparse.ArgumentParser, out: str) -> None:
    """Which results, and where to write."""
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument("--out", metavar="DIR", help=out)


def add_study(parser: argparse.ArgumentParser) -> None:
    """Which study, and where its results are."""
    parser.add_argument("study", metavar="STUDY", help="the study file (YAML)")
    parser.add_argument("--out", metavar="DIR", help="results folder (default: results/<study>)")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Whether code that comes with a checkpoint may run."""
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with a checkpoint: it can do anything you can do on this machine "
        "(default: refuse such checkpoints); recorded in the provenance",
    )


def add_capture_options(parser: argparse.ArgumentParser) -> None:
    """What a capture does in addition to summing, and where."""
    add = parser.add_argument
    add(
        "--evict",
        action="store_true",
        help="delete a checkpoint's downloads from the Hub cache once its moments are saved (ten 3B checkpoints are 60 "
        "GB); folders of your own are never deleted",
    )
    add(
        "--vectors",
        type=vector_rate,
        nargs="?",
        const=(None, 0),
        metavar="RATE",
        help="also keep the raw vectors of a random share RATE of all tokens, one parquet file per head, in "
        "<results>/vectors/ (without RATE: on average one token per position bucket; log or log:N: log-uniform, N "
        f"tokens each time the position doubles, {PER_DOUBLING} by default)",
    )
    add("--vector-tokens", action="store_true", help="with --vectors: also keep the text of each token")
    add_shard_options(parser)
    add_engine_options(parser)


def add_shard_options(parser: argparse.ArgumentParser) -> None:
    """What the capture of a shard may leave out or replace."""
    add_trust(parser)
    for option, about in {
        "--skip-bad-checkpoints": "continue without checkpoints that cannot be measured (NaN weights, a damaged file, "
        "a refused model) instead of stopping; they are listed at the end, by `qkscope status`, and in the provenance",
        "--skip-bad-documents": "leave out documents that make the model fail instead of stopping; they are listed in "
        "the provenance",
        "--overwrite": "replace finished moments that were made from other weights, documents, settings or versions; "
        "without it, those that still fit the study are reused, and any that do not cause an error before anything "
        "runs",
    }.items():
        parser.add_argument(option, action="store_true", help=about)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Where the work runs."""
    add = parser.add_argument_group("where it runs").add_argument
    add("--engine", default="local", metavar="NAME", help="local (default) or ray (pip install 'qkscope[ray]')")
    add(
        "--workers",
        type=positive,
        metavar="N",
        help="local: number of processes that share the GPUs and cores (default: 1, this process); "
        "ray: number of workers (default: as many as the cluster has room for)",
    )
    add("--ray-address", metavar="ADDRESS", help="a running Ray cluster: auto, host:port or ray://host:port")
    per_worker = {"cpus": "1 with a GPU, otherwise a whole node", "gpus": "1 if the cluster has GPUs"}
    for what, default in per_worker.items():
        about = f"ray: {what[:-1].upper()}s per worker (default: {default})"
        add(f"--{what}-per-worker", type=float, metavar="N", help=about)


def vector_rate(text: str) -> tuple[float | None, int]:
    """`0.01`, `log` or `log:16`: a share of tokens, and of a log-uniform sample how many for each doubling."""
    word, _, amount = text.partition(":")
    if word == "log":
        try:
            return None, positive(amount) if amount or ":" in text else PER_DOUBLING
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: write log:16, with a number of tokens") from None
    try:
        rate = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: write a share of tokens, log, or log:16") from None
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(f"{rate:g}: a share of tokens must be above 0 and at most 1")
    return rate, 0


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def quantity(text: str) -> float:
    """A number with a suffix as people write it: 80GB, 400T, 2GB/s, 1e9; powers of ten."""
    match = re.fullmatch(r"(?i)(\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmgtp]?)(b|flops?)?(/s)?", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a quantity such as 80GB, 312T, 2GB/s or 1e9")
    return float(match[1]) * 1000.0 ** " kmgtp".index(match[2].lower() or " ")
