"""Change the scores of some heads where the model calls its attention kernel, and nothing else.

The model's own kernel runs for all heads. For edited heads attention is then computed again, explicitly, with the edit,
and their part of the kernel's output is replaced. So all other heads, also those that read the same keys, keep the
kernel's output bit for bit, and a pass without edits is the model's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.ablate.edits import HeadEdit
from qkscope.capture.tap import Tap, argument
from qkscope.errors import CaptureError

Edits = Mapping[int, Mapping[int, HeadEdit]]  # layer: head: edit
BLOCK = 512  # queries whose scores are held at once
OTHER_CHANGES = ("softcap", "s_aux", "head_mask", "block_mask")  # arguments of kernels that change scores otherwise
# Tolerance between the kernel's output and the explicit one, as a share of the output's size, by precision.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Attention:
    """Where a head attends: means over the queries of a pass but the first, which sees itself only."""

    entropy: float  # of the attention weights, in nats
    distance: float  # from the query to the keys, in tokens, weighted by attention


class EditTap(Tap):
    """A context manager: while it is open, passes of `backbone` have these edits; `edits` may be changed in between.

    Each pass leaves in `attention` where the heads in `watched`, (layer, head), attend. While `checking`, nothing is
    edited: `refused` gets the layers whose kernel is not the explicit computation, with the reason.
    """

    def __init__(self, backbone: nn.Module, edits: Edits | None = None) -> None:
        super().__init__(backbone, lambda call: None)
        self.edits: Edits = dict(edits or {})
        self.watched: Collection[tuple[int, int]] = ()
        self.attention: dict[tuple[int, int], Attention] = {}
        self.checking = False
        self.refused: dict[int, str] = {}

    def returned(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """The kernel's output with the edited heads' parts replaced."""
        layer = self._layer_of(module)
        edits, watched = self.edits.get(layer) or {}, [head for of, head in self.watched if of == layer]
        if self.checking:
            try:
                require_editable(layer, module, kwargs)
                require_same(layer, KernelCall.of(module, args, kwargs), output[0])
            except CaptureError as error:
                self.refused[layer] = str(error)
        if self.checking or not (edits or watched):
            return output
        require_editable(layer, module, kwargs)
        call = KernelCall.of(module, args, kwargs)
        for head in watched:
            self.attention[layer, head] = call.attention(head, edits.get(head, HeadEdit()))
        if not edits:
            return output
        own = output[0]  # (batch, tokens, heads, width)
        changed = own.clone()
        for head, edit in edits.items():
            changed[:, :, head] = 0 if edit.zero_output else call.attend(head, edit).to(own.dtype)
        return (changed, *output[1:])


def require_editable(layer: int, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a kernel that does more to scores than scale, mask and softmax."""
    others = [name for name in OTHER_CHANGES if kwargs.get(name) is not None]
    if getattr(module, "sinks", None) is not None:
        others.append("sinks")
    if others:
        raise CaptureError(
            f"layer {layer}: its kernel is given {others[0]}, so an edit of its scores is not defined here"
        )


def require_same(layer: int, call: KernelCall, own: Tensor) -> None:
    """Refuse a kernel whose output (batch, tokens, heads, width) is not that of the explicit computation."""
    size = own.float().abs().max().clamp_min(1e-30)
    worst = [(own[:, :, head] - call.attend(head, HeadEdit())).abs().max() / size for head in range(own.shape[2])]
    difference = float(torch.stack(worst).max())
    if difference > ROUNDING.get(own.dtype, 1e-4):
        raise CaptureError(
            f"layer {layer}: attention computed as softmax of scaled scores differs from its kernel's by "
            f"{difference:.1g} of its size (sinks, a soft cap or a mask of its own?), so its heads cannot be edited"
        )


@dataclass(frozen=True)
class KernelCall:
    """One layer's queries, keys and values (batch, heads, tokens, width), as its kernel was given them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    causal: bool

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelCall:
        """The arguments of a call, with the defaults of transformers' kernels."""
        query, key, value, mask = (argument(name, args, kwargs) for name in ("query", "key", "value", "attention_mask"))
        scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        return cls(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else float(scale), causal)

    def attend(self, head: int, edit: HeadEdit) -> Tensor:
        """The head's output (batch, tokens, width), computed in float32 or better."""
        value = self.value[:, self._key_head(head)]
        out = torch.empty_like(value, dtype=_precise(self.query))
        for rows, weights in self._weights(head, edit):
            out[:, rows] = weights @ value.to(weights.dtype)
        return out

    def attention(self, head: int, edit: HeadEdit) -> Attention:
        """Where the head attends with the edit; a head that puts out zeros attends where it did."""
        entropy = distance = 0.0
        tokens = self.query.shape[2]
        for rows, weights in self._weights(head, edit):
            exact = weights.double()
            entropy += float(torch.special.entr(exact).sum())
            distance += float((exact * _distances(rows, tokens, exact)).sum())
        queries = max(1, (tokens - 1) * len(self.query))
        return Attention(entropy / queries, distance / queries)

    def _key_head(self, head: int) -> int:
        return head * self.key.shape[1] // self.query.shape[1]

    def _weights(self, head: int, edit: HeadEdit) -> Iterator[tuple[slice, Tensor]]:
        """Attention weights (batch, rows, tokens) of one block of queries after the other."""
        precision = _precise(self.query)
        q, k = self.query[:, head].to(precision), self.key[:, self._key_head(head)].to(precision)
        q, k = _shifted(q, edit.query_shift), _shifted(k, edit.key_shift)
        tokens = q.shape[1]
        for start in range(0, tokens, BLOCK):
            rows = slice(start, min(start + BLOCK, tokens))
            scores = q[:, rows] @ k.transpose(1, 2) + self._added(edit, rows, tokens, q)
            yield rows, self._masked(scores * self.scale, head, rows).softmax(dim=-1)

    def _added(self, edit: HeadEdit, rows: slice, tokens: int, like: Tensor) -> Tensor | float:
        """What the edit adds to raw scores (rows, tokens)."""
        added: Tensor | float = 0.0
        if edit.mean_pair is not None:
            query, key = (_tensor(part[:tokens], like) for part in edit.mean_pair)
            added = added - query[rows] @ key.T
        if edit.by_distance is not None:
            added = added + _tensor(edit.by_distance, like)[_distances(rows, tokens, like).clamp_min(0)]
        return added

    def _masked(self, scores: Tensor, head: int, rows: slice) -> Tensor:
        tokens = scores.shape[-1]
        if self.mask is None:
            if not self.causal:
                return scores
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)[rows]
            return scores.masked_fill(later, float("-inf"))
        mask = self.mask[..., :tokens]
        mask = mask[:, head if mask.shape[1] > 1 else 0, rows]  # (batch or 1, rows, tokens)
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)


def _precise(vectors: Tensor) -> torch.dtype:
    return torch.promote_types(vectors.dtype, torch.float32)


def _distances(rows: slice, tokens: int, like: Tensor) -> Tensor:
    """From each query of a block back to each key: (rows, tokens)."""
    queries = torch.arange(rows.start, rows.stop, device=like.device)
    return queries[:, None] - torch.arange(tokens, device=like.device)


def _shifted(vectors: Tensor, shift: Any) -> Tensor:
    return vectors if shift is None else vectors - _tensor(shift[: vectors.shape[1]], vectors)


def _tensor(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)
