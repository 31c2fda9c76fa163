"""Load a checkpoint's config, tokenizer and backbone, safely, on the devices there are.

A config is changed as the study says, and checked against what the study expects.
"""

from __future__ import annotations

import difflib
import gc
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from qkscope.capture.hub import adapter_folder, download_weights, explain_failure, needs_remote_code, pin_revision
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import apply_bos_setting, merge_adapter, shared_gguf_reader
from qkscope.errors import ModelError, QkscopeWarning, panics_raised

MISSING = object()  # of a config that has no such key; a value may be None
INDIFFERENT = ("_name_or_path", "transformers_version", "use_cache", "architectures")  # change no number
# Far above any model: a slip or a trap, which would be found only after minutes of building layers.
MOST = {"num_hidden_layers": 4096, "num_attention_heads": 10_000, "num_key_value_heads": 10_000, "head_dim": 4096}


def load_config(source: ModelSource, overrides: Mapping[str, Any] | None = None) -> Any:
    """The checkpoint's config with `overrides` applied; failures say what to do."""
    from transformers import AutoConfig

    try:
        with shared_gguf_reader(source.gguf_file):
            config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except Exception as error:
        raise explain_failure(source, error) from error
    # A type that transformers does not know comes back as a bare config whose code lives with the checkpoint.
    if not source.trust_remote_code and not type(config).__module__.startswith("transformers."):
        raise needs_remote_code(source)
    if getattr(config, "auto_map", None) and not source.trust_remote_code:
        warnings.warn(
            f"{source} comes with Python code of its own, which is not run: transformers' own {config.model_type!r} "
            "model is used instead (the checkpoint's own runs if remote code is trusted)",
            QkscopeWarning,
            stacklevel=2,
        )
    if (named := getattr(config, "transformers_weights", None)) is not None:
        raise ModelError(
            f"{source}: its config names a weight file of its own ({str(named)[:80]!r}), which is not read"
        )
    _refuse_fetched_kernels(source, config)
    for key, value in (overrides or {}).items():
        _override(config, key, value)
    return config


def text_part(config: Any) -> Any:
    """The config of the text backbone, which multimodal configs nest."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def config_text(config: Any) -> str:
    """A config as text, equal where nothing differs that changes a number."""
    relevant = {key: value for key, value in config.to_dict().items() if key not in INDIFFERENT}
    return json.dumps(relevant, sort_keys=True, default=str)


def _refuse_fetched_kernels(source: ModelSource, config: Any) -> None:
    """Attention and expert kernels named like a repository would be downloaded and run: that is code as well."""
    for name, value in vars(config).items():
        if name.endswith("_implementation_internal") and "/" in str(value) and not source.trust_remote_code:
            raise ModelError(
                f"{source}: its config asks for the kernel {str(value)[:80]!r}, which is code to be downloaded and is "
                "not run unless you allow it"
            ).advised(python="pass trust_remote_code=True if you trust it", command="--trust-remote-code runs it")
        if isinstance(getattr(value, "model_type", None), str) and hasattr(value, "to_dict"):
            _refuse_fetched_kernels(source, value)


def _require_sane_rope(rope: Any) -> None:
    """Angles are position / rope_theta ** x: a base of 0, or of no number at all, leaves them undefined."""
    for key, value in rope.items() if isinstance(rope, Mapping) else ():
        if isinstance(value, Mapping):  # kinds of layers may have parameters of their own
            _require_sane_rope(value)
        elif key in ("rope_theta", "factor") and value is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise ModelError(
                    f"the config has {key} {value!r}, where RoPE needs a positive, finite number; correct its "
                    "config.json, or set it under `config:`"
                )


def check_config(config: Any, context: int, expect: Mapping[str, Any] | None = None) -> None:
    """Refuse a config that is not what the study expects, that no model has, or whose maximum is below `context`."""
    for key, most in MOST.items():
        value = find_value(config, key)
        if isinstance(value, int | float) and not 0 <= value <= most:
            raise ModelError(f"the config has {key} {value!r}, which no model has (at most {most})")
    text = text_part(config)
    _require_sane_rope({"rope_theta": getattr(text, "rope_theta", None)})
    _require_sane_rope(getattr(text, "rope_parameters", None))
    for key, wanted in (expect or {}).items():
        value = find_value(config, key)
        if value is MISSING:
            raise ModelError(f"expect: the config has no {key!r}{_closest(config, key)}")
        if not _same(value, wanted):
            raise ModelError(f"expect: {key} should be {wanted!r} but the loaded config has {value!r}")
    longest = find_value(config, "max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ModelError(
            f"context {context} is longer than the model's maximum of {longest} positions; shorten it, or raise "
            "max_position_embeddings (and set RoPE scaling) under `config:`"
        )


def find_value(config: Any, key: str) -> Any:
    """A config value wherever this transformers version keeps it (the text part, or its RoPE parameters), or MISSING.

    Dotted keys descend. Where layer types have RoPE parameters of their own, the result maps types to values, unless
    all agree.
    """
    text = text_part(config)
    for holder in (text, config):
        for part in key.split("."):
            holder = holder.get(part, MISSING) if isinstance(holder, Mapping) else getattr(holder, part, MISSING)
        if holder is not MISSING:
            return holder
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return MISSING
    if key in rope:
        return rope[key]
    by_type = {kind: part[key] for kind, part in rope.items() if isinstance(part, Mapping) and key in part}
    values = list(by_type.values())
    return by_type if any(value != values[0] for value in values) else next(iter(values), MISSING)


def _override(config: Any, key: str, value: Any) -> None:
    text = text_part(config)
    rope = getattr(text, "rope_parameters", None)
    try:
        if hasattr(text, key) and not callable(getattr(text, key)):
            old = getattr(text, key)
            merged = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
            setattr(text, key, merged)
        elif isinstance(rope, Mapping) and key in rope:
            text.rope_parameters = {**rope, key: value}
        else:
            raise ModelError(f"config: the model's config has no {key!r}{_closest(config, key)}")
    except (TypeError, ValueError) as error:
        raise ModelError(f"config: {key} cannot be set to {value!r} ({error})") from None


def _closest(config: Any, key: str) -> str:
    known = [*config.to_dict(), *(getattr(config, "rope_parameters", None) or {})]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _same(actual: Any, wanted: Any) -> bool:
    if isinstance(actual, int | float) and isinstance(wanted, int | float):
        return float(actual) == float(wanted)
    if isinstance(actual, Mapping) and isinstance(wanted, Mapping):
        return all(key in actual and _same(actual[key], value) for key, value in wanted.items())
    return bool(actual == wanted)


# -- weights -----------------------------------------------------------------------------------------------


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
    if here and wanted.type != "cpu":
        backend: Any = torch.backends.mps if wanted.type == "mps" else getattr(torch, wanted.type, None)
        there = backend is not None and hasattr(backend, "is_available") and backend.is_available()
        count = backend.device_count() if there and hasattr(backend, "device_count") else int(there)
        if not there or (wanted.index is not None and wanted.index >= count):
            raise ModelError(f"device {device!r} is not on this machine; {_devices()}")
    return str(wanted)


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

    from qkscope.capture.blueprint import require_loaded, require_tensors

    chosen = choose_device(device)
    if source.kind == "hub":  # a local folder was checked when it was found
        download_weights(source)
    placement = "auto" if chosen == "cuda" and torch.cuda.device_count() > 1 and device == "auto" else chosen
    require_tensors(source, config)
    try:
        with panics_raised(), shared_gguf_reader(source.gguf_file), quiet_loading():
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
    if (folder := adapter_folder(source)) is not None:
        merge_adapter(model, folder)
        model = model if head else model.base_model
    return model.eval()


@contextmanager
def quiet_loading(*, report: bool = True) -> Iterator[None]:
    """Without transformers' progress bar, which would stand between the lines of a run's progress, or also its report.

    The bar of downloads stays.
    """
    from transformers.utils import logging

    bars: Any = import_module("huggingface_hub.utils")
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    downloads = not bars.are_progress_bars_disabled()
    if not report:
        logging.set_verbosity_error()
    if bar:
        logging.disable_progress_bar()  # which turns off that of downloads, too
        if downloads:
            bars.enable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
            if not downloads:
                bars.disable_progress_bars()


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
    import torch

    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return [name.strip() for name in asked.split(",") if name.strip()]

    return [str(index) for index in range(torch.cuda.device_count())]


def smallest_gpu() -> int:
    """Bytes of memory of the smallest GPU that this process may use; 0 where there is none."""
    import torch

    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(index).total_memory for index in gpus), default=0)


def limit_process(threads: int, gpus: list[str]) -> None:
    """Keep to so many threads and these GPUs; before the first use of CUDA."""
    import torch

    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    torch.set_num_threads(threads)


def release_memory() -> None:
    """Give back what is no longer in use."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
