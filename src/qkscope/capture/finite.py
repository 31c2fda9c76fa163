"""Find weights that are NaN or infinite: a checkpoint that diverged, or a damaged file, before anything runs.

One reduction per tensor where it lies, one answer per device; only where something is wrong are values counted. Weights
that accelerate has offloaded are read from where its hooks would read them, one tensor at a time.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkscope.errors import ModelError, QkscopeWarning
from qkscope.text import are, counted

LISTED = 3  # tensors that a message names


class _Bad(NamedTuple):
    """A tensor with values that are not finite."""

    name: str
    values: int  # of them all
    wrong: int  # that are NaN or infinite


def require_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights; the error names layers, tensors and how many values there are."""
    bad = [*_in_memory(model), *_offloaded(model)]
    if not bad:
        return
    named = [f"{_layer(each.name)}{each.name} has {each.wrong} of {each.values}" for each in bad[:LISTED]]
    more = f", and {len(bad) - LISTED} more tensors have some" if len(bad) > LISTED else ""
    raise ModelError(
        f"{sum(each.wrong for each in bad)} of its weights are NaN or infinite: {', '.join(named)}{more}; its "
        "training diverged, or its file is damaged"
    )


def _in_memory(model: nn.Module) -> Iterator[_Bad]:
    suspects: list[tuple[str, Tensor]] = []
    extremes: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        if hasattr(tensor, "full_tensor") or tensor.element_size() == 1:
            suspects.append((name, tensor))  # split over ranks, or of eight bits: torch has no such reduction
        else:
            extremes[tensor.device].append((name, tensor, torch.stack(torch.aminmax(tensor))))
    for of_device in extremes.values():
        # In float32, where any finite weight stays finite (float64 ones may be larger and are counted below).
        finite = torch.isfinite(torch.stack([each.float() for _, _, each in of_device])).all(dim=1)
        suspects += [(of_device[i][0], of_device[i][1]) for i in (~finite).nonzero().flatten().tolist()]
    yield from _count_each(suspects)


def _offloaded(model: nn.Module) -> Iterator[_Bad]:
    """Of weights that are in memory only while their module runs: accelerate's hooks know where they lie."""
    looked: set[str] = set()

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, key, weights in _places(model):
            looked.add(name)
            yield name, weights[key].detach()

    yield from _count_each(read())
    absent = {
        name
        for name, each in model.named_parameters(remove_duplicate=False)
        if each.is_meta and each.is_floating_point() and each.numel()
    }
    if unseen := sorted(absent - looked):
        warnings.warn(
            f"{counted(len(unseen), 'tensor')} of weights (the first: {unseen[0]}) {are(len(unseen))} offloaded in a "
            "way that qkscope cannot read, so whether all values are finite was not checked",
            QkscopeWarning,
            stacklevel=2,
        )


def _places(model: nn.Module) -> Iterator[tuple[str, str, Mapping[str, Tensor]]]:
    """Each offloaded parameter of floating point: its name, and its key in the mapping that reads it."""
    for path, module in model.named_modules():
        for hook in _hooks(module):
            weights: Mapping[str, Tensor] | None = getattr(hook, "weights_map", None)
            if weights is None:
                continue
            for key, parameter in module.named_parameters(recurse=hook.place_submodules, remove_duplicate=False):
                if parameter.is_meta and parameter.is_floating_point() and parameter.numel():
                    yield f"{path}.{key}".lstrip("."), key, weights


def _hooks(module: nn.Module) -> list[Any]:
    """The hooks that accelerate has put on a module; several are held by one."""
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [hook])) if hook is not None else []


def _count_each(suspects: Iterable[tuple[str, Tensor]]) -> Iterator[_Bad]:
    """Those that do have values which are not finite; one tensor is held at a time."""
    for name, tensor in suspects:
        if count := _count(tensor):
            yield _Bad(name, tensor.numel(), count)


def _count(tensor: Tensor) -> int:
    wide = tensor.float() if tensor.element_size() == 1 else tensor
    count = torch.isfinite(wide).logical_not().sum()
    whole: Tensor = count.full_tensor() if hasattr(count, "full_tensor") else count  # over all ranks
    return int(whole)


def _layer(name: str) -> str:
    """`layer 3, ` for `layers.3.self_attn.q_proj.weight`."""
    number = re.search(r"\.(\d+)\.", f".{name}")
    return f"layer {number[1]}, " if number else ""
