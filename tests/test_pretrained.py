"""A real pretrained model over real documents: SmolLM2-135M, its whole qk.csv against sklearn and scipy."""

import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoModel, AutoTokenizer

from qkscope.capture.backbone import evaluation, run_backbone
from qkscope.capture.tap import Tap
from qkscope.run.execute import run_study
from reference import reference_rows

CONTEXT = 256
DOCUMENTS = ("argparse", "inspect", "tarfile", "typing")


@pytest.fixture(scope="module")
def weights() -> Iterator[Path]:
    """The GGUF file that `make weights` unpacks, parsed once.

    Config, tokenizer and weights are each read from it more than once, and each time its 49,152 tokens are parsed in
    Python for seconds; the map of its names is made anew for each of 395 modules. Who reads them changes neither, so
    all may have the same.
    """
    import gguf

    found = sorted((Path(__file__).parent.parent / ".cache/smollm2").rglob("*.gguf"))
    if not found:
        pytest.fail("SmolLM2's weights are missing: run `make weights` (or `make test`, which does)")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield found[0]


def keeping(patch, loader):
    """What `loader.from_pretrained` has given: reading the file takes transformers ten seconds each time."""
    kept, load = [], loader.from_pretrained

    def from_pretrained(*given, **options):
        kept.append(load(*given, **options))
        return kept[-1]

    patch.setattr(loader, "from_pretrained", from_pretrained)
    return kept


@pytest.mark.slow
def test_smollm2_against_the_reference(weights, tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in DOCUMENTS:
        (tmp_path / f"docs/{name}.txt").write_text((library / f"{name}.py").read_text(encoding="utf-8"))
    study = {
        "study": "smollm2",
        "documents": {"files": "docs/*.txt", "special_tokens": "none"},
        "checkpoints": [{"name": "smollm2", "model": str(weights), "context": CONTEXT}],
    }
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    models, tokenizers = (keeping(monkeypatch, loader) for loader in (AutoModel, AutoTokenizer))
    table = pd.read_csv(run_study(tmp_path / "study.yaml", tmp_path / "out") / "qk.csv")
    assert len(table) == 30 * 9 * 10
    assert set(table["rotary_dims"]) == {64}

    assert {weight.dtype for weight in models[-1][0].parameters()} == {torch.float32}
    vectors = raw_vectors(models[-1][0], tokenizers[-1], [tmp_path / f"docs/{name}.txt" for name in DOCUMENTS])
    t = np.tile(np.arange(float(CONTEXT)), len(DOCUMENTS))
    worst = {"explained_variance": 0.0, "r_q": 0.0, "r_k": 0.0}
    for layer in range(30):
        for head in range(9):
            q, k = vectors[layer][0][head], vectors[layer][1][head // 3]
            expected = reference_rows(q, k, t, t, 10, lines=False)
            rows = table[(table["layer"] == layer) & (table["head"] == head)]
            for column in worst:
                worst[column] = max(worst[column], np.abs(rows[column].to_numpy() - expected[column].to_numpy()).max())
    assert max(worst.values()) < 1e-5, worst  # float32 products
    # The trained model encodes position somewhere: this is not noise.
    assert table.loc[table["pc"] == 0, "r_q"].max() > 0.5


def raw_vectors(model, tokenizer, paths):
    """Every head's vectors, kept whole in float64, document after document."""
    kept = {}
    for path in paths:
        ids = tokenizer(path.read_text(), add_special_tokens=False)["input_ids"][:CONTEXT]
        with evaluation(model), Tap(model, lambda call: kept.setdefault(call.layer, []).append((call.query, call.key))):
            run_backbone(model, torch.tensor([ids]))
    return {
        layer: tuple(np.concatenate([pair[i][0].double().numpy() for pair in pairs], axis=1) for i in (0, 1))
        for layer, pairs in kept.items()
    }
