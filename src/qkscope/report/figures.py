"""Draw what a study carries into `figures/<folder>/`, each figure next to its card; `figures/README.md` lists all."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib

from qkscope.draw import style
from qkscope.files import write_text
from qkscope.foreign import Unreadable, is_finite, opened, read_bytes
from qkscope.lenses.base import Figure
from qkscope.lenses.views import Results
from qkscope.page.about import facts
from qkscope.processes import over_cores
from qkscope.report.cards import draw_chart, drawable, drawing_place, figure_card, folder_name, takeaways
from qkscope.report.published import PUBLISHED, published_folder
from qkscope.results.entries import Entry, phase_segments
from qkscope.results.folder import (
    CARD,
    FIGURE,
    FIGURE_FILES,
    FIGURE_PNG,
    FIGURE_SVG,
    FIGURES,
    PROVENANCE_JSON,
    entries,
    gallery_path,
    output_folder,
    subfolder,
)
from qkscope.results.mapped import drop_page_cache
from qkscope.results.remove import remove_figure
from qkscope.text import counted
from qkscope.words.blocks import AnyBlock, Code, Picture, Strong, bullet, heading, paragraph, to_markdown
from qkscope.words.phrases import listed, shortened

WORTH_SHARING = 12  # figures; fewer are drawn before another process has started
LISTED_CHECKPOINTS = 12  # of a phase
LARGEST_PICTURE, LARGEST_INPUT = 2**26, 2**62  # bytes
PACKAGE = Path(__file__).parents[1]


def write_figure(
    figure: Figure, tables: Results, folder: Path, *, name: str | None = None, titles: bool = True
) -> list[Path]:
    """Draw one figure, with its card, into the folder `figures/<name>`; returns what was written.

    Without `titles` it has no headline and no note, for papers with captions of their own.
    """
    place = output_folder(folder, FIGURES, name or folder_name(figure))
    _draw(figure, tables, place, titles)
    return _write_card(figure, tables, place)


def _draw(figure: Figure, tables: Results, place: Path, titles: bool) -> None:
    picture = draw_chart(figure, tables)
    for text in picture.texts:
        text.set_visible(titles or text.get_gid() not in ("title", "note"))
    style.save_as(picture, place / FIGURE_PNG, place / FIGURE_SVG)
    drop_page_cache()


def _write_card(figure: Figure, tables: Results, place: Path) -> list[Path]:
    write_text(place / CARD, to_markdown(figure_card(figure, tables)))
    return [place / each for each in FIGURE_FILES]


def write_figures(tables: Results, folder: Path, *, titles: bool = True) -> list[Path]:
    """Draw every figure that the study carries, and the published ones.

    Pictures that an earlier report drew from the same tables with the same code stay; the gallery states what they were
    drawn from. Figures of an earlier report that no longer apply are removed.
    """
    shown = drawable(tables)
    figures = [*((folder_name(each), each) for each in shown), *((published_folder(p), p) for p in PUBLISHED.values())]
    places = [output_folder(folder, FIGURES, name) for name, _ in figures]
    # Cards first, so that what figures need is computed once, not in every process.
    cards = zip(figures, places, strict=True)
    written = [path for (_, figure), place in cards for path in _write_card(figure, tables, place)]
    gallery, inputs = gallery_path(folder), _inputs(tables, [figure for _, figure in figures], titles)
    stamp = _stamp(places, inputs)
    if stamp is None or stamp.encode() not in (_contents(gallery) or b""):

        def draw(number: int) -> None:
            _draw(figures[number][1], tables, places[number], titles)

        list(over_cores(draw, range(len(figures)), WORTH_SHARING))
        stamp = _stamp(places, inputs)
    remove_stale_figures(folder, {name for name, _ in figures})
    write_text(gallery, to_markdown(_gallery(shown, tables)) + (f"\n{stamp}\n" if stamp else ""))
    return [*written, gallery]


def _inputs(tables: Results, figures: Sequence[Figure], titles: bool) -> str | None:
    """A digest of all that pictures depend on: tables, names of the study, declarations, code, and fonts.

    None where that is unknown, because a file cannot be read.
    """
    study, files = tables.own.study, tables.files.folder
    entries = [(c.name, c.label, c.phase, c.context, c.record.step, c.record.trained_tokens) for c in study.checkpoints]
    names = (study.title, study.kind, study.axis, study.axis_scale, study.selected, entries)
    declared = [(f.name, f.title, f.chart) for f in figures], list(tables.own.measures.values())
    digest = hashlib.sha256(repr((names, declared, titles, matplotlib.__version__, style.families())).encode())
    own = (importlib.util.find_spec(drawing_place(figure).split(":")[0]) for figure in figures)  # or another package's
    code = {*PACKAGE.rglob("*.py"), *(Path(str(spec.origin)) for spec in own if spec is not None)}
    data = [path for path in files.iterdir() if path.suffix in (".csv", ".parquet")]
    for path in (*sorted(code), *sorted(data)):
        try:
            with opened(path, LARGEST_INPUT, follow=path in code) as file:
                digest.update(path.name.encode() + hashlib.file_digest(cast(Any, file), "sha256").digest())
        except Unreadable:
            return None
    return digest.hexdigest()


def _stamp(places: Sequence[Path], inputs: str | None) -> str | None:
    """A line about all pictures in these folders and what they were drawn from; None where one is missing."""
    pictures = [_contents(place / picture) for place in places for picture in (FIGURE_PNG, FIGURE_SVG)]
    known = [hashlib.sha256(picture).digest() for picture in pictures if picture is not None]
    if inputs is None or len(known) < len(pictures):
        return None
    return f"<!-- pictures {hashlib.sha256(b''.join(known)).hexdigest()[:32]}, drawn from {inputs[:32]} -->"


def _contents(path: Path) -> bytes | None:
    try:
        return read_bytes(path, LARGEST_PICTURE)
    except Unreadable:
        return None


def remove_stale_figures(folder: Path, drawn: Collection[str]) -> None:
    """Remove our files of figures that were not drawn now, under whatever name an earlier version gave them."""
    for entry in entries(subfolder(folder, FIGURES)):
        if FIGURE.fullmatch(entry.name) and entry.name not in drawn:
            remove_figure(folder, entry.name)


def _gallery(figures: Sequence[Figure], tables: Results) -> list[AnyBlock]:
    """Every figure with a thumbnail and one sentence, and what produced all of them, stated once."""
    blocks: list[AnyBlock] = [heading(1, f"{shortened(tables.own.study.title)}: figures")]
    for title, is_main in (("Main figures", True), ("Appendix", False)):
        part = [figure for figure in figures if (figure.number is not None) is is_main]
        blocks += [heading(2, title)] if part else []
        for figure in part:
            place = folder_name(figure)
            blocks += [
                heading(3, figure.title),
                paragraph(next(iter(takeaways(figure, tables)), figure.caption)),
                Picture(f"{place}/{FIGURE_PNG}", figure.title, f"{place}/{CARD}"),
            ]
    corpus = tables.files.provenance.corpus
    fingerprint = corpus.fingerprint if corpus is not None else None
    return [
        *blocks,
        heading(2, "How these figures were produced"),
        *(bullet(Strong(title), f": {text}") for title, text in facts(tables)),
        *([bullet(Strong("Corpus fingerprint"), ": ", Code(fingerprint))] if fingerprint else []),
        bullet(Strong("Settings"), ":"),
        *(bullet(line, level=1) for line in _settings(tables.own.study.checkpoints)),
        bullet(Strong("Command"), ": ", Code("qkscope report RESULTS"), "; provenance: ", Code(PROVENANCE_JSON)),
    ]


def _settings(checkpoints: Sequence[Entry]) -> list[str]:
    """The checkpoints of each phase with their contexts, RoPE bases and longest contexts."""
    lines = []
    for phase, first, last in phase_segments(checkpoints):
        group = checkpoints[first : last + 1]
        title = shortened(phase) if phase else "All" if len(group) == len(checkpoints) else "No phase"
        names = [shortened(c.label) for c in group]
        if len(names) > LISTED_CHECKPOINTS:
            names = [f"{counted(len(names), 'checkpoint')} from {names[0]} to {names[-1]}"]
        parts = [
            ("context", [c.context for c in group], " tokens"),
            ("rope_theta", [c.record.rope_theta for c in group], ""),
            ("max_position_embeddings", [c.record.max_position_embeddings for c in group], ""),
        ]
        known = [(name, [_spelled(v) for v in values if v is not None], unit) for name, values, unit in parts]
        settings = ", ".join(f"{name} {listed(list(dict.fromkeys(v)))}{unit}" for name, v, unit in known if v)
        lines.append(f"{title}: {listed(names)}{f' ({settings})' if settings else ''}")
    return lines


def _spelled(value: Any) -> str:
    """A setting as text; a mapping, such as a base for each kind of layer, in words."""
    if isinstance(value, Mapping):
        return listed([f"{_spelled(v)} for {shortened(str(k))} layers" for k, v in list(value.items())[:8]])
    if is_finite(value):
        return f"{value:,.0f}" if value == int(value) else f"{value:,g}"
    return shortened(str(value))
