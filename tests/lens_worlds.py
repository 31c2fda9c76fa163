"""Results folders of made-up moments, for tests of what a lens draws and says; tables come the way they always do."""

import functools

import numpy as np

import shared
from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.views import build_tables
from qkscope.moments.layout import capture_layout
from qkscope.results.read import load_results
from qkscope.tables.from_moments import analyze_files

WIDTH, HEADS, KEYS, GROUPS, LAYERS = 6, 4, 2, 5, 5
CONTEXTS = (64, 64, 128)
NOPE = 2  # the layer without drift


class Silent:
    """Hears and says nothing."""

    def wrote(self, path):
        pass

    def noted(self, message):
        pass


def drifting(checkpoint, layer, context, rows=GROUPS):
    """Queries and keys of one layer: keys move by the same distance over the window, whatever its length."""
    rng = np.random.default_rng(100 * layer + checkpoint)
    same = np.random.default_rng(layer)  # what checkpoints have in common
    q = rng.normal(size=(rows, HEADS, context, WIDTH)) + 0.2 * rng.normal(size=(rows, HEADS, 1, WIDTH))
    k = rng.normal(size=(rows, KEYS, context, WIDTH)) + 0.2 * rng.normal(size=(rows, KEYS, 1, WIDTH))
    q += 3 * same.uniform(0.5, 1.5, size=(1, HEADS, 1, 1)) * np.eye(WIDTH)[0]
    k += 2 * np.eye(WIDTH)[1] * same.uniform(-1, 1, size=(1, KEYS, 1, 1))
    if layer != NOPE:
        along = np.arange(context)[:, None] / context * np.eye(WIDTH)[0]
        k += (2 + layer) * along
        q += 0.5 * along
    return q, k


def moments_of(checkpoint, context, *, layers=LAYERS, common=64, scale=0.5):
    turns = Rotation(((0, 3), (1, 4), (2, 5)), (0.5, 0.05, 0.005))
    facts = [
        LayerFacts(layer, HEADS, KEYS, WIDTH, score_scale=scale, **({"rotary": "nope"} if layer == NOPE else rotary))
        for layer, rotary in enumerate([{"rotary": "rotary", "rotation": turns}] * layers)
    ]
    about = {"name": f"step-{checkpoint}", "label": f"S{checkpoint}", "n_layers": layers, "context": context}
    moments = Moments(capture_layout(context, buckets=4, groups=GROUPS, common=common), facts, about)
    for layer in range(layers):
        moments.add(layer, *drifting(checkpoint, layer, context), groups=list(range(GROUPS)))
    return moments


def results_of(contexts=CONTEXTS, *, kind="checkpoints", **options):
    """A results folder with a checkpoint per context, made once for whoever asks for the same; not to be changed."""

    def make(folder):
        files = []
        for number, context in enumerate(contexts):
            files.append(folder / f"step-{number}.safetensors")
            moments_of(number, context, common=min(contexts), **options).save(files[-1])
        analyze_files(files, Silent(), "test", out=folder / "out", common_window=min(contexts), kind=kind)

    return shared.once(f"lens world {contexts} {kind} {options}", make) / "out"


@functools.cache
def tables_of(contexts=CONTEXTS, **options):
    """The same, read: one for all tests of a process, which do not change it."""
    return build_tables(load_results(results_of(contexts, **options)))
