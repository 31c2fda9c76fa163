"""Where the tap's time goes: torch's profiler over layers of SmolLM2-135M's shape, whose sums are cold as in a run.

`python benchmarks/profile_tap.py [--width 64] [--tokens 2048]`
"""

import argparse
import time

import torch
from common import layout_of
from torch.profiler import ProfilerActivity, profile

from qkscope.layers import LayerFacts
from qkscope.moments import live
from qkscope.moments.moments import Moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    heads = (9, 3) if options.width == 64 else (16, 4)
    q, k = (torch.randn(1, options.tokens, count, options.width).transpose(1, 2) for count in heads)
    facts = [LayerFacts(layer, *heads, options.width) for layer in range(options.layers)]
    moments = Moments(layout_of(options.tokens), facts)

    def one_document():
        for layer in range(options.layers):
            moments.add(layer, q, k)

    while moments.tokens()[0] < live.FLOAT64_TOKENS:
        one_document()
    one_document()
    seconds = []
    for _ in range(options.rounds):
        begun = time.process_time()
        one_document()
        seconds.append((time.process_time() - begun) / options.layers)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        one_document()
    print(f"one layer's queries and keys: {1000 * min(seconds):.2f} ms of processor time (best of {options.rounds})")
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=30))


if __name__ == "__main__":
    main()
