"""Load a checkpoint's backbone and tokenizer, safely, on the devices there are."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from qkscope.capture.adapter import merge_adapter
from qkscope.capture.gguf import apply_bos_setting, shared_gguf_reader
from qkscope.capture.hub import adapter_folder, explain_failure, pin_revision, weights_index
from qkscope.capture.source import ModelSource
from qkscope.errors import ModelError, QkscopeWarning, panics_raised


def choose_device(device: str, *, here: bool = True) -> str:
    """`auto` is the GPU if there is one, else the CPU; anything else must be a device, and one of this machine's.

    With `here=False` the work will run on other machines, which have devices of their own.
    """
    import torch

    if device == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ModelError(f"device {device!r} is not one that torch knows; {_devices()}") from None
    if wanted.type == "meta":
        raise ModelError(f"device 'meta' computes nothing; {_devices()}")
    if here and not _is_here(wanted.type, wanted.index):
        raise ModelError(f"device {device!r} is not on this machine; {_devices()}")
    return str(wanted)


def _is_here(kind: str, index: int | None) -> bool:
    import torch

    if kind == "cpu":
        return True
    backend: Any = torch.backends.mps if kind == "mps" else getattr(torch, kind, None)
    if backend is None or not hasattr(backend, "is_available") or not backend.is_available():
        return False
    count = backend.device_count() if hasattr(backend, "device_count") else 1
    return index is None or index < count


def _devices() -> str:
    """The devices that a study may name on this machine."""
    import torch

    names = ["auto", "cpu"]
    if torch.cuda.is_available():
        names += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return f"it should be one of {', '.join(names)} (`auto` takes the GPUs, if there are any)"


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


def load_backbone(
    source: ModelSource, config: Any, *, dtype: str = "auto", device: str = "auto", head: bool = False
) -> Any:
    """The model in evaluation mode, without its language-model head unless asked; several GPUs share its layers."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from qkscope.capture.tensors import require_loaded, require_tensors

    chosen = choose_device(device)
    if source.kind == "hub":  # a local folder was checked when it was found
        weights_index(source)
    placement = "auto" if chosen == "cuda" and torch.cuda.device_count() > 1 and device == "auto" else chosen
    require_tensors(source, config)
    try:
        with panics_raised(), shared_gguf_reader(source.gguf_file), _no_bar():
            model, info = (AutoModelForCausalLM if head or source.adapter else AutoModel).from_pretrained(
                source.location,
                config=config,
                dtype=choose_dtype(dtype, chosen, config),
                use_safetensors=None if source.gguf_file else True,
                device_map=placement,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **source.arguments,
            )
    except Exception as error:
        raise explain_failure(source, error) from error
    require_loaded(source, config, info, head=head or not source.adapter)
    if source.adapter:
        model = merge_adapter(model, adapter_folder(source))
        model = model if head else model.base_model
    return model.eval()


@contextmanager
def _no_bar() -> Iterator[None]:
    """transformers' bar for each load would stand between the lines of a run's progress; that of downloads stays."""
    from transformers.utils import logging

    bars: Any = import_module("huggingface_hub.utils")
    if bars.are_progress_bars_disabled() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    bars.enable_progress_bars()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def allow_unpickling_custom_configs() -> None:
    """Let configs of checkpoints with their own code be unpacked in this process; runs none of it."""
    from transformers.dynamic_module_utils import init_hf_modules

    init_hf_modules()


def load_tokenizer(source: ModelSource) -> tuple[Any, ModelSource]:
    """The tokenizer, without a length limit (the study sets the context), and its source at a fixed commit."""
    from transformers import AutoTokenizer

    try:
        exact = pin_revision(source, "tokenizer_config.json")
        with panics_raised(), shared_gguf_reader(exact.gguf_file):
            tokenizer = AutoTokenizer.from_pretrained(exact.location, **exact.arguments)
            if exact.gguf_file:
                apply_bos_setting(tokenizer, str(Path(exact.location) / exact.gguf_file))
    except Exception as error:
        reason = error if isinstance(error, ModelError) else explain_failure(source, error)
        way_out = "another one can be named with `tokenizer:` in the study"
        raise reason.within("no tokenizer").advised(python=way_out, command=way_out) from error
    tokenizer.model_max_length = int(1e12)  # otherwise long documents only warn
    return tokenizer, exact


def visible_gpus() -> list[str]:
    """The names (as CUDA_VISIBLE_DEVICES has them) of the GPUs this process may use."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def smallest_gpu() -> int:
    """Bytes of memory of the smallest GPU that this process may use; 0 where there is none."""
    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(index).total_memory for index in gpus), default=0)


def limit_process(threads: int, gpus: list[str]) -> None:
    """Keep to so many threads and these GPUs; before the first use of CUDA."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    torch.set_num_threads(threads)


def release_memory() -> None:
    """Give back what is no longer in use."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
