"""`qkscope join` and `qkscope among`: their options, and what they do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from qkscope.cli.command import add_command
from qkscope.text import visible_line

ABOUT = """\
Do internal measures correlate with benchmark scores? Joins each model's mean over heads with its score, and reports
what so few models can support: exact permutation p, intervals, how much depends on one model or family, what is left
at equal parameters, and Holm's correction for every measure that was tried. The number of parameters is the null model
in the same table; for scores at several lengths, so is length.
"""
EXAMPLES = """\
examples:
  qkscope join results/models --scores scores.csv
  qkscope join results/models --scores scores.csv --measure r_q --measure plasticity.ap --models models.csv
  qkscope join published:models --scores published:longbench-pro --measure ap_drop --out join
"""
AMONG = """\
Where is my model among the published ones? Means over heads of each entry next to those of thirteen published models,
each with its window. The published values are of full-attention layers, so heads of other layers are left out where a
model has both. Numbers measured at a different window get no rank.
"""


def add_join(commands: Any) -> None:
    """Both commands and their options."""
    _add_among(commands)
    summary = "whether internal measures of models correlate with benchmark scores"
    parser = add_command(commands, "join", "qkscope.cli.join:join", summary, ABOUT, EXAMPLES)
    parser.add_argument(
        "measures",
        metavar="RESULTS|FILE",
        help="a results folder, a CSV file with a row per model, or published:models",
    )
    parser.add_argument(
        "--scores", required=True, metavar="FILE",
        help="a CSV file with model, score and, for several lengths, length (in tokens); or published:NAME",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="append", default=[], metavar="NAME",
        help="a column of heads, such as r_q or plasticity.ap; may be repeated (default: eight, one per question)",
    )  # fmt: skip
    parser.add_argument(
        "--models", metavar="FILE", help="a CSV file with model, family and parameters, if the study does not have them"
    )
    parser.add_argument(
        "--windows", choices=("own", "common"),
        help="take measures at each entry's own context, or at the common window (default: common, if there is one)",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="where to write the join (default: RESULTS/join/<scores>)")


def join(options: argparse.Namespace) -> int:
    """`qkscope join`."""
    from qkscope.join.write import JoinRequest, join_scores

    common = None if options.windows is None else options.windows == "common"
    request = JoinRequest(options.measures, options.scores, options.measure, options.models, common)
    outcome = join_scores(request, Path(options.out) if options.out else None)
    print("\n".join(map(visible_line, outcome.lines)))
    print(f"join: {outcome.folder}/")
    return 0


def _add_among(commands: Any) -> None:
    """The command and its options."""
    summary = "where a model stands among thirteen published ones"
    parser = add_command(
        commands, "among", "qkscope.cli.join:among", summary, AMONG, "example:\n  qkscope among results/models"
    )
    parser.add_argument("results", metavar="RESULTS", help="a folder with qk.csv")
    parser.add_argument("--out", metavar="DIR", help="where to write the table (default: RESULTS/join/among)")


def among(options: argparse.Namespace) -> int:
    """`qkscope among`."""
    from qkscope.join.among import write_among

    lines, folder = write_among(Path(options.results), Path(options.out) if options.out else None)
    print("\n".join(map(visible_line, lines)))
    print(f"table: {folder}/")
    return 0
