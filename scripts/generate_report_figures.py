"""Draw the published figures of a results folder: `python scripts/generate_report_figures.py RESULTS [--no-titles]`.

Each function below writes one figure with its card and returns the figure's folder. Without an argument it takes the
study that the published documents describe. `qkscope report RESULTS` draws the same figures, and its own.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from qkscope.errors import QkscopeError
from qkscope.lenses.base import Figure
from qkscope.lenses.views import build_tables
from qkscope.report.figures import write_figure
from qkscope.report.published import PUBLISHED, published_folder
from qkscope.results.read import load_results

DEFAULT_RESULTS = Path("results/smollm3_training_progress")


def _writer(name: str, figure: Figure) -> Callable[..., Path]:
    def write(results: Path = DEFAULT_RESULTS, *, titles: bool = True) -> Path:
        tables = build_tables(load_results(results))
        return write_figure(figure, tables, results, name=published_folder(figure), titles=titles)[0].parent

    write.__name__, write.__doc__ = name, figure.caption
    return write


FIGURES = tuple(_writer(name, figure) for name, figure in PUBLISHED.items())
globals().update({draw.__name__: draw for draw in FIGURES})  # by the names in the published documents


def main(arguments: list[str]) -> int:
    """Draw all six figures of one results folder."""
    parser = argparse.ArgumentParser(description="Draw the six published figures of a results folder.")
    parser.add_argument("results", nargs="?", type=Path, default=DEFAULT_RESULTS)
    parser.add_argument("--no-titles", action="store_true", help="leave titles out, for papers with captions")
    options = parser.parse_args(arguments)
    try:
        for draw in FIGURES:
            print(draw(options.results, titles=not options.no_titles))
    except QkscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
