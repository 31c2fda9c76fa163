"""`qkscope ablate`."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from qkscope.cli.arguments import add_engine_options, add_study, add_trust
from qkscope.results.folder import ABLATION_CSV, results_file
from qkscope.text import counted

if TYPE_CHECKING:
    from qkscope.ablate.work import CheckpointAblation

DEPTHS = (0.1, 0.5, 0.9)  # early, in the middle, late


def ablate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope ablate`."""
    add_study(parser)
    add = parser.add_argument
    about = "one of the edits above; may be repeated (default: kernel, zero)"
    add("--edit", action="append", metavar="EDIT", help=about)
    add("--heads", nargs="+", default=[], metavar="HEAD", help="L5H3, a category, or all (default: all)")
    add("--top", type=int, metavar="N", help="the N heads with the largest absolute value of --by")
    add("--by", default="r_q", metavar="COLUMN", help="a column of heads.csv (default: r_q)")
    add("--together", action="store_true", help="edit the chosen heads as one group, and compare with controls")
    about = "with --together: number of control groups (default: 4)"
    add("--controls", type=int, default=4, metavar="N", help=about)
    about = "with --together: controls from which the edit kernel removes as much, not as many heads in each layer"
    add("--match-dose", action="store_true", help=about)
    add("--checkpoint", action="append", metavar="NAME", help="only this checkpoint; may be repeated")
    add("--documents", type=int, default=16, metavar="N", help="number of documents to measure on (default: 16)")
    add("--tokens", type=int, metavar="N", help="tokens per document (default: the checkpoint's context)")
    add("--seed", type=int, default=0, metavar="N", help="seed for controls and shuffles (default: 0)")
    about = "also plant a sentence at these depths, 0 to 1 (default: 0.1 0.5 0.9), and ask for its number at the end"
    add("--needle", nargs="*", type=float, metavar="DEPTH", help=about)
    add("--attention", action="store_true", help="also measure where edited heads attend")
    add("--replace", action="store_true", help="remove earlier ablations from the tables (default: keep them)")
    add("--estimate", action="store_true", help="print the cost and exit")
    add_trust(parser)
    add_engine_options(parser)


def ablate(options: argparse.Namespace) -> int:
    """Remove positional information from heads and measure the loss.

    Take position away from heads and measure what the model loses.

    The model reads documents with and without an edit of a head's attention scores, and the losses of every token are
    compared: for each chosen head alone, or for all of them together, against matched groups of other heads. What an
    edit takes away is measured on different documents. Needs the moments and tables that `qkscope run STUDY` writes.

    edits:
      kernel           the mean score at each distance, as RoPE makes it from the mean query and key
      kernel_measured  the mean score of each pair of positions, as measured
      key_mean         the mean key, as RoPE rotates it
      query_mean       the mean query, as RoPE rotates it
      flatten          the drift with position along axis a (flatten_pc0: along component 0)
      shuffle          every distance gets the mean score of another one
      zero             zero the head's output: its total contribution
      nothing          no change: a check on rounding error

    outcomes (each with its standard error over documents):
      all              mean loss of all tokens but the first, in nats per token
      positions ...    the same for each quarter of a document
      repeated, new    loss of tokens completing a three-token sequence seen earlier in the document, and of all others
      needle at ...    --needle: -ln of the probability of a number, which a sentence planted at that depth states and
                       the end of the document asks for; documents are shortened to make room for both
      attention entropy, attention distance
                       --attention: means over the queries of edited heads: entropy of the attention weights in nats,
                       and how many tokens back a query looks

    All ablations of a study share ablation.csv. To continue one that was stopped, run the same command again.

    examples:
      qkscope ablate study.yaml                                         each head alone: kernel and zero
      qkscope ablate study.yaml --heads position-dominated --together   a category against matched random heads
      qkscope ablate study.yaml --top 20 --by position_share --together --edit kernel --edit shuffle
      qkscope ablate study.yaml --heads L5H3 L7H0 --checkpoint step-50000 --tokens 1024
      qkscope ablate study.yaml --needle --attention --top 20 --together
      qkscope ablate study.yaml --workers 8                             eight processes, one per GPU
      qkscope ablate study.yaml --estimate                              what it would cost; nothing runs
    """
    from qkscope.ablate.study import AblationOptions, ablate_study, prepare_ablation
    from qkscope.ablate.work import AblationSettings, HeadChoice
    from qkscope.cli.commands import command_line, quiet_libraries
    from qkscope.run.engines import Placement
    from qkscope.run.progress import progress

    quiet_libraries()
    settings = AblationSettings(
        edits=tuple(options.edit or ("kernel", "zero")),
        heads=HeadChoice(
            tuple(options.heads),
            options.top,
            options.by,
            options.together,
            options.controls,
            options.seed,
            options.match_dose,
        ),
        documents=options.documents,
        tokens=options.tokens,
        only=tuple(options.checkpoint or ()),
        seed=options.seed,
        needle=() if options.needle is None else tuple(options.needle or DEPTHS),
        attention=options.attention,
    )
    placement = Placement(options.workers, options.ray_address, options.cpus_per_worker, options.gpus_per_worker)
    how = AblationOptions(options.engine, placement, options.replace, options.trust_remote_code)
    with progress() as events:
        if options.estimate:
            ablations = prepare_ablation(options.study, options.out, settings, events, how)
            print("\n".join(estimate_lines(ablations)))
            return 0
        folder = ablate_study(options.study, options.out, settings, events, command_line(), how)
    print(f"ablation: {results_file(folder, ABLATION_CSV)}")
    print(f"figures: qkscope report {shlex.quote(str(folder))}")
    return 0


def estimate_lines(ablations: list[CheckpointAblation]) -> list[str]:
    """How much work each checkpoint is; a pass with an edit starts at the first edited layer."""
    from qkscope.cli.describe import scaled
    from qkscope.cost import ablation_cost

    lines = []
    for each in ablations:
        cost = ablation_cost([each])
        lines.append(
            f"{each.name}: {len(each.units):,} units x {len(each.settings.edits)} edits x {len(each.documents)} "
            f"documents of {each.tokens:,} tokens: at most {cost.passes:,} passes ({cost.tokens:,} tokens), "
            f"{scaled(cost.flops)}FLOPs in {counted(len(each.shards), 'shard')}"
        )
    whole = ablation_cost(ablations)
    return [*lines, f"total: at most {whole.tokens:,} tokens, {scaled(whole.flops)}FLOPs"]
