"""Studies of models and of seeds with the tables of every lens, for tests of what is said and drawn of them.

The models are small ones of three families: sliding and full layers; full ones, every fourth without RoPE; full ones
that all rotate. The seeds are of the second family, which has two kinds of layers.
"""

import functools

import shared
from families import FAMILIES, tiny, tokens
from lens_worlds import Silent
from qkscope.api import capture_moments
from qkscope.lenses.views import build_tables
from qkscope.results.read import load_results
from qkscope.tables.from_moments import analyze_files

CHANGES = {family.name: (family.kind, family.changes) for family in FAMILIES}
# By kind of study: the name of each entry, its label, its family, how its weights are drawn, and its context.
ENTRIES = {
    "models": (
        ("gemma-x", "Gemma-X", "Gemma 3 text", 1, 128),
        ("smol-3", "Smol-3", "SmolLM3", 2, 64),
        ("llama-t", "Llama-T", "Llama", 0, 64),
    ),
    "seeds": tuple((f"draw-{i}", f"Draw-{i}", "Gemma 3 text", i, 64) for i in (1, 2, 3)),
}
SHORTEST, ROWS, GROUPS = 64, 8, 4


def results_of(kind):
    """The results folder of one such study, made once for whoever asks; not to be changed."""

    def make(folder):
        files = []
        for name, label, family, seed, context in ENTRIES[kind]:
            model_type, changes = CHANGES[family]
            windows = tokens(rows=ROWS, length=context, seed=seed).tolist()
            moments = capture_moments(
                tiny(model_type, seed, **changes),
                windows,
                groups=GROUPS,
                buckets=4,
                common_window=SHORTEST,
                batch_size=ROWS,
            )
            about = {"name": name, "label": label, "model_type": model_type, "family": family}
            moments.provenance.update(about | ({"run": name} if kind == "seeds" else {}))
            files.append(folder / f"{name}.safetensors")
            moments.save(files[-1])
        analyze_files(files, Silent(), "test", out=folder / "out", common_window=SHORTEST, kind=kind)

    return shared.once(f"entry world {kind}", make) / "out"


@functools.cache
def tables_of(kind):
    """The same, read: one for all tests of a process, which do not change it."""
    return build_tables(load_results(results_of(kind)))
