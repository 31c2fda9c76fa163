"""Draw the published figures of a results folder: `python scripts/generate_report_figures.py RESULTS`.

Thin over the package: each function below writes one figure with its card and returns the figure's folder; without
an argument it takes the study that the published documents describe. `qkscope report RESULTS` draws the same, and
the figures that were added since.
"""

import sys
from pathlib import Path

from qkscope.errors import QkscopeError
from qkscope.report.write import write_card_and_figure

DEFAULT_RESULTS = Path("results/smollm3_training_progress")


def smollm_fig01_position_signal_over_training(results: Path = DEFAULT_RESULTS) -> Path:
    """Mean r_q and r_k on PC0 over the checkpoints."""
    return write_card_and_figure(results, "position_signal")


def smollm_fig03_taxonomy_evolution(results: Path = DEFAULT_RESULTS) -> Path:
    """Fractions of heads per category over the checkpoints."""
    return write_card_and_figure(results, "taxonomy_evolution")


def smollm_fig04_explained_variance_evolution(results: Path = DEFAULT_RESULTS) -> Path:
    """Explained variance of PC0 over the checkpoints."""
    return write_card_and_figure(results, "explained_variance")


def smollm_fig05_layer_heatmap_rq(results: Path = DEFAULT_RESULTS) -> Path:
    """Mean r_q by checkpoint and depth."""
    return write_card_and_figure(results, "layer_heatmap_rq")


def smollm_fig06_layer_heatmap_rk(results: Path = DEFAULT_RESULTS) -> Path:
    """Mean r_k by checkpoint and depth."""
    return write_card_and_figure(results, "layer_heatmap_rk")


def smollm_fig07_rq_rk_scatter_grid(results: Path = DEFAULT_RESULTS) -> Path:
    """Phase portraits of r_q against r_k at six checkpoints."""
    return write_card_and_figure(results, "rq_rk_scatter_grid")


FIGURES = (
    smollm_fig01_position_signal_over_training,
    smollm_fig03_taxonomy_evolution,
    smollm_fig04_explained_variance_evolution,
    smollm_fig05_layer_heatmap_rq,
    smollm_fig06_layer_heatmap_rk,
    smollm_fig07_rq_rk_scatter_grid,
)


def main(arguments: list[str]) -> int:
    """Draw all six figures of one results folder."""
    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        print("usage: generate_report_figures.py [RESULTS]", file=sys.stderr)
        return 2
    results = Path(arguments[0]) if arguments else DEFAULT_RESULTS
    try:
        for draw in FIGURES:
            print(draw(results))
    except QkscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
