"""One style for all figures: fonts, text, the header, the checkpoint axis, and deterministic files.

Figures use matplotlib's object interface on the Agg canvas, so nothing global changes and no display is needed. Text of
a study (titles, labels, phases) passes through `plain`, so that neither `$` nor 200 characters can disturb a drawing.
Checkpoint labels are thinned by the extents that the renderer measures.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import blended_transform_factory

from qkscope.draw.axis import NumberAxis
from qkscope.draw.palette import AMBER, BLUE, FAINT, GREY, INK, LINE, PURPLE, RED
from qkscope.errors import QkscopeWarning
from qkscope.files import replacing
from qkscope.results.entries import Entries, phase_segments
from qkscope.words.phrases import shortened

__all__ = ["AMBER", "BLUE", "FAINT", "GREY", "INK", "LINE", "PURPLE", "RED"]  # next to what is defined here

DPI = 200
AXIS_LABEL_CHARACTERS = 26  # longer labels are shortened in the middle: names often differ at either end
TITLE_CHARACTERS, FEWEST_CHARACTERS = 44, 12  # of a study in a title
HEADER_INCHES = 0.62
LEGEND_ROOM = 0.02  # inches between a legend in the header and the titles of panels
OWN_FONT = "DejaVu Sans"  # ships with matplotlib: the same letters on every machine
# Tried in this order where DejaVu Sans lacks a character (Chinese, Japanese, Korean, emoji). Outline fonts only:
# matplotlib cannot draw colored emoji as text.
OTHER_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Noto Sans CJK TC", "Noto Sans SC", "Noto Sans JP",
    "Noto Sans KR", "Source Han Sans SC", "Source Han Sans", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei",
    "Droid Sans Fallback", "IPAexGothic", "IPAGothic", "TakaoGothic", "NanumGothic", "UnBatang", "PingFang SC",
    "Hiragino Sans", "Hiragino Sans GB", "Heiti TC", "Apple SD Gothic Neo", "Arial Unicode MS", "Microsoft YaHei",
    "SimHei", "SimSun", "MS Gothic", "Yu Gothic", "Malgun Gothic", "Noto Sans", "Noto Sans Arabic",
    "Noto Sans Devanagari", "Noto Sans Thai", "Noto Emoji", "Noto Sans Symbols2", "Noto Sans Symbols", "Symbola",
    "Segoe UI Symbol", "Segoe UI Emoji", "FreeSans", "FreeSerif", "Unifont",
)  # fmt: skip


@cache
def families() -> tuple[str, ...]:
    """The fonts to draw with; the first that has a character draws it."""
    there = {entry.name for entry in fontManager.ttflist}
    return (OWN_FONT, *(name for name in OTHER_FONTS if name in there))


RC: dict[Any, Any] = {
    "font.family": list(families()),
    "font.size": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "hatch.linewidth": 0.6,
    "axes.unicode_minus": True,
    "text.usetex": False,  # whatever the user's settings: labels are never LaTeX
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qkscope",  # the same ids in every run
    "savefig.facecolor": "white",
}


@cache
def _characters(family: str) -> frozenset[int]:
    path = fontManager.findfont(FontProperties(family=[family]), fallback_to_default=False)
    return frozenset(get_font(path).get_charmap())


def drawable(text: str) -> str:
    """The text with every character that no font here has as its number (`[U+4E2D]`), with a warning."""
    missing = {c for c in text if not any(ord(c) in _characters(family) for family in families())}
    if missing:
        named = "".join(sorted(missing)[:5]) + ("…" if len(missing) > 5 else "")
        warnings.warn(
            f"no font on this machine has {named} of {text!r}: figures show numbers instead, the page "
            "and the cards show the text; install for instance Noto Sans CJK or Noto Emoji",
            QkscopeWarning,
            stacklevel=2,
        )
    return "".join(f"[U+{ord(c):04X}]" if c in missing else c for c in text)


def plain(text: str, characters: int = AXIS_LABEL_CHARACTERS) -> str:
    """Text of a study, ready for matplotlib: shortened, drawable, and `$` is a dollar sign rather than mathematics.

    Characters that cannot be drawn become longer, so that a text is shortened before and after.
    """
    shown = drawable(shortened(text, characters))
    return shortened(shown, max(characters, 2 * AXIS_LABEL_CHARACTERS)).replace("$", r"\$")


def new_figure(width: float, height: float, study: Entries, headline: str, note: str = "") -> Figure:
    """An empty figure with its title, and under it a note about windows."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    engine = figure.get_layout_engine()
    assert engine is not None
    header = HEADER_INCHES if note else HEADER_INCHES - 0.2
    engine.set(rect=(0.0, 0.0, 1.0, 1.0 - header / height), w_pad=0.08, h_pad=0.06)  # type: ignore[call-arg]
    top = 1.0 - 0.12 / height
    title = figure.text(0.12 / width, top, "", fontsize=12, fontweight="bold", va="top", gid="title")
    for characters in range(TITLE_CHARACTERS, FEWEST_CHARACTERS - 1, -4):  # a narrow figure has room for fewer
        title.set_text(f"{plain(study.title, characters)}: {headline}")
        if title.get_window_extent().x1 <= figure.bbox.x1:
            break
    if note:
        below = top - 0.24 / height
        figure.text(0.12 / width, below, note, fontsize=8.5, color=GREY, va="top", gid="note")
    return figure


def header_legend(figure: Figure, handles: Sequence[Artist], columns: int) -> None:
    """The legend at the right end of the header, clear of the data and of the phase names.

    Where it would cover the note about windows, it gets fewer columns, down to two.
    """
    note = [text.get_window_extent() for text in figure.texts if text.get_gid() == "note"]
    for count in range(columns, min(columns, 2) - 1, -1):
        legend = figure.legend(
            handles=list(handles),
            loc="upper right",
            bbox_to_anchor=(1.0 - 0.05 / figure.get_figwidth(), 1.0 - 0.35 / figure.get_figheight()),
            ncols=count,
            borderaxespad=0.0,
            borderpad=0.1,
            handlelength=2.2 if count <= 3 else 1.6,
            columnspacing=2.0 if count <= 3 else 1.0,  # four must leave the note its room
        )
        legend.set_in_layout(False)
        if count <= 2 or not note or not legend.get_window_extent().overlaps(note[0]):
            break
        legend.remove()
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):  # panels and their titles begin below the legend
        below = legend.get_window_extent().y0 / figure.bbox.height - LEGEND_ROOM / figure.get_figheight()
        left, bottom, width, height = engine.get()["rect"]
        engine.set(rect=(left, bottom, width, min(height, below)))


def marker_size(checkpoints: int) -> float:
    """Markers shrink when there are many checkpoints, so that the line stays visible."""
    return 5.5 if checkpoints <= 40 else 2.5


def window_note(windows: Sequence[float], common: bool) -> str:
    """What a figure states about its windows; empty when no table recorded one."""
    known = sorted({int(w) for w in windows if not math.isnan(w)})
    if not known:
        return ""
    length = f"{known[0]:,}" if len(known) == 1 else f"{known[0]:,}–{known[-1]:,}"
    if not common:
        return f"native context length: {length} tokens"
    return f"common window: {length} tokens{' (equally many characters)' if len(known) > 1 else ''}"


def readable_on(colour: str | tuple[float, float, float]) -> str:
    """Black or white, whichever has the higher contrast (WCAG) on this colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "#ffffff"


# --- the checkpoint axis ----------------------------------------------------------------------------


def checkpoint_axis(axes: Axes, study: Entries, *, labels: bool = True, phase_names: bool = True) -> None:
    """Put the checkpoints of the study on the x axis at 0, 1, 2, ..., with dashed lines between phases.

    Where the study asks for an axis of steps or tokens, 0, 1, 2, ... are placed at these numbers.
    """
    n = len(study.checkpoints)
    margin = 0.6 + max(0.0, (4 - n) / 2)  # one bar alone should not fill the page
    axes.set_xlim(-margin, n - 1 + margin)
    texts = [plain(c.label) for c in study.checkpoints] if labels else [""] * n
    axes.set_xticks(range(n), texts, rotation=45, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=3 if labels else 0)
    numbers = NumberAxis.of(study)
    if numbers is not None:
        numbers.apply(axes, labels)
    segments = phase_segments(study.checkpoints)
    for _, first, _ in segments[1:]:
        axes.axvline(first - 0.5, color=LINE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0.5, gid="phase")
    if phase_names and len(segments) > 1:
        above = blended_transform_factory(axes.transData, axes.transAxes)
        for phase, first, last in segments:
            if phase:
                middle = (first + last) / 2
                if numbers is not None:
                    middle = float(numbers.index_of(numbers.place_of([first, last]).mean()))
                axes.text(middle, 1.015, plain(phase), transform=above, ha="center", va="bottom", fontsize=7.5,
                          color=GREY, gid="phase name")  # fmt: skip


def finish(figure: Figure) -> Figure:
    """Lay the figure out, then thin checkpoint labels and drop phase names that have no room."""
    engine = figure.get_layout_engine()
    assert engine is not None
    with matplotlib.rc_context(RC):
        engine.execute(figure)  # drawing would do it too, and take as long again for the rest
        for _ in range(2):  # thinner labels change the margins, which changes the room once more
            changed = [_thin_checkpoint_labels(figure, axes) for axes in figure.axes]
            if not any(changed):
                break
            engine.execute(figure)
        for axes in figure.axes:
            _drop_crowded_phase_names(figure, axes)
        figure.set_layout_engine(None)  # what was measured stays where it is; "none" would lay out at each saving
    return figure


def text_size(figure: Figure, text: str, points: float) -> tuple[float, float]:
    """Width and height of a text in pixels, as the renderer measures it."""
    renderer = cast(FigureCanvasAgg, figure.canvas).get_renderer()  # type: ignore[no-untyped-call]
    font = FontProperties(family=matplotlib.rcParams["font.family"], size=points)
    width, height, _ = renderer.get_text_width_height_descent(text.replace(r"\$", "$"), font, ismath=False)
    return width, height


def _thin_checkpoint_labels(figure: Figure, axes: Axes) -> bool:
    """Lay slanted labels flat where all fit, else keep as many as fit; returns whether anything changed."""
    ticks = axes.get_xticklabels()
    if not any(tick.get_rotation() == 45.0 and tick.get_text() for tick in ticks):
        return False
    positions = [float(x) for x in axes.get_xticks()]
    texts = [tick.get_text() for tick in ticks]
    sizes = [text_size(figure, text, float(tick.get_fontsize())) for text, tick in zip(texts, ticks, strict=True)]
    left, right = axes.get_xlim()
    step = axes.bbox.width * ((positions[1] - positions[0]) / (right - left) if len(positions) > 1 else 1.0)
    # At 45°, lines of text clear each other when ticks are height / sin 45° apart.
    height = max(height for _, height in sizes)
    stride = math.ceil(1.3 * height / (step * math.sin(math.pi / 4)))
    if stride > 1:
        last = len(positions) - 1
        kept = [*range(0, last, stride), last]
        if last - kept[-2] < stride and len(kept) > 2:  # it would crowd the last one
            kept.pop(-2)
        axes.set_xticks([positions[i] for i in kept], [texts[i] for i in kept])
        return True
    widest = max((a[0] + b[0]) / 2 for a, b in itertools.pairwise([*sizes, sizes[-1]]))
    if widest + 8 * DPI / 72 >= step:
        return False
    axes.set_xticks(positions, texts, rotation=0.0, ha="center", rotation_mode="default")
    return True


def _drop_crowded_phase_names(figure: Figure, axes: Axes) -> None:
    lines = (line.get_xdata() for line in axes.lines if line.get_gid() == "phase")
    edges = sorted({*axes.get_xlim(), *(float(np.asarray(x)[0]) for x in lines)})
    for name in [text for text in axes.texts if text.get_gid() == "phase name"]:
        x = name.get_position()[0]
        ends = (max(e for e in edges if e < x), min(e for e in edges if e > x))
        low, high = (float(axes.transData.transform((end, 0.0))[0]) for end in ends)
        if text_size(figure, name.get_text(), float(name.get_fontsize()))[0] > (high - low) * 0.96:
            name.remove()


# --- files ------------------------------------------------------------------------------------------


def save_as(figure: Figure, png: Path, svg: Path) -> None:
    """Write both pictures, each whole or not at all; the same figure gives the same bytes. Links are replaced."""
    with matplotlib.rc_context(RC):
        with replacing(png) as temporary:
            figure.savefig(temporary, format="png", dpi=DPI, metadata={"Software": None})
        with replacing(svg) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
