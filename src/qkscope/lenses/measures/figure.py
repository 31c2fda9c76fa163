"""Means over heads of the measures that need no component: queries on the left, keys on the right."""

from matplotlib.figure import Figure

from qkscope.draw import style
from qkscope.draw.curves import draw_band_line, spread_keys
from qkscope.lenses.canvas import canvas
from qkscope.lenses.errors import column_means, has_errors
from qkscope.lenses.measures.table import FILE
from qkscope.lenses.views import WindowView

LINES = (
    ("decode", style.PURPLE, "o", "position read out"),
    ("shape", style.AMBER, "D", "follows position"),
    ("share", style.BLUE, "s", "linear in position"),
)
BESIDE = 0.12  # where no line tells measures apart, their bars stand beside each other


def draw_measures(at: WindowView) -> Figure:
    """decode, shape and share of queries and of keys at each entry, with their spread over heads."""
    study = at.study
    table = column_means(at, FILE, [f"{measure}_{kind}" for measure, *_ in LINES for kind in ("q", "k")])
    figure = canvas(at, 9.0, 4.6, f"Position without Components {style.span_title(study)}")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind, name in zip(panels, ("q", "k"), ("queries", "keys"), strict=True):
        for place, (measure, colour, marker, label) in enumerate(LINES, start=-1):
            column = f"{measure}_{kind}"
            places = [i + (0.0 if study.one_run else BESIDE * place) for i in range(len(table))]
            draw_band_line(
                axes, table, column, colour=colour, marker=marker, label=label, x=places, joined=study.one_run
            )
        axes.set_xlabel(name)
        axes.set_ylim(-0.02, 1.02)
        style.checkpoint_axis(axes, study, phase_names=False)
    panels[0].set_ylabel("share, mean over heads")
    keys = spread_keys(style.GREY, has_errors(table, [f"{measure}_q" for measure, *_ in LINES]))
    style.header_legend(figure, [*panels[0].get_legend_handles_labels()[0], *keys], 3 if len(keys) > 1 else 2)
    return style.finish(figure)
