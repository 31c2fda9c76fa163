"""Which part of a model is run, and how: the text backbone alone, no logits, no cache, inference mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.errors import CaptureError


def text_backbone(model: nn.Module) -> nn.Module:
    """The module that turns token ids into hidden states: no language-model head, no vision tower."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise CaptureError(f"{type(model).__name__} is not a transformers model; qkscope taps transformers' attention")
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(model).__name__} is an encoder-decoder: its cross-attention heads have no one position axis; "
            "give a decoder-only or an encoder-only model"
        )
    find: Any = model.get_decoder
    backbone = find()
    return backbone if isinstance(backbone, nn.Module) else model


def text_config(model: nn.Module) -> Any:
    """The backbone's own config (multimodal configs nest it)."""
    config: Any = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation and inference mode; afterwards each module trains again exactly if it did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def run_backbone(backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """One forward pass without a cache; returns the last hidden states (batch, tokens, hidden)."""
    arguments: dict[str, Any] = {"input_ids": input_ids.to(input_device(backbone))}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask.to(arguments["input_ids"].device)
    if "use_cache" in inspect.signature(backbone.forward).parameters:
        arguments["use_cache"] = False
    hidden: Tensor = backbone(**arguments)[0]
    return hidden


def input_device(backbone: nn.Module) -> torch.device:
    """Where token ids go: the embedding's device (with a device map the layers may live elsewhere)."""
    find: Any = getattr(backbone, "get_input_embeddings", None)
    embedding = find() if find is not None else None
    hook = getattr(embedding, "_hf_hook", None)  # offloaded by accelerate: weights are elsewhere until used
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device)
    parameter = next((embedding if embedding is not None else backbone).parameters())
    return parameter.device
