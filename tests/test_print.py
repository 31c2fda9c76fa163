"""Figures at the size at which they are saved: no text below 7 points, none off the canvas, no label on another."""

import itertools

import pytest
from matplotlib.text import Text

import entry_worlds
import lens_worlds
from qkscope.lenses.views import build_tables
from qkscope.report.cards import draw_chart, drawable
from qkscope.report.published import PUBLISHED
from qkscope.results.read import load_results

SMALLEST = 7.0  # points
STUDIES = {
    "one run": lens_worlds.tables_of,
    "seeds": lambda: entry_worlds.tables_of("seeds"),
    "models with sliding layers": lambda: entry_worlds.tables_of("models"),
}


def shown_texts(figure):
    """Every text that is drawn, with its extent."""
    figure.draw_without_rendering()
    hidden = {id(text) for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    ticks = {}  # ticks outside of an axis have a label, which is not drawn
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                drawn = low <= tick.get_loc() <= high
                ticks |= {id(tick.label1): drawn, id(tick.label2): drawn}
    return [(text, text.get_window_extent()) for text in texts if id(text) not in hidden and ticks.get(id(text), True)]


def assert_fit_for_print(figure):
    texts = shown_texts(figure)
    canvas = figure.bbox.padded(1.0)
    for text, extent in texts:
        assert text.get_fontsize() >= SMALLEST, text
        inside = canvas.x0 <= extent.x0 and extent.x1 <= canvas.x1 and canvas.y0 <= extent.y0 and extent.y1 <= canvas.y1
        assert inside, f"{text.get_text()!r} leaves the canvas"
    level = [(text, extent.padded(-1.0)) for text, extent in texts if text.get_rotation() in (0.0, 90.0)]
    for (one, first), (other, second) in itertools.combinations(level, 2):
        assert not first.overlaps(second), f"{one.get_text()!r} lies on {other.get_text()!r}"


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_every_figure_is_fit_for_print(study):
    tables = STUDIES[study]()
    figures = [*drawable(tables), *PUBLISHED.values()]
    assert len(figures) > 12
    for figure in figures:
        picture = draw_chart(figure, tables)
        try:
            assert_fit_for_print(picture)
        except AssertionError as error:
            raise AssertionError(f"{figure.name}: {error}") from None
        for axes in picture.axes:  # none is empty
            assert not axes.get_visible() or axes.has_data(), figure.name


def test_a_figure_of_a_results_folder_is_fit_for_print(published_folder):
    tables = build_tables(load_results(published_folder))
    for figure in drawable(tables):
        assert_fit_for_print(draw_chart(figure, tables))
