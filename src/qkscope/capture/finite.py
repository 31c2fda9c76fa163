"""Find weights that are NaN or infinite: a checkpoint that diverged, or a damaged file, before anything runs.

One reduction per tensor where it lies, one answer per device; only where something is wrong are values counted.
"""

from __future__ import annotations

import re
from collections import defaultdict

import torch
from torch import Tensor, nn

from qkscope.errors import ModelError

LISTED = 3  # tensors that a message names


def require_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights; the error names layers, tensors and how many values there are."""
    bad = _non_finite(model)
    if not bad:
        return
    named = [f"{_layer(name)}{name} has {count} of {tensor.numel()}" for name, tensor, count in bad[:LISTED]]
    more = f", and {len(bad) - LISTED} more tensors have some" if len(bad) > LISTED else ""
    raise ModelError(
        f"{sum(count for _, _, count in bad)} of its weights are NaN or infinite: {', '.join(named)}{more}; its "
        "training diverged, or its file is damaged"
    )


def _non_finite(model: nn.Module) -> list[tuple[str, Tensor, int]]:
    """Name, tensor and number of bad values of each parameter that has any."""
    suspects: list[tuple[str, Tensor]] = []
    extremes: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue  # offloaded weights are looked at nowhere: reading them from disk costs as much as the capture
        if hasattr(tensor, "full_tensor") or tensor.element_size() == 1:
            suspects.append((name, tensor))  # split over ranks, or of eight bits: torch has no such reduction
        else:
            extremes[tensor.device].append((name, tensor, torch.stack(torch.aminmax(tensor))))
    for found in extremes.values():
        # In float32, where any finite weight stays finite (float64 ones may be larger and are counted below).
        finite = torch.isfinite(torch.stack([each.float() for _, _, each in found])).all(dim=1)
        suspects += [(found[i][0], found[i][1]) for i in (~finite).nonzero().flatten().tolist()]
    counted = [(name, tensor, _count(tensor)) for name, tensor in suspects]
    return [each for each in counted if each[2]]


def _count(tensor: Tensor) -> int:
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    count = torch.isfinite(wide).logical_not().sum()
    whole: Tensor = count.full_tensor() if hasattr(count, "full_tensor") else count  # over all ranks
    return int(whole)


def _layer(name: str) -> str:
    """`layer 3, ` for `layers.3.self_attn.q_proj.weight`."""
    number = re.search(r"\.(\d+)\.", f".{name}")
    return f"layer {number[1]}, " if number else ""
