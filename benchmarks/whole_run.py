"""A study of ten checkpoints from the command to its tables: how much of the time is not spent in forward passes.

The checkpoints are random models of one shape, stored in bfloat16 as most are, with a real tokenizer and real texts.
Everything that the command does is timed by phase, wall and processor time, each without what is inside it. Forward
passes are those over documents, as far as they go, with the sums that are made within them; the probe's are not.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import yaml
from common import WORK, Found, export_model

CHECKPOINTS, CONTEXT, DOCUMENTS = 10, 1024, 100
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}

TIMED_RUN = """
import sys, time
started = float(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from whole_run import Phases
phases = Phases(started)
from qkscope.cli.main import main
code = main(sys.argv[3:])
phases.told(code)
"""
FORWARD = "forward passes"
# Where a phase happens; a function that calls another one of these is charged without it.
PLACES = {
    "planning": [("qkscope.run.execute", "plan_capture")],
    "loading": [("qkscope.capture.load", "load_backbone")],
    "probing": [("qkscope.capture.probe", "probe_model")],
    FORWARD: [("qkscope.capture.collect", "run_until_seen")],
    "saving": [("qkscope.run.engines.worker", "deliver"), ("qkscope.run.execute", "_accept")],
    "the last tables": [("qkscope.tables.from_moments", "analyze_study")],
}


class Phases:
    """Wall and processor seconds of each phase of this process, exclusive of phases inside it."""

    def __init__(self, started: float) -> None:
        from importlib import import_module

        self._started, self._stack = started, []
        self.spent = {name: [0.0, 0.0] for name in PLACES}
        for name, places in PLACES.items():
            for module, function in places:
                owner = import_module(module)
                setattr(owner, function, self._timed(name, getattr(owner, function)))
        self.spent["imports"] = [time.time() - started, time.process_time()]

    def _timed(self, name, action):
        def timed(*given, **named):
            begun = time.perf_counter(), time.process_time()
            self._stack.append([0.0, 0.0])
            try:
                return action(*given, **named)
            finally:
                took = [time.perf_counter() - begun[0], time.process_time() - begun[1]]
                inside = self._stack.pop()
                for which in (0, 1):
                    self.spent[name][which] += took[which] - inside[which]
                    if self._stack:
                        self._stack[-1][which] += took[which]

        return timed

    def told(self, code: int) -> None:
        found = {"code": code, "wall": time.time() - self._started, "processor": time.process_time()}
        print("PHASES", json.dumps({**found, "spent": self.spent}))


def whole_run(quick: bool, documents: int = DOCUMENTS) -> Found:
    """The share of the time outside forward passes, and what it goes into."""
    folder, found = WORK / "whole-run", Found()
    checkpoints, documents = (2, 2) if quick else (CHECKPOINTS, documents)
    study = make_study(folder, checkpoints, documents)
    out = folder / "results"
    shutil.rmtree(out, ignore_errors=True)
    first = timed_run(study, out)
    name = f"{checkpoints} checkpoints × {documents} documents of {CONTEXT} tokens"
    share, of_processor = (100 * (1 - first["spent"][FORWARD][i] / first[key]) for i, key in enumerate(CLOCKS))
    text = (
        f"{share:.1f} % of {first['wall']:.1f} s; {of_processor:.1f} % of {first['processor']:.1f} s of processor time"
    )
    found.row(f"time outside forward passes, from the command to the tables, {name}", text, "≤ 5 %", share <= 5)
    again = timed_run(study, out)
    found.row("the same command on finished results", f"{again['wall']:.1f} s", "stated")
    found.notes.append(
        "By phase, wall and processor seconds: "
        + ", ".join(f"{phase} {wall:.1f} and {used:.1f}" for phase, (wall, used) in first["spent"].items())
        + "."
    )
    outside = {phase: used for phase, (_, used) in first["spent"].items() if phase != FORWARD}
    once = sum(outside.pop(phase, 0.0) for phase in ("imports", "planning", "the last tables"))
    each, forward = sum(outside.values()) / checkpoints, first["spent"][FORWARD][1] / (checkpoints * documents)
    enough = 19 * (once / CHECKPOINTS + each) / forward
    found.notes.append(
        f"In processor time: {once:.1f} s once, {each:.2f} s for each checkpoint, {forward:.3f} s for each document. "
        f"{CHECKPOINTS} checkpoints of this shape stay within 5 % of it from {enough:.0f} documents on."
    )
    return found


CLOCKS = ("wall", "processor")


def timed_run(study: Path, out: Path) -> dict:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", TIMED_RUN, str(time.time()), here, "run", str(study), "--out", str(out)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in run.stdout.splitlines() if line.startswith("PHASES"))
    told = json.loads(line.removeprefix("PHASES"))
    assert told["code"] == 0, run.stderr
    return told


def make_study(folder: Path, checkpoints: int, documents: int) -> Path:
    """Random checkpoints, texts and the study file; what is there already is used again."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(export_model())
    for number in range(checkpoints):
        place = folder / f"step-{number}"
        if not (place / "tokenizer.json").exists():
            torch.manual_seed(number)
            config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **SHAPE)
            LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
            tokenizer.save_pretrained(place)
    texts = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: (-path.stat().st_size, path))
    (folder / "docs").mkdir(parents=True, exist_ok=True)
    for path in texts[:DOCUMENTS]:
        shutil.copy(path, folder / "docs" / f"{path.stem}.txt")
    study = {
        "study": "whole-run",
        "documents": {"files": "docs/*.txt", "limit": documents},
        "checkpoints": [
            {"name": f"step-{number}", "model": f"step-{number}", "context": CONTEXT} for number in range(checkpoints)
        ],
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    return folder / "study.yaml"


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]  # documents; fewer on a machine that is busy
    measured = whole_run("--quick" in sys.argv, *given)
    for row in measured.rows:
        print(json.dumps(row.__dict__, ensure_ascii=False))
    print("\n".join(measured.notes))
