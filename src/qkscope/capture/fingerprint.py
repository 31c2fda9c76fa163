"""Distinguish checkpoints: by samples of their files, by their tensors, and by the weights of a loaded model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from qkscope.capture.hub import adapter_folder, fetch_file
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import ADAPTER, ADAPTER_WEIGHTS, SAFE, SINGLE, read_header, weight_files

SAMPLE_BYTES, SAMPLES = 64 * 1024, 64  # of each weight file: distinguishing checkpoints need not read 140 GB
MAX_TOKENIZER = 256 * 2**20  # bytes in all; the largest vocabularies have 40 MB
# Files next to a tokenizer that are not part of it. Whatever else is there counts.
NO_TOKENIZER = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".md")
NO_TOKENIZER_FILES = ("model.safetensors.index.json", "trainer_state.json", "generation_config.json")

TENSOR_SAMPLE_BYTES, TENSOR_SAMPLES = 4096, 8  # a first look at tensors, which is confirmed by reading everything
BLOCK = 16 * 1024 * 1024
SHA256_DIGITS = 64
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")

# How families name what makes queries and keys, one matrix for each or one for all three.
PROJECTION = re.compile(r"(^|\.)(q_proj|k_proj|qkv_proj|query|key|query_key_value|c_attn|Wqkv|qkv|wq|wk|q|k)\.weight$")
SAMPLED_NUMBERS = 4096  # of each matrix, evenly spaced: different weights differ in nearly all of them

FileStates = tuple[tuple[Path, int, tuple[int, ...]], ...]  # files with their sizes, times and inodes


# -- by files ----------------------------------------------------------------------------------------------


def weights_fingerprint(source: ModelSource, *, fresh: bool = False) -> str | None:
    """A hash that distinguishes a local checkpoint's weights from others: sizes and evenly spaced samples of each file.

    A model on the Hub is identified by its commit, so None is returned, unless an adapter is added to it. `fresh` reads
    the files again even if their sizes and times are those of an earlier call.
    """
    if source.adapter_revision is not None:
        base = source.without_adapter
        of_base = weights_fingerprint(base, fresh=fresh) or base.revision
        return f"{of_base} {source.adapter}@{source.adapter_revision}"
    files = _local_files(source)
    if not files:
        return None
    state = _state(files)
    samples = _hash_files.__wrapped__(state) if fresh else _hash_files(state)
    return f"{source.revision} {samples}" if source.kind == "hub" else samples


def weights_file_state(source: ModelSource) -> str | None:
    """A hash of names, sizes, times and inodes of a checkpoint's local weight files; None where there are none.

    Equal hashes mean unchanged files, without reading any weights. A copy of the same weights has another hash.
    """
    files = _local_files(source)
    if not files:
        return None
    text = "\n".join(f"{path.name} {size} {of}" for path, size, of in _state(files))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _local_files(source: ModelSource) -> list[Path]:
    """The local files that decide about the numbers: weights, config, trusted code, adapter."""
    named = None if source.adapter_revision else source.adapter
    adapter = [] if named is None else [Path(named) / ADAPTER, Path(named) / ADAPTER_WEIGHTS]
    if source.kind == "hub":
        return adapter
    folder = Path(source.location)
    if source.gguf_file:
        files = [folder / source.gguf_file]
    else:
        files = sorted(folder.glob("*.safetensors"))
        files += [path for path in [folder / "config.json"] if path.is_file()]
    if source.trust_remote_code:  # then the code decides about the numbers as the weights do
        files += sorted(path for path in folder.rglob("*.py") if path.is_file())
    return files + adapter


def tokenizer_files_fingerprint(source: ModelSource) -> str | None:
    """Equal for local folders that hold the same tokenizer, byte for byte; None where files do not decide that.

    The config counts too: it may name the tokenizer's class.
    """
    if source.kind != "local" or source.trust_remote_code:
        return None
    files = [
        path
        for path in sorted(Path(source.location).iterdir())
        if path.is_file() and path.name not in NO_TOKENIZER_FILES and not path.name.endswith(NO_TOKENIZER)
    ]
    state = _state(files)
    return _hash_files(state, whole=True) if sum(size for _, size, _ in state) <= MAX_TOKENIZER else None


def _state(files: list[Path]) -> FileStates:
    states = ((path, path.stat()) for path in files)
    return tuple((path, of.st_size, (of.st_mtime_ns, of.st_ctime_ns, of.st_ino)) for path, of in states)


@lru_cache(maxsize=8192)
def _hash_files(state: FileStates, whole: bool = False) -> str:
    """A hash of names, sizes, and evenly spaced samples or the whole of each file."""
    digest = hashlib.sha256()
    for path, size, _ in state:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for offset, length in _places(size, SAMPLES, SAMPLE_BYTES) if not whole else [(0, -1)]:
                file.seek(offset)
                digest.update(file.read(length))
    return f"sha256:{digest.hexdigest()}"


def _places(size: int, samples: int, length: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of evenly spaced samples of so many bytes; the first and the last bytes are among them."""
    for number in range(samples):
        offset = number * max(0, size - length) // (samples - 1)
        yield offset, min(length, size - offset)


# -- by tensors --------------------------------------------------------------------------------------------


class _HubFile(NamedTuple):
    """What is known of a file on the Hub without downloading it."""

    size: int | None
    digest: str  # sha256 of its bytes if it is 64 digits long, as of all large files; else git's own hash


class WeightContent:
    """The weights of one source, to be compared with others; nothing is read before a comparison needs it.

    Local safetensors are compared tensor by tensor: file names, shards and config.json make no difference. GGUF files
    are compared as wholes, with each other only. Repositories on the Hub are compared by the hashes that it states of
    their safetensors files, without a download; a repository and a local folder by those hashes too, which finds exact
    copies of the files only.
    """

    def __init__(self, source: ModelSource, noted: Callable[[str], None] = lambda message: None) -> None:
        self.source = source
        self._noted = noted
        self._file_digests: dict[Path, str] = {}

    def known(self) -> bool:
        """Whether anything can be compared: a repository on the Hub may not be reached, or state no hashes."""
        return self.source.kind != "hub" or bool(self._hub_files)

    def equals(self, other: WeightContent) -> bool:
        """Whether both hold the same weights, as far as that can be known without a download."""
        if self.source == other.source:
            return True
        if (self.source.adapter is None) != (other.source.adapter is None):
            return False  # a merged copy is not recognized
        if self.source.adapter is not None and self._adapter != other._adapter:
            return False
        if self.source.without_adapter == other.source.without_adapter:
            return True
        kinds = {self.source.kind, other.source.kind}
        if kinds == {"hub"}:
            mine, theirs = (sorted(each.digest for each in of._hub_files.values()) for of in (self, other))
            return self.known() and mine == theirs
        if kinds == {"hub", "local"}:
            hub, local = (self, other) if self.source.kind == "hub" else (other, self)
            return hub._is_copied_to(local)
        return len(kinds) == 1 and self._sampled == other._sampled and self._whole == other._whole

    def _is_copied_to(self, local: WeightContent) -> bool:
        """Whether a folder has the files that the Hub states: by name and size, then by every byte of each in turn."""
        files = {path.name: path for path in weight_files(Path(local.source.location))}
        sizes = {name: each.size for name, each in self._hub_files.items()}
        if not sizes or sizes != {name: path.stat().st_size for name, path in files.items()}:
            return False
        return all(local._file_digest(files[name]) == each.digest for name, each in self._hub_files.items())

    @cached_property
    def _hub_files(self) -> dict[str, _HubFile]:
        """The files that would be loaded: the Hub states their hashes; the cache names its files by them."""
        stated = _stated_by_hub(self.source) or _stated_by_cache(self.source)
        if SINGLE in stated:
            return {SINGLE: stated[SINGLE]}
        shards = {name: int(named[1]) for name in stated if (named := SHARD.fullmatch(name))}
        if not shards:
            return stated
        complete = set(shards.values()) == {len(shards)}  # the cache may hold some of them
        return {name: stated[name] for name in shards} if complete else {}

    def _file_digest(self, path: Path) -> str:
        if path not in self._file_digests:
            size = path.stat().st_size / 1e6
            self._noted(f"reading {path} ({size:.0f} MB) to compare it with a file of the same size on the Hub")
            with path.open("rb") as file:
                self._file_digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._file_digests[path]

    @cached_property
    def _adapter(self) -> str:
        """A hash of an adapter's tensors and of its config; the Hub states that of its file."""
        source = self.source.adapter_source
        assert source is not None
        stated = _stated_by_hub(source).get(ADAPTER_WEIGHTS) if source.kind == "hub" else None
        if stated is not None and len(stated.digest) == SHA256_DIGITS:
            return hashlib.sha256(fetch_file(source, ADAPTER).read_bytes() + bytes.fromhex(stated.digest)).hexdigest()
        folder = adapter_folder(self.source)
        with (folder / ADAPTER_WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        return hashlib.sha256((folder / ADAPTER).read_bytes() + digest).hexdigest()

    @cached_property
    def _sampled(self) -> str:
        """A hash of samples of a local source's tensors, which other weights may, rarely, share."""
        return _hash_tensors(self.source, lambda size: _places(size, TENSOR_SAMPLES, TENSOR_SAMPLE_BYTES))

    @cached_property
    def _whole(self) -> str:
        return _hash_tensors(self.source, lambda size: ((at, min(BLOCK, size - at)) for at in range(0, size, BLOCK)))


def _hash_tensors(source: ModelSource, places: Callable[[int], Iterator[tuple[int, int]]]) -> str:
    """A hash of these places of each tensor of a local source; a GGUF file counts as one."""
    tensors: list[tuple[str, Path, int, int]] = []  # label, file, offset, length
    if source.gguf_file:
        path = Path(source.location) / source.gguf_file
        tensors.append(("gguf", path, 0, path.stat().st_size))
    else:
        for path in weight_files(Path(source.location)):
            with path.open("rb") as file:
                begin = 8 + int.from_bytes(file.read(8), "little")
            for name, entry in read_header(path).items():
                start, stop = entry["data_offsets"]
                tensors.append((f"{name} {entry['dtype']} {entry['shape']}", path, begin + start, stop - start))
    digest = hashlib.sha256()
    for label, path, start, length in sorted(tensors, key=lambda each: each[0]):
        digest.update(f"{label} {length}\n".encode())
        with path.open("rb") as file:
            for offset, size in places(length):
                file.seek(start + offset)
                digest.update(file.read(size))
    return digest.hexdigest()


def _stated_by_hub(source: ModelSource) -> dict[str, _HubFile]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        files = HfApi().model_info(source.location, revision=source.revision, files_metadata=True).siblings
    except Exception:  # no answer, or one without hashes: then the cache is used
        return {}
    weights = [file for file in files or () if _is_weights(file.rfilename)]
    stated = {
        file.rfilename: _HubFile(file.size, (file.lfs.sha256 if file.lfs else file.blob_id) or "") for file in weights
    }
    return stated if all(each.digest for each in stated.values()) else {}


def _stated_by_cache(source: ModelSource) -> dict[str, _HubFile]:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    if not isinstance(config, str):
        return {}
    links = [path for path in Path(config).parent.iterdir() if _is_weights(path.name) and path.is_symlink()]
    return {path.name: _HubFile(path.stat().st_size, path.readlink().name) for path in links if path.exists()}


def _is_weights(name: str) -> bool:
    return name.endswith(SAFE) and "/" not in name


# -- of a loaded model -------------------------------------------------------------------------------------


def count_parameters(backbone: Any) -> int:
    """The numbers in a model's weights, shared ones once; the output matrix counts only where it is the embedding."""
    return sum(int(parameter.numel()) for parameter in backbone.parameters())


def attention_hashes(backbone: Any) -> list[str]:
    """A short hash of each projection to queries or keys, equal for equal numbers in float32.

    Layers are not named: a model that has more of them, with those of another among them, is recognized. Weights that
    are not in memory (offloaded) are left out.
    """
    import torch

    hashes = []
    for name, parameter in backbone.named_parameters():
        if not PROJECTION.search(name) or parameter.device.type == "meta" or parameter.ndim != 2:
            continue
        with torch.no_grad():
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // SAMPLED_NUMBERS)
            sample = flat[::step].to(device="cpu", dtype=torch.float32).contiguous()
            if sample.numel() < 2 or bool((sample == sample[0]).all()):
                continue  # never trained, or set to 0: equal in models that have nothing in common
            digest = hashlib.sha256(f"{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return hashes
