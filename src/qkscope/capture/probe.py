"""Measure what each layer is, and prove that the tap is harmless, on a few tokens before the real run.

Rotary or not is measured, not read from a config: each attention module is run again on the same hidden states
with half a turn added to every plane that turns. Rotated coordinates then come back with the opposite sign and
the others bit for bit the same, in any precision and any pair layout. What the rotation is, is measured in a pass
of its own (rotation.py). Cost: four short forward passes.

NaN and infinite weights (a checkpoint that diverged, or a damaged file) are refused before that.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import (
    call_backbone,
    evaluation,
    forward_signature,
    input_device,
    require_all_heads,
    run_backbone,
    text_backbone,
    text_config,
)
from qkscope.capture.replay import ReplayTap, half_turn
from qkscope.capture.rotation import measure_rotations, probed_positions
from qkscope.capture.tap import AttentionCall, Tap
from qkscope.errors import CaptureError, ModelError, QkscopeError, QkscopeWarning, first_line
from qkscope.layers import AttentionKind, LayerFacts
from qkscope.text import are, counted

PROBE_TOKENS = 16  # enough for every head to have something to attend to; short enough to cost nothing
UNDECLARED = 4096  # the context of a model that neither the caller nor its config gives one
SHIFT = 3  # positions, for models whose attention takes no position embeddings
LISTED = 3  # tensors that a message names


@dataclass(frozen=True)
class ProbedModel:
    """What was found: the layers that call in, how many layers the model has, and which kernels they use."""

    layers: tuple[LayerFacts, ...]
    n_layers: int
    kernels: tuple[str, ...]
    unmeasured: Mapping[int, str] = field(default_factory=dict)  # why a rotary layer's rotation is not known

    @classmethod
    def of(
        cls,
        layers: tuple[LayerFacts, ...],
        calls: Mapping[int, AttentionCall],
        config: Any,
        unmeasured: Mapping[int, str],
    ) -> ProbedModel:
        """What calls from these layers show of a model with this config."""
        n_layers = max(int(getattr(config, "num_hidden_layers", 0) or 0), layers[-1].layer + 1)
        return cls(layers, n_layers, tuple(sorted({call.kernel for call in calls.values()})), unmeasured)

    @property
    def gaps(self) -> tuple[int, ...]:
        """Layers without ordinary attention (linear attention, cross-attention without an image)."""
        measured = {facts.layer for facts in self.layers}
        return tuple(layer for layer in range(self.n_layers) if layer not in measured)


def probe_model(model: nn.Module, context: int | None = None, *, some_heads: bool = False) -> ProbedModel:
    """Find the attention layers of `model` and their facts; refuse a model that cannot be captured.

    Rotations are those of sequences of `context` tokens, by default the longest that the model declares. With
    `some_heads`, the model may be tensor-parallel, and the facts are of this rank's heads.
    """
    if not some_heads:
        require_all_heads(model)
    backbone, config = text_backbone(model), text_config(model)
    positions = probed_positions(max(2, context or _longest(config)))
    tokens, calls = probe_tokens(backbone, config), dict[int, AttentionCall]()
    rotary: dict[int, int | None] = {}

    def observe(call: AttentionCall) -> None:
        calls[call.layer] = replace(call, query=call.query.clone(), key=call.key.clone())
        try:
            turned = zip((call.query, call.key), tap.replay(half_turn), strict=True)
            counts = {_flipped(before, after) for before, after in turned}
        except CaptureError:  # no position embeddings, or none of a known form: a shift of positions may show more
            counts = {None}
        rotary[call.layer] = counts.pop() if len(counts) == 1 else None

    try:
        with evaluation(model):
            require_finite_weights(backbone)
            # First, so that the passes below leave a model whose angles follow the length as they found it.
            rotations = measure_rotations(backbone, _random_tokens(backbone, config, len(positions)), positions)
            untouched = run_backbone(backbone, tokens)
            with ReplayTap(backbone, observe) as tap:
                tapped = run_backbone(backbone, tokens)
            if not calls:
                raise CaptureError(never_called_message(model))
            require_identical(untouched, tapped)
            if missing := [layer for layer, dims in rotary.items() if dims is None]:
                shifted = _dims_shifted(backbone, calls, tokens)
                rotary |= {layer: shifted.get(layer) for layer in missing}
    except QkscopeError:
        raise
    except Exception as error:  # whatever a model raises on a few tokens is a reason not to capture from it
        what = f"{type(error).__name__}: {first_line(error)}"
        raise CaptureError(f"the model fails on {PROBE_TOKENS} tokens ({what})") from error
    layers = tuple(
        replace(layer_facts(calls[layer], rotary[layer], config), rotation=rotations.by_layer.get(layer))
        for layer in sorted(calls)
    )
    unknown = [facts.layer for facts in layers if facts.rotation is None and facts.rotary != "nope"]
    return ProbedModel.of(layers, calls, config, {layer: rotations.why(layer) for layer in unknown})


def never_called_message(model: nn.Module) -> str:
    """Why a model that does not dispatch its attention is refused."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return (
        f"no attention call arrived from this model (type {kind!r}): its modeling code computes attention itself "
        "instead of asking transformers' AttentionInterface, so its queries and keys cannot be captured"
    )


def probe_tokens(backbone: nn.Module, config: Any) -> Tensor:
    """A few random token ids that the model can take."""
    return _random_tokens(backbone, config, max(2, min(PROBE_TOKENS, _longest(config) - SHIFT)))


def _longest(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", None) or UNDECLARED)


def _random_tokens(backbone: nn.Module, config: Any, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, max(2, int(config.vocab_size)), (1, length), generator=generator)
    return ids.to(input_device(backbone))


def require_identical(untouched: Tensor, tapped: Tensor) -> None:
    """Refuse a model whose output changes when it is observed."""
    # NaN hidden states are equal here too: they are found, and reported with their place, by the real run.
    if not torch.equal(untouched.nan_to_num(0.0), tapped.nan_to_num(0.0)):
        worst = (untouched - tapped).abs().max().item()
        raise CaptureError(
            f"the model's output differs by {worst:.3g} when its attention is observed (the same input gave another "
            "output): the model is not deterministic, or its code depends on the attention function it is given"
        )


def _flipped(before: Tensor, after: Tensor) -> int | None:
    """How many coordinates changed sign; None if a coordinate neither flipped nor stayed."""
    same = (before == after).flatten(0, 2).all(dim=0)
    opposite = (before == -after).flatten(0, 2).all(dim=0)
    if not bool((same | opposite).all()):
        return None
    # A coordinate that is zero everywhere is both: it counts as rotated only where another one shows rotation.
    rotated = opposite & ~same
    return int((opposite if bool(rotated.any()) else rotated).sum())


def _dims_shifted(backbone: nn.Module, calls: dict[int, AttentionCall], tokens: Tensor) -> dict[int, int | None]:
    """Shift all positions: a rotated coordinate changes, lengths and scores stay; absolute positions change all.

    Slow planes hardly move over a few positions: a shift shows that a layer is rotary (None), or is not (0).
    """
    if "position_ids" not in forward_signature(backbone).parameters:
        return {}
    shifted: dict[int, AttentionCall] = {}
    positions = torch.arange(SHIFT, SHIFT + tokens.shape[1], device=tokens.device)[None]
    with Tap(backbone, lambda call: shifted.__setitem__(call.layer, call)):
        call_backbone(backbone, input_ids=tokens, position_ids=positions)
    dims: dict[int, int | None] = {}
    for layer in calls.keys() & shifted.keys():
        before, after = calls[layer].query, shifted[layer].query
        scale = before.norm(dim=-1).max()
        # Where numbers are not finite nothing is known; the real run finds the place. Where lengths change, learned or
        # absolute positions enter through the hidden states, and nothing is rotated.
        known = bool(torch.isfinite(scale))
        stay = known and torch.allclose(before.norm(dim=-1), after.norm(dim=-1), atol=1e-3 * float(scale))
        rotary = stay and bool(((before - after).abs() > 1e-3 * scale).any())
        dims[layer] = None if rotary or not known else 0
    return dims


def layer_facts(call: AttentionCall, rotary_dims: int | None, config: Any) -> LayerFacts:
    """The facts that a layer's attention call shows; its rotary coordinates are measured elsewhere."""
    attention, window = attention_kind(call.layer, call.sliding_window, config)
    scale = call.query.shape[3] ** -0.5 if call.scaling is None else call.scaling
    return LayerFacts(
        layer=call.layer,
        q_heads=call.query.shape[1],
        kv_heads=call.key.shape[1],
        head_dim=call.query.shape[3],
        rotary="unknown" if rotary_dims is None else "rotary" if rotary_dims else "nope",
        rotary_dims=rotary_dims,
        attention=attention,
        attention_window=window,
        # What softmax sees q.k times; None where it is no plain number (a learned scale).
        score_scale=float(scale) if isinstance(scale, int | float) and scale > 0 else None,
    )


def attention_kind(layer: int, sliding_window: int | None, config: Any) -> tuple[AttentionKind, int | None]:
    """Full, sliding or chunked: what the call says, and for chunks (which only the mask knows) the config."""
    if sliding_window is not None:
        return "sliding", int(sliding_window)
    types = getattr(config, "layer_types", None) or []
    declared = types[layer] if layer < len(types) else "full_attention"
    if declared == "chunked_attention":
        return "chunked", getattr(config, "attention_chunk_size", None)
    if declared == "sliding_attention":
        return "sliding", getattr(config, "sliding_window", None)
    return "full", None


# -- weights that are not finite ---------------------------------------------------------------------------


def require_finite_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights; the error names layers, tensors and how many values there are."""
    bad = []
    for name, tensor in _suspects(model):
        count = torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).logical_not().sum()
        if total := int(count.full_tensor() if hasattr(count, "full_tensor") else count):  # over all ranks
            layer = re.search(r"\.(\d+)\.", f".{name}")
            where = f"layer {layer[1]}, " if layer else ""
            bad.append((total, f"{where}{name} has {total} of {tensor.numel()}"))
    if bad:
        more = f", and {len(bad) - LISTED} more tensors have some" if len(bad) > LISTED else ""
        raise ModelError(
            f"{sum(count for count, _ in bad)} of its weights are NaN or infinite: "
            f"{', '.join(text for _, text in bad[:LISTED])}{more}; its training diverged, or its file is damaged"
        )


def _suspects(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that may have non-finite values: one reduction per tensor in memory, one answer per device."""
    extremes: dict[torch.device, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        if hasattr(tensor, "full_tensor") or tensor.element_size() == 1:
            yield name, tensor  # split over ranks, or of eight bits: torch has no such reduction
        else:
            extremes[tensor.device].append((name, tensor, torch.stack(torch.aminmax(tensor))))
    for of_device in extremes.values():
        # In float32, where any finite weight stays finite (float64 ones may be larger and are counted later).
        finite = torch.isfinite(torch.stack([each.float() for _, _, each in of_device])).all(dim=1)
        yield from (of_device[i][:2] for i in (~finite).nonzero().flatten().tolist())
    yield from _offloaded(model)


def _offloaded(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights that are in memory only while their module runs, one at a time, read as accelerate's hooks do."""
    read: set[str] = set()
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            weights: Mapping[str, Tensor] | None = getattr(each, "weights_map", None)
            if weights is None:
                continue
            for key, parameter in module.named_parameters(recurse=each.place_submodules, remove_duplicate=False):
                if _is_absent(parameter):
                    name = f"{path}.{key}".lstrip(".")
                    read.add(name)
                    yield name, weights[key].detach()
    absent = {name for name, each in model.named_parameters(remove_duplicate=False) if _is_absent(each)}
    if unread := sorted(absent - read):
        warnings.warn(
            f"{counted(len(unread), 'tensor')} of weights (the first: {unread[0]}) {are(len(unread))} offloaded in a "
            "way that qkscope cannot read, so whether all values are finite was not checked",
            QkscopeWarning,
            stacklevel=2,
        )


def _is_absent(parameter: Tensor) -> bool:
    return parameter.is_meta and parameter.is_floating_point() and parameter.numel() > 0
