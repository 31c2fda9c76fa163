"""Which part of a model is run, and how: the text backbone alone, no logits, no cache, no gradients, not compiled."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.capture.load import text_part
from qkscope.errors import CaptureError


def text_backbone(model: nn.Module) -> nn.Module:
    """The module that turns token ids into hidden states: no language-model head, no vision tower."""
    inner = unwrap_model(model)
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "get_decoder"):
        raise CaptureError(f"{type(inner).__name__} is not a transformers model; qkscope taps transformers' attention")
    if getattr(config, "is_encoder_decoder", False):
        raise CaptureError(
            f"{type(inner).__name__} is an encoder-decoder: its cross-attention heads have no one position axis; "
            "give a decoder-only or an encoder-only model"
        )
    find: Any = inner.get_decoder
    backbone = find()
    return backbone if isinstance(backbone, nn.Module) else inner


def text_config(model: nn.Module) -> Any:
    """The backbone's own config (multimodal configs nest it)."""
    return text_part(unwrap_model(model).config)


def model_limits(model: nn.Module) -> tuple[int | None, int | None]:
    """How many token ids and how many positions the model has, where it says so."""
    find: Any = getattr(text_backbone(model), "get_input_embeddings", None)
    table = getattr(find() if find is not None else None, "weight", None)
    longest = getattr(text_config(model), "max_position_embeddings", None)
    vocabulary = int(table.shape[0]) if table is not None and table.ndim == 2 and len(table) else None
    return vocabulary, longest if isinstance(longest, int) and longest > 0 else None


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside data-parallel and compiled wrappers; refuses what splits it so that no rank has a head."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or _is_compiled_wrapper(model):
        inner: Any = model._orig_mod if _is_compiled_wrapper(model) else model.module
        model = inner
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{type(model).__name__} is not a model; give a transformers model that is loaded")
    if any(_is_flat_sharded(module) for module in model.modules()):
        raise CaptureError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which keeps its weights flattened and split "
            "over ranks outside its own forward pass; shard it with fully_shard (FSDP2), or save a checkpoint and "
            "capture from that"
        )
    return model


def head_ranks(model: nn.Module) -> int:
    """Over how many ranks a tensor-parallel model splits its heads; 1 where each rank has all of them."""
    ranks = getattr(unwrap_model(model), "tp_size", None)
    return ranks if isinstance(ranks, int) else 1


def require_all_heads(model: nn.Module) -> None:
    """Refuse a model of which this rank has some of the heads only, and would count them from 0."""
    if (ranks := head_ranks(model)) > 1:
        raise CaptureError(
            f"the model is tensor-parallel over {ranks} ranks, each of which computes only some of the heads and "
            "numbers them from 0; load it without tp_plan, or measure it with qkscope.train, which puts them together"
        )


def _is_compiled_wrapper(model: Any) -> bool:
    return isinstance(getattr(model, "_orig_mod", None), nn.Module)


def _is_flat_sharded(module: nn.Module) -> bool:
    # Whoever has such a module has imported its package; importing it here would cost everybody else a second.
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FullyShardedDataParallel)


def find_compiled(model: nn.Module) -> list[str]:
    """Names of modules that run as compiled graphs ('' is the model itself)."""
    return [
        name
        for name, module in model.named_modules()
        if _is_compiled_wrapper(module)
        or getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, torch.jit.ScriptModule)
    ]


def run_uncompiled() -> AbstractContextManager[None]:
    """While it is entered, what was compiled runs as it was written: a finished graph asks for no kernel."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    # Without dynamo nothing has been compiled, and loading it takes seconds.
    if set_stance is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = set_stance("force_eager")
    return stance


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module trains again exactly if it did before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference mode: what a model fills on the way (RoPE caches, gathered weights) must be fit for training.
        with torch.no_grad(), run_uncompiled(), _sharded_as_before(model):
            yield
    finally:
        for module in training:
            module.training = True


_WHOLE: dict[nn.Module, nn.Module] = {}  # by backbone, while it is evaluated: the model that has to be called for it


@contextmanager
def _sharded_as_before(model: nn.Module) -> Iterator[None]:
    """Where FSDP2 shards more than the backbone, the whole model is called: its root gathers weights for others.

    A group of modules that share weights over ranks also counts which of them have run, and would wait for its last
    one (accelerate puts the final norm and the language-model head into one). All ranks have to take part.
    """
    package = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(package, "FSDPModule", ())
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    backbone = text_backbone(model) if sharded else model
    if set(sharded) <= set(backbone.modules()) or backbone in _WHOLE:
        yield
        return
    _WHOLE[backbone] = unwrap_model(model)
    try:
        yield
    finally:
        del _WHOLE[backbone]
        for module in sharded:
            module.reshard()


def forward_signature(module: nn.Module) -> inspect.Signature:
    """What a module's forward takes; looked up once for all modules of a class, of which a model has hundreds."""
    forward: Any = module.forward
    if getattr(forward, "__self__", None) is not module:  # replaced, as accelerate does
        return inspect.signature(forward)
    return _method_signature(forward.__func__)


@functools.lru_cache(maxsize=256)
def _method_signature(method: Callable[..., Any]) -> inspect.Signature:
    whole = inspect.signature(method)
    return whole.replace(parameters=list(whole.parameters.values())[1:])


def run_backbone(backbone: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """One forward pass without a cache; returns the last hidden states (batch, tokens, hidden)."""
    arguments: dict[str, Any] = {"input_ids": input_ids.to(input_device(backbone))}
    if attention_mask is not None:
        arguments["attention_mask"] = attention_mask.to(arguments["input_ids"].device)
    if "use_cache" in forward_signature(backbone).parameters:
        arguments["use_cache"] = False
    return call_backbone(backbone, **arguments)


def call_backbone(backbone: nn.Module, **arguments: Any) -> Tensor:
    """The last hidden states of a pass with these arguments."""
    whole = _WHOLE.get(backbone)
    if whole is None:
        hidden: Tensor = backbone(**arguments)[0]
        return hidden
    seen: list[Tensor] = []
    handle = backbone.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    few_logits = {"logits_to_keep": 1} if "logits_to_keep" in forward_signature(whole).parameters else {}
    try:
        whole(**arguments, **few_logits)
    finally:
        handle.remove()
    return seen[0]


def can_stop_early(model: nn.Module) -> bool:
    """Whether a forward pass may be left in the middle: not where hooks put weights away again behind a module."""
    package = sys.modules.get("torch.distributed.fsdp")
    sharded: Any = getattr(package, "FSDPModule", ())
    return not any(isinstance(module, sharded) or _offloads(module) for module in model.modules())


def _offloads(module: nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ())))


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
