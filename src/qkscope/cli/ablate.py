"""`qkscope ablate`: its options, and what it does."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.cli.command import add_command

if TYPE_CHECKING:
    from qkscope.ablate.run import AblationSettings, CheckpointAblation

ABOUT = """\
Take position away from heads and measure what the model loses.

For each chosen head (or for all of them together, against groups of other heads drawn to match) the model reads
documents with and without an edit of that head's attention scores; the loss of every token is compared. What an edit
takes away is known from other documents. Needs the moments and tables of `qkscope run STUDY`.

edits:
  kernel           the mean score at each distance, as RoPE makes it of the mean query and key
  kernel_measured  the mean score of each pair of positions, as measured
  key_mean         the mean key, as RoPE turns it
  query_mean       the mean query, as RoPE turns it
  flatten          the drift with position along axis a (flatten_pc0: along component 0)
  shuffle          every distance gets the mean score of another one
  zero             the head's output: what it is worth at all
  nothing          nothing: what rounding alone does
"""
EXAMPLES = """\
examples:
  qkscope ablate study.yaml                                         every head by itself: kernel and zero
  qkscope ablate study.yaml --heads position-dominated --together   a category against matched random heads
  qkscope ablate study.yaml --top 20 --by position_share --together --edit kernel --edit shuffle
  qkscope ablate study.yaml --heads L5H3 L7H0 --checkpoint step-50000 --tokens 1024
  qkscope ablate study.yaml --estimate                              how many passes that is; nothing runs
"""


def add_ablate(commands: Any) -> None:
    """The command and its options."""
    summary = "take position away from heads and measure what the model loses"
    parser = add_command(commands, "ablate", "qkscope.cli.ablate:ablate", summary, ABOUT, EXAMPLES)
    parser.add_argument("study", metavar="STUDY", help="study file (.yaml)")
    parser.add_argument("--out", metavar="DIR", help="the study's results folder (default: results/<study>)")
    parser.add_argument("--edit", action="append", metavar="EDIT", help="may be given again (default: kernel, zero)")
    parser.add_argument(
        "--heads", nargs="+", default=[], metavar="HEAD", help="L5H3, a category, or all (default: all)"
    )
    parser.add_argument("--top", type=int, metavar="N", help="the N heads with the largest absolute value of --by")
    parser.add_argument("--by", default="r_q", metavar="COLUMN", help="a column of tables/heads.csv (default: r_q)")
    parser.add_argument("--together", action="store_true", help="edit the chosen heads as one group, against controls")
    parser.add_argument(
        "--controls", type=int, default=4, metavar="N", help="with --together: groups of other heads (default: 4)"
    )
    parser.add_argument("--checkpoint", action="append", metavar="NAME", help="only this one; may be given again")
    parser.add_argument("--documents", type=int, default=16, metavar="N", help="documents to measure on (default: 16)")
    parser.add_argument("--tokens", type=int, metavar="N", help="of each document (default: the checkpoint's context)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of controls and shuffles (default: 0)")
    parser.add_argument("--estimate", action="store_true", help="say how many passes it takes, and stop")
    parser.add_argument("--trust-remote-code", action="store_true", help="let Python code that lies with a model run")


def settings_of(options: argparse.Namespace) -> AblationSettings:
    """What the command line asks for."""
    from qkscope.ablate.choice import HeadChoice
    from qkscope.ablate.run import AblationSettings

    choice = HeadChoice(tuple(options.heads), options.top, options.by, options.together, options.controls, options.seed)
    return AblationSettings(
        edits=tuple(options.edit or ("kernel", "zero")),
        heads=choice,
        documents=options.documents,
        tokens=options.tokens,
        only=tuple(options.checkpoint or ()),
        seed=options.seed,
    )


def demo_ablation(study: Path) -> AblationSettings:
    """What the demo ablates in seconds: every head of its last checkpoint, by itself, on a few short documents."""
    from qkscope.ablate.run import AblationSettings
    from qkscope.study.load import load_study

    last = load_study(study).study.checkpoints[-1].name
    return AblationSettings(edits=("kernel",), documents=8, tokens=128, only=(last,))


def ablate(options: argparse.Namespace) -> int:
    """`qkscope ablate`."""
    from qkscope.ablate.study import ablate_study, prepare_ablation
    from qkscope.cli.commands import command_line, quiet_libraries
    from qkscope.cli.progress import progress

    quiet_libraries()
    settings, trust = settings_of(options), options.trust_remote_code
    with progress() as events:
        if options.estimate:
            _, works = prepare_ablation(options.study, options.out, settings, events, trust_remote_code=trust)
            print("\n".join(estimate_lines(works)))
            return 0
        folder = ablate_study(options.study, options.out, settings, events, command_line(), trust_remote_code=trust)
    print(f"ablation: {folder}/ablation.csv")
    print(f"figures: qkscope report {shlex.quote(str(folder))}")
    return 0


def estimate_lines(works: list[CheckpointAblation]) -> list[str]:
    """How much work each checkpoint is, in passes of a whole document; late layers take part of one."""
    lines = [
        f"{work.plan.checkpoint.name}: {len(work.units):,} units x {len(work.settings.edits)} edits x "
        f"{len(work.documents)} documents of {work.tokens:,} tokens: at most {work.passes:,} passes "
        f"({work.passes * work.tokens:,} tokens)"
        for work in works
    ]
    total = sum(work.passes * work.tokens for work in works)
    return [*lines, f"in all at most {total:,} tokens; a head in the middle of the model takes about half a pass"]
