"""Drift and bias of pretrained models at several windows: what changes without any training.

`python benchmarks/rotation.py` takes the sums of SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-0.5B over eight State of
the Union speeches (captured once and kept: see `rope_alone.py`), and writes means over all heads at each window into
docs/lenses/rotation.md. The weights are the same at every window, so every difference comes from the window.
"""

import argparse
import math
import re

import pandas as pd
from rope_alone import CASES, ROOT, Case, fetch, mean_error, means_of_layers, moments_of

from qkscope.lenses.rotation.table import TABLE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.moments import Moments
from qkscope.results.schema import LAYER_MEANS

PAGE = ROOT / "docs/lenses/rotation.md"
MODELS = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b")
UNITS = {  # measure: what the table calls it
    "alpha_k_per_1000": "slope of keys per 1,000 tokens",
    "alpha_k_window_abs": "slope × window",
    "mu_q_a": "mean query along a",
    "bias_per_1000": "bias per 1,000 tokens",
    "bias_strength_window": "bias × window",
    "bias_effect": "bias in standard deviations",
}
MISSED = {
    "off_axis_q": "queries' drift off a",
    "off_axis_k": "keys' drift off a",
    "drift_cos": "cosine of both drifts",
    "offset_on_a": "offset on a",
    "separation_strength": "separation",
    "plane_var_fraction": "plane",
}


def rows_of(case: Case, moments: Moments) -> tuple[list[str], list[str]]:
    """The lines of both tables for one model, a window each."""
    units, missed = [], []
    for window in case.windows[::2]:
        found = checkpoint_rows(moments, [TABLE], RowSettings(own=window), model=case.name)
        heads, means = found[TABLE.table], found[LAYER_MEANS]
        who = [case.title, f"{window:,}"]
        units.append(line([*who, *(cell(means, measure) for measure in UNITS)]))
        negative, total = (heads["drift_cos"] < 0).mean(), heads["bias_total"].mean()
        along = f"{100 * heads['bias_strength'].mean() / total:.0f}%" if total > 0 else "–"
        checks = [f"{100 * negative:.0f}%", along]
        missed.append(line([*who, *(cell(means, measure) for measure in MISSED), *checks]))
        print(units[-1], missed[-1], sep="\n", flush=True)
    return units, missed


def cell(means: pd.DataFrame, measure: str) -> str:
    """A mean over heads with its error over documents, to the error's first two digits, four decimals at most."""
    of = means_of_layers(means, measure)
    mean, error = float((of["mean"] * of["heads"]).sum() / of["heads"].sum()), mean_error(means, measure)
    if not error > 0:
        return f"{mean:.3g} (no error)".replace("-", "−")
    digits = min(max(0, 1 - math.floor(math.log10(error))), 3 if error >= 0.0005 else 4)
    return f"{mean:.{digits}f} ± {error:.{digits}f}".replace("-", "−")


def line(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def table(headings: list[str], rows: list[str]) -> list[str]:
    """A Markdown table."""
    return [line(headings), line(["---"] * len(headings)), *rows]


def write(text: str) -> None:
    """Put the tables between the page's marks."""
    marks = re.compile(r"(<!-- real models -->\n).*?(<!-- end -->)", re.DOTALL)
    before = PAGE.read_text(encoding="utf-8")
    if not marks.search(before):
        raise SystemExit(f"{PAGE} has no section for real models")
    PAGE.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", before), encoding="utf-8")


def main() -> int:
    """A line per model and window in either table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=MODELS)
    options = parser.parse_args()
    fetch()
    units, missed = [], []
    for case in CASES:
        if case.name in options.models:
            of_units, of_missed = rows_of(case, moments_of(case))
            units, missed = units + of_units, missed + of_missed
    who, checks = ["model", "window"], ["drifts opposed", "bias on a"]
    first = table([*who, *UNITS.values()], units)
    second = table([*who, *MISSED.values(), *checks], missed)
    write("\n".join([*first, "", *second]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
