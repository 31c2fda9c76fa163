"""A forward pass through a model in training after which model, random numbers and compiled graphs are as before.

A pass in evaluation mode draws no random numbers and changes no weight. What it can change is what a model fills on the
way: angles that follow the length of the last text (dynamic RoPE) are put back with their modules' plain attributes.
Nothing runs in inference mode, whose tensors could not be trained with afterwards; where a trainer is in it (Lightning,
during validation), it is left for the duration.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qkscope.capture.backbone import uncompiled

PLAIN = (bool, int, float, str, type(None))  # attributes of a module that may describe its buffers


@contextmanager
def untouched(model: nn.Module, autocast: torch.dtype | None = None) -> Iterator[None]:
    """Evaluation without gradients, uncompiled; afterwards model and random numbers are as if it had not been.

    With `autocast`, passes run in that precision, as a mixed-precision training does; without, in whatever precision
    is set around the call.
    """
    with (
        torch.inference_mode(False),  # first: copies of buffers must be fit for training, too
        _random_numbers_restored(),
        _modules_restored(model),
        torch.no_grad(),
        uncompiled(),
        _precision(model, autocast),
    ):
        model.eval()
        yield


def _precision(model: nn.Module, autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    """The training's own precision, without a cache.

    Weights that autocast casts under `no_grad` have no gradient. Older versions of torch kept them in the cache, and
    the training around would have gone on with them.
    """
    kind = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if autocast is None and not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=autocast or torch.get_autocast_dtype(kind), cache_enabled=False)


@contextmanager
def _modules_restored(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    # Those of scripted modules are no dict, and cannot be put back by hand.
    buffers = [
        _ModuleBuffers(module) for module in model.modules() if isinstance(module._buffers, dict) and module._buffers
    ]
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for each in buffers:
            each.put_back()


class _ModuleBuffers:
    """A module's buffers, by identity and by value, and its plain attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = dict(module._buffers)
        self._values = {name: tensor.detach().clone() for name, tensor in self._buffers.items() if tensor is not None}
        self._plain = {name: value for name, value in vars(module).items() if isinstance(value, PLAIN)}
        self._versions = {name: tensor._version for name, tensor in self._tensors()}

    def put_back(self) -> None:
        for name, tensor in self._tensors():
            if tensor._version != self._versions[name]:
                with torch.no_grad():
                    tensor.copy_(self._values[name])
        self._module._buffers.clear()
        self._module._buffers.update(self._buffers)
        vars(self._module).update(self._plain)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        # Inference tensors count no versions, and nothing outside of inference mode can change them.
        named = [(name, tensor) for name, tensor in self._buffers.items() if tensor is not None]
        return [(name, tensor) for name, tensor in named if not tensor.is_inference()]


@contextmanager
def _random_numbers_restored() -> Iterator[None]:
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    # Only kinds of devices that have been used: asking another one for its state would start it.
    used: list[Any] = [each for each in (torch.cuda, torch.xpu) if each.is_available() and each.is_initialized()]
    devices = [(module, module.get_rng_state_all()) for module in used]
    apple = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - a training may draw from it
        torch.set_rng_state(host)
        for module, states in devices:
            module.set_rng_state_all(states)
        if apple is not None:
            torch.mps.set_rng_state(apple)
