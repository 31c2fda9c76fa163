"""A study of ten checkpoints from the command to its tables: how much of the time is not spent in forward passes.

The checkpoints are random models of one shape, stored in bfloat16 as most are, with a real tokenizer and real texts.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import yaml
from common import WORK, Found, export_model

CHECKPOINTS, CONTEXT, DOCUMENTS = 10, 1024, 8
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}

# Forward passes are timed from the model's call to its return: the sums are made within them.
TIMED_RUN = """
import sys, time
begun = time.time()
started = float(sys.argv[1])
import qkscope.capture.load as load
spent, calls = [], []
plain = load.load_backbone
def timed(*arguments, **options):
    model = plain(*arguments, **options)
    model.register_forward_pre_hook(lambda *_: calls.append(time.perf_counter()))
    model.register_forward_hook(lambda *_: spent.append(time.perf_counter() - calls.pop()))
    return model
load.load_backbone = timed
from qkscope.cli.main import main
code = main(sys.argv[2:])
print("TIMES", code, sum(spent), time.time() - started)
"""


def whole_run(quick: bool) -> Found:
    folder = WORK / "whole-run"
    study = make_study(folder, 2 if quick else CHECKPOINTS, 2 if quick else DOCUMENTS)
    found = Found()
    out = folder / "results"
    shutil.rmtree(out, ignore_errors=True)
    first = timed_run(study, out)
    name = f"{2 if quick else CHECKPOINTS} checkpoints × {2 if quick else DOCUMENTS} documents of {CONTEXT} tokens"
    share = 100 * (1 - first["forward"] / first["wall"])
    text = f"{share:.1f} % of {first['wall']:.1f} s"
    found.row(f"time outside forward passes, from the command to the tables, {name}", text, "≤ 5 %", share <= 5)
    again = timed_run(study, out)
    found.row("the same command again, when all is finished", f"{again['wall']:.1f} s", "stated")
    return found


def timed_run(study: Path, out: Path) -> dict[str, float]:
    import time

    command = [sys.executable, "-c", TIMED_RUN, str(time.time()), "run", str(study), "--out", str(out)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in run.stdout.splitlines() if line.startswith("TIMES"))
    code, forward, wall = (float(part) for part in line.split()[1:])
    assert code == 0, run.stderr
    return {"forward": forward, "wall": wall}


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
    for row in whole_run("--quick" in sys.argv).rows:
        print(json.dumps(row.__dict__, ensure_ascii=False))
