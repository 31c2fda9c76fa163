"""What each command does: options in, calls of the other rooms, a line or two about where the results are."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.errors import InputError
from qkscope.results.folder import (
    CARD,
    FIGURE_PNG,
    FIGURES,
    STUDY_YAML,
    TABLES,
    moments_folder,
    subfolder,
)
from qkscope.text import counted, short_number, visible, visible_line

if TYPE_CHECKING:
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.plan import Plan
    from qkscope.run.progress import Events


# What `qkscope plan` hands on to the `qkscope shard` commands that it prints.
SHARD_FLAGS = ("trust_remote_code", "skip_bad_documents", "skip_bad_checkpoints", "overwrite")


def run(options: argparse.Namespace) -> int:
    """`qkscope run`."""
    from qkscope.run.progress import progress

    with progress(verbose=options.verbose) as events:
        events.began(f"checking {options.study}")
        from qkscope.run.execute import results_folder, run_study  # takes a moment
        from qkscope.run.unchanged import is_unchanged
        from qkscope.study.load import load_study

        file, chosen = load_study(options.study), capture_options(options)
        folder = results_folder(file, options.out)
        if not is_unchanged(file, folder, events, chosen):
            quiet_libraries()
            run_study(file, folder, events, command=command_line(), options=chosen)
    tell_left_out(folder)
    print_summary(folder)
    tables = [path for path in folder.iterdir() if path.suffix in (".csv", ".parquet")]
    print(f"results: {folder}/ ({counted(len(tables), 'table')})")
    print(f"next: qkscope report {shlex.quote(str(folder))}")
    return 0


def print_summary(folder: Path) -> None:
    """Headline, findings, and heads to start with; those of unchanged tables are not computed again."""
    from qkscope.results.current import read_current, tables_key

    current, key = read_current(folder), tables_key(folder)
    if current is not None and current.summary is not None and current.summary[1] == key:
        print(current.summary[0], end="\n\n")
        return
    from qkscope.lenses.views import build_tables
    from qkscope.report.summary import summarize
    from qkscope.results.read import load_results

    summary = visible(str(summarize(build_tables(load_results(folder)))))
    print(summary, end="\n\n")
    if current is not None:
        current.model_copy(update={"summary": [summary, key]}).save(folder)


def tell_left_out(folder: Path) -> None:
    """Say, last of all, what the results are without."""
    from qkscope.cli.describe import left_out_lines
    from qkscope.results.folder import STUDY_YAML, results_file
    from qkscope.results.provenance import read_left_out
    from qkscope.study.load import load_study

    kept = load_study(results_file(folder, STUDY_YAML)).study  # with the checkpoints that a series found
    names, reasons = [each.name for each in kept.checkpoints], read_left_out(folder)
    left_out = {name: reasons[name] for name in names if name in reasons}
    for line in left_out_lines(left_out, len(names)):
        print(line, file=sys.stderr)


def capture_options(options: argparse.Namespace) -> CaptureOptions:
    """What the command line says about a capture."""
    from qkscope.run.engines import CaptureOptions, Placement
    from qkscope.validation.sampling import VectorSample

    sample = None
    if options.vectors is not None:
        rate, per_doubling = options.vectors
        sample = VectorSample(rate, tokens=getattr(options, "vector_tokens", False), per_doubling=per_doubling)
    elif getattr(options, "vector_tokens", False):
        raise InputError("--vector-tokens only works with --vectors; give --vectors, too")
    return CaptureOptions(
        only=getattr(options, "checkpoint", ()),
        evict=options.evict,
        trust_remote_code=options.trust_remote_code,
        vectors=sample,
        skip_bad_documents=options.skip_bad_documents,
        overwrite=options.overwrite,
        skip_bad_checkpoints=options.skip_bad_checkpoints,
        engine=options.engine,
        placement=Placement(options.workers, options.ray_address, options.cpus_per_worker, options.gpus_per_worker),
    )


def status(options: argparse.Namespace) -> int:
    """`qkscope status`."""
    from qkscope.cli.describe import describe_status
    from qkscope.run.status import read_status

    print("\n".join(map(visible_line, describe_status(read_status(Path(options.results))))))
    return 0


def plan(options: argparse.Namespace) -> int:
    """`qkscope plan`."""
    from qkscope.cli.estimate import cluster_of, estimate_lines
    from qkscope.run.execute import results_folder
    from qkscope.run.finished import examine
    from qkscope.run.progress import progress

    with progress() as events:
        made = planned(options, events, here=False)  # the shards may run on other machines
    if options.estimate:
        print("\n".join(estimate_lines(made, cluster_of(options))))
        return 0
    numbered = made.numbered_shards()
    numbers = list(range(len(numbered)))
    if options.left:
        folder = results_folder(made.file, options.out)
        states = [examine(each, folder, overwrite=options.overwrite, headers_only=True) for each in made.checkpoints]
        missing = {(state.plan.checkpoint.name, shard.number) for state in states for shard in state.left}
        numbers = [k for k in numbers if (numbered[k][0].checkpoint.name, numbered[k][1].number) in missing]
    if options.count:
        print(len(numbers))
        return 0
    also = ["--out", options.out] if options.out else []
    also += [f"--{flag.replace('_', '-')}" for flag in SHARD_FLAGS if getattr(options, flag)]
    for number in numbers:
        print(shlex.join(["qkscope", "shard", options.study, str(number), *also]))
    return 0


def planned(options: argparse.Namespace, events: Events, *, here: bool = True) -> Plan:
    """The plan of the study that was named."""
    from qkscope.run.execute import results_folder
    from qkscope.run.plan import make_plan
    from qkscope.study.load import load_study

    quiet_libraries()
    file = load_study(options.study)
    results = results_folder(file, options.out)
    return make_plan(
        file,
        events,
        here=here,
        trust_remote_code=options.trust_remote_code,
        results=results,
        check_tensors=not getattr(options, "skip_bad_checkpoints", False),
    )


def shard(options: argparse.Namespace) -> int:
    """`qkscope shard`."""
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.execute import capture_shard, results_folder
    from qkscope.run.progress import progress

    with progress() as events:
        made = planned(options, events)
        chosen = CaptureOptions(
            skip_bad_documents=options.skip_bad_documents,
            skip_bad_checkpoints=options.skip_bad_checkpoints,
            overwrite=options.overwrite,
        )
        capture_shard(made, options.number, results_folder(made.file, options.out), events, chosen)
    return 0


def report(options: argparse.Namespace) -> int:
    """`qkscope report`."""
    if options.no_page and options.serve is not None:
        raise InputError("--serve shows the page, and --no-page leaves it out: drop one of them")
    folder, out = Path(options.results), Path(options.out) if options.out else None
    draw_report(folder, figures=not options.no_figures, page=not options.no_page, out=out, verbose=options.verbose)
    if options.serve is not None:
        from qkscope.cli.serve import serve

        serve(out or folder, options.serve)
    return 0


def compare(options: argparse.Namespace) -> int:
    """`qkscope compare`: 0 if reproduced, 1 if not."""
    from qkscope.compare.write import compare_results

    out = Path(options.out) if options.out else None
    comparison = compare_results(options.results, options.reference, tolerance=options.tolerance, out=out)
    print("\n".join(comparison.lines))
    print(f"comparison: {comparison.folder}/")
    return 0 if comparison.reproduced else 1


def draw_report(
    folder: Path, *, figures: bool = True, page: bool = True, out: Path | None = None, verbose: bool = False
) -> None:
    """Write figures, cards, tables, and page of a results folder; print the summary and where they are."""
    doing = "drawing figures" if figures else "writing the page" if page else "writing tables"
    print(f"{doing} ...", file=sys.stderr, flush=True)  # before imports that take a second
    from qkscope.lenses.views import build_tables
    from qkscope.report.summary import summarize
    from qkscope.report.write import write_report_of
    from qkscope.results.read import load_results

    tables = build_tables(load_results(folder))
    written = write_report_of(tables, figures=figures, page=page, out=out)
    if figures or page:
        print(visible(str(summarize(tables))), end="\n\n")
    if figures:
        _print_figures(out or folder, written, verbose)
    if page:
        print(f"page: {written[-1]} ({written[-1].stat().st_size / 1e6:.1f} MB, opens in any browser without network)")
    if not figures and not page:
        print(f"tables: {subfolder(out or folder, TABLES)}/")


def _print_figures(folder: Path, written: list[Path], verbose: bool) -> None:
    figures = sorted({path.parent for path in written if path.name == FIGURE_PNG})
    for figure in figures if verbose else ():
        print(f"wrote {figure}/", file=sys.stderr)
    print(f"figures: {subfolder(folder, FIGURES)}/ ({counted(len(figures), 'figure')}, each with a card in {CARD})")


def capture(options: argparse.Namespace) -> int:
    """`qkscope capture`."""
    from qkscope.run.execute import capture_plan, plan_capture, results_folder
    from qkscope.run.progress import progress
    from qkscope.study.load import load_study

    quiet_libraries()
    file = load_study(options.study)
    unknown = set(options.checkpoint) - {checkpoint.name for checkpoint in file.study.checkpoints}
    if unknown:
        raise InputError(f"--checkpoint {sorted(unknown)[0]!r} is not a checkpoint of {options.study}")
    folder = results_folder(file, options.out)
    chosen = capture_options(options)
    with progress() as events:
        capture_plan(plan_capture(file, folder, events, chosen), folder, events, chosen)
    tell_left_out(folder)
    print(f"moments: {moments_folder(folder)}/")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """`qkscope inspect`."""
    from qkscope.cli.describe import describe_model, describe_plan
    from qkscope.run.execute import results_folder
    from qkscope.run.plan import make_plan
    from qkscope.run.progress import progress
    from qkscope.study.load import load_study

    quiet_libraries()
    trusted = options.trust_remote_code
    is_results = Path(options.target, STUDY_YAML).is_file()  # load_study names the study file to give
    if options.target.lower().endswith((".yaml", ".yml")) or is_results:
        with progress() as events:
            file = load_study(options.target)
            folder = results_folder(file, options.out)
            plan = make_plan(file, events, trust_remote_code=trusted, results=folder)
        print("\n".join(describe_plan(plan, folder)))
    else:
        arguments = (options.target, options.revision, options.context, options.documents)
        with progress() as events:
            lines = describe_model(*arguments, noted=events.noted, trust_remote_code=trusted)
        print("\n".join(lines))
    return 0


def demo(options: argparse.Namespace) -> int:
    """`qkscope demo`."""
    from qkscope.ablate.study import AblationOptions, ablate_study
    from qkscope.cli.ablate import demo_ablations
    from qkscope.demo.prepare import prepare_demo
    from qkscope.demo.settings import DemoSettings
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.execute import run_study
    from qkscope.run.progress import progress, step_progress
    from qkscope.validation.sampling import VectorSample

    quiet_libraries()
    settings = DemoSettings(seed=options.seed).scaled(options.steps)
    folder = Path(options.out)
    with step_progress("training") as show:
        study = prepare_demo(
            folder,
            settings,
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


def command_line() -> str:
    """The command as it was typed, for the provenance."""
    return shlex.join(["qkscope", *sys.argv[1:]])


def quiet_libraries() -> None:
    """Leave the screen to our own progress: other libraries' bars and advice go away, their errors stay."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
