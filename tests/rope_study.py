"""A study of made-up moments whose context length, RoPE base and means before rotation change."""

import numpy as np

from lens_worlds import Silent
from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.layout import capture_layout
from qkscope.tables.from_moments import analyze_files
from rope_world import turn

WIDTH, HEADS, KEYS, GROUPS, LAYERS, NOPE = 8, 4, 2, 5, 3, 1
RUN = ((64, 50.0), (64, 50.0), (128, 2000.0))  # context and base of each checkpoint


def rotation(base):
    angles = tuple(float(np.float32(base ** (-plane / 4))) for plane in range(4))
    return Rotation(tuple((i, i + 4) for i in range(4)), angles)


def moments_of(number, context, base, common, known=True, unmeasured=()):
    """A checkpoint whose means at rest grow with training, and with them what RoPE makes of position."""
    by = rotation(base)
    rotary = "rotary" if known else "unknown"
    facts = [
        LayerFacts(i, HEADS, KEYS, WIDTH, "nope", score_scale=0.5) if i == NOPE and known
        else LayerFacts(i, HEADS, KEYS, WIDTH, rotary, rotation=by if known and i not in unmeasured else None,
                        score_scale=0.5)
        for i in range(LAYERS)
    ]  # fmt: skip
    about = {"name": f"step-{number}", "label": f"S{number}", "n_layers": LAYERS, "context": context,
             "documents": GROUPS, "corpus": {"fingerprint": "sha256:1"}}  # fmt: skip
    moments = Moments(capture_layout(context, buckets=4, groups=GROUPS, common=common), facts, about)
    for layer in facts:
        rng = np.random.default_rng(100 * layer.layer + number)
        same = np.random.default_rng(layer.layer)
        parts = []
        for count in (HEADS, KEYS):
            x = rng.normal(size=(GROUPS, count, context, WIDTH)) + 0.1 * rng.normal(size=(GROUPS, count, 1, WIDTH))
            x += (1 + number) * same.normal(size=(1, count, 1, WIDTH))
            parts.append(turn(x, np.arange(context), by) if layer.rotation or layer.rotary != "nope" else x)
        moments.add(layer.layer, *parts, groups=list(range(GROUPS)))
    return moments


def folder_of(place, run=RUN, kind="checkpoints", **options):
    place.mkdir(parents=True, exist_ok=True)
    known, detail = options.pop("known", True), options.pop("detail", True)
    unmeasured = options.pop("unmeasured", ())
    files = [place / f"step-{number}.safetensors" for number in range(len(run))]
    for number, (context, base) in enumerate(run):
        moments_of(number, context, base, min(c for c, _ in run), known, unmeasured).save(files[number])
    common = min(context for context, _ in run)
    return analyze_files(files, Silent(), "test", out=place / "out", common_window=common, kind=kind, detail=detail)
