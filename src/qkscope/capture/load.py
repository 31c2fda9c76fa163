"""Load a checkpoint's backbone and tokenizer, safely, on the devices there are."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from qkscope.capture.hub import explain, pinned
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import INDEX, require_safe_index
from qkscope.errors import ModelError, QkscopeWarning, panics_raised


def choose_device(device: str) -> str:
    """`auto` is the GPU if there is one, else the CPU; anything else must be a device torch knows."""
    import torch

    if device != "auto":
        try:
            return str(torch.device(device))
        except RuntimeError as error:
            raise ModelError(f"device {device!r} is none that torch knows ({error})") from None
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def choose_dtype(dtype: str, device: str, config: Any) -> Any:
    """The dtype to load in: `auto` is float32 on a CPU, where it is faster and exact, else the checkpoint's own."""
    import torch

    if dtype != "auto":
        if device == "cpu" and dtype != "float32":
            warnings.warn(
                f"dtype {dtype} on a CPU is slow, and bfloat16 ends the process on machines whose AMX units are not "
                "usable (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 avoids that); dtype: auto uses float32 there",
                QkscopeWarning,
                stacklevel=2,
            )
        return getattr(torch, dtype)
    if device == "cpu":
        return torch.float32
    return getattr(config, "dtype", None) or torch.float32


def load_backbone(source: ModelSource, config: Any, *, dtype: str = "auto", device: str = "auto") -> Any:
    """The model without its language-model head, in evaluation mode; several GPUs share its layers."""
    import torch
    from transformers import AutoModel

    chosen = choose_device(device)
    if source.kind == "hub":  # a local folder was checked when it was found
        _require_safe_hub_index(source)
    placement = "auto" if chosen == "cuda" and torch.cuda.device_count() > 1 and device == "auto" else chosen
    try:
        with panics_raised():
            model = AutoModel.from_pretrained(
                source.location,
                config=config,
                dtype=choose_dtype(dtype, chosen, config),
                use_safetensors=None if source.gguf_file else True,
                device_map=placement,
                **source.arguments,
            )
    except Exception as error:
        raise explain(source, error) from error
    return model.eval()


def _require_safe_hub_index(source: ModelSource) -> None:
    """Look at the index that a sharded checkpoint on the Hub has, before any of its shards is fetched."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            source.location,
            INDEX,
            revision=source.revision or "main",
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except Exception as error:
        raise explain(source, error) from error
    if found is not None:
        require_safe_index(Path(found))


def find_custom_code() -> None:
    """Let configs of checkpoints with their own code be unpacked in this process; runs none of it."""
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()


def load_tokenizer(source: ModelSource) -> tuple[Any, ModelSource]:
    """The tokenizer, without a length limit of its own (the study sets the context), and its pinned source."""
    from transformers import AutoTokenizer

    try:
        exact = pinned(source, "tokenizer_config.json")
        with panics_raised():
            tokenizer = AutoTokenizer.from_pretrained(exact.location, **exact.arguments)
    except Exception as error:
        reason = explain(source, error)
        raise ModelError(f"no tokenizer: {reason}; another one can be named with `tokenizer:`") from error
    tokenizer.model_max_length = int(1e12)  # otherwise long documents only warn
    return tokenizer, exact
