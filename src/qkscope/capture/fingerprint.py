"""Tell checkpoints apart: by samples of their files, by their tensors, and by the weights of a loaded model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from qkscope.capture.adapter import WEIGHTS, adapter_files
from qkscope.capture.hub import adapter_folder, fetch_file
from qkscope.capture.source import ModelSource
from qkscope.capture.weights import ADAPTER, SAFE, SINGLE, read_header, weight_files

SAMPLE_BYTES, SAMPLES = 64 * 1024, 64  # of each weight file: telling checkpoints apart need not read 140 GB
MAX_TOKENIZER = 256 * 2**20  # bytes in all; the largest vocabularies have 40 MB

# What lies beside a tokenizer and is none of it. Whatever else is there counts.
NO_TOKENIZER = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".md")
NO_TOKENIZER_FILES = ("model.safetensors.index.json", "trainer_state.json", "generation_config.json")

FileStates = tuple[tuple[Path, int, tuple[int, ...]], ...]  # files with their sizes, times and inodes


def weights_fingerprint(source: ModelSource, *, fresh: bool = False) -> str | None:
    """A hash that tells a local checkpoint's weights from others: sizes and evenly spaced samples of each file.

    Of a model on the Hub its commit says it, and None is returned, unless an adapter is added to it. `fresh` reads the
    files again even if their sizes and times are those of an earlier call.
    """
    if source.adapter_revision is not None:
        base = source.without_adapter
        of_base = weights_fingerprint(base, fresh=fresh) or base.revision
        return f"{of_base} {source.adapter}@{source.adapter_revision}"
    if source.kind == "hub":
        return f"{source.revision} {_sampled(_state(_adapter(source)), fresh)}" if source.adapter else None
    return _sampled(_state(_weight_files(source)), fresh)


def weights_file_state(source: ModelSource) -> str | None:
    """A hash of names, sizes, times and inodes of a checkpoint's local weight files; None where there are none.

    Equal hashes mean unchanged files, without reading any weights. A copy of the same weights has another hash.
    """
    files = _adapter(source) if source.kind == "hub" else _weight_files(source)
    if not files:
        return None
    text = "\n".join(f"{path.name} {size} {of}" for path, size, of in _state(files))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _adapter(source: ModelSource) -> list[Path]:
    return [] if source.adapter is None or source.adapter_revision else adapter_files(source.adapter)


def _weight_files(source: ModelSource) -> list[Path]:
    """The local files that decide about the numbers: weights, config, trusted code, adapter."""
    folder = Path(source.location)
    files = [folder / source.gguf_file] if source.gguf_file else sorted(folder.glob("*.safetensors"))
    files += [path for path in [folder / "config.json"] if path.is_file() and not source.gguf_file]
    if source.trust_remote_code:  # then the code decides about the numbers as the weights do
        files += sorted(path for path in folder.rglob("*.py") if path.is_file())
    return files + _adapter(source)


def tokenizer_files_fingerprint(source: ModelSource) -> str | None:
    """Equal for local folders that hold the same tokenizer, byte for byte; None where that is not to be told so.

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
    return _whole(state) if sum(size for _, size, _ in state) <= MAX_TOKENIZER else None


def _state(files: list[Path]) -> FileStates:
    states = ((path, path.stat()) for path in files)
    return tuple((path, of.st_size, (of.st_mtime_ns, of.st_ctime_ns, of.st_ino)) for path, of in states)


def _sampled(state: FileStates, fresh: bool) -> str:
    return _read_samples(state) if fresh else _remembered_samples(state)


@lru_cache(maxsize=4096)
def _remembered_samples(state: FileStates) -> str:
    return _read_samples(state)


def _read_samples(state: FileStates) -> str:
    digest = hashlib.sha256()
    for path, size, _ in state:
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for i in range(SAMPLES):
                file.seek(i * max(0, size - SAMPLE_BYTES) // max(1, SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()}"


@lru_cache(maxsize=4096)
def _whole(state: FileStates) -> str:
    digest = hashlib.sha256()
    for path, size, _ in state:
        digest.update(f"{path.name} {size}\n".encode())
        digest.update(path.read_bytes())
    return f"sha256:{digest.hexdigest()}"


FIRST_LOOK_BYTES, FIRST_LOOKS = 4096, 8  # bytes and places: a first look, which is confirmed by reading everything
BLOCK = 16 * 1024 * 1024
SHA256 = 64  # digits
SHARD = re.compile(r"model-\d+-of-(\d+)\.safetensors")


@dataclass(frozen=True)
class _Stretch:
    """Some bytes of a file that belong together, and what they are."""

    about: str
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class _Stated:
    """What is known of a file on the Hub without having it."""

    size: int | None
    digest: str  # sha256 of its bytes if it is 64 digits long, as of all large files; else git's own hash


class WeightContent:
    """The weights of one source, to be compared with others; nothing is read before a comparison needs it.

    Local safetensors are compared tensor by tensor, so that other file names, another cut into shards and another
    config.json make no difference; GGUF files as wholes; repositories on the Hub by the hashes that it states of their
    safetensors files, without downloading any; a repository and a local copy of it by those hashes too, if the copy
    has the same files. A copy that was saved again, or cut into other files, is not seen to be the same as what is on
    the Hub. GGUF files are compared with other GGUF files alone.
    """

    def __init__(self, source: ModelSource, noted: Callable[[str], None] = lambda message: None) -> None:
        self.source = source
        self._noted = noted
        self._digests: dict[Path, str] = {}

    def known(self) -> bool:
        """Whether anything can be compared: a repository on the Hub may not be reached, or state no hashes."""
        return self.source.kind != "hub" or bool(self._stated)

    def equals(self, other: WeightContent) -> bool:
        """Whether both hold the same weights, as far as that can be known without a download."""
        if self.source == other.source:
            return True
        if (self.source.adapter is None) != (other.source.adapter is None):
            return False  # a merged copy is not seen to be the same
        if self.source.adapter is not None and self._adapter != other._adapter:
            return False
        if self.source.without_adapter == other.source.without_adapter:
            return True
        kinds = {self.source.kind, other.source.kind}
        if kinds == {"hub"}:
            return self.known() and self._hashes == other._hashes
        if kinds == {"hub", "local"}:
            hub, local = (self, other) if self.source.kind == "hub" else (other, self)
            return hub._is_stored_in(local)
        if len(kinds) > 1:
            return False
        return self._sample == other._sample and self._whole == other._whole

    def _is_stored_in(self, local: WeightContent) -> bool:
        """Whether a folder has the files that the Hub states: by name and size, then by every byte of each in turn."""
        files = {path.name: path for path in local._files}
        sizes = {name: each.size for name, each in self._stated.items()}
        if not sizes or sizes != {name: path.stat().st_size for name, path in files.items()}:
            return False
        return all(local._digest_of(files[name]) == each.digest for name, each in self._stated.items())

    @cached_property
    def _stated(self) -> dict[str, _Stated]:
        """Of the files that would be loaded: the Hub states their hashes; the cache names its files by them."""
        stated = _stated_by_hub(self.source) or _stated_by_cache(self.source)
        if SINGLE in stated:
            return {SINGLE: stated[SINGLE]}
        shards = {name: int(named[1]) for name in stated if (named := SHARD.fullmatch(name))}
        if not shards:
            return stated
        whole = set(shards.values()) == {len(shards)}  # the cache may hold some of them
        return {name: stated[name] for name in shards} if whole else {}

    @cached_property
    def _hashes(self) -> list[str]:
        return sorted(each.digest for each in self._stated.values())

    @cached_property
    def _files(self) -> list[Path]:
        return weight_files(Path(self.source.location))

    def _digest_of(self, path: Path) -> str:
        if path not in self._digests:
            size = path.stat().st_size / 1e6
            self._noted(f"reading {path} ({size:.0f} MB) to compare it with a file of the same size on the Hub")
            with path.open("rb") as file:
                self._digests[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self._digests[path]

    @cached_property
    def _adapter(self) -> str:
        """A hash of an adapter's tensors and of what is done with them; the Hub states that of its file."""
        source = self.source.adapter_source
        assert source is not None
        stated = _stated_by_hub(source).get(WEIGHTS) if source.kind == "hub" else None
        if stated is not None and len(stated.digest) == SHA256:
            return hashlib.sha256(fetch_file(source, ADAPTER).read_bytes() + bytes.fromhex(stated.digest)).hexdigest()
        about, weights = adapter_files(str(adapter_folder(self.source)))
        with weights.open("rb") as file:
            return hashlib.sha256(about.read_bytes() + hashlib.file_digest(file, "sha256").digest()).hexdigest()

    @cached_property
    def _sample(self) -> str:
        return _digest(self.source, whole=False)

    @cached_property
    def _whole(self) -> str:
        return _digest(self.source, whole=True)


def _digest(source: ModelSource, *, whole: bool) -> str:
    """A hash of a local source's tensors; of samples of them, which others may, rarely, share too."""
    digest = hashlib.sha256()
    for stretch in sorted(_stretches(source), key=lambda each: each.about):
        digest.update(f"{stretch.about} {stretch.length}\n".encode())
        with stretch.path.open("rb") as file:
            for block in _all(file, stretch) if whole else _samples(file, stretch):
                digest.update(block)
    return digest.hexdigest()


def _all(file: BinaryIO, stretch: _Stretch) -> Iterator[bytes]:
    file.seek(stretch.start)
    left = stretch.length
    while left and (block := file.read(min(BLOCK, left))):
        left -= len(block)
        yield block


def _samples(file: BinaryIO, stretch: _Stretch) -> Iterator[bytes]:
    """Evenly spaced, the first and the last bytes among them; small tensors are read whole."""
    for number in range(FIRST_LOOKS):
        offset = number * max(0, stretch.length - FIRST_LOOK_BYTES) // (FIRST_LOOKS - 1)
        file.seek(stretch.start + offset)
        yield file.read(min(FIRST_LOOK_BYTES, stretch.length - offset))


def _stretches(source: ModelSource) -> Iterator[_Stretch]:
    folder = Path(source.location)
    if source.gguf_file:
        path = folder / source.gguf_file
        yield _Stretch("gguf", path, 0, path.stat().st_size)
        return
    for path in weight_files(folder):
        yield from _tensors(path)


def _tensors(path: Path) -> Iterator[_Stretch]:
    listed = read_header(path)
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
    for name, entry in listed.items():
        start, stop = entry["data_offsets"]
        yield _Stretch(f"{name} {entry['dtype']} {entry['shape']}", path, begin + start, stop - start)


def _stated_by_hub(source: ModelSource) -> dict[str, _Stated]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        files = HfApi().model_info(source.location, revision=source.revision, files_metadata=True).siblings
    except Exception:  # no answer, or one without hashes: then the cache is looked at
        return {}
    weights = [file for file in files or () if _is_weights(file.rfilename)]
    hashes = {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in weights}
    sizes = {file.rfilename: file.size for file in weights}
    stated = {name: _Stated(sizes[name], digest) for name, digest in hashes.items() if digest}
    return stated if len(stated) == len(weights) else {}


def _stated_by_cache(source: ModelSource) -> dict[str, _Stated]:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source.location, "config.json", revision=source.revision)
    if not isinstance(config, str):
        return {}
    links = [path for path in Path(config).parent.iterdir() if _is_weights(path.name) and path.is_symlink()]
    return {path.name: _Stated(path.stat().st_size, path.readlink().name) for path in links if path.exists()}


def _is_weights(name: str) -> bool:
    return name.endswith(SAFE) and "/" not in name


# How families name what makes queries and keys, one matrix for each or one for all three.
PROJECTION = re.compile(r"(^|\.)(q_proj|k_proj|qkv_proj|query|key|query_key_value|c_attn|Wqkv|qkv|wq|wk|q|k)\.weight$")
SAMPLED = 4096  # numbers of each matrix, evenly spaced: different weights differ in nearly all of them


def count_parameters(backbone: Any) -> int:
    """The numbers in a model's weights, shared ones once; the output matrix counts only where it is the embedding."""
    return sum(int(parameter.numel()) for parameter in backbone.parameters())


def attention_hashes(backbone: Any) -> list[str]:
    """A short hash of each projection to queries or keys, equal for equal numbers in float32.

    Layers are not named: a model that has more of them, with those of another among them, is recognised. Weights that
    are not in memory (offloaded) are left out.
    """
    import torch

    hashes = []
    for name, parameter in backbone.named_parameters():
        if not PROJECTION.search(name) or parameter.device.type == "meta" or parameter.ndim != 2:
            continue
        with torch.no_grad():
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // SAMPLED)
            sample = flat[::step].to(device="cpu", dtype=torch.float32).contiguous()
            if sample.numel() < 2 or bool((sample == sample[0]).all()):
                continue  # never trained, or set to 0: equal in models that have nothing in common
            digest = hashlib.sha256(f"{tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
        hashes.append(digest.hexdigest()[:16])
    return hashes
