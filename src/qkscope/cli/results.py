"""The commands about finished results: compare, among, join, collage, export, push, log, and docs."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from qkscope.cli.arguments import add_results
from qkscope.errors import InputError
from qkscope.text import visible, visible_line

INSTALLED = Path(__file__).parents[1] / "docs"  # in a wheel
CHECKOUT = Path(__file__).parents[3] / "docs"  # in a clone
WITH_TEXT = "also include tables with document text (tokens.csv), and show that text on the page"


def compare_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope compare`."""
    add_results(parser, "where to write the comparison (default: RESULTS/comparison/<reference>)")
    about = "published:NAME, a results folder, or an exported .zip"
    parser.add_argument("--with", dest="reference", metavar="REFERENCE", required=True, help=about)
    about = "largest difference that still counts as reproduced"
    parser.add_argument("--tolerance", type=float, metavar="X", help=about)


def compare(options: argparse.Namespace) -> int:
    """Check whether results reproduce published numbers or another results folder.

    Compare a results folder, number by number, with published values that ship with qkscope, or with another
    results folder (then head by head). Writes a table, a figure and a card into RESULTS/comparison/.
    Exit code 0: reproduced within the stated tolerances; 1: not reproduced; 2: nothing to compare.

    examples:
      qkscope compare results/smollm3_training_progress --with published:smollm3-3b
      qkscope compare results/today --with results/yesterday --tolerance 1e-4
    """
    from qkscope.compare.write import compare_results

    out = Path(options.out) if options.out else None
    comparison = compare_results(options.results, options.reference, tolerance=options.tolerance, out=out)
    print("\n".join(comparison.lines))
    print(f"comparison: {comparison.folder}/")
    return 0 if comparison.reproduced else 1


def among_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope among`."""
    add_results(parser, "where to write the table (default: RESULTS/join/among)")


def among(options: argparse.Namespace) -> int:
    """Rank a model among thirteen published ones.

    Where is my model among the published ones? Means over heads of each entry next to those of thirteen published
    models, each with its window. The published values are of full-attention layers, so heads of other layers are left
    out where a model has both. Numbers measured at a different window get no rank.

    example:
      qkscope among results/models
    """
    from qkscope.join.among import write_among

    lines, folder = write_among(Path(options.results), Path(options.out) if options.out else None)
    print("\n".join(map(visible_line, lines)))
    print(f"table: {folder}/")
    return 0


def join_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope join`."""
    add = parser.add_argument
    about = "a results folder, a CSV file with a row per model, or published:models"
    add("measures", metavar="RESULTS|FILE", help=about)
    about = "a CSV file with model, score and, for several lengths, length (in tokens); or published:NAME"
    add("--scores", required=True, metavar="FILE", help=about)
    about = "a column of heads, such as r_q or ap; may be repeated (default: eight, one per question)"
    add("--measure", action="append", default=[], metavar="NAME", help=about)
    about = "a CSV file with model, family and parameters, if the study does not have them"
    add("--models", metavar="FILE", help=about)
    about = "take measures at each entry's own context, or at the common window (default: common, if there is one)"
    add("--windows", choices=("own", "common"), help=about)
    add("--out", metavar="DIR", help="where to write the join (default: RESULTS/join/<scores>)")


def join(options: argparse.Namespace) -> int:
    """Correlate measures of models with benchmark scores.

    Do internal measures correlate with benchmark scores? Joins each model's mean over heads with its score, and
    reports what so few models can support: exact permutation p, intervals, how much depends on one model or family,
    what is left at equal parameters, and Holm's correction for every measure that was tried. The number of parameters
    is the null model in the same table; for scores at several lengths, so is length.

    examples:
      qkscope join results/models --scores scores.csv
      qkscope join results/models --scores scores.csv --measure r_q --measure ap --models models.csv
      qkscope join published:models --scores published:longbench-pro --measure ap_drop --out join
    """
    from qkscope.join.write import JoinRequest, join_scores

    common = None if options.windows is None else options.windows == "common"
    request = JoinRequest(options.measures, options.scores, options.measure, options.models, common)
    outcome = join_scores(request, Path(options.out) if options.out else None)
    print("\n".join(map(visible_line, outcome.lines)))
    print(f"join: {outcome.folder}/")
    return 0


def collage_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope collage`."""
    add = parser.add_argument
    add("results", metavar="RESULTS", help="a results folder with moments/ and vectors/")
    add("--checkpoint", required=True, metavar="NAME", help="the checkpoint to draw")
    about = "a head; may be repeated (default: four at random, seed 42)"
    add("--head", action="append", default=[], metavar="LxHy", help=about)
    add("--components", nargs=2, type=int, default=[0, 1], metavar="N", help="two components (default: 0 1)")
    add("--plane", action="store_true", help="draw along axes a (drift) and b (separation) instead")
    add("--document", type=int, metavar="N", help="show this document in colour over the others")
    add("--out", metavar="DIR", help="where to write the picture (default: RESULTS/collage/...)")


def collage(options: argparse.Namespace) -> int:
    """Draw single heads from kept vectors.

    Draw single heads from the vectors that a run kept (--vectors): queries and keys along two components, or in the
    plane of drift and separation, coloured by position. The tokens farthest from a line in position are labelled.

    examples:
      qkscope collage results/models --checkpoint smollm2 --head L5H3 --head L5H4
      qkscope collage results/models --checkpoint smollm2 --plane --document 7
    """
    from qkscope.report.drawings.collage import write_collage

    first, second = options.components
    if min(first, second) < 0 or first == second:
        raise InputError(f"--components {first} {second}: give two different components, counted from 0")
    axes = None if options.plane else (first, second)
    out = Path(options.out) if options.out else None
    place = write_collage(Path(options.results), options.checkpoint, options.head, axes, options.document, out)
    print(f"collage: {place}/")
    return 0


# --- sharing ----------------------------------------------------------------------------------------


def export_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope export`."""
    add_results(parser, "where to write it (default: <RESULTS>-export, or <RESULTS>-export.zip)")
    parser.add_argument("--zip", action="store_true", help="write a single archive")
    about = "also write every table as Parquet (data/), as push does"
    parser.add_argument("--parquet", action="store_true", help=about)
    parser.add_argument("--with-text", action="store_true", help=WITH_TEXT)


def export(options: argparse.Namespace) -> int:
    """Package results for others: tables, page, figures with cards, provenance.

    Write the parts of a results folder that others need: tables, the page, figures with their cards, and provenance.
    The export is itself a results folder: report, compare and load_results read it, as a folder or as an archive.
    Moments, token ids, vectors and document text are not included, and absolute paths are shortened.

    examples:
      qkscope export results/my_study --zip
      qkscope export results/my_study --out shared
    """
    from qkscope.share.export import export_results

    name = Path(options.results).resolve().name
    out = Path(options.out) if options.out else Path(f"{name}-export{'.zip' if options.zip else ''}")
    _log("writing tables and page ...")
    written = export_results(
        options.results, out, archive=options.zip, with_text=options.with_text, parquet=options.parquet, report=_log
    )
    print(f"export: {written}")
    return 0


def _log(line: str) -> None:
    print(visible(line), file=sys.stderr, flush=True)


def push_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope push`."""
    add = parser.add_argument
    add("results", metavar="RESULTS", help="a folder with qk.csv")
    add("repo", metavar="REPO", help="owner/name on the Hub; created if missing")
    add("--dry-run", action="store_true", help="only list what would be uploaded")
    add("--private", action="store_true", help="create private repositories")
    add("--no-space", action="store_true", help="upload only the dataset")
    add("--with-text", action="store_true", help=WITH_TEXT)
    about = "commit message (default: Results of qkscope)"
    add("--message", default="Results of qkscope", metavar="TEXT", help=about)


def push(options: argparse.Namespace) -> int:
    """Upload results to the Hub, as a dataset and a static Space.

    Upload a results folder to the Hub: what `qkscope export --parquet` writes as a dataset, the page as a static Space
    of the same name. Set HF_TOKEN to authenticate. With --dry-run, nothing leaves this machine.

    examples:
      qkscope push results/my_study my-org/my-study-heads --dry-run
      qkscope push results/my_study my-org/my-study-heads --private
    """
    from qkscope.share.push import push_results

    addresses = push_results(
        options.results,
        options.repo,
        space=not options.no_space,
        private=options.private,
        message=options.message,
        with_text=options.with_text,
        dry_run=options.dry_run,
        report=_log,
    )
    for address in addresses:
        print(f"uploaded: {address}")
    return 0


def log_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope log`."""
    add = parser.add_argument
    add("results", metavar="RESULTS", help="a folder with qk.csv")
    add("--to", required=True, choices=("tensorboard", "wandb", "trackio"), help="the tracker")
    about = "where the tracker keeps its files (default: runs for tensorboard, the tracker's own place for wandb)"
    add("--dir", metavar="DIR", help=about)
    add("--project", default="qkscope", metavar="NAME", help="project in wandb or trackio (default: qkscope)")
    add("--name", metavar="NAME", help="the run's name (default: the study's title)")


def log(options: argparse.Namespace) -> int:
    """Log a finished study to TensorBoard, Weights & Biases or trackio.

    Log a finished study to a tracker, next to the loss curves of its training run: means over heads, by layer type and
    depth, and the share of each category, with standard errors, at each checkpoint's step. Keys:
    eval/qkscope/r_q_mean, ... Install the tracker yourself. W&B honours WANDB_MODE (offline, online).

    examples:
      qkscope log results/my_study --to tensorboard --dir runs
      qkscope log results/my_study --to wandb --project my-model
    """
    from qkscope.share.trackers import log_results

    where = Path(options.dir) if options.dir else None
    for line in log_results(options.results, options.to, where=where, project=options.project, name=options.name):
        print(line)
    return 0


# --- documentation ----------------------------------------------------------------------------------


def docs_options(parser: argparse.ArgumentParser) -> None:
    """The options of `qkscope docs`."""
    parser.add_argument("page", metavar="PAGE", nargs="?", help="a page from the list, such as study-files")


def docs(options: argparse.Namespace) -> int:
    """List or print documentation pages.

    List the pages of the documentation, or print one. Pages are Markdown files, and need no network.

    examples:
      qkscope docs
      qkscope docs study-files
    """
    folder = INSTALLED if INSTALLED.is_dir() else CHECKOUT
    pages = {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.md"))}
    if options.page is None:
        for name, path in pages.items():
            first = path.read_text(encoding="utf-8").partition("\n")[0]
            print(f"{name:<20}  {first.lstrip('# ')}")
        print(f"\npages: {folder}/")
        return 0
    if options.page not in pages:
        close = difflib.get_close_matches(options.page, pages, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "`qkscope docs` lists the pages"
        raise InputError(f"there is no page {options.page!r}; {hint}")
    print(pages[options.page].read_text(encoding="utf-8"), end="")
    return 0
