"""`qkscope join`: read measures and scores, join them, and write table, picture and card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qkscope.errors import InputError
from qkscope.files import write_text
from qkscope.join.from_results import measures_from_results
from qkscope.join.inputs import FAMILY, MODEL, SCORE, Measures, Scores, measures_of, models_of, read_table, scores_of
from qkscope.join.published import MODELS, PREFIX, load_published_models, published_scores
from qkscope.join.table import Joined, join
from qkscope.join.text import join_card, terminal_lines
from qkscope.results.archive import is_archive
from qkscope.results.csv_files import write_csv
from qkscope.results.folder import (
    CARD,
    CHANGES_CSV,
    DIFFERENCES_CSV,
    JOIN,
    JOIN_CSV,
    JOIN_PNG,
    JOIN_SVG,
    LENGTHS_CSV,
    POINTS_CSV,
    output_folder,
    plain_name,
)
from qkscope.words.blocks import to_markdown


@dataclass(frozen=True)
class JoinRequest:
    """What to join."""

    measures: str  # a results folder, a CSV file with a row per model, or published:models
    scores: str  # a CSV file, or published:NAME
    chosen: Sequence[str] = ()  # measures; all of a CSV file, a few of a results folder by default
    models: str | None = None  # a CSV file with family and parameters
    common: bool | None = None  # at which windows; the common one where there is one by default


@dataclass(frozen=True)
class JoinOutcome:
    """What a join gave and where it was written."""

    joined: Joined
    lines: tuple[str, ...]
    folder: Path
    files: tuple[Path, ...]


def join_scores(request: JoinRequest, out: Path | None = None) -> JoinOutcome:
    """Join and write; raises InputError where there is nothing to join."""
    from qkscope.draw.style import save_as  # matplotlib: only here
    from qkscope.join.figure import draw_join

    measures, scores = _measures(request), _scores(request.scores)
    if request.models is not None:
        measures = measures.with_models(models_of(read_table(Path(request.models), [MODEL], (MODEL, FAMILY))))
    folder = out or _folder(request, scores)
    joined = join(measures, scores)
    files = [folder / JOIN_CSV, folder / POINTS_CSV]
    write_csv(joined.table, files[0])
    write_csv(joined.points, files[1])
    by_length = {LENGTHS_CSV: joined.within, CHANGES_CSV: joined.changes, DIFFERENCES_CSV: joined.across}
    for name, table in by_length.items():
        if len(table):
            files.append(folder / name)
            write_csv(table, files[-1])
    files += [*save_as(draw_join(joined), folder / JOIN_PNG, folder / JOIN_SVG), folder / CARD]
    write_text(files[-1], to_markdown(join_card(joined)))
    return JoinOutcome(joined, tuple(terminal_lines(joined)), folder, tuple(files))


def _measures(request: JoinRequest) -> Measures:
    source, path = request.measures, Path(request.measures)
    if source == f"{PREFIX}{MODELS}":
        return _choose(load_published_models().measures, request.chosen)
    if source.startswith(PREFIX):
        raise InputError(f"{source}: the published measures are {PREFIX}{MODELS}")
    if path.is_dir() or (is_archive(path) and path.exists()):
        return measures_from_results(path, request.chosen, common=request.common)
    if not path.exists():
        raise InputError(
            f"{path}: no such results folder or file; give a folder that `qkscope run` wrote, a CSV file with "
            f"a row per model, or {PREFIX}{MODELS}"
        )
    return _choose(measures_of(read_table(path, [MODEL]), str(path)), request.chosen)


def _choose(measures: Measures, chosen: Sequence[str]) -> Measures:
    unknown = [name for name in chosen if name not in measures.names]
    if unknown:
        raise InputError(
            f"--measure {unknown[0]}: {measures.source} has no such measure; it has {', '.join(measures.names)}"
        )
    kept = list(dict.fromkeys(chosen)) or list(measures.names)
    by_length = measures.by_length
    if by_length is not None:
        by_length = by_length[[name for name in by_length if name in (MODEL, "length", *kept)]]
    return replace(measures, means=measures.means[kept], errors=measures.errors[kept], by_length=by_length)


def _scores(source: str) -> Scores:
    if source.startswith(PREFIX):
        return published_scores(source.removeprefix(PREFIX))
    path = Path(source)
    return scores_of(read_table(path, [MODEL, SCORE], (MODEL,)), path.stem, str(path))


def _folder(request: JoinRequest, scores: Scores) -> Path:
    """In the results, under the scores' name."""
    path = Path(request.measures)
    if not path.is_dir():
        raise InputError(f"{request.measures} is not a results folder; give --out to say where to write the join")
    return output_folder(path, JOIN, plain_name(scores.name))
