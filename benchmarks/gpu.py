"""What sums would cost on a GPU, from counts alone: nothing here has been run on one.

The calls that an accelerator would be given are made on the host (`way="device"`) for one layer of real shape, and each
is counted: kernels started, bytes that it reads and writes if nothing stays in a cache, floating-point operations.
"""

import torch
from common import Found
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from qkscope.layers import LayerFacts, Rotation
from qkscope.moments.layout import capture_layout
from qkscope.moments.moments import Moments
from qkscope.moments.sizes import predict_sizes, workspace_bytes

GATHERS = {"index", "index_select"}  # read as much as they write, not all that they are given
LAUNCH = 5e-6  # seconds to start a kernel: what CUDA takes from Python, where nothing hides it
LAYERS, HIDDEN, PARAMETERS = 36, 2048, 3.08e9  # SmolLM3-3B
CARDS = (("A100 80GB", 312e12, 19.5e12, 2.0e12), ("RTX 4090", 165e12, 82.6e12, 1.0e12))  # bf16, fp32, bytes/s


class Counted(TorchDispatchMode):
    """Kernels that a device would start, and the bytes that they move."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ("_unsafe_view", "empty", "detach"):
            self.launches += 1
            written = size(found)
            name = func.overloadpacket.__name__
            self.moved += written + (written if name in GATHERS else size(args))
        return found


def size(given) -> int:
    """Bytes of all tensors; what is broadcast is stored once."""
    if isinstance(given, torch.Tensor):
        stored = 1
        for length, stride in zip(given.shape, given.stride(), strict=True):
            stored *= length if stride else 1
        return stored * given.element_size()
    return sum(map(size, given)) if isinstance(given, list | tuple) else 0


def counts(facts: LayerFacts, tokens: int) -> tuple[int, int, int]:
    """Kernels, bytes and floating-point operations of one layer and one document."""
    moments = Moments(capture_layout(tokens), [facts], way="device")
    q, k = (
        torch.randn(1, tokens, heads, facts.head_dim).to(torch.bfloat16).transpose(1, 2)
        for heads in (facts.q_heads, facts.kv_heads)
    )
    moments.add(0, q, k)  # decides on the pivot and lays out memory
    with Counted() as counted, FlopCounterMode(display=False) as flops:
        moments.add(0, q, k)
    return counted.launches, counted.moved, flops.get_total_flops()


def layer_facts(q_heads: int, kv_heads: int, width: int = 128) -> LayerFacts:
    half = width // 2
    rotation = Rotation(tuple((i, i + half) for i in range(half)), tuple(5e6 ** (-i / half) for i in range(half)))
    return LayerFacts(0, q_heads, kv_heads, width, rotary="rotary", rotation=rotation)


def gpu(quick: bool) -> Found:
    found, tokens = Found(), 4096
    launches, moved, flops = (LAYERS * count for count in counts(layer_facts(16, 4), tokens))
    model = tokens * (2 * PARAMETERS + 2 * 2 * HIDDEN * tokens * LAYERS / 2)  # weights, and causal attention
    found.notes.append(
        f"Not run on a GPU. One document of {tokens} tokens of SmolLM3-3B, counted from the calls themselves: "
        f"{launches // LAYERS} kernels per layer, {launches} in all; {moved / 1e9:.1f} GB read and written if nothing "
        f"stays in a cache; {flops / 1e9:.0f} GFLOP in float32, beside {model / 1e12:.1f} TFLOP of the model's own."
    )
    for name, bf16, fp32, bandwidth in CARDS:
        base = model / (0.5 * bf16)
        parts = {
            "memory": moved / (0.8 * bandwidth),
            "arithmetic": flops / (0.5 * fp32),
            "starting kernels": launches * LAUNCH,
        }
        listed = ", ".join(f"{part} {1000 * seconds:.1f} ms" for part, seconds in parts.items())
        text = f"about {100 * sum(parts.values()) / base:.0f} % of {1000 * base:.0f} ms for a plain pass ({listed})"
        how = "half of peak arithmetic, 80 % of peak bandwidth, 5 µs per kernel, nothing overlaps"
        found.row(f"estimate, {name} ({how})", text, "an estimate")
    for name, facts, length in (
        ("SmolLM3-3B", layer_facts(16, 4), 4096),
        ("SmolLM3-3B", layer_facts(16, 4), 32768),
        ("SmolLM3-3B", layer_facts(16, 4), 131072),
        ("70B, 64 + 8 heads", layer_facts(64, 8), 131072),
    ):
        layout = capture_layout(length)
        sums = predict_sizes(layout, [facts]).memory
        text = f"{workspace_bytes(layout, facts, length) / 2**30:.2f} GiB, and {sums / 2**20:.0f} MiB of sums per layer"
        found.row(f"bound on memory besides the sums, {name}, one document of {length} tokens", text, "computed")
    return found
