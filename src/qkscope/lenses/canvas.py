"""The empty figure of a lens: its headline, and under it the windows over which the entries were measured."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.lenses.views import WindowView


def canvas(at: WindowView, width: float, height: float, headline: str, names: Sequence[str] | None = None) -> Figure:
    """A figure of so many inches; `names` are the entries that it shows, all by default.

    The title says so where all are at the common window: two drawings of one study never have the same title.
    """
    windows = [at.window_of(name) for name in (at.names if names is None else names)]
    note = style.window_note(windows, at.common, at.study.noun)
    return style.new_figure(width, height, at.study, at.headline(headline), note)
