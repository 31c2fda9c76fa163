"""What the benchmarks share: the model, the documents, timing, memory, and a description of the machine."""

import os
import platform
import resource
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
WORK = Path(os.environ.get("QKSCOPE_BENCH", ROOT / ".cache/bench"))
MODEL = WORK / "smollm2-135m"
BENCH_PYTHON = ROOT / ".cache/bench-venv/bin/python"
BUCKETS, GROUPS = 16, 8


@dataclass
class Row:
    """One line of the page's table; `met` is None where there is nothing to reach."""

    quantity: str
    result: str
    target: str = "—"
    met: bool | None = None


@dataclass
class Found:
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, quantity, result, target="—", met=None):
        self.rows.append(Row(quantity, result, target, None if met is None else bool(met)))


def export_model() -> Path:
    """SmolLM2-135M as safetensors: the other tools cannot read GGUF, and a dequantized model cannot save itself."""
    if not (MODEL / "config.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        (weights, *_) = sorted((ROOT / ".cache/smollm2").rglob("*.gguf"))
        source = {"gguf_file": weights.name}
        model = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **source)
        config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
        plain = type(model)(type(model.config)(**config)).to(torch.float32)
        plain.load_state_dict(model.state_dict())
        AutoTokenizer.from_pretrained(weights.parent, **source).save_pretrained(MODEL)
        plain.save_pretrained(MODEL)
    return MODEL


def document_ids(count: int, context: int) -> np.ndarray:
    """(count, context) token ids: Python's own modules in order of name, joined where one is not enough."""
    from transformers import AutoTokenizer

    path = WORK / f"ids-{count}-{context}.npy"
    if not path.exists():
        tokenizer = AutoTokenizer.from_pretrained(export_model())
        rows, held = [], []
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if source.stat().st_size < 4 * min(context, 2048):
                continue
            text = source.read_text(encoding="utf-8", errors="replace")
            held += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(held) >= context:
                rows.append(held[:context])
                held = []
            if len(rows) == count:
                break
        assert len(rows) == count, f"{len(rows)} documents of {context} tokens"
        np.save(path, np.array(rows, dtype=np.int64))
    return np.load(path)


def load_model():
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(export_model(), dtype=torch.float32)
    for weights in model.parameters():
        weights.sum()  # they are read from the file, page by page, when they are first used: that is the model's memory
    return model


def layout_of(context: int):
    """What a study would use: position 0 apart, and sums before rotation."""
    from qkscope.moments.layout import capture_layout

    return capture_layout(context, buckets=BUCKETS, groups=GROUPS)


def one_document_batches(ids: np.ndarray):
    from qkscope.capture.collect import make_batch

    return [make_batch([row], [i % GROUPS], [f"document {i}"], [i]) for i, row in enumerate(ids)]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds_of(action) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def processor_seconds(action) -> float:
    """Of all threads of this process."""
    begun = time.process_time()
    action()
    return time.process_time() - begun


def spread(values, digits=3) -> str:
    """Median and the range."""
    low, middle, high = min(values), float(np.median(values)), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} … {high:.{digits}f})"


def machine() -> str:
    name = platform.processor() or platform.machine()
    memory = 0.0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except OSError:
        pass
    import torch

    return (
        f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.machine()}; "
        f"Python {platform.python_version()}, torch {torch.__version__} with {torch.get_num_threads()} threads "
        f"({torch.backends.cpu.get_cpu_capability()}), numpy {np.__version__}"
    )
