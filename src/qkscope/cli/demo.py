"""`qkscope demo`: ten small checkpoints, and everything run on them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.text import short_number

if TYPE_CHECKING:
    from qkscope.ablate.work import AblationSettings


def demo_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope demo`."""
    add = parser.add_argument
    add("--out", metavar="DIR", default="results/demo", help="results folder (default: results/demo)")
    about = "train for FACTOR times as many steps as usual (default: 1)"
    add("--steps", type=float, default=1.0, metavar="FACTOR", help=about)
    add("--seed", type=int, default=0, metavar="N", help="seed for weights and data order (default: 0)")


def demo(options: argparse.Namespace) -> int:
    """Train ten small checkpoints and run everything on them (three minutes, no network).

    Train a small SmolLM3 on the source code of Python's standard library, through pretraining and two
    long-context phases; save ten checkpoints, and run an ordinary study on them. A second run reuses the
    checkpoints.

    examples:
      qkscope demo
      qkscope demo --steps 0.25 --out quick-demo
    """
    from qkscope.ablate.study import AblationOptions, ablate_study
    from qkscope.cli.commands import command_line, draw_report, quiet_libraries
    from qkscope.demo.prepare import prepare_demo
    from qkscope.demo.settings import DemoSettings
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.execute import run_study
    from qkscope.run.progress import progress, step_progress
    from qkscope.validation.layout import VectorSample

    quiet_libraries()
    folder = Path(options.out)
    with step_progress("training") as show:
        study = prepare_demo(
            folder,
            DemoSettings(seed=options.seed).scaled(options.steps),
            lambda now: show(
                now.step,
                now.total_steps,
                f"{now.phase}, towards {now.checkpoint}, loss {now.loss:.2f}, "
                f"{short_number(now.tokens_per_second)} tokens/s",
            ),
        )
    with progress(verbose=options.verbose) as events:
        # The folder is the demo's own: checkpoints that were trained again replace what was measured of the old ones.
        capture = CaptureOptions(overwrite=True, vectors=VectorSample(tokens=True))
        run_study(study, folder, events, command=command_line(), options=capture)
        for number, ablation in enumerate(demo_ablations(study)):
            ablate_study(study, folder, ablation, events, command_line(), AblationOptions(replace=number == 0))
    print(f"results: {folder}/")
    draw_report(folder, verbose=options.verbose)
    return 0


def demo_ablations(study: Path) -> list[AblationSettings]:
    """What the demo ablates in seconds, on a few short documents: every head by itself, early, in the middle and late
    in training; and at the end, the heads with the largest r_q together against random ones."""
    from qkscope.ablate.work import AblationSettings, HeadChoice
    from qkscope.study.load import load_study

    names = [each.name for each in load_study(study).study.checkpoints]
    some = tuple(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
    strongest = HeadChoice(top=12, together=True)
    return [
        AblationSettings(edits=("kernel",), documents=8, tokens=128, only=some),
        AblationSettings(edits=("kernel", "shuffle", "zero"), heads=strongest, documents=8, tokens=128, only=some[-1:]),
    ]
