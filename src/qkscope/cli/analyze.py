"""`qkscope analyze` and `qkscope predict`: numbers from moments, without a model."""

from __future__ import annotations

import argparse
from functools import partial
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.cli.arguments import positive
from qkscope.errors import InputError
from qkscope.kinds import KINDS
from qkscope.text import aligned

if TYPE_CHECKING:
    from qkscope.lenses.rope.extrapolate import CheckpointPrediction
    from qkscope.train.folder import TrainingFolder


def analyze_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope analyze`."""
    add = parser.add_argument
    add("inputs", metavar="RESULTS|FILE", nargs="*", help="a results folder, or moments files")
    add("--out", metavar="DIR", help="where to write the tables (default: the results folder)")
    add("--components", type=int, metavar="N", help="components per head (default: as in the study, or 10)")
    about = (
        "how the inputs are related: checkpoints of one training run, seeds of one architecture, or different models, "
        "as which alone different architectures are read (default: seeds if they are of several runs, else checkpoints)"
    )
    add("--kind", choices=KINDS, help=about)
    add = parser.add_argument_group("from moments").add_argument
    about = "common window, over which all entries are compared (default: the shortest context)"
    add("--common-window", type=positive, metavar="TOKENS", help=about)
    about = "leave out the first N positions; 1 leaves out attention sinks (default: as in the study)"
    add("--skip-positions", type=int, metavar="N", help=about)
    about = "write tables with many rows per head, by position bucket or plane (default: as in the study)"
    add("--detail", action=argparse.BooleanOptionalAction, help=about)
    about = (
        "for a results folder whose run kept --vectors: also write plasticity_sampled.csv, plasticity from up to N "
        "pairs of real keys per part of the window, and by the published protocol"
    )
    add("--plasticity-pairs", type=positive, metavar="N", help=about)
    add = parser.add_argument_group("from raw vectors").add_argument
    about = "a dataset of raw vectors (one folder l00h00q, l00h00k, ... per head); may be repeated"
    add("--vectors", metavar="[NAME=]DIR|HUB_ID[@REV]", action="append", default=[], help=about)
    about = "use only the first TOKENS positions of each document (default: all)"
    add("--window", type=positive, metavar="TOKENS", help=about)
    add("--group-size", type=int, metavar="N", help="query heads per key head, if a dataset does not say")
    about = "number of layers in the model, if a dataset lacks the last ones"
    add("--n-layers", type=int, metavar="N", help=about)


def analyze(options: argparse.Namespace) -> int:
    """Write the tables from moments, without a model.

    Rebuild the tables from moments: those of a results folder with its study.yaml, or individual moments files.
    Or make qk.csv from datasets of raw vectors. Needs no model, no GPU and no documents.

    examples:
      qkscope analyze results/demo
      qkscope analyze results/demo --skip-positions 1 --out without-sinks
      qkscope analyze a.safetensors b.safetensors --common-window 1024 --out tables
      qkscope analyze --vectors early=org/vectors@step-1 --vectors late=org/vectors@step-2 --out tables
      qkscope analyze results/demo --plasticity-pairs 1000   # if the run kept --vectors
    """
    from qkscope.cli.commands import command_line
    from qkscope.run.progress import progress

    inputs = [Path(each) for each in options.inputs]
    out = Path(options.out) if options.out else None
    one_folder = len(inputs) == 1 and inputs[0].is_dir()
    _refuse_conflicts(options, one_folder)
    shared = {"components": options.components, "kind": options.kind}
    windows = {"common_window": options.common_window, "skip_positions": options.skip_positions}
    pairs = options.plasticity_pairs
    with progress(verbose=options.verbose) as events:
        events.began("reading vectors" if options.vectors else "reading moments")
        from qkscope.tables.from_moments import analyze_files, analyze_folder  # takes a second
        from qkscope.train.folder import TrainingFolder
        from qkscope.validation.plasticity_table import require_vectors, write_plasticity_pairs
        from qkscope.validation.tables import analyze_vectors

        if pairs:
            require_vectors(inputs[0])
        if one_folder and (training := TrainingFolder.reopened(inputs[0])) is not None:
            _complete(training, options)
            return 0
        if options.vectors:
            sizes = {"window": options.window, "group_size": options.group_size, "n_layers": options.n_layers}
            folder = analyze_vectors(options.vectors, Path(options.out), events, command_line(), **shared, **sizes)
        else:
            analyze_inputs = partial(analyze_folder, inputs[0]) if one_folder else partial(analyze_files, inputs)
            folder = analyze_inputs(events, command_line(), out=out, detail=options.detail, **shared, **windows)
        if pairs:
            write_plasticity_pairs(inputs[0], events, pairs, out=folder, **windows)
    print(f"results: {folder}/")
    return 0


def _refuse_conflicts(options: argparse.Namespace, one_folder: bool) -> None:
    """Refuse options that do not go together."""
    vectors, window, common = options.vectors, options.window, options.common_window
    conflicts = {
        "--plasticity-pairs only applies to a results folder that has vectors: qkscope analyze RESULTS": (
            vectors and options.plasticity_pairs
        ),
        "analyze --vectors takes no other inputs, and needs --out, the folder for the tables": (
            vectors and (options.inputs or not options.out)
        ),
        "--common-window only applies to moments; for tables of --vectors over the first positions, use --window "
        f"{common}": vectors and common is not None,
        "nothing to analyze: give a results folder, moments files, or --vectors DIR": (
            not vectors and not options.inputs
        ),
        "--window only applies to --vectors; to compare moments over that window, use --common-window "
        f"{window}": not vectors and window is not None,
        "--plasticity-pairs needs a results folder with the moments and vectors of one run": (
            options.plasticity_pairs and not one_folder
        ),
    }
    for message, applies in conflicts.items():
        if applies:
            raise InputError(message)


def _complete(training: TrainingFolder, options: argparse.Namespace) -> None:
    """The tables of a training run's folder, which has no study file; of one that goes on, as it is now."""
    changes = ("out", "components", "common_window", "skip_positions", "detail", "kind", "plasticity_pairs")
    if stated := [name for name in changes if getattr(options, name) is not None]:
        raise InputError(
            f"{training.path} is of a training run, whose tables have the settings of its callback; leave out "
            f"--{stated[0].replace('_', '-')}"
        )
    training.write_tables()
    print(f"results: {training.path}/")


def predict_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope predict`."""
    add = parser.add_argument
    add("results", metavar="RESULTS", help="a results folder with moments/")
    add("--checkpoint", action="append", default=[], metavar="NAME", help="only this checkpoint; may be repeated")
    about = "predict for a window of TOKENS positions (default: the checkpoint's own context)"
    add("--window", type=int, metavar="TOKENS", help=about)
    about = (
        "predict for another RoPE base, in layers whose angles follow one base; OLD=NEW if layers have several bases"
    )
    add("--rope-theta", action="append", default=[], metavar="[OLD=]NEW", help=about)
    add("--rotation-of", metavar="NAME", help="predict with the rotation of another checkpoint in the folder")
    add("--skip-positions", type=int, metavar="N", help="leave out the first N positions (default: as in the results)")
    add("--out", metavar="DIR", help="where to write the tables (default: RESULTS)")


def predict(options: argparse.Namespace) -> int:
    """The rotated-mean prediction for a window or base that was not run.

    The rotated-mean prediction for a window or a RoPE base that was never run: r_q, r_k and category of every head, and
    its positional kernel. Computed from the moments of a results folder; no model runs.

    Queries and keys before RoPE stay those of the checkpoint, so the effect of training at that window on the weights
    is not predicted. If the folder has a checkpoint that was trained there, its measurement is shown next to the
    prediction.

    examples:
      qkscope predict results/smollm3 --checkpoint stage3-step-4720000 --window 32768 --rope-theta 2000000
      qkscope predict results/smollm3 --window 65536                     every checkpoint, with its own base
      qkscope predict results/gemma3 --rope-theta 1000000=8000000        only layers of that base (they have two)
      qkscope predict results/llama3 --window 131072 --rotation-of long  angles that follow no single base
    """
    from qkscope.lenses.rope.extrapolate import PredictionRequest, head_rows, kernel_rows, predict_folder
    from qkscope.results.csv_files import write_csv
    from qkscope.results.folder import PREDICTION_CSV, PREDICTION_KERNEL_CSV, results_file

    folder = Path(options.results)
    if options.window is None and not options.rope_theta and options.rotation_of is None:
        raise InputError("predict what? give --window TOKENS, --rope-theta BASE, or --rotation-of NAME")
    request = PredictionRequest(options.window, bases_of(options.rope_theta), options.rotation_of)
    answers = predict_folder(folder, options.checkpoint, request, options.skip_positions)
    out = Path(options.out) if options.out else folder
    heads, kernels = results_file(out, PREDICTION_CSV), results_file(out, PREDICTION_KERNEL_CSV)
    write_csv(head_rows(answers), heads)
    write_csv(kernel_rows(answers), kernels)
    for each in answers:
        print("\n".join(_prediction_lines(each)))
    print(f"heads: {heads}")
    print(f"kernels: {kernels}")
    return 0


def bases_of(texts: list[str]) -> dict[float | None, float]:
    """`2000000`, or `10000=500000` for layers of one base."""
    bases: dict[float | None, float] = {}
    for text in texts:
        old, equals, new = text.rpartition("=")
        try:
            bases[float(old) if equals else None] = float(new)
        except ValueError:
            raise InputError(f"--rope-theta {text}: write a number, or OLD=NEW") from None
    if None in bases and len(bases) > 1:
        raise InputError("--rope-theta: write OLD=NEW for every base, or one number for all layers")
    return bases


def _prediction_lines(each: CheckpointPrediction) -> list[str]:
    """A small table: measured, predicted at the native context length and as asked, and what was trained so."""
    from qkscope.words.phrases import plus_minus, share_plus_minus

    window = int(each.predicted.heads["window"].iloc[0])
    measured = {key: (value, nan) for key, value in each.measured.items()}
    columns = [
        (f"measured at {each.context:,}", measured),
        (f"predicted at {each.context:,}", each.own.means),
        (f"predicted at {window:,}", each.predicted.means),
    ]
    if each.trained is not None:
        name, there = each.trained
        columns.append((f"{name[:24]}, measured there", {key: (value, nan) for key, value in there.items()}))
    columns = [(title, values) for title, values in columns if values]
    rows = [("", *(title for title, _ in columns))]
    for key, title in (("r_q", "mean r_q"), ("r_k", "mean r_k"), ("position_dominated", "position-dominated")):
        write = share_plus_minus if key == "position_dominated" else plus_minus
        rows.append((title, *(write(*values[key]) if key in values else "-" for _, values in columns)))
    bases = sorted(set(each.predicted.heads["base"].dropna()))
    new = f"base {bases[0]:,.0f}" if len(bases) == 1 else "several bases" if bases else "a rotation of no one base"
    old = "no one base" if each.base is None else f"base {each.base:,.0f}"
    left_out = [f"  heads without a prediction: {each.predicted.left_out}"] if each.predicted.left_out else []
    return [
        f"{each.name}: {window:,} tokens, {new} (was run at {each.context:,} tokens, {old})",
        *(f"  {line}" for line in aligned(rows)),
        *left_out,
    ]
