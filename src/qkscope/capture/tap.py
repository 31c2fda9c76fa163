"""The seam into the model: see every attention call's queries and keys, change nothing.

transformers' modeling files ask one method, `AttentionInterface.get_interface`, for the kernel to call. While a
tap is open that lookup hands out the very kernel it would have handed out, wrapped so that modules of tapped
models are observed first. The implementation's name, the masks made for it and a file's own eager kernel stay
as they are, so the output is bit-identical; Gemma2's and GPT-OSS's eager defaults and a modeling file's private
interface need no special case. Compiled graphs ask for no kernel, so while a tap is open compiled code runs as it
was written. Cost: one dictionary look-up per attention call.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from qkscope.capture.backbone import find_compiled, run_uncompiled
from qkscope.errors import CaptureError


@dataclass(frozen=True)
class AttentionCall:
    """What one layer hands to its attention kernel: the vectors whose dot product is the score (see also prerope)."""

    layer: int
    query: Tensor  # (batch, query heads, tokens, head width)
    key: Tensor  # (batch, key heads, tokens, head width)
    sliding_window: int | None
    kernel: str
    scaling: float | None = None  # of scores, as the call says; None is the kernels' default, 1 / sqrt(head width)
    softcap: float | None = None  # scores become softcap tanh(score / softcap) before softmax
    sinks: Tensor | None = None  # (query heads,): learned logits of "no key"


Observer = Callable[[AttentionCall], None]


class StopForward(BaseException):
    """Ends a forward pass whose wanted layers have all been seen.

    No Exception, so that no modeling code takes it for a failure of its own.
    """


class Tap:
    """A context manager that shows `observer` each attention call of `backbone`, once per layer and forward.

    `calls` and `tokens` count per layer what was seen, so that a run can prove that it captured something. Where `last`
    names layers, a forward pass ends, with `StopForward`, as soon as each of them has been shown: what comes after
    their queries and keys (attention, feed-forward, later layers, the final norm) is not needed for any sum.
    """

    last: frozenset[int] | None = None

    def __init__(self, backbone: nn.Module, observer: Observer) -> None:
        self.calls: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.forwards = 0
        self._backbone = backbone
        self._observer = observer
        self._names = {id(module): name for name, module in backbone.named_modules()}
        self._numbers: dict[int, int] = {}  # id(module) -> layer, for modules that carry no layer_idx
        # By layer, what this forward showed there: the module, its queries and its keys.
        self._seen: dict[int, tuple[nn.Module, weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __enter__(self) -> Tap:
        _lookup.open(self, self._names)
        self._hook = self._backbone.register_forward_pre_hook(self._start_forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _lookup.close(self._names)
        if self._hook is not None:
            self._hook.remove()
        self._seen.clear()
        if error is None and not self.calls and (parts := find_compiled(self._backbone)):
            raise CaptureError(
                f"no attention call arrived: {parts[0] or 'the model'} is compiled, and an already compiled graph "
                "no longer looks up its kernels; capture from the model before it is compiled, or with torch 2.6 "
                "or newer, which can run it uncompiled"
            )

    def _start_forward(self, *_: Any) -> None:
        self._seen.clear()
        self.forwards += 1

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, kernel: str, kernel_kwargs: Mapping[str, Any]
    ) -> None:
        """Count and pass on one call; called by the wrapped kernel."""
        layer = self._layer_of(module)
        if not self._is_new(layer, module, query, key):
            return
        self.calls[layer] += 1
        self.tokens[layer] += query.shape[0] * query.shape[2]
        self._observer(
            AttentionCall(
                layer,
                query,
                key,
                kernel_kwargs.get("sliding_window"),
                kernel,
                kernel_kwargs.get("scaling"),
                kernel_kwargs.get("softcap"),
                kernel_kwargs.get("s_aux"),
            )
        )
        if self.last is not None and self.last <= self._seen.keys():
            raise StopForward

    def replace_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """What the model gets back from its kernel: a tap that only watches hands on what the kernel returned."""
        return output

    def _layer_of(self, module: nn.Module) -> int:
        # Some encoders do not number their layers: the order of first calls is the order of layers.
        number = getattr(module, "layer_idx", None)
        return self._numbers.setdefault(id(module), len(self._numbers)) if number is None else int(number)

    def _is_new(self, layer: int, module: nn.Module, query: Tensor, key: Tensor) -> bool:
        """Whether this forward pass has not shown the layer's head yet; refuses queries and keys that are no head's."""
        if (seen := self._seen.get(layer)) is not None:
            # Differential attention calls twice with the same queries and keys and other values: one head, seen once.
            if seen[0] is module and seen[1]() is query and seen[2]() is key:
                return False
            names = sorted({self._names[id(seen[0])], self._names[id(module)]})
            raise CaptureError(
                f"layer {layer} calls attention more than once per forward pass, with different queries or keys "
                f"(in {' and '.join(names)}); qkscope cannot tell which of them is the head"
            )
        self._seen[layer] = module, weakref.ref(query), weakref.ref(key)  # the tap must not keep activations alive
        if query.dim() != 4 or key.dim() != 4:
            raise CaptureError(
                f"layer {layer}: queries and keys should be (batch, heads, tokens, width), "
                f"got {tuple(query.shape)} and {tuple(key.shape)}"
            )
        if query.shape[2] != key.shape[2]:
            raise CaptureError(
                f"layer {layer}: {query.shape[2]} queries against {key.shape[2]} keys: a KV cache or "
                "cross-attention; run without a cache, on a self-attention model"
            )
        if query.shape[1] % key.shape[1] or query.shape[3] != key.shape[3]:
            raise CaptureError(
                f"layer {layer}: {query.shape[1]} query heads of width {query.shape[3]} do not fit "
                f"{key.shape[1]} key heads of width {key.shape[3]}"
            )
        return True


KERNEL_ARGUMENTS = ("query", "key", "value", "attention_mask")  # of a kernel's arguments behind the module


def kernel_argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One of a kernel's first arguments, however it was given; None where it was not."""
    positional = [each for each in KERNEL_ARGUMENTS if each not in kwargs]
    return kwargs[name] if name in kwargs else dict(zip(positional, args, strict=False)).get(name)


class _Lookup:
    """Installs the wrapped look-up with the first open tap and removes it with the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taps: dict[int, Tap] = {}  # id(module) -> its tap
        self._original: Callable[..., Any] | None = None
        self._uncompiled: AbstractContextManager[None] = nullcontext()

    def open(self, tap: Tap, modules: dict[int, str]) -> None:
        with self._lock:
            if taken := [modules[m] or "the model" for m in modules if m in self._taps]:
                raise CaptureError(f"{taken[0]} is already being captured by another tap")
            if self._original is None:
                self._original = original = getattr(AttentionInterface, "get_interface", None)
                if original is None:
                    raise CaptureError(
                        "this transformers version has no AttentionInterface.get_interface; "
                        "install transformers 5.7 or newer"
                    )
                AttentionInterface.get_interface = functools.wraps(original)(
                    lambda *args, **kwargs: self._observed(original(*args, **kwargs))
                )
                self._uncompiled = run_uncompiled()
                self._uncompiled.__enter__()
            self._taps.update(dict.fromkeys(modules, tap))

    def close(self, modules: dict[int, str]) -> None:
        with self._lock:
            for module in modules:
                self._taps.pop(module, None)
            if not self._taps and self._original is not None:
                AttentionInterface.get_interface = self._original
                self._original = None
                self._uncompiled.__exit__(None, None, None)

    def _observed(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def observed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            tap = self._taps.get(id(module))
            if tap is None:
                return kernel(module, *args, **kwargs)
            query, key = kernel_argument("query", args, kwargs), kernel_argument("key", args, kwargs)
            tap.observe(module, query, key, getattr(kernel, "__name__", type(kernel).__name__), kwargs)
            return tap.replace_output(module, args, kwargs, kernel(module, *args, **kwargs))

        return observed


_lookup = _Lookup()
