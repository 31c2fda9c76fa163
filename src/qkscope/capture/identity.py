"""What a loaded model is, whatever its files are called: how many parameters it has, and hashes of its attention."""

from __future__ import annotations

import hashlib
import re
from typing import Any

# How families name what makes queries and keys, one matrix for each or one for all three.
PROJECTION = re.compile(r"(^|\.)(q_proj|k_proj|qkv_proj|query|key|query_key_value|c_attn|Wqkv|qkv|wq|wk|q|k)\.weight$")
SAMPLED = 4096  # numbers of each matrix, evenly spaced: different weights differ in nearly all of them


def count_parameters(backbone: Any) -> int:
    """The numbers in a model's weights, shared ones once; the output matrix counts only where it is the embedding."""
    return sum(int(parameter.numel()) for parameter in backbone.parameters())


def attention_hashes(backbone: Any) -> list[str]:
    """A short hash of each projection to queries or keys, equal for equal numbers in float32.

    Layers are not named: a model that has more of them, with those of another among them, is recognised. Weights that
    are not in memory (offloaded) are left out.
    """
    import torch

    hashes = []
    for name, parameter in backbone.named_parameters():
        if not PROJECTION.search(name) or parameter.device.type == "meta" or parameter.ndim != 2:
            continue
        with torch.no_grad():
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // SAMPLED)
            sample = flat[::step].to(device="cpu", dtype=torch.float32).contiguous()
            if sample.numel() < 2 or bool((sample == sample[0]).all()):
                continue  # never trained, or set to 0: equal in models that have nothing in common
            digest = hashlib.sha256(f"{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return hashes
