"""A layer's softmax computed explicitly, and the proof that this is what its kernel computes.

Sampled query rows (`moments/attention_running.py`) are evaluated next to the kernel, not inside it. So before a
capture, a few tokens are run with every layer's attention weights computed explicitly, and weights times values are
compared with the kernel's own output. Layers where they differ are captured without rows, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import can_stop_early, evaluation, run_backbone, text_backbone, text_config
from qkscope.capture.probe import probe_tokens
from qkscope.capture.tap import AttentionCall, StopForward, Tap, kernel_argument
from qkscope.layers import LayerFacts
from qkscope.moments.attention_running import HIDDEN, SoftmaxRule

# Largest difference between the kernel's output and the explicit one, as a share of the output's size.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def softmax_rule(call: AttentionCall) -> SoftmaxRule | None:
    """What the kernel does to scores besides masking; None where its scale is no plain number."""
    scale = call.query.shape[-1] ** -0.5 if call.scaling is None else call.scaling
    if not isinstance(scale, int | float) or not isinstance(call.softcap, int | float | None):
        return None
    return SoftmaxRule(float(scale), call.softcap or None)


def attention_weights(call: AttentionCall, facts: LayerFacts, real: Tensor | None = None) -> Tensor:
    """Weights (rows, heads, tokens, tokens) of causal attention, in float32 or better; `real` (rows, tokens) is 0 for
    padding on the right.
    """
    rule = softmax_rule(call)
    if rule is None:
        raise ValueError("the scale of its scores is no plain number")
    precision = torch.promote_types(call.query.dtype, torch.float32)
    tokens, each = call.query.shape[2], call.query.shape[1] // call.key.shape[1]
    keys = call.key.to(precision).repeat_interleave(each, dim=1)
    scores = call.query.to(precision) @ keys.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    seen = visible_keys(tokens, facts, scores.device)
    if real is not None:
        seen = seen & real[:, None, None].to(device=scores.device, dtype=torch.bool)
    scores = scores.masked_fill(~seen, HIDDEN)
    if call.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = call.sinks.to(scores)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def visible_keys(tokens: int, facts: LayerFacts, device: torch.device | None = None) -> Tensor:
    """Which key (column) each query (row) sees: none behind it, and none beyond the layer's reach."""
    t = torch.arange(tokens, device=device)
    seen = t[:, None] >= t
    if facts.attention_window is not None and facts.attention == "sliding":
        seen &= t[:, None] - t < facts.attention_window
    if facts.attention_window is not None and facts.attention == "chunked":
        seen &= t[:, None] // facts.attention_window == t // facts.attention_window
    return seen


def prove_attention(model: nn.Module, layers: Iterable[LayerFacts]) -> dict[int, str]:
    """The layers whose attention cannot be evaluated from queries and keys, and why; one short forward pass."""
    backbone = text_backbone(model)
    tap = _ProvingTap(backbone, {facts.layer: facts for facts in layers}, can_stop_early(model))
    with evaluation(model), tap, suppress(StopForward):
        run_backbone(backbone, probe_tokens(backbone, text_config(model)))
    return tap.reasons


class _ProvingTap(Tap):
    """Compares each kernel's output with that of explicit attention."""

    def __init__(self, backbone: nn.Module, layers: Mapping[int, LayerFacts], may_stop: bool) -> None:
        super().__init__(backbone, self._keep)
        self.reasons: dict[int, str] = {}
        self._layers, self._left, self._may_stop = layers, set(layers), may_stop
        self._call: AttentionCall | None = None

    def _keep(self, call: AttentionCall) -> None:
        self._call = call

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        call, self._call = self._call, None
        if call is not None and call.layer in self._layers:
            value = kernel_argument("value", args, kwargs)
            reason = _difference(call, self._layers[call.layer], value, output[0])
            if reason:
                self.reasons[call.layer] = reason
            self._left.discard(call.layer)
            if self._may_stop and not self._left:
                raise StopForward
        return output


def _difference(call: AttentionCall, facts: LayerFacts, value: Tensor, own: Tensor) -> str:
    """Why explicit attention is not the kernel's; "" where it is. `own` is (rows, tokens, heads, width)."""
    if softmax_rule(call) is None:
        return "the scale of its scores is no plain number"
    weights = attention_weights(call, facts)
    values = value.to(weights.dtype).repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    explicit = (weights @ values).transpose(1, 2)
    if explicit.shape != own.shape:
        return f"its kernel returns {tuple(own.shape)}, not one vector per head and token"
    size = own.float().abs().max().clamp_min(1e-30)
    difference = float((explicit - own.to(explicit.dtype)).abs().max() / size)
    if difference <= TOLERANCE.get(own.dtype, 1e-4):
        return ""
    return (
        f"its kernel does more than scale, cap, mask, and softmax (outputs differ by {difference:.1g} of their size: "
        "attention in both directions, a bias, or a mask of its own)"
    )
