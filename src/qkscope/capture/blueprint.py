"""A model as shapes, on torch's meta device: no weights, no memory, any size.

**Its attention layers**: one forward pass of shapes is tapped. A layer is rotary if its queries depend on the position
embeddings, which autograd knows without computing anything.

**Whether a checkpoint's tensors fit it**: transformers fills missing tensors with random numbers and drops unexpected
ones; both only log a warning. Here either is an error. Before anything runs, transformers' own loader fills the model
with the names and shapes of the checkpoint's headers, so all of its renaming and fusing applies and no weight is read.
When weights are loaded, the loader's report is checked again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import forward_signature, text_backbone, text_config
from qkscope.capture.gguf import gguf_names, gguf_shapes, rename_tensors
from qkscope.capture.hub import cached_adapter, cached_weights, explain_failure, is_unconverted, weights_index
from qkscope.capture.load import config_text, quiet_loading
from qkscope.capture.probe import ProbedModel, attention_kind, layer_facts, never_called_message
from qkscope.capture.replay import POSITIONS
from qkscope.capture.source import ModelSource
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.capture.weights import INDEX, read_shapes, require_adapter_fits, weight_files, weight_map
from qkscope.errors import CaptureError, ModelError, first_line
from qkscope.layers import LayerFacts, Rotary
from qkscope.text import counted

TOKENS = 8  # in the pass of shapes
SHOWN = 5  # tensors of each kind in a message
# What a backbone does not use: output heads, value heads, multi-token prediction.
HEADS = re.compile(r"(lm_head|embed_out|score|classifier|qa_outputs|v_head|mtp)\.")
PREFIXES = {
    "_orig_mod.": "which torch.compile adds: save the original with model._orig_mod.save_pretrained(folder)",
    "module.": "which DataParallel and DistributedDataParallel add: save with model.module.save_pretrained(folder)",
    "_fsdp_wrapped_module.": "which FSDP adds: save the full state dict of the unwrapped model",
    "base_model.model.": "which peft adds: save with model.merge_and_unload().save_pretrained(folder)",
    "model.model.": "which a wrapper adds: save the model inside it, with wrapper.model.save_pretrained(folder)",
}

Shapes = dict[str, tuple[int, ...] | None]  # by name; None where only the name is known

_fitting: set[int] = set()  # hashes of configs and tensors that fit: those of one training run are all the same


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


# -- tensors that fit --------------------------------------------------------------------------------------


class Misfits(NamedTuple):
    """Tensors that a checkpoint and its architecture do not share."""

    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]  # with both shapes


def require_tensors(source: ModelSource, config: Any) -> None:
    """Refuse a checkpoint whose headers do not fit its config; reads no weights.

    Undecided cases pass, and `require_loaded` decides: weights that are not on this machine yet, quantized models, and
    GGUF architectures whose tensors have no one-to-one names in transformers.
    """
    stored = _stored(source)
    if stored is not None and getattr(config, "quantization_config", None) is None:
        key = hash((config_text(config), str(getattr(config, "architectures", None)), frozenset(stored.items())))
        if key not in _fitting or source.trust_remote_code:
            info = _load_shapes(source, config, stored)
            if info is not None:
                require_loaded(source, config, info)
            _fitting.add(key)
    folder = cached_adapter(source)
    if folder is not None:
        require_adapter_fits(folder, build_on_meta(config, source.trust_remote_code, head=True))


def require_loaded(source: ModelSource, config: Any, info: Mapping[str, Any], *, head: bool = True) -> None:
    """Refuse what transformers' loading info says was missing, unexpected, or of another shape, unless harmless.

    With `head=False`, the model has a head that is not used, which may be missing.
    """
    unused = _unused(info["unexpected_keys"], config)
    misfits = Misfits(
        sorted(name for name in info["missing_keys"] if head or not HEADS.match(name)),
        sorted(set(info["unexpected_keys"]) - unused),
        sorted(f"{name}: {_shape(stored)}, not {_shape(needed)}" for name, stored, needed in info["mismatched_keys"]),
    )
    if any(misfits):
        raise ModelError(_message(source, config, misfits))


def _unused(names: Iterable[str], config: Any) -> set[str]:
    """Those of a checkpoint's tensors that belong to a head: by name, or because the class that was saved has them."""
    import transformers

    unused = {name for name in names if HEADS.match(name)}
    kind = getattr(transformers, str((getattr(config, "architectures", None) or [""])[0]), None)
    if unused.issuperset(names) or not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return unused
    try:
        with torch.device("meta"):
            model = kind(deepcopy(config))
    except Exception:  # a class of another config
        return unused
    backbone, own = f"{model.base_model_prefix}.", model.state_dict().keys()
    return unused | {name for name in names if name in own and not name.startswith(backbone)}


def _stored(source: ModelSource) -> Shapes | None:
    """Names and shapes in the headers of a source's weight files; None while they are not on this machine.

    Of sharded weights on the Hub, the index has the names.
    """
    if source.gguf_file:
        return gguf_shapes(source.location, source.gguf_file)
    files = weight_files(Path(source.location)) if source.kind == "local" else cached_weights(source)
    if files is not None:
        return {name: shape for path in files for name, shape in read_shapes(path).items()}
    index = weights_index(source)
    return None if index is None else dict.fromkeys(weight_map(index))


def _load_shapes(source: ModelSource, config: Any, stored: Shapes) -> dict[str, Any] | None:
    """The loading info of transformers for these tensors; None where it cannot be had without weights."""
    model, file_names = build_on_meta(config, source.trust_remote_code), {}
    names_only = None in stored.values()
    if source.gguf_file:
        names = gguf_names(source.location, source.gguf_file, model)
        if names is None:
            return None
        stored, file_names = rename_tensors(stored, names, model), names
    try:
        with quiet_loading(report=False):
            shapes = {name: torch.empty(shape or (), device="meta") for name, shape in stored.items()}
            _, info = type(model).from_pretrained(
                None,
                config=deepcopy(config),
                state_dict=shapes,
                device_map="meta",
                dtype=torch.bfloat16,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        if is_unconverted(error) and not names_only:
            raise explain_failure(source, error) from error
        return None  # code that needs values: loading decides
    prefix = f"{model.base_model_prefix}."
    twice = {name for name in model.state_dict() if name in stored and prefix + name in stored}
    return {
        **info,
        "missing_keys": [file_names.get(name, name) for name in info["missing_keys"]],
        "mismatched_keys": () if names_only else info["mismatched_keys"],
        "unexpected_keys": twice | set(info["unexpected_keys"]),
    }


def _message(source: ModelSource, config: Any, misfits: Misfits) -> str:
    parts = [
        f"{counted(len(names), 'tensor')} {what} ({_listed(names)})"
        for names, what in zip(misfits, ("missing", "unexpected", "of another shape"), strict=True)
        if names
    ]
    return (
        f"{_file(source)} does not fit its config (type {config.model_type!r}): {'; '.join(parts)}."
        " transformers would fill missing tensors with random numbers and drop unexpected ones; "
        f"{_cure(misfits.unexpected)}"
    )


def _file(source: ModelSource) -> str:
    """The file whose tensors were compared, where its name is known."""
    if source.kind != "local" or source.adapter:
        return str(source)
    files = weight_files(Path(source.location))
    return str(files[0] if len(files) == 1 else Path(source.location) / INDEX)


def _listed(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def _cure(names: list[str]) -> str:
    """What to do about it; where most names contain what only a wrapper adds, how to save without it."""
    for prefix, cure in PREFIXES.items():
        if 2 * sum(f".{prefix}" in f".{name}" for name in names) > len(names):
            return f"the names contain `{prefix}`, {cure}"
    return "save the checkpoint again, or correct its config"


def _shape(shape: Any) -> str:
    return str(list(shape))
