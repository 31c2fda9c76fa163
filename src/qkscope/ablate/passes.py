"""Passes of a language model with and without edits: the loss of every token.

An edit in layer L leaves all layers before L as they were. Their outputs are kept from the pass without an edit, where
memory allows, so that a pass with an edit begins at L.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from qkscope.ablate.tap import Attention, Edits, EditTap
from qkscope.capture.backbone import evaluation, forward_signature, input_device, text_backbone
from qkscope.errors import CaptureError, InputError

MOST_KEPT = 2 * 2**30  # bytes of layer outputs of one document
ROWS = 512  # tokens whose logits over the vocabulary are held at once in float32

Losses = NDArray[np.float64]


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
