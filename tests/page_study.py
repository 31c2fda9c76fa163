"""Results folders of any size, with every table that lenses write, for tests and benchmarks of the page.

A small real analysis of made-up vectors says what the tables look like. Its heads are then drawn again, each with noise
of its own, until the study has as many checkpoints, layers and heads as asked for: noise is what compresses least.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow.csv import write_csv

from lens_worlds import Silent
from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.registry import registered
from qkscope.moments.layout import capture_layout
from qkscope.results.schema import HEADS as HEADS_TABLE
from qkscope.results.schema import REPLICATES
from qkscope.tables.from_moments import analyze_files

# Of a page whose first screen is not the point.
NO_SUMMARY = {"headline": "", "findings": [], "heads": [], "certainty": ""}
WIDTH, HEADS, KEYS, GROUPS, SHORT, LONG = 16, 4, 2, 8, 128, 512
KINDS = ("rotary", "nope", "rotary")  # of the source's layers
NOISE = 0.02
CORPUS = {"documents": GROUPS, "fingerprint": "sha256:made-up", "source": "made up"}


def source(folder: Path) -> Path:
    """Two checkpoints of three layers with four heads, over 128 and 512 tokens, as `qkscope analyze` writes them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, context in enumerate((SHORT, LONG)):
        files.append(folder / f"step-{number}.safetensors")
        _moments(number, context).save(files[-1])
    return analyze_files(files, Silent(), "made up", out=folder / "out", common_window=SHORT, kind="checkpoints")


def _moments(number: int, context: int) -> Moments:
    turns = Rotation(
        tuple((i, i + WIDTH // 2) for i in range(WIDTH // 2)), tuple(0.5 / 3**i for i in range(WIDTH // 2))
    )
    facts = [
        LayerFacts(i, HEADS, KEYS, WIDTH, score_scale=0.25, rotary=kind, rotation=turns if kind == "rotary" else None)
        for i, kind in enumerate(KINDS)
    ]
    about = {
        "name": f"step-{number}",
        "n_layers": len(KINDS),
        "context": context,
        "documents": GROUPS,
        "corpus": CORPUS,
    }
    moments = Moments(capture_layout(context, buckets=16, groups=GROUPS, common=SHORT), facts, about)
    for layer, kind in enumerate(KINDS):
        rng, same = np.random.default_rng(10 * layer + number), np.random.default_rng(layer)
        along = np.arange(context)[:, None] / context * (3.0 if kind == "rotary" else 0.1)
        drift = same.normal(size=(2, 1, HEADS, 1, WIDTH))
        q, k = (
            rng.normal(size=(GROUPS, n, context, WIDTH)) + along * drift[i, :, :n] for i, n in enumerate((HEADS, KEYS))
        )
        moments.add(layer, q + same.normal(size=(1, HEADS, 1, WIDTH)), k, groups=list(range(GROUPS)))
    return moments


def grow(small: Path, out: Path, *, checkpoints: int = 10, layers: int = 8, heads: int = 8) -> Path:
    """A results folder of this size: every fourth layer has no rotation, the last four in ten read longer windows."""
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    names = [f"step-{i:03d}" for i in range(checkpoints)]
    long = checkpoints * 6 // 10
    layer_of = pd.DataFrame(
        {"layer": range(layers), "from_layer": [1 if i % 4 == 3 else rng.choice([0, 2]) for i in range(layers)]}
    )
    models = pd.DataFrame({"model": names, "from_model": [f"step-{int(i >= long)}" for i in range(checkpoints)]})
    rows = models.merge(layer_of, how="cross")
    by_head = rows.merge(pd.DataFrame({"head": range(heads)}), how="cross")
    by_head["from_head"] = rng.integers(HEADS, size=len(by_head))
    for file in sorted(path for path in small.iterdir() if path.suffix in (".csv", ".parquet")):
        table = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
        if "from_model" in table.columns:
            grown = _steps(table, models)
        else:
            wanted = by_head if "head" in table.columns else rows
            keys = ["model", "layer", *(["head"] if "head" in table.columns else [])]
            grown = wanted.merge(
                table.rename(columns={key: f"from_{key}" for key in keys}), on=[f"from_{key}" for key in keys]
            )
            grown = grown.drop(columns=[f"from_{key}" for key in keys])
            grown = grown.assign(
                **{key: value for key, value in _places(grown, layers, heads).items() if key in table.columns}
            )
            grown = _with_noise(grown, file.stem, rng)
        if file.suffix == ".csv":
            write_csv(pa.Table.from_pandas(grown, preserve_index=False), out / file.name)
        else:
            grown.to_parquet(out / file.name, index=False)
    records = {each["name"]: each for each in json.loads((small / "provenance.json").read_text())["checkpoints"]}
    described = [
        {**records[f], "name": n, "n_layers": layers, "step": i + 1}
        for i, (n, f) in enumerate(models.itertuples(index=False))
    ]
    record = {"kind": "checkpoints", "study": {"title": "Made up"}, "corpus": CORPUS, "checkpoints": described}
    (out / "provenance.json").write_text(json.dumps(record))
    return out


def _places(grown: pd.DataFrame, layers: int, heads: int) -> dict[str, "pd.Series[float]"]:
    found = {"depth": grown["layer"] / max(1, layers - 1)}
    return found | ({"kv_head": grown["head"] // 2} if "head" in grown.columns else {})


def _measured(stem: str) -> dict[str, tuple[float, float] | None]:
    """The columns of a table that are estimates, and what they cannot exceed."""
    sets = [
        each for lens in registered() for each in lens.tables if each.table == stem.replace(REPLICATES, HEADS_TABLE)
    ]
    return {column.name: column.limits for each in sets for column in each.columns if column.error}


def _with_noise(grown: pd.DataFrame, stem: str, rng: np.random.Generator) -> pd.DataFrame:
    noisy = {}
    for column, limits in _measured(stem).items():
        for name in (column, f"{column}_se", *(f"{column}_without_{group}" for group in range(GROUPS))):
            if name in grown.columns:
                values = grown[name].to_numpy(float) * (1 + NOISE * rng.normal(size=len(grown)))
                noisy[name] = values if limits is None or name.endswith("_se") else np.clip(values, *limits)
    return grown.assign(**noisy)


def _steps(table: pd.DataFrame, models: pd.DataFrame) -> pd.DataFrame:
    """Rows about a step from one checkpoint to another: for each neighbouring pair, and for the first and the last."""
    names = list(models["model"])
    first = table[(table["from_model"] == "step-0") & (table["to_model"] == "step-1")]
    pairs = [*itertools.pairwise(names), (names[0], names[-1])] if len(names) > 2 else [*itertools.pairwise(names)]
    return pd.concat([first.assign(from_model=a, to_model=b) for a, b in pairs], ignore_index=True)
