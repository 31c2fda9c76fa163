"""Head types: attention to the previous token, to an earlier copy of the token, and to what followed that copy.

Sequences of random tokens are repeated once. Nothing but position and repetition can be attended to there, so the mean
attention weight of queries in the second copy tells previous-token, duplicate-token, and induction heads from others:
on the token before, on the first copy of the token, and on the token that followed it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qkscope.capture.attention import attention_weights
from qkscope.capture.backbone import evaluation, input_device, run_backbone, text_backbone, text_config
from qkscope.capture.probe import ProbedModel
from qkscope.capture.tap import AttentionCall, Tap

LENGTH = 32  # random tokens before they are repeated
PATTERNS = ("previous", "duplicate", "induction")


def repeated_tokens(config: Any, sequences: int, seed: int = 0) -> Tensor:
    """(sequences, 1 + 2 LENGTH) token ids: the first one (BOS where the model has one), then random ones, twice."""
    generator = torch.Generator().manual_seed(seed)
    special = {getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ordinary = torch.tensor([token for token in range(int(config.vocab_size)) if token not in special])
    half = ordinary[torch.randint(0, len(ordinary), (sequences, LENGTH), generator=generator)]
    first = getattr(config, "bos_token_id", None)
    first = first if isinstance(first, int) and first < config.vocab_size else int(ordinary[0])
    return torch.cat([torch.full((sequences, 1), first), half, half], dim=1)


def pattern_scores(weights: Tensor) -> Tensor:
    """Mean weights of the second copy's queries on each pattern: (sequences, heads, 3) of (…, tokens, tokens)."""
    tokens = torch.arange(1 + LENGTH, 1 + 2 * LENGTH, device=weights.device)
    keys = torch.stack([tokens - 1, tokens - LENGTH, tokens - LENGTH + 1])
    return weights[:, :, tokens, keys].mean(dim=-1)


def measure_head_types(
    model: nn.Module, probed: ProbedModel, sequences: int, skipped: Collection[int] = (), seed: int = 0
) -> dict[int, NDArray[np.float32]]:
    """(heads, sequences, 3) by layer, of layers whose attention can be evaluated; one short forward pass."""
    backbone, layers = text_backbone(model), {facts.layer: facts for facts in probed.layers}
    scores: dict[int, NDArray[np.float32]] = {}

    def observe(call: AttentionCall) -> None:
        if call.layer in layers and call.layer not in skipped:
            of_layer = pattern_scores(attention_weights(call, layers[call.layer]))
            scores[call.layer] = of_layer.transpose(0, 1).float().cpu().numpy()

    ids = repeated_tokens(text_config(model), sequences, seed).to(input_device(backbone))
    with evaluation(model), Tap(backbone, observe):
        run_backbone(backbone, ids)
    return scores
