"""Compare a results folder with a published study or with another results folder, and write down the outcome.

`compare_results` loads both sides, lets `compare.judge` or `compare.two_runs` judge every number, and writes into
`RESULTS/comparison/<reference>/` the long table, the heads that changed category (two folders), the picture and a
card in words. Whether the reference was reproduced and what to tell on a terminal comes back to the caller.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from qkscope.compare.heads import HeadFacts, head_card, head_lines, head_note
from qkscope.compare.judge import PublishedComparison, compare_with_published
from qkscope.compare.lens_means import rows_at_own_window
from qkscope.compare.lenses import LENS_MEANS
from qkscope.compare.published import PublishedFacts, published_card, published_lines, published_note
from qkscope.compare.references import PublishedReference, load_reference, shipped_references
from qkscope.compare.two_runs import HeadComparison, compare_heads
from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.lenses.draws import drawn_heads, replicate_groups
from qkscope.results.archive import is_archive
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import CARD, CHANGED_HEADS_CSV, COMPARISON_CSV, comparison_folder
from qkscope.results.read import Entries, Entry, ResultsFolder, load_results
from qkscope.results.schema import LAYER_MEANS, REPLICATES
from qkscope.stats.jackknife import FEWEST_GROUPS
from qkscope.words.blocks import AnyBlock, to_markdown

PREFIX = "published:"
_NAME_CHARACTERS = 60


@dataclass(frozen=True)
class Comparison:
    """The outcome: the verdict, lines for a terminal, what was written, and the tables behind it."""

    reproduced: bool
    lines: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]
    cells: pd.DataFrame
    changed: pd.DataFrame | None  # heads of another category; None where the reference has no heads


def compare_results(
    results: Path | str, with_: str, *, tolerance: float | None = None, out: Path | None = None
) -> Comparison:
    """Compare RESULTS with `published:NAME` or with another results folder, and write the comparison.

    `tolerance` replaces the default (see `compare.tolerance` and `compare.two_runs`). Raises InputError when
    either side cannot be read, or when the two have nothing in common.
    """
    if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
        raise InputError(f"--tolerance {tolerance}: expected a number that is not negative")
    mine = _load(Path(results))
    if with_.startswith(PREFIX):
        return _with_published(mine, _published(with_.removeprefix(PREFIX)), tolerance, out)
    other = Path(with_)
    if other.resolve() == mine.source.resolve():
        raise InputError(f"{with_}: is the results folder itself; choose another one to compare it with")
    return _with_folder(mine, _load(other), tolerance, out)


def _load(folder: Path) -> ResultsFolder:
    if not folder.is_dir() and not (is_archive(folder) and folder.exists()):
        raise InputError(f"{folder}: no such results folder or archive; {_choices()}")
    return load_results(folder)


def _published(name: str) -> PublishedReference:
    try:
        return load_reference(name)
    except KeyError:
        raise InputError(f"there is no published reference {name[:60]!r}; {_choices()}") from None


def _choices() -> str:
    shipped = ", ".join(PREFIX + name for name in shipped_references())
    return f"compare with what `qkscope run` or `qkscope export` wrote, or with what ships with the package: {shipped}"


def _with_published(
    mine: ResultsFolder, reference: PublishedReference, tolerance: float | None, out: Path | None
) -> Comparison:
    from qkscope.compare.figure import draw_published_comparison, save_comparison  # matplotlib: only here

    draws = drawn_heads(mine.heads, rows_at_own_window(mine, REPLICATES))
    read = {name: lens.read(mine) for name, lens in LENS_MEANS.items() if name in reference.tables}
    of_lenses = {name: table for name, table in read.items() if table is not None}
    means = rows_at_own_window(mine, LAYER_MEANS)
    comparison = compare_with_published(
        mine.heads, mine.study.names, reference, tolerance, of_lenses, list(draws), means
    )
    facts = PublishedFacts(mine, reference, comparison, tolerance)
    published = tuple(Entry(c.name, c.label, c.phase, c.context) for c in reference.checkpoints)
    figure = draw_published_comparison(
        Entries(mine.study.title, published, ()),
        comparison,
        f"Compared with {PREFIX}{reference.name}",
        published_note(facts),
    )
    folder = out or comparison_folder(mine.writable_folder, f"published-{reference.name}")
    return _write(folder, comparison, published_card(facts), published_lines(facts), partial(save_comparison, figure))


def _with_folder(mine: ResultsFolder, other: ResultsFolder, tolerance: float | None, out: Path | None) -> Comparison:
    from qkscope.compare.figure import draw_head_comparison, save_comparison

    comparison = compare_heads(
        mine.heads,
        mine.study.names,
        other.heads,
        other.study.names,
        tolerance,
        other_documents=_other_documents(mine, other),
        groups=min(_groups(run) for run in (mine, other)),
    )
    facts = HeadFacts(mine, other, comparison)
    figure = draw_head_comparison(mine.study, comparison, "Compared Head by Head", head_note(facts))
    folder = out or comparison_folder(mine.writable_folder, folder_name(other.source))
    return _write(folder, comparison, head_card(facts), head_lines(facts), partial(save_comparison, figure))


def _groups(run: ResultsFolder) -> int:
    """The groups of documents behind a run's errors: those of its replicates, else those of its study."""
    replicates = rows_at_own_window(run, REPLICATES)
    if replicates is not None and (groups := replicate_groups(replicates)):
        return len(groups)
    study = run.provenance.study
    return max(FEWEST_GROUPS, 0 if study is None else study.groups or 0)


def _other_documents(mine: ResultsFolder, other: ResultsFolder) -> list[str]:
    """The checkpoints of both that are known to have read other documents."""
    seen = [
        {
            c.name: (c.record.corpus.fingerprint if c.record.corpus else None, c.record.documents)
            for c in run.study.checkpoints
        }
        for run in (mine, other)
    ]
    shared = [name for name in seen[0] if name in seen[1] and None not in (*seen[0][name], *seen[1][name])]
    return [name for name in shared if seen[0][name] != seen[1][name]]


def folder_name(reference: Path) -> str:
    """A name for the comparison with this folder: its own name, reduced to letters that are harmless in a path.

    A short digest of the whole path follows, so that two references of the same name do not overwrite each other.
    """
    whole = reference.resolve()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", whole.name).strip(".-")[:_NAME_CHARACTERS]
    return f"{plain or 'reference'}-{hashlib.sha256(str(whole).encode()).hexdigest()[:8]}"


def _write(
    folder: Path,
    comparison: PublishedComparison | HeadComparison,
    card: list[AnyBlock],
    lines: list[str],
    save: Callable[[Path], list[Path]],
) -> Comparison:
    files = [folder / COMPARISON_CSV]
    write_csv(comparison.cells, files[0])
    changed = comparison.changed if isinstance(comparison, HeadComparison) else None
    if changed is not None:
        files.append(folder / CHANGED_HEADS_CSV)
        write_csv(changed, files[-1])
    files += [*save(folder), folder / CARD]
    write_text(files[-1], to_markdown(card))
    return Comparison(comparison.reproduced, tuple(lines), folder, tuple(files), comparison.cells, changed)
