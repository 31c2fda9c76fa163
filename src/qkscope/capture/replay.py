"""Compute the queries and keys that an attention layer would have with another rotation, or none.

Hooks record which modules that take `position_embeddings` are running, and their inputs. When a call reaches its
kernel, the innermost of them can be run once more on the same inputs with other embeddings; that second run ends where
its kernel would start, so it costs the projections only. The real run is not affected: caches are left out, and
mappings through which layers share keys (Gemma 3n, Gemma 4) are shadowed.

`PreRopeTap` shows each call as it would be with the rotation of position 0 for every token. What else a model does to
queries and keys stays: a scale that RoPE scaling puts into cos and sin (YaRN), norms and scales after the rotation. So
vectors before and after rotation differ by the rotation alone.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from qkscope.capture.backbone import forward_signature
from qkscope.capture.tap import AttentionCall, Observer, Tap
from qkscope.errors import CaptureError
from qkscope.layers import Stage

POSITIONS = "position_embeddings"


class ReplayTap(Tap):
    """A tap whose observer may compute the call it is shown again with other position embeddings (`replay`)."""

    def __init__(self, backbone: nn.Module, observer: Observer) -> None:
        super().__init__(backbone, observer)
        self._running: list[tuple[nn.Module, inspect.BoundArguments]] = []  # outermost first
        self._calling: nn.Module | None = None  # the module whose kernel call is being observed
        self._replaying = False
        self._shadows: dict[int, dict[Any, Any]] = {}  # id(mapping) -> what replays of this forward put there
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> ReplayTap:
        super().__enter__()
        for module in self._backbone.modules():
            signature = forward_signature(module)
            if POSITIONS in signature.parameters:
                entering = functools.partial(self._entering, signature)
                self._handles.append(module.register_forward_pre_hook(entering, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leaving))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        self._shadows.clear()
        super().__exit__(kind, error, trace)

    def _start_forward(self, *_: Any) -> None:
        super()._start_forward()
        self._running.clear()
        self._shadows.clear()

    def _entering(
        self, signature: inspect.Signature, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._running.append((module, signature.bind(*args, **kwargs)))

    def _leaving(self, module: nn.Module, *_: Any) -> None:
        while self._running and self._running.pop()[0] is not module:
            pass

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, kernel: str, kernel_kwargs: Mapping[str, Any]
    ) -> None:
        """As in `Tap`, except that a replay ends here."""
        if self._replaying:
            raise _AtKernel(module, query, key)
        self._calling = module
        try:
            super().observe(module, query, key, kernel, kernel_kwargs)
        finally:
            self._calling = None

    @property
    def embeddings(self) -> Any:
        """The position embeddings that the running layer was given; None where there are none."""
        return self._running[-1][1].arguments.get(POSITIONS) if self._running else None

    def replay(self, change: Callable[[Any], Any]) -> tuple[Tensor, Tensor]:
        """The observed call's queries and keys with `change` applied to its layer's position embeddings."""
        if self.embeddings is None:
            raise CaptureError("its attention is given no position embeddings")
        module, bound = self._running[-1]
        again = inspect.BoundArguments(bound.signature, OrderedDict())
        for name, value in bound.arguments.items():
            extra = bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            private = (
                {key: self._private(key, of) for key, of in value.items()} if extra else self._private(name, value)
            )
            again.arguments[name] = private
        again.arguments[POSITIONS] = change(self.embeddings)
        depth = len(self._running)
        self._replaying = True
        try:
            module.forward(*again.args, **again.kwargs)
        except _AtKernel as reached:
            if reached.module is not self._calling:
                raise CaptureError("its position embeddings are given to several attention layers at once") from None
            return reached.query, reached.key
        finally:
            self._replaying = False
            del self._running[depth:]
        raise CaptureError("its attention, called again on the same inputs, did not reach its kernel")

    def _private(self, name: str, value: Any) -> Any:
        """An argument of the real run as a replay may have it: nothing that it could change there."""
        if name == "past_key_values":
            return None  # queries and keys are of the same tokens (the tap checked), so there is no past to miss
        if not isinstance(value, MutableMapping):
            return value
        shadow = self._shadows.setdefault(id(value), {})
        for key, item in value.items():
            shadow.setdefault(key, item)
        return shadow


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


def open_tap(backbone: nn.Module, observer: Observer, stage: Stage = "post_rope") -> Tap:
    """A tap to enter: `observer` is shown queries and keys as the kernel gets them, or as they were unrotated."""
    if stage == "post_rope":
        return Tap(backbone, observer)
    if stage == "pre_rope":
        return PreRopeTap(backbone, observer)
    raise CaptureError(f"stage {stage!r} is neither 'post_rope' nor 'pre_rope'")


class _AtKernel(BaseException):
    """Ends a replay; no Exception, so that no modeling code takes it for a failure of its own."""

    def __init__(self, module: nn.Module, query: Tensor, key: Tensor) -> None:
        super().__init__()
        self.module, self.query, self.key = module, query, key


def half_turn(embeddings: Any) -> Any:
    """The rotation with 180° added in every plane that rotates at all: rotated coordinates change sign."""
    parts, zeros = _rotation(embeddings)
    still = functools.reduce(torch.logical_or, (zero.flatten(0, -2).all(dim=0) for zero in zeros))  # (planes,)
    return _like(embeddings, [torch.where(still, part, -part) for part in parts])


def no_rotation(embeddings: Any) -> Any:
    """No rotation: every token gets what the model itself gives to position 0, which also keeps its scale."""
    parts, zeros = _rotation(embeddings)
    still = functools.reduce(torch.logical_or, (zero.all(dim=-1) for zero in zeros))  # (..., tokens)
    places = still.nonzero()
    if not len(places):
        raise CaptureError("no token is at position 0, so its queries and keys without rotation cannot be computed")
    first = tuple(places[0].tolist())
    return _like(embeddings, [part[first].expand_as(part).clone() for part in parts])


def quarter_turn(embeddings: Any, columns: Tensor) -> Any:
    """No rotation, except for a quarter turn by the columns (of cos and sin, or complex) that are marked."""
    parts, _ = _rotation(no_rotation(embeddings))
    columns = columns.to(parts[0].device)
    if len(parts) == 1:
        return torch.where(columns, parts[0] * 1j, parts[0])
    sines = 0 if bool((parts[0] == 0).all()) else 1
    quarter = list(parts)
    quarter[1 - sines] = torch.where(columns, parts[sines], parts[1 - sines])
    quarter[sines] = torch.where(columns, parts[1 - sines], parts[sines])
    return _like(embeddings, quarter)


def cos_and_sin(embeddings: Any) -> tuple[Tensor, Tensor]:
    """What a rotation whose first token is at position 0 multiplies with: (tokens, columns) each, on the CPU."""
    parts, _ = _rotation(embeddings)
    parts = [parts[0].real, parts[0].imag] if len(parts) == 1 else parts
    flat = [part.reshape(-1, *part.shape[-2:]).cpu() for part in parts]
    if any(part.dim() < 2 or not torch.equal(part, part[:1].expand_as(part)) for part in flat):
        raise CaptureError("its position embeddings are not the same for all rows")
    first, second = (part[0] for part in flat)
    if not bool((second[0] == 0).all()):
        first, second = second, first
    if not bool((second[0] == 0).all()):
        raise CaptureError("it rotates position 0")
    return first, second


def _rotation(embeddings: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a rotation, and where its sines are zero (of two tensors either may hold the sines)."""
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        return [embeddings], [embeddings.imag == 0]
    pair = isinstance(embeddings, tuple | list) and len(embeddings) == 2
    if pair and all(isinstance(part, Tensor) and part.shape == embeddings[0].shape for part in embeddings):
        return list(embeddings), [part == 0 for part in embeddings]
    raise CaptureError("its position embeddings are neither (cos, sin) nor complex numbers")


def _like(embeddings: Any, parts: list[Tensor]) -> Any:
    return parts[0] if isinstance(embeddings, Tensor) else type(embeddings)(parts)
