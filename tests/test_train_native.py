"""The recipe of docs/training.md for models that are not of transformers, run on one of torchtitan's structure."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from qkscope.train import TrainingFolder

PAGE = Path(__file__).parents[1] / "docs/training.md"
WIDTH, HEADS, KEY_HEADS, CONTEXT = 32, 4, 2, 32


def recipe():
    """The functions of the page's block, as they stand."""
    (block,) = re.findall(r"```python\n# native_attention\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(compile(block, str(PAGE), "exec"), namespace)
    return namespace["head_moments"]


class InnerAttention(nn.Module):
    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH * KEY_HEADS // HEADS, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH * KEY_HEADS // HEADS, bias=False)
        self.inner_attention = InnerAttention()

    def forward(self, x, turns):
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k = (torch.view_as_real(torch.view_as_complex(e.unflatten(-1, (-1, 2))) * turns).flatten(-2) for e in (q, k))
        return self.inner_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.dropout = Attention(), nn.Dropout(0.2)

    def forward(self, x, turns):
        return x + self.dropout(self.attention(nn.functional.rms_norm(x, (WIDTH,)), turns))


class Native(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(2)})
        angles = torch.outer(torch.arange(CONTEXT), 100.0 ** -torch.arange(0, 1, 2 / (WIDTH // HEADS)))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles)[:, None])

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.turns)
        return x @ self.tok_embeddings.weight.T


def train(model, look=lambda step: None, steps=6):
    torch.manual_seed(1)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        look(step)
        batch = torch.randint(0, 64, (2, CONTEXT))
        loss = nn.functional.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def windows():
    return torch.randint(0, 64, (16, CONTEXT), generator=torch.Generator().manual_seed(3))


def by_hand(model, windows, layer, head):
    """r_q and r_k of PC0 from raw vectors, by numpy alone; which way PC0 points is not decided."""
    with torch.no_grad():
        x = model.tok_embeddings(windows)
        for number in range(layer):
            x = model.layers[str(number)].eval()(x, model.turns)
        x = nn.functional.rms_norm(x, (WIDTH,))
        attention, d = model.layers[str(layer)].attention, WIDTH // HEADS
        vectors = []
        for weights, place in ((attention.wq, head), (attention.wk, head * KEY_HEADS // HEADS)):
            plain = (x @ weights.weight.T)[..., place * d : (place + 1) * d].double()
            pairs = torch.complex(plain[..., ::2], plain[..., 1::2]) * model.turns[:, 0].to(torch.complex128)
            vectors.append(torch.stack([pairs.real, pairs.imag], -1).flatten(-2).flatten(0, 1).numpy())
    q, k = vectors
    both = np.concatenate([q, k])
    axis = np.linalg.eigh(np.cov(both.T))[1][:, -1]
    position = np.tile(np.arange(CONTEXT), len(windows))
    r_q, r_k = (np.corrcoef(each @ axis, position)[0, 1] for each in (q, k))
    return np.array([r_q, r_k])


def test_the_recipe_finds_what_raw_vectors_give(windows, tmp_path):
    model = Native()
    folder = TrainingFolder(tmp_path / "out")
    folder.add(0, recipe()(model, windows))
    folder.write_tables()
    table = pd.read_csv(tmp_path / "out/qk.csv").query("pc == 0").set_index(["layer", "head"])
    assert len(table) == 2 * HEADS
    for (layer, head), row in table.iterrows():
        found, expected = row[["r_q", "r_k"]].to_numpy(float), by_hand(model, windows, layer, head)
        off = min(np.abs(found - expected).max(), np.abs(found + expected).max())
        assert off < 1e-5, (layer, head)


@pytest.mark.slow
def test_compiled_blocks_are_seen_and_the_training_is_bit_identical(windows, tmp_path):
    import torch._dynamo

    def compiled(made):
        def backend(graph, inputs):
            made.append(graph)
            return graph.forward

        torch._dynamo.reset()
        model = Native().train()
        for block in model.layers.values():
            block.compile(backend=backend, fullgraph=True)
        return model

    graphs, again = [], []
    plain = train(compiled(graphs))
    model, folder, head_moments = compiled(again), TrainingFolder(tmp_path / "out"), recipe()
    look = lambda step: folder.add(step, head_moments(model, windows)) if step % 3 == 0 else None  # noqa: E731
    assert train(model, look) == plain
    assert len(again) == len(graphs) > 0  # none was made for a look, and none was made again after it
    folder.write_page()
    assert folder.steps == [0, 3]
    assert (tmp_path / "out/report.html").is_file()
    torch._dynamo.reset()
