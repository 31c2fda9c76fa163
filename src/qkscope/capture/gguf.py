"""GGUF files: the extra that reads them, and one parse for config, tokenizer and weights together.

transformers parses the whole file each time it wants something of it, and each parse takes seconds. While
`shared_gguf_reader` is open, what it asks for the same file again is the reader that it got the first time.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qkscope.errors import ModelError

KEPT = 4  # readers at a time; each holds some hundred megabytes of a vocabulary as Python objects
# Tensors that a backbone does not need: the output matrix, and RoPE factors, which transformers takes from the config.
UNUSED = ("output.weight", "output.bias", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_readers: OrderedDict[tuple[str, int, int], Any] = OrderedDict()
_swapping = threading.RLock()


def require_gguf_reader() -> None:
    """Refuse a GGUF file where the library that reads it is missing."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ModelError("a GGUF file needs the gguf library: pip install 'qkscope[gguf]'") from None


@contextmanager
def shared_gguf_reader(gguf_file: str | None) -> Iterator[None]:
    """Let transformers parse each GGUF file once in this process; does nothing where there is no such file."""
    if gguf_file is None:
        yield
        return
    import gguf

    with _swapping:
        parse = gguf.GGUFReader

        def reader(path: Any, mode: str = "r") -> Any:
            return parse(path, mode) if mode != "r" else _cached_reader(os.path.realpath(path), parse)

        gguf.GGUFReader = reader
        try:
            yield
        finally:
            gguf.GGUFReader = parse


def apply_bos_setting(tokenizer: Any, path: str) -> None:
    """Let a tokenizer put the BOS token before a text, or not, as the file's header says: transformers does not ask it.

    A model that was trained with the token and reads without it predicts far worse, and nothing shows it.
    """
    import gguf

    field = gguf.GGUFReader(path).fields.get("tokenizer.ggml.add_bos_token")
    if field is None or tokenizer.bos_token_id is None:
        return
    stated = bool(field.parts[field.data[0]][0])
    if (tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]) != stated:
        tokenizer.add_bos_token = stated


def gguf_shapes(folder: str, file: str) -> dict[str, tuple[int, ...] | None]:
    """The names and shapes of a file's tensors, in the order of torch's dimensions."""
    return {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in _read(folder, file).tensors}


def gguf_names(folder: str, file: str, model: Any) -> dict[str, str] | None:
    """The file's name for each tensor of a transformers backbone; None if one has no name that the library knows.

    Fused and split tensors (experts) have none: transformers converts them as it loads the file.
    """
    import gguf

    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds.get(_read(folder, file).fields["general.architecture"].contents())
    layers = getattr(model.config, "num_hidden_layers", None)
    if kind is None or not isinstance(layers, int):
        return None
    known, prefix = gguf.get_tensor_name_map(kind, layers), f"{model.base_model_prefix}."
    names = {name: known.get_name(prefix + name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    return None if None in names.values() else names


def rename_tensors(
    stored: Mapping[str, tuple[int, ...] | None], names: Mapping[str, str], model: Any
) -> dict[str, tuple[int, ...] | None]:
    """A file's tensors under the names of transformers; others keep their names, and unused ones are left out.

    Tensors of the expected size count as of the expected shape: some are stored transposed.
    """
    tensors: dict[str, tuple[int, ...] | None] = {}
    keys = {name: key for key, name in names.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, shape in stored.items():
        expected = shapes.get(keys.get(name, ""))
        same = expected is not None and math.prod(expected) == math.prod(shape or ())
        if name not in UNUSED:
            tensors[keys.get(name, name)] = expected if same else shape
    return tensors


def gguf_fields(folder: str, file: str) -> dict[str, Any]:
    """What a file's header says of the architecture and its RoPE."""
    fields = _read(folder, file).fields
    return {
        name: each.contents() for name, each in fields.items() if name == "general.architecture" or ".rope." in name
    }


def _read(folder: str, file: str) -> Any:
    import gguf

    with shared_gguf_reader(file):
        return gguf.GGUFReader(os.path.join(folder, file))


def _cached_reader(path: str, parse: Any) -> Any:
    """The reader of this file as it is now: a file that was replaced is parsed again."""
    state = os.stat(path)
    key = (path, state.st_mtime_ns, state.st_size)
    if key not in _readers:
        _readers[key] = _on_plain_array(parse)(path)
        while len(_readers) > KEPT:
            _readers.popitem(last=False)
    _readers.move_to_end(key)
    return _readers[key]


def _on_plain_array(parse: Any) -> Any:
    """A reader that slices a plain array: slicing a memory map runs Python code, a million times for a vocabulary."""
    import numpy as np

    if not isinstance(parse, type):  # replaced elsewhere, as `reader` above replaces it
        return parse

    class Reader(parse):  # type: ignore[misc]
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)  # the same memory, still mapped

    return Reader
