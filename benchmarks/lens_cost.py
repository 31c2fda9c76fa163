"""What all lenses cost over a checkpoint of 3B parameters, which of them takes how much, and how that grows.

Sums are those of random vectors that turn as RoPE turns them: 36 layers of 16 + 4 heads of width 128, 16 position
buckets and position 0 apart, 8 document groups, sums before rotation, a common window that is a quarter of the context.
Wall time and memory are of a process of its own that reads the file and makes every table of every lens, as `qkscope
analyze` does; processor time is of all threads. A lens by itself pays for the components and bucket sums that lenses
share when they run together.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import WORK, Found, processor_seconds

from qkscope import Moments
from qkscope.layers import LayerFacts, Rotation
from qkscope.lenses.registry import registered
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.moments.layout import capture_layout

MOST_SECONDS, MOST_MB, CORES = 60.0, 4096.0, 2


@dataclass(frozen=True)
class Shape:
    """A checkpoint; tokens per document are few, because lenses never see tokens."""

    layers: int = 36
    heads: int = 16
    key_heads: int = 4
    width: int = 128
    buckets: int = 16
    groups: int = 8
    context: int = 1024

    @property
    def common(self) -> int:
        return self.context // 4


LARGE = Shape()
FEW = replace(LARGE, layers=2)  # enough to tell lenses apart


def facts_of(shape: Shape) -> list[LayerFacts]:
    half = shape.width // 2
    rotation = Rotation(tuple((i, i + half) for i in range(half)), tuple(50000.0 ** (-i / half) for i in range(half)))
    turned = {"rotary": "rotary", "rotary_dims": shape.width, "rotation": rotation, "score_scale": shape.width**-0.5}
    return [LayerFacts(i, shape.heads, shape.key_heads, shape.width, **turned) for i in range(shape.layers)]


def moments_of(shape: Shape) -> Moments:
    """Sums of vectors with a mean that RoPE turns: what lenses find in them is theirs to say, not to be fast about."""
    layout = capture_layout(shape.context, buckets=shape.buckets, groups=shape.groups, common=shape.common)
    facts = facts_of(shape)
    moments, rng = (
        Moments(layout, facts, {"n_layers": shape.layers, "context": shape.context}),
        np.random.default_rng(0),
    )
    angles = np.arange(shape.context)[:, None] * np.array(facts[0].rotation.angles)
    cos, sin = np.cos(angles), np.sin(angles)

    def turned(x):
        one, other = np.split(x, 2, axis=-1)
        return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1).astype(np.float32)

    means = [rng.normal(size=(1, count, 1, shape.width)) for count in (shape.heads, shape.key_heads)]
    for group in range(shape.groups):
        q, k = (turned(m + rng.normal(size=(1, m.shape[1], shape.context, shape.width))) for m in means)
        for layer in range(shape.layers):  # the same in every layer: sums do not know, and no lens compares layers
            moments.add(layer, q, k, groups=group)
    moments.settle()
    return moments


def tables_of(name: str | None = None):
    """The tables that follow from sums, of all lenses or of one."""
    lenses = [lens for lens in registered() if name is None or lens.name == name]
    return [table for lens in lenses for table in lens.tables if table.rows is not None]


def analysed(moments: Moments, shape: Shape, name: str | None = None):
    settings = RowSettings(own=shape.context, common=shape.common)
    return checkpoint_rows(moments, tables_of(name), settings, model="m")


SCRIPT = """
import sys, time
sys.path[:0] = [{here!r}]
from common import peak_mb
from lens_cost import LARGE, Shape, analysed
from qkscope import Moments
begun, used = time.perf_counter(), time.process_time()
tables = analysed(Moments.load(sys.argv[1]), Shape(layers=int(sys.argv[2])))
print(time.perf_counter() - begun, time.process_time() - used, peak_mb(), sum(map(len, tables.values())))
"""


def from_file(shape: Shape) -> tuple[float, float, float, float]:
    """Wall seconds, processor seconds, peak MB and rows of a process that makes all tables from a file."""
    WORK.mkdir(parents=True, exist_ok=True)
    path = WORK / f"lenses-{shape.layers}.safetensors"
    moments_of(shape).save(path)
    script = SCRIPT.format(here=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(path), str(shape.layers)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    path.unlink()
    wall, used, peak, rows = (float(part) for part in run.stdout.split()[-4:])
    return wall, used, peak, rows


def by_lens(found: Found) -> None:
    """Each lens by itself, and all together, scaled up to the whole checkpoint."""
    moments, scale = moments_of(FEW), LARGE.layers / FEW.layers
    analysed(moments, FEW)  # imports and caches
    names = [lens.name for lens in registered() if tables_of(lens.name)]
    seconds = {name: processor_seconds(lambda name=name: analysed(moments, FEW, name)) * scale for name in names}
    for name, each in sorted(seconds.items(), key=lambda item: -item[1]):
        found.row(f"lens `{name}` alone, processor time for 36 layers", f"{each:.1f} s", "stated")


def growth(found: Found, quick: bool) -> None:
    """Processor time of all lenses together over heads, buckets and d, fitted on a log scale."""
    small = replace(FEW, layers=1, width=64)
    sizes = {
        "heads": [replace(small, heads=n, key_heads=n // 4) for n in (8, 16, 32)],
        "buckets": [replace(small, buckets=n) for n in (8, 16, 32)],
        "d": [replace(small, width=n) for n in (32, 64, 128)],
    }
    for name, shapes in sizes.items():
        chosen = shapes[:2] if quick else shapes
        seconds = []
        for shape in chosen:
            moments = moments_of(shape)
            runs = [processor_seconds(lambda m=moments, s=shape: analysed(m, s)) for _ in range(1 if quick else 3)]
            seconds.append(min(runs))
        values = [{"heads": s.heads, "buckets": s.buckets, "d": s.width}[name] for s in chosen]
        exponent = np.polyfit(np.log(values), np.log(seconds), 1)[0]
        each = ", ".join(f"{value}: {second:.2f} s" for value, second in zip(values, seconds, strict=True))
        fixed = "one layer" if name == "d" else "one layer, d = 64"
        found.row(f"all lenses, growth with {name} ({fixed})", f"exponent {exponent:.2f} ({each})", "stated")


def lens_cost(quick: bool) -> Found:
    """The part of the suite."""
    found = Found()
    shape = replace(LARGE, layers=4) if quick else LARGE
    wall, used, peak, rows = from_file(shape)
    what = f"all lenses over {shape.layers} layers × {shape.heads} heads, d = {shape.width}"
    idle = used / min(CORES, os.cpu_count() or 1)
    # Beside other processes wall time says little; with both cores to itself it is at least half the processor time.
    target = f"< {MOST_SECONDS:.0f} s"
    found.row(f"{what}, wall time here", f"{wall:.0f} s", target, wall < MOST_SECONDS)
    found.row(f"{what}, processor time over {CORES} cores", f"{idle:.0f} s", target, idle < MOST_SECONDS)
    found.row(f"{what}, peak memory", f"{peak:.0f} MB", f"< {MOST_MB:.0f} MB", peak < MOST_MB)
    found.notes.append(f"{rows:,.0f} rows of tables, at the own context and at the common window, with every error.")
    by_lens(found)
    growth(found, quick)
    return found
