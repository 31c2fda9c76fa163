"""A model's attention layers from its config alone: no weights, no memory, any size.

The model is built on torch's meta device and one forward pass of shapes is tapped. A layer is rotary if its
queries depend on the position embeddings, which autograd knows without computing anything.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import forward_signature, text_backbone, text_config
from qkscope.capture.probe import ProbedModel, attention_kind, layer_facts, never_called_message
from qkscope.capture.replay import POSITIONS
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.errors import CaptureError, ModelError, first_line
from qkscope.layers import LayerFacts, Rotary

TOKENS = 8


@dataclass(frozen=True)
class WeightCounts:
    """Parameters by what they cost: all are loaded, some are multiplied with every token, some are only looked up."""

    embedding: int  # the table of token embeddings
    active: int  # multiplied with each token: matrices, of routed experts only as many as a token visits
    head: int  # stored with the backbone but never loaded: an untied language-model head
    hidden: int  # width of the residual stream
    inner: int  # width of the feed-forward layer that a token passes


@dataclass(frozen=True)
class Blueprint:
    """The layers a config describes; `exact` where a pass of shapes confirmed them."""

    probe: ProbedModel
    exact: bool
    parameters: int
    weights: WeightCounts


def blueprint(config: Any, *, trust_remote_code: bool = False) -> Blueprint:
    """Layers, heads and windows that `config` will have; refuses a model that never calls in."""
    model = build_on_meta(config, trust_remote_code)
    parameters, weights = sum(parameter.numel() for parameter in model.parameters()), _weights(model)
    calls: dict[int, AttentionCall] = {}
    try:
        _run_shapes(text_backbone(model), calls)
    except CaptureError:
        raise
    except Exception:  # code that looks at values cannot run on shapes; the real probe will see these models
        return Blueprint(_declared(text_config(model)), exact=False, parameters=parameters, weights=weights)
    if not calls:
        raise CaptureError(never_called_message(model))
    return Blueprint(_confirmed(calls, text_config(model)), exact=True, parameters=parameters, weights=weights)


def _weights(model: nn.Module) -> WeightCounts:
    config, backbone = text_config(model), text_backbone(model)
    find: Any = backbone.get_input_embeddings
    table = find().weight
    looked_up = {name for name, module in backbone.named_modules() if isinstance(module, nn.Embedding)}
    share, active = _visited_share(config), 0.0
    for name, parameter in backbone.named_parameters():  # a vision tower is loaded but does not run
        # Vectors (norms, biases) are added or multiplied element by element: negligible next to a matrix.
        if parameter.dim() > 1 and name.rpartition(".")[0] not in looked_up:
            active += parameter.numel() * (share if "experts" in name.split(".") else 1.0)
    hidden = int(table.shape[1])
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return WeightCounts(
        table.numel(), round(active), 0 if tied else table.numel(), hidden, _inner_width(config, share, hidden)
    )


def _visited_share(config: Any) -> float:
    """The share of routed experts that one token visits; 1 where there are none or the config does not say."""
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    visited = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    return visited / experts if experts and visited else 1.0


def _inner_width(config: Any, share: float, hidden: int) -> int:
    dense = _first(config, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    if share == 1.0:
        return dense
    visited = _first(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k") or 1
    return max(dense, visited * (_first(config, "moe_intermediate_size") or dense))


def _first(config: Any, *names: str) -> int | None:
    """The first of these config values that is a whole number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def build_on_meta(config: Any, trust_remote_code: bool = False, *, head: bool = False) -> Any:
    """The model of a config, as shapes; without its language-model head unless asked."""
    from transformers import AutoModel, AutoModelForCausalLM

    # Half precision: some expert kernels accept nothing else, and on the meta device it costs nothing.
    try:
        with torch.device("meta"):
            # A copy: from_config writes the dtype into the config, from which the checkpoint's own dtype is read later.
            copy = deepcopy(config)
            kind = AutoModelForCausalLM if head else AutoModel
            model = kind.from_config(copy, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
    except Exception as error:  # sizes that do not fit each other, in whatever way this architecture notices
        raise ModelError(f"no model can be built from its config ({first_line(error)})") from error
    return model.eval().requires_grad_(False)


def _run_shapes(backbone: Any, calls: dict[int, AttentionCall]) -> None:
    backbone.warn_if_padding_and_no_attention_mask = lambda *_: None  # it looks at token values; shapes have none
    if hasattr(backbone, "config"):  # a copy; without a cache masks look at token values, and trainers save it so
        backbone.config.use_cache = True
    hooks = [
        module.register_forward_pre_hook(_track_positions, with_kwargs=True)
        for module in backbone.modules()
        if POSITIONS in forward_signature(module).parameters
    ]
    try:
        with Tap(backbone, lambda call: calls.__setitem__(call.layer, call)):
            backbone(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()


def _track_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let gradients start at this module's position embeddings and nowhere before."""
    bound = forward_signature(module).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor):
            bound.arguments[name] = value.detach()
    embeddings = bound.arguments.get(POSITIONS)
    if isinstance(embeddings, Tensor):
        bound.arguments[POSITIONS] = embeddings.detach().clone().requires_grad_()
    elif isinstance(embeddings, tuple | list):
        bound.arguments[POSITIONS] = tuple(part.detach().clone().requires_grad_() for part in embeddings)
    return bound.args, bound.kwargs


def _confirmed(calls: dict[int, AttentionCall], config: Any) -> ProbedModel:
    layers = []
    for _, call in sorted(calls.items()):
        rotary: Rotary = "rotary" if call.query.requires_grad else "nope"
        layers.append(replace(layer_facts(call, None, config), rotary=rotary, score_scale=None))
    return ProbedModel.of(tuple(layers), calls, config, {})


def _declared(config: Any) -> ProbedModel:
    """What the config says of itself, where shapes alone could not be run."""
    heads = int(config.num_attention_heads)
    keys = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = []
    for layer in range(int(config.num_hidden_layers)):
        attention, window = attention_kind(layer, None, config)
        layers.append(LayerFacts(layer, heads, keys, width, "unknown", None, attention, window))
    return ProbedModel(tuple(layers), len(layers), ())
