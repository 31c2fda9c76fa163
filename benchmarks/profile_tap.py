"""Where the tap's time goes: torch's profiler over layers of SmolLM2-135M's shape, whose sums are cold as in a run.

`python benchmarks/profile_tap.py [--width 64] [--tokens 2048] [--first]`
"""

import argparse
import time
from dataclasses import replace

import torch
from common import layout_of
from torch.profiler import ProfilerActivity, profile

from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.moments import Moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first", action="store_true", help="the first document, in float64, instead of a later one")
    parser.add_argument("--table", action="store_true", help="torch's own profile of one document as well")
    options = parser.parse_args()
    heads = (9, 3) if options.width == 64 else (16, 4)
    q, k = (torch.randn(1, options.tokens, count, options.width).transpose(1, 2) for count in heads)
    half = options.width // 2
    angles = tuple(10000.0 ** (-i / half) for i in range(half))
    rotation = Rotation(pairs=tuple((i, i + half) for i in range(half)), angles=angles)
    facts = [
        LayerFacts(layer, *heads, options.width, rotary="rotary", rotation=rotation) for layer in range(options.layers)
    ]
    pre_rope = layout_of(options.tokens)

    def one_document(moments):
        for layer in range(options.layers):
            moments.add(layer, q, k)

    def started(layout):
        moments = Moments(layout, facts)
        if not options.first:
            one_document(moments)
        return moments

    for name, layout in (("sums", replace(pre_rope, unrotated_every=0)), ("sums, also at rest", pre_rope)):
        seconds, kept = [], started(layout)
        for _ in range(options.rounds):
            moments = started(layout) if options.first else kept
            begun = time.process_time()
            one_document(moments)
            seconds.append((time.process_time() - begun) / options.layers)
        best = f"{1000 * min(seconds):.2f} ms of processor time (best of {options.rounds})"
        print(f"{name}: one layer's queries and keys: {best}, {torch.get_num_threads()} threads")
        if options.table:
            moments = started(layout) if options.first else kept
            with profile(activities=[ProfilerActivity.CPU]) as found:
                one_document(moments)
            print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=30))


if __name__ == "__main__":
    main()
