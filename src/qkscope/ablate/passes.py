"""Passes of a language model whose heads' scores are edited: the loss of every token, with and without edits.

The model's own kernel runs for all heads. For edited heads attention is then computed again, explicitly, with the edit,
and their part of the kernel's output is replaced. So all other heads, also those that read the same keys, keep the
kernel's output bit for bit, and a pass without edits is the model's own.

An edit in layer L leaves all layers before L as they were. Their outputs are kept from the pass without an edit, where
memory allows, so that a pass with an edit begins at L.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from qkscope.ablate.edits import HeadEdit
from qkscope.capture.backbone import evaluation, forward_signature, input_device, text_backbone
from qkscope.capture.tap import Tap, argument
from qkscope.errors import CaptureError, InputError

Losses = NDArray[np.float64]
Edits = Mapping[int, Mapping[int, HeadEdit]]  # layer: head: edit
BLOCK = 512  # queries whose scores are held at once
OTHER_CHANGES = ("softcap", "s_aux", "head_mask", "block_mask")  # arguments of kernels that change scores otherwise
# Tolerance between the kernel's output and the explicit one, as a share of the output's size, by precision.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
MOST_KEPT = 2 * 2**30  # bytes of layer outputs of one document
ROWS = 512  # tokens whose logits over the vocabulary are held at once in float32


class EditableModel:
    """A language model whose heads can be edited, on one document at a time. Use it as a context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._backbone = model, text_backbone(model)
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise InputError(f"{type(model).__name__} has no language-model head, so no loss; load it with its head")
        self._tap = EditTap(self._backbone)
        self._layers = decoder_layers(self._backbone)
        self._outputs: dict[int, Any] = {}  # by layer, in the pass without edits
        self._ids: Tensor | None = None
        self._open = ExitStack()

    def __enter__(self) -> EditableModel:
        self._open.enter_context(evaluation(self._model))
        self._open.enter_context(self._tap)
        return self

    def __exit__(self, *error: Any) -> None:
        self._outputs.clear()
        self._open.__exit__(*error)

    def check(self, ids: NDArray[np.int64]) -> dict[int, str]:
        """The layers that cannot be edited, and why; found by computing every head of one document explicitly."""
        self._tap.checking = True
        try:
            self._forward(self._tokens(ids))
        finally:
            self._tap.checking = False
        if not self._tap.calls:
            raise CaptureError("no attention call arrived from this model, so none of its heads can be edited")
        return self._tap.refused

    @property
    def attention(self) -> dict[tuple[int, int], Attention]:
        """Where the watched heads attended in the last pass, by (layer, head)."""
        return self._tap.attention

    def begin(self, ids: NDArray[np.int64], watched: Collection[tuple[int, int]] = ()) -> Losses:
        """Take a document (tokens,); the loss of each token but the first, without edits.

        `attention` gets where the `watched` heads attend.
        """
        self._ids = self._tokens(ids)
        self._outputs.clear()
        with self._outputs_kept():
            return self._pass({}, watched)

    def edited(self, edits: Edits, watched: Collection[tuple[int, int]] = ()) -> Losses:
        """The losses of the same document with edits."""
        changed = [layer for layer in edits if edits[layer]]
        with self._starting_at(min([*changed, *(layer for layer, _ in watched)], default=0)):
            return self._pass(edits, watched)

    def _pass(self, edits: Edits, watched: Collection[tuple[int, int]]) -> Losses:
        self._tap.edits, self._tap.watched, self._tap.attention = edits, watched, {}
        try:
            return self._losses()
        finally:
            self._tap.edits, self._tap.watched = {}, ()

    def _tokens(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.asarray(ids), dtype=torch.long)[None].to(input_device(self._backbone))

    def _forward(self, ids: Tensor) -> Tensor:
        """Logits (1, tokens, vocabulary)."""
        arguments: dict[str, Any] = {"input_ids": ids}
        if "use_cache" in forward_signature(self._model).parameters:
            arguments["use_cache"] = False
        logits: Tensor = self._model(**arguments).logits
        return logits

    def _losses(self) -> Losses:
        assert self._ids is not None  # `begin` was called
        logits, targets = self._forward(self._ids)[0, :-1], self._ids[0, 1:]
        parts = [
            functional.cross_entropy(rows.float(), of.to(rows.device), reduction="none")
            for rows, of in zip(torch.split(logits, ROWS), torch.split(targets, ROWS), strict=True)
        ]
        return torch.cat(parts).double().cpu().numpy()

    @contextmanager
    def _outputs_kept(self) -> Iterator[None]:
        """Keep each layer's output, as long as there is room for it."""
        room = MOST_KEPT

        def keep(layer: int, output: Any) -> None:
            nonlocal room
            room -= sum(each.nbytes for each in _tensors(output))
            if room >= 0:
                self._outputs[layer] = output

        with ExitStack() as hooks:
            for layer, module in self._layers.items():
                hook = module.register_forward_hook(lambda _m, _i, output, layer=layer: keep(layer, output))
                hooks.callback(hook.remove)
            yield

    @contextmanager
    def _starting_at(self, first: int) -> Iterator[None]:
        """Layers before `first` return what they returned without edits; they are not computed."""
        with ExitStack() as replaced:
            for layer, module in self._layers.items():
                if layer < first and layer in self._outputs:
                    module.forward = lambda *_args, _output=self._outputs[layer], **_kwargs: _output
                    replaced.callback(delattr, module, "forward")
            yield


def _tensors(output: Any) -> list[Tensor]:
    return [each for each in (output if isinstance(output, tuple | list) else [output]) if isinstance(each, Tensor)]


def decoder_layers(backbone: nn.Module) -> dict[int, nn.Module]:
    """The blocks that are run one after the other, by number; none where that cannot be told."""
    lists = [module for module in backbone.children() if isinstance(module, nn.ModuleList) and len(module)]
    if len(lists) != 1:
        return {}
    blocks = dict(enumerate(lists[0]))
    plain = all("forward" not in vars(block) and not hasattr(block, "_hf_hook") for block in blocks.values())
    return blocks if plain else {}


# -- the kernel's output with edits ---------------------------------------------------------------------------


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
