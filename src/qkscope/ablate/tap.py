"""Change some heads' scores at the kernel's door, and nothing else.

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
from qkscope.capture.tap import Tap, kernel_argument
from qkscope.errors import CaptureError

Edits = Mapping[int, Mapping[int, HeadEdit]]  # layer: head: edit
BLOCK = 512  # queries whose scores are held at once
UNKNOWN = ("softcap", "s_aux", "head_mask", "block_mask")  # of a kernel's arguments: they change scores in other ways
# Between the kernel's output and the explicit one, as a share of the output's size: rounding, by precision.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Attention:
    """Where a head looks, on average over the queries of a pass but the first, which sees itself only."""

    entropy: float  # of its attention weights, in nats
    distance: float  # from the query to the keys, in tokens, weighted by attention


class EditTap(Tap):
    """A context manager: while it is open, passes of `backbone` have these edits; `edits` may be changed in between.

    Of the heads in `watched`, (layer, head), each pass leaves in `attention` where they look.
    """

    def __init__(self, backbone: nn.Module, edits: Edits | None = None) -> None:
        super().__init__(backbone, lambda call: None)
        self.edits: Edits = dict(edits or {})
        self.watched: Collection[tuple[int, int]] = ()
        self.attention: dict[tuple[int, int], Attention] = {}

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """The kernel's output with the edited heads' parts replaced."""
        layer = self._layer_of(module)
        edits, watched = self.edits.get(layer) or {}, [head for of, head in self.watched if of == layer]
        if not edits and not watched:
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
            changed[:, :, head] = 0 if edit.silent else call.attend(head, edit).to(own.dtype)
        return (changed, *output[1:])


class CheckTap(Tap):
    """Compares the kernel's output with the explicit computation of every head: `differences` by layer."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone, lambda call: None)
        self.differences: dict[int, float] = {}
        self.refused: dict[int, str] = {}

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """The output as it is; what the explicit computation gives is only compared."""
        layer, own = self._layer_of(module), output[0]
        try:
            require_editable(layer, module, kwargs)
        except CaptureError as error:
            self.refused[layer] = str(error)
            return output
        call = KernelCall.of(module, args, kwargs)
        size = own.float().abs().max().clamp_min(1e-30)
        worst = [(own[:, :, head] - call.attend(head, HeadEdit())).abs().max() / size for head in range(own.shape[2])]
        self.differences[layer] = float(torch.stack(worst).max())
        if self.differences[layer] > ROUNDING.get(own.dtype, 1e-4):
            self.refused[layer] = (
                f"layer {layer}: attention computed as softmax of scaled scores differs from its kernel's by "
                f"{self.differences[layer]:.1g} of its size (sinks, a soft cap or a mask of its own?), so its heads "
                "cannot be edited"
            )
        return output


def require_editable(layer: int, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a kernel that does more to scores than scale, mask and softmax."""
    odd = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if getattr(module, "sinks", None) is not None:
        odd.append("sinks")
    if odd:
        raise CaptureError(f"layer {layer}: its kernel is given {odd[0]}, so an edit of its scores is not defined here")


class KernelCall:
    """One layer's queries, keys, values and mask, as its kernel was given them."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, causal: bool
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, mask
        self.scale, self.causal = scale, causal
        self.group = query.shape[1] // key.shape[1]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> KernelCall:
        """From what the kernel was called with."""
        query, key, value, mask = (
            kernel_argument(name, args, kwargs) for name in ("query", "key", "value", "attention_mask")
        )
        scale = kwargs.get("scaling")
        said = kwargs.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if said is None else said)
        return cls(query, key, value, mask, query.shape[-1] ** -0.5 if scale is None else float(scale), causal)

    def attend(self, head: int, edit: HeadEdit) -> Tensor:
        """The head's output (batch, tokens, width), computed in float32 or better."""
        value = self.value[:, head // self.group]
        out = torch.empty_like(value, dtype=_precise(self.query))
        for rows, weights in self._weights(head, edit):
            out[:, rows] = weights @ value.to(weights.dtype)
        return out

    def attention(self, head: int, edit: HeadEdit) -> Attention:
        """Where the head looks with the edit; one that is silent looks where it did."""
        entropy = distance = 0.0
        tokens = self.query.shape[2]
        for rows, weights in self._weights(head, edit):
            exact = weights.double()
            entropy += float(torch.special.entr(exact).sum())
            distance += float((exact * _distances(rows, tokens, exact)).sum())
        queries = max(1, (tokens - 1) * len(self.query))
        return Attention(entropy / queries, distance / queries)

    def _weights(self, head: int, edit: HeadEdit) -> Iterator[tuple[slice, Tensor]]:
        """Attention weights (batch, rows, tokens) of one block of queries after the other."""
        precision = _precise(self.query)
        q, k = self.query[:, head].to(precision), self.key[:, head // self.group].to(precision)
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
