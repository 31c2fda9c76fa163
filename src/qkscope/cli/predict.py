"""`qkscope predict`: its options, and what it does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qkscope.cli.command import add_command
from qkscope.errors import InputError

if TYPE_CHECKING:
    from qkscope.lenses.rope.extrapolate import CheckpointPrediction

ABOUT = """\
The rotated-mean prediction for a window or a RoPE base that was never run: r_q, r_k and category of every head, and
its positional kernel. Computed from the moments of a results folder; no model runs.

Queries and keys before RoPE stay those of the checkpoint, so the effect of training at that window on the weights is
not predicted. If the folder has a checkpoint that was trained there, its measurement is shown next to the prediction.
"""
EXAMPLES = """\
examples:
  qkscope predict results/smollm3 --checkpoint stage3-step-4720000 --window 32768 --rope-theta 2000000
  qkscope predict results/smollm3 --window 65536                     every checkpoint, with its own base
  qkscope predict results/gemma3 --rope-theta 1000000=8000000        only layers of that base (they have two)
  qkscope predict results/llama3 --window 131072 --rotation-of long  angles that follow no single base
"""
WIDTH = 24  # of a column
ROWS = (("r_q", "mean r_q"), ("r_k", "mean r_k"), ("position_dominated", "position-dominated"))


def add_predict(commands: Any) -> None:
    """The command and its options."""
    summary = "the rotated-mean prediction for a window or base that was not run"
    parser = add_command(commands, "predict", "qkscope.cli.predict:predict", summary, ABOUT, EXAMPLES)
    parser.add_argument("results", metavar="RESULTS", help="a results folder with moments/")
    parser.add_argument(
        "--checkpoint", action="append", default=[], metavar="NAME", help="only this checkpoint; may be repeated"
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="TOKENS",
        help="predict for a window of TOKENS positions (default: the checkpoint's own context)",
    )
    parser.add_argument(
        "--rope-theta", action="append", default=[], metavar="[OLD=]NEW",
        help="predict for another RoPE base, in layers whose angles follow one base; OLD=NEW if layers have several "
        "bases",
    )  # fmt: skip
    parser.add_argument(
        "--rotation-of", metavar="NAME", help="predict with the rotation of another checkpoint in the folder"
    )
    parser.add_argument(
        "--skip-positions", type=int, metavar="N", help="leave out the first N positions (default: as in the results)"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write the tables (default: RESULTS)")


def predict(options: argparse.Namespace) -> int:
    """`qkscope predict`."""
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
        print("\n".join(lines(each)))
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


def lines(each: CheckpointPrediction) -> list[str]:
    """A small table: measured, predicted at the native context length and as asked, and what was trained so."""
    window = int(each.predicted.heads["window"].iloc[0])
    columns = [
        ("measured", f"at {each.context:,}", {key: (value, float("nan")) for key, value in each.measured.items()}),
        ("predicted", f"at {each.context:,}", each.own.means),
        ("predicted", f"at {window:,}", each.predicted.means),
    ]
    if each.trained is not None:
        name, measured = each.trained
        columns.append((name, "measured there", {key: (value, float("nan")) for key, value in measured.items()}))
    columns = [(head[: WIDTH - 2], place, values) for head, place, values in columns if values]
    said = [f"{each.name}: {_setting(each, window)}"]
    said += ["".join([f"{'':22}", *(f"{column[line]:>{WIDTH}}" for column in columns)]) for line in (0, 1)]
    for key, title in ROWS:
        cells = [_cell(column[2].get(key), share=key == "position_dominated") for column in columns]
        said.append("".join([f"  {title:20}", *(f"{cell:>{WIDTH}}" for cell in cells)]))
    if each.predicted.left_out:
        said.append(f"  heads without a prediction: {each.predicted.left_out}")
    return said


def _setting(each: CheckpointPrediction, window: int) -> str:
    bases = sorted(set(each.predicted.heads["base"].dropna()))
    new = f"base {bases[0]:,.0f}" if len(bases) == 1 else "several bases" if bases else "a rotation of no one base"
    old = "no one base" if each.base is None else f"base {each.base:,.0f}"
    return f"{window:,} tokens, {new} (was run at {each.context:,} tokens, {old})"


def _cell(value: tuple[float, float] | None, *, share: bool) -> str:
    if value is None or value[0] != value[0]:
        return "-"
    mean, error = (100 * each if share else each for each in value)
    digits = 1 if share else 3
    unit = " %" if share else ""
    return f"{mean:.{digits}f}{unit}" if error != error else f"{mean:.{digits}f} ± {error:.{digits}f}{unit}"
