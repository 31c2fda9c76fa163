"""The tap's work is counted, not timed: products launched, their floating-point operations, memory allocated."""

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from qkscope.layers import LayerFacts
from qkscope.moments.layout import Layout, bucket_edges
from qkscope.moments.moments import Moments

Q_HEADS, KV_HEADS, WIDTH, CONTEXT = 9, 3, 64, 2048  # a layer of SmolLM2-135M
HEADS = Q_HEADS + KV_HEADS


class Calls(TorchDispatchMode):
    """Counts the operations that torch is asked for."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def activations(tokens=CONTEXT):
    """Queries and keys as a model lays them out: tokens before heads in memory."""
    torch.manual_seed(0)
    return [torch.randn(1, tokens, heads, WIDTH).transpose(1, 2) for heads in (Q_HEADS, KV_HEADS)]


@pytest.fixture
def warm():
    """Moments of one layer, workspace in place."""
    moments = Moments(Layout(bucket_edges(CONTEXT, 16), 8), [LayerFacts(0, Q_HEADS, KV_HEADS, WIDTH)])
    q, k = activations()
    moments.add(0, q, k)
    return moments


def test_a_piece_takes_two_products_whatever_its_heads_and_buckets(warm):
    q, k = activations()
    with Calls() as calls:
        warm.add(0, q, k, groups=3)
    assert calls.counts["bmm"] == 2 + 1  # and one that adds buckets up to segments
    assert calls.counts["sub"] == 2  # queries and keys: the only pass over the vectors besides the products
    assert calls.counts["cat"] == calls.counts["clone"] == 0


def test_layers_share_the_plan_of_their_products():
    """What is cut up for one layer serves the next: cutting would take as long as centring."""
    facts = [LayerFacts(layer, Q_HEADS, KV_HEADS, WIDTH) for layer in range(2)]
    moments = Moments(Layout(bucket_edges(CONTEXT, 16), 8), facts)
    q, k = activations()
    counts = []
    for layer in range(2):
        with Calls() as calls:
            moments.add(layer, q, k)
        counts.append(calls.counts["transpose"])
    assert counts[0] - counts[1] == 2


def test_a_layer_asks_torch_for_little_besides_its_products(warm):
    """Each call costs Python some microseconds: at 60 of them they took a tenth of a layer."""
    q, k = activations()
    warm.add(0, q, k)
    with Calls() as calls:
        warm.add(0, q, k)
    # Per kind: three views and a subtraction. Per half: an addition. The rest adds cells to sums of all kinds.
    assert sum(calls.counts.values()) - calls.counts["bmm"] - calls.counts["baddbmm"] <= 40


def test_the_pivot_looks_at_few_tokens():
    """Means and spreads of all tokens in float64 took longer than all products of a document."""
    q, k = activations()
    moments = Moments(Layout(bucket_edges(CONTEXT, 16), 8), [LayerFacts(0, Q_HEADS, KV_HEADS, WIDTH)])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        moments.add(0, q, k)
    in_copies = sum(max(0, e.self_cpu_memory_usage) for e in found.events() if e.name == "aten::empty_strided")
    assert in_copies < 8 * HEADS * WIDTH * CONTEXT // 4


def test_products_do_three_quarters_of_the_square(warm):
    q, k = activations()
    with FlopCounterMode(display=False) as flops:
        warm.add(0, q, k)
    by_product = flops.get_flop_counts()["Global"]
    done = sum(count for of, count in by_product.items() if of.__name__ in ("bmm", "baddbmm"))
    square = 2 * HEADS * CONTEXT * WIDTH * WIDTH
    # By hand: (32 + 2) x 64 + 32 x 32 = 3200 multiplications per token and head, against 64 x 64 = 4096.
    assert square * 3200 // 4096 <= done < 1.05 * square * 3200 // 4096  # buckets are added up to segments, too


def test_memory_allocated_per_layer_does_not_hold_the_vectors(warm):
    """Vectors, products and sums have their places; what is allocated are packed triangles of the batch's buckets."""
    q, k = activations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        warm.add(0, q, k)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in found.events())
    assert allocated <= 3.5 * 4 * HEADS * 16 * (WIDTH * (WIDTH + 1) // 2)


def kept_bytes(moments, q, k, times=1):
    """What torch has allocated and not given back after adding these `times`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for _ in range(times):
            moments.add(0, q, k)
    return sum(event.self_cpu_memory_usage for event in found.events())


def test_the_sums_do_not_grow_with_tokens(warm):
    q, k = activations()
    warm.add(0, q, k)
    assert kept_bytes(warm, q, k, times=3) == 0


def test_memory_does_not_grow_with_the_context():
    """Sums and workspace of one document, at contexts of two pieces and of eight."""
    kept = []
    for context in (4096, 16384):
        moments = Moments(Layout(bucket_edges(context, 16), 8), [LayerFacts(0, Q_HEADS, KV_HEADS, WIDTH)])
        kept.append(kept_bytes(moments, *activations(context)))
    assert 0 < kept[1] <= kept[0]
