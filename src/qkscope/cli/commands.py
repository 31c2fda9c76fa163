"""The commands about studies: run, capture, plan, shard, status, inspect, report, and demo."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qkscope.cli.arguments import (
    add_capture_options,
    add_results,
    add_shard_options,
    add_study,
    add_trust,
    quantity,
)
from qkscope.errors import InputError
from qkscope.results.folder import (
    CARD,
    FIGURE_PNG,
    FIGURES,
    STUDY_YAML,
    TABLES,
    moments_folder,
    results_file,
    subfolder,
)
from qkscope.text import counted, visible, visible_line

if TYPE_CHECKING:
    from qkscope.cost import Cluster
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.plan import Plan
    from qkscope.run.progress import Events

INSPECTED = 64  # documents that `qkscope inspect` reads of a study that has not begun
# What `qkscope plan` hands on to the `qkscope shard` commands that it prints.
SHARD_FLAGS = ("trust_remote_code", "skip_bad_documents", "skip_bad_checkpoints", "overwrite")


# --- run and capture --------------------------------------------------------------------------------


def run_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope run`."""
    add_study(parser)
    add_capture_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure every checkpoint of a study and write its tables.

    Run every checkpoint of a study over its documents, and write all tables (qk.csv, heads.csv and others)
    and provenance.json. If it is stopped or killed, run it again to continue: finished work is not repeated.
    Tables are byte-identical with any engine and any number of workers.

    examples:
      qkscope run studies/smollm3_training_progress.yaml --out results/smollm3
      qkscope run study.yaml --workers 8                       # eight processes, one per GPU
      qkscope run study.yaml --engine ray --ray-address auto   # on the Ray cluster that this machine is part of
    """
    from qkscope.run.progress import progress

    with progress(verbose=options.verbose) as events:
        events.began(f"checking {options.study}")
        from qkscope.run.execute import results_folder, run_study  # takes a moment
        from qkscope.run.unchanged import is_unchanged
        from qkscope.study.load import load_study

        file, chosen = load_study(options.study), chosen_capture(options)
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
    from qkscope.results.provenance import read_left_out

    reasons = read_left_out(folder)
    if not reasons:
        return
    from qkscope.cli.describe import left_out_lines
    from qkscope.study.load import load_study

    kept = load_study(results_file(folder, STUDY_YAML)).study  # with the checkpoints that a series found
    names = [each.name for each in kept.checkpoints]
    for line in left_out_lines({name: reasons[name] for name in names if name in reasons}, len(names)):
        print(line, file=sys.stderr)


def chosen_capture(options: argparse.Namespace) -> CaptureOptions:
    """What the command line says about a capture."""
    from qkscope.run.engines import CaptureOptions, Placement
    from qkscope.validation.layout import VectorSample

    sample = None
    if options.vectors is not None:
        rate, per_doubling = options.vectors
        sample = VectorSample(rate, tokens=options.vector_tokens, per_doubling=per_doubling)
    elif options.vector_tokens:
        raise InputError("--vector-tokens only works with --vectors; give --vectors, too")
    return CaptureOptions(
        only=getattr(options, "checkpoint", ()),
        evict=options.evict,
        vectors=sample,
        engine=options.engine,
        placement=Placement(options.workers, options.ray_address, options.cpus_per_worker, options.gpus_per_worker),
        **{flag: getattr(options, flag) for flag in SHARD_FLAGS},
    )


def capture_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope capture`."""
    add_study(parser)
    about = "only this checkpoint; may be repeated"
    parser.add_argument("--checkpoint", metavar="NAME", action="append", default=[], help=about)
    add_capture_options(parser)


def capture(options: argparse.Namespace) -> int:
    """Run the models and write moments only, no tables.

    Run the checkpoints of a study over its documents and write their moments, one file per checkpoint.
    `qkscope analyze` makes the tables from them.

    example:
      qkscope capture study.yaml --checkpoint stage1-step-40000
    """
    from qkscope.run.execute import capture_plan, plan_capture, results_folder
    from qkscope.run.progress import progress
    from qkscope.study.load import load_study

    quiet_libraries()
    file = load_study(options.study)
    unknown = set(options.checkpoint) - {checkpoint.name for checkpoint in file.study.checkpoints}
    if unknown:
        raise InputError(f"--checkpoint {sorted(unknown)[0]!r} is not a checkpoint of {options.study}")
    folder, chosen = results_folder(file, options.out), chosen_capture(options)
    with progress() as events:
        capture_plan(plan_capture(file, folder, events, chosen), folder, events, chosen)
    tell_left_out(folder)
    print(f"moments: {moments_folder(folder)}/")
    return 0


def status_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope status`."""
    parser.add_argument("results", metavar="RESULTS", help="the results folder of a run that has started")


def status(options: argparse.Namespace) -> int:
    """Show the progress of a run: shards done, running, and left, and the time left.

    Show how far along a run is, from its results folder alone: while it runs, after it was killed, and for
    shards that run elsewhere on a shared disk.

    example:
      qkscope status results/smollm3
    """
    from qkscope.cli.describe import describe_status
    from qkscope.run.status import read_status

    print("\n".join(map(visible_line, describe_status(read_status(Path(options.results))))))
    return 0


# --- plan, shard, and inspect -----------------------------------------------------------------------


def plan_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope plan`, among them the fields of `Cluster`."""
    from qkscope.cost import Cluster

    add_study(parser)
    parser.add_argument("--count", action="store_true", help="print only the number of shards")
    parser.add_argument("--left", action="store_true", help="list only shards that are not finished")
    about = "instead of commands, print device hours, memory, disk, network, wall time on a cluster, and the bottleneck"
    parser.add_argument("--estimate", action="store_true", help=about)
    add_shard_options(parser)
    group = parser.add_argument_group("the cluster, for --estimate (default GPU: an A100 with 80 GB)")
    for field in fields(Cluster):
        option, about = f"--{field.name.replace('_', '-')}", field.metadata["about"]
        if field.name == "evict":
            group.add_argument(option, action="store_true", help=about)
            continue
        kind, metavar = (int, "N") if field.name.startswith("devices") else (quantity, "X")
        shown = "" if field.default is None else f" (default: {field.default:g})"
        group.add_argument(option, type=kind, default=field.default, metavar=metavar, help=f"{about}{shown}")


def plan(options: argparse.Namespace) -> int:
    """Print the shards of a study as commands, for a batch system.

    Print one `qkscope shard` command per shard, passing on the options below. Run them in any order, any number
    at a time, on any machine that can access the results folder; then `qkscope run` makes the tables.
    With --estimate, print what the study would cost on a cluster instead.

    examples:
      qkscope plan study.yaml | xargs -P 8 -I{} sh -c '{}' && qkscope run study.yaml
      qkscope plan study.yaml --estimate --devices 8
      sbatch --array=0-$(($(qkscope plan study.yaml --count) - 1)) job.sh   # runs the line below
      qkscope shard study.yaml $SLURM_ARRAY_TASK_ID
    """
    from qkscope.run.execute import results_folder
    from qkscope.run.finished import examine
    from qkscope.run.progress import progress

    with progress() as events:
        made = planned(options, events, here=False)  # the shards may run on other machines
    if options.estimate:
        from qkscope.cli.describe import estimate_lines

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


def cluster_of(options: argparse.Namespace) -> Cluster:
    """The cluster that the options describe."""
    from qkscope.cost import Cluster

    return Cluster(**{field.name: getattr(options, field.name) for field in fields(Cluster)})


def planned(options: argparse.Namespace, events: Events, *, here: bool = True) -> Plan:
    """The plan of the study that was named."""
    from qkscope.run.execute import results_folder
    from qkscope.run.plan import make_plan
    from qkscope.study.load import load_study

    quiet_libraries()
    file = load_study(options.study)
    return make_plan(
        file,
        events,
        here=here,
        trust_remote_code=options.trust_remote_code,
        results=results_folder(file, options.out),
        check_tensors=not options.skip_bad_checkpoints,
    )


def shard_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope shard`."""
    add_study(parser)
    parser.add_argument("number", metavar="K", type=int, help="the shard's number in the plan, from 0")
    add_shard_options(parser)


def shard(options: argparse.Namespace) -> int:
    """Run exactly one shard of a study.

    Run one shard of the plan and write its moments. A checkpoint's last shard also adds up its moments.
    A finished shard is not run again. `qkscope plan` lists the shards; `qkscope run` makes the tables.

    example:
      qkscope shard study.yaml 12 --out results/smollm3
    """
    from qkscope.run.engines import CaptureOptions
    from qkscope.run.execute import capture_shard, results_folder
    from qkscope.run.progress import progress

    with progress() as events:
        made = planned(options, events)
        chosen = CaptureOptions(**{flag: getattr(options, flag) for flag in SHARD_FLAGS if flag != "trust_remote_code"})
        capture_shard(made, options.number, results_folder(made.file, options.out), events, chosen)
    return 0


def inspect_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope inspect`."""
    add = parser.add_argument
    add("target", metavar="MODEL|STUDY", help="Hub id, model directory, .gguf file, or study file")
    add("--revision", metavar="REV", help="the revision of a model on the Hub")
    add("--out", metavar="DIR", help="the study's results folder (default: results/<study>)")
    add("--context", type=int, metavar="TOKENS", help="tokens per document (default: the model's maximum)")
    add("--documents", type=int, default=100, metavar="N", help="number of documents (default: 100)")
    add_trust(parser)


def inspect(options: argparse.Namespace) -> int:
    """Show a model's attention layers, or check a study and show its cost.

    Show a model's attention layers (heads, widths, NoPE layers, windows) from its config alone, without loading
    weights. Or check a whole study before anything runs, and show its cost: tokens, GPU hours, downloads, memory, and
    disk. Of a study that has not begun, the first 64 documents are read, and its `limit` is taken for the rest.

    examples:
      qkscope inspect HuggingFaceTB/SmolLM2-135M --context 8192 --documents 100
      qkscope inspect studies/smollm3_training_progress.yaml
    """
    from qkscope.cli.describe import describe_model, describe_plan
    from qkscope.run.execute import results_folder
    from qkscope.run.plan import make_plan
    from qkscope.run.progress import progress
    from qkscope.study.load import load_study

    quiet_libraries()
    trusted = options.trust_remote_code
    is_results = Path(options.target, STUDY_YAML).is_file()  # load_study names the study file to give
    with progress() as events:
        if options.target.lower().endswith((".yaml", ".yml")) or is_results:
            file = load_study(options.target)
            folder = results_folder(file, options.out)
            documents = file.study.documents
            if not folder.exists() and (documents.limit or 0) > INSPECTED:  # a run would tokenize all of them
                few = documents.model_copy(update={"limit": INSPECTED})
                file = replace(file, study=file.study.model_copy(update={"documents": few}))
            plan = make_plan(file, events, trust_remote_code=trusted, results=folder)
            lines = describe_plan(plan, folder, documents.limit)
        else:
            arguments = (options.target, options.revision, options.context, options.documents)
            lines = describe_model(*arguments, noted=events.noted, trust_remote_code=trusted)
    print("\n".join(lines))
    return 0


# --- report --------------------------------------------------------------------------------


def report_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope report`."""
    add_results(parser, "write here and leave RESULTS unchanged (default: RESULTS)")
    parser.add_argument("--no-figures", action="store_true", help="do not draw figures")
    parser.add_argument("--no-page", action="store_true", help="do not write report.html")
    about = "then serve the report, on this machine only (127.0.0.1), and open the page (default port: 8737)"
    parser.add_argument("--serve", type=int, nargs="?", const=8737, metavar="PORT", help=about)


def report(options: argparse.Namespace) -> int:
    """Summarize results: findings, figures with cards, claims, and an interactive page.

    Print the summary, and write RESULTS/report.html (the interactive page: one file, no network),
    RESULTS/figures/ (each figure as PNG and SVG with a card, README.md), RESULTS/claims.md, and the tables of
    means and changes behind them (RESULTS/tables/).

    examples:
      qkscope report results/demo
      qkscope report results/demo --serve --no-figures
    """
    if options.no_page and options.serve is not None:
        raise InputError("--serve shows the page, and --no-page leaves it out: drop one of them")
    folder, out = Path(options.results), Path(options.out) if options.out else None
    draw_report(folder, figures=not options.no_figures, page=not options.no_page, out=out, verbose=options.verbose)
    if options.serve is not None:
        from qkscope.cli.serve import serve

        serve(out or folder, options.serve)
    return 0


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
    place = out or folder
    if figures or page:
        print(visible(str(summarize(tables))), end="\n\n")
    else:
        print(f"tables: {subfolder(place, TABLES)}/")
    if figures:
        drawn = sorted({path.parent for path in written if path.name == FIGURE_PNG})
        for figure in drawn if verbose else ():
            print(f"wrote {figure}/", file=sys.stderr)
        print(f"figures: {subfolder(place, FIGURES)}/ ({counted(len(drawn), 'figure')}, each with a card in {CARD})")
    if page:
        print(f"page: {written[-1]} ({written[-1].stat().st_size / 1e6:.1f} MB, opens in any browser without network)")


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
