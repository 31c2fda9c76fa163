"""The same capture before rotation: queries and keys after projection and norms, with the rotation left out.

Each attention layer is run a second time on its own inputs with the rotation of position 0 for every token, up to
its kernel; then the real call goes on untouched, so hidden states are those of the real model. What else a model
does to queries and keys stays: a scale that RoPE scaling puts into cos and sin (YaRN), norms and scales after the
rotation. Both stages thus differ by the rotation alone. Cost: the attention projections once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import evaluation, run_backbone, text_backbone, text_config
from qkscope.capture.probe import probe_tokens, require_identical
from qkscope.capture.replay import ReplayTap, no_rotation
from qkscope.capture.tap import AttentionCall, Observer, Tap
from qkscope.errors import CaptureError
from qkscope.layers import LayerFacts, Stage


def open_tap(backbone: nn.Module, observer: Observer, stage: Stage = "post_rope") -> Tap:
    """A tap to enter: `observer` is shown queries and keys as the kernel gets them, or as they were unrotated."""
    if stage == "post_rope":
        return Tap(backbone, observer)
    if stage == "pre_rope":
        return PreRopeTap(backbone, observer)
    raise CaptureError(f"stage {stage!r} is neither 'post_rope' nor 'pre_rope'")


class PreRopeTap(ReplayTap):
    """A tap that shows each call with its rotation left out; the calls themselves stay as they are."""

    def __init__(self, backbone: nn.Module, observer: Observer) -> None:
        super().__init__(backbone, self._without_rotation)
        self._shown = observer

    def _without_rotation(self, call: AttentionCall) -> None:
        try:
            query, key = self.replay(no_rotation)
        except CaptureError as error:
            raise CaptureError(f"layer {call.layer} cannot be captured before rotation: {error}") from None
        self._shown(replace(call, query=query, key=key))


def prove_pre_rope(model: nn.Module, layers: Iterable[LayerFacts]) -> None:
    """Refuse a model whose pre-RoPE vectors are not what they are called, on a few tokens before the real run.

    Its output must not change; at position 0, and in layers without rotation everywhere, both stages must be equal;
    in rotary layers some later token must differ.
    """
    backbone = text_backbone(model)
    tokens = probe_tokens(backbone, text_config(model))
    with evaluation(model):
        untouched = run_backbone(backbone, tokens)
        after = _calls(backbone, tokens, untouched, "post_rope")
        before = _calls(backbone, tokens, untouched, "pre_rope")
    for facts in layers:
        rotated, unrotated = after[facts.layer], before[facts.layer]
        _check_layer(facts, "queries", rotated.query, unrotated.query)
        _check_layer(facts, "keys", rotated.key, unrotated.key)


def _calls(backbone: nn.Module, tokens: Tensor, untouched: Tensor, stage: Stage) -> dict[int, AttentionCall]:
    calls: dict[int, AttentionCall] = {}
    with open_tap(backbone, lambda call: calls.__setitem__(call.layer, call), stage):
        require_identical(untouched, run_backbone(backbone, tokens))
    return calls


def _check_layer(facts: LayerFacts, name: str, rotated: Tensor, unrotated: Tensor) -> None:
    where = f"layer {facts.layer} cannot be captured before rotation: its {name}"
    if not _same(rotated[:, :, 0], unrotated[:, :, 0]):
        raise CaptureError(f"{where} change at position 0, where a rotation changes nothing")
    same = _same(rotated, unrotated)
    if facts.rotary == "nope" and not same:
        raise CaptureError(f"{where} change although the layer has no rotation")
    if facts.rotary == "rotary" and same:
        raise CaptureError(f"{where} stay the same although the layer has a rotation")


def _same(left: Tensor, right: Tensor) -> bool:
    # NaNs are found, and reported with their place, by the real run.
    return left.shape == right.shape and torch.equal(left.nan_to_num(0.0), right.nan_to_num(0.0))
