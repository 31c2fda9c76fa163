"""`qkscope analyze`: its options, and what it does."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.cli.command import add_command
from qkscope.cli.options import positive
from qkscope.errors import InputError
from qkscope.kinds import KINDS

if TYPE_CHECKING:
    from qkscope.run.progress import Events

ABOUT = """\
Rebuild the tables from moments: those of a results folder with its study.yaml, or individual moments files.
Or make qk.csv from datasets of raw vectors. Needs no model, no GPU and no documents.
"""
EXAMPLES = """\
examples:
  qkscope analyze results/demo
  qkscope analyze results/demo --skip-positions 1 --out without-sinks
  qkscope analyze a.safetensors b.safetensors --common-window 1024 --out tables
  qkscope analyze --vectors early=org/vectors@step-1 --vectors late=org/vectors@step-2 --out tables
  qkscope analyze results/demo --plasticity-pairs 1000   # if the run kept --vectors
"""


def add_analyze(commands: Any) -> None:
    """The command and its options."""
    summary = "write the tables from moments, without a model"
    parser = add_command(commands, "analyze", "qkscope.cli.analyze:analyze", summary, ABOUT, EXAMPLES)
    parser.add_argument("inputs", metavar="RESULTS|FILE", nargs="*", help="a results folder, or moments files")
    parser.add_argument("--out", metavar="DIR", help="where to write the tables (default: the results folder)")
    parser.add_argument(
        "--components", type=int, metavar="N", help="components per head (default: as in the study, or 10)"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        help="how the inputs are related: checkpoints of one training run, seeds of one architecture, or "
        "different models, as which alone different architectures are read (default: seeds if they are of several "
        "runs, else checkpoints)",
    )
    _add_moments_options(parser.add_argument_group("from moments"))
    _add_vectors_options(parser.add_argument_group("from raw vectors"))


def _add_moments_options(moments: argparse._ArgumentGroup) -> None:
    moments.add_argument(
        "--common-window",
        type=positive,
        metavar="TOKENS",
        help="common window, over which all entries are compared (default: the shortest context)",
    )
    moments.add_argument(
        "--skip-positions",
        type=int,
        metavar="N",
        help="leave out the first N positions; 1 leaves out attention sinks (default: as in the study)",
    )
    moments.add_argument(
        "--detail",
        action=argparse.BooleanOptionalAction,
        help="write tables with many rows per head, by position bucket or plane (default: as in the study)",
    )
    moments.add_argument(
        "--plasticity-pairs",
        type=positive,
        metavar="N",
        help="for a results folder whose run kept --vectors: also write plasticity_sampled.csv, plasticity from up to "
        "N pairs of real keys per part of the window, and by the published protocol",
    )


def _add_vectors_options(vectors: argparse._ArgumentGroup) -> None:
    vectors.add_argument(
        "--vectors",
        metavar="[NAME=]DIR|HUB_ID[@REV]",
        action="append",
        default=[],
        help="a dataset of raw vectors (one folder l00h00q, l00h00k, ... per head); may be repeated",
    )
    vectors.add_argument(
        "--window",
        type=positive,
        metavar="TOKENS",
        help="use only the first TOKENS positions of each document (default: all)",
    )
    vectors.add_argument(
        "--group-size", type=int, metavar="N", help="query heads per key head, if a dataset does not say"
    )
    vectors.add_argument(
        "--n-layers", type=int, metavar="N", help="number of layers in the model, if a dataset lacks the last ones"
    )


def analyze(options: argparse.Namespace) -> int:
    """`qkscope analyze`."""
    from qkscope.cli.commands import command_line
    from qkscope.run.progress import progress

    inputs = [Path(each) for each in options.inputs]
    out = Path(options.out) if options.out else None
    if options.vectors:
        return _analyze_vectors(options, out)
    one_folder = len(inputs) == 1 and inputs[0].is_dir()
    _check_moments_options(options, one_folder)
    with progress(verbose=options.verbose) as events:
        events.began("reading moments")
        from qkscope.tables.from_moments import analyze_files, analyze_folder  # takes a second
        from qkscope.validation.plasticity_table import require_vectors

        if options.plasticity_pairs:
            require_vectors(inputs[0])
        analyze_inputs = partial(analyze_folder, inputs[0]) if one_folder else partial(analyze_files, inputs)
        folder = analyze_inputs(
            events,
            command_line(),
            out=out,
            components=options.components,
            common_window=options.common_window,
            skip_positions=options.skip_positions,
            detail=options.detail,
            kind=options.kind,
        )
        if options.plasticity_pairs:
            _draw_plasticity_pairs(options, inputs[0], folder, events)
    print(f"results: {folder}/")
    return 0


def _check_moments_options(options: argparse.Namespace, one_folder: bool) -> None:
    """Refuse options that do not go with moments, or not with single files of them."""
    if not options.inputs:
        raise InputError("nothing to analyze: give a results folder, moments files, or --vectors DIR")
    if options.window is not None:
        raise InputError(
            "--window only applies to --vectors; to compare moments over that window, use "
            f"--common-window {options.window}"
        )
    if options.plasticity_pairs and not one_folder:
        raise InputError("--plasticity-pairs needs a results folder with the moments and vectors of one run")


def _draw_plasticity_pairs(options: argparse.Namespace, folder: Path, out: Path, events: Events) -> None:
    """`qkscope analyze RESULTS --plasticity-pairs`."""
    from qkscope.validation.plasticity_table import write_plasticity_pairs

    write_plasticity_pairs(
        folder,
        events,
        options.plasticity_pairs,
        out=out,
        common_window=options.common_window,
        skip_positions=options.skip_positions,
    )


def _analyze_vectors(options: argparse.Namespace, out: Path | None) -> int:
    """`qkscope analyze --vectors`."""
    from qkscope.cli.commands import command_line
    from qkscope.run.progress import progress
    from qkscope.validation.tables import analyze_vectors

    if options.plasticity_pairs:
        raise InputError(
            "--plasticity-pairs only applies to a results folder that has vectors: qkscope analyze RESULTS"
        )
    if options.inputs or out is None:
        raise InputError("analyze --vectors takes no other inputs, and needs --out, the folder for the tables")
    if options.common_window is not None:
        raise InputError(
            "--common-window only applies to moments; for tables of --vectors over the first positions, use "
            f"--window {options.common_window}"
        )
    with progress() as events:
        analyze_vectors(
            options.vectors,
            out,
            events,
            command_line(),
            components=options.components,
            window=options.window,
            kind=options.kind,
            group_size=options.group_size,
            n_layers=options.n_layers,
        )
    print(f"results: {out}/")
    return 0
