"""A model that two processes train together is measured by both: each takes its documents, and sums are added up."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import qkscope
from families import tiny
from train_ranks import DOCUMENTS, GROUPS, LAYERS
from warm import two_ranks

pytestmark = pytest.mark.slow  # processes of its own

HERE = Path(__file__).parent
WAYS = ["plain", "ddp", "fsdp2", "fsdp2, trained before", "compiled layers", "tensor parallel"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found; they meet over gloo."""
    return two_ranks(HERE / "train_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone():
    """The same documents in one process."""
    model = tiny("llama", num_hidden_layers=LAYERS)
    return qkscope.analyze(qkscope.capture_moments(model, DOCUMENTS, groups=GROUPS), model="step-0")


@pytest.mark.parametrize("way", WAYS)
def test_both_together_find_what_one_process_finds(ranks, alone, way):
    first, second = (found[way] for found in ranks)
    assert (first["steps"], second["steps"]) == ([0, 1], None)
    assert all(first["scalars"]) and second["scalars"] == [{}, {}]
    table = pd.read_csv(Path(first["out"]) / "qk.csv")
    table = table[table["model"] == "step-0"]
    assert set(table["n_q"]) == {7 * 48}
    for column in ("r_q", "r_k", "explained_variance"):
        np.testing.assert_allclose(table[column], alone[column], rtol=0, atol=1e-5, err_msg=column)
    # Files keep three digits of what serves errors alone, and tables are what files give.
    np.testing.assert_allclose(table["r_q_se"], alone["r_q_se"], rtol=0.02)


@pytest.mark.parametrize("way", WAYS)
def test_both_train_on_bit_by_bit_as_they_would_have(ranks, way):
    for found in ranks:
        assert found[way]["same"]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("fsdp1", "FullyShardedDataParallel (FSDP1)"),
        ("different documents", "ranks were given different documents"),
        ("taken", "holds the results of something else"),
    ],
)
def test_what_cannot_be_measured_is_refused_on_both_with_its_reason(ranks, way, message):
    for found in ranks:
        assert message in found[way]["message"]


def test_what_fails_on_one_rank_is_an_error_of_both(ranks):
    first, second = (found["broken on one"] for found in ranks)
    assert "division by zero" in second["message"]
    assert "rank 1 could not be measured" in first["message"]
    assert "division by zero" in first["message"]


def test_a_trainer_on_two_ranks_measures_on_both_and_logs_on_the_first(ranks):
    first, second = (found["trainer"] for found in ranks)
    assert first["wrapped"] == second["wrapped"] == "DistributedDataParallel"
    assert (first["steps"], second["steps"]) == ([0, 2, 4], [])
    assert first["same"] and second["same"]


def test_a_trainer_that_shards_with_fsdp2_is_measured_and_trains_on_as_it_would_have(ranks):
    from test_train_trainer import DOCUMENTS as THEIRS
    from test_train_trainer import llama

    first, second = (found["sharding trainer"] for found in ranks)
    assert first["sharded"] == ["FSDPEmbedding", "FSDPLinear", "FSDPLlamaDecoderLayer", "FSDPLlamaForCausalLM",
                                "FSDPLlamaRMSNorm"]  # fmt: skip
    assert (first["steps"], second["steps"]) == ([0, 2, 4], [])
    assert first["same"] and second["same"]
    assert first["equal"] and second["equal"]
    table = pd.read_csv(Path(first["out"]) / "qk.csv")
    alone = qkscope.analyze(qkscope.capture_moments(llama(), THEIRS))
    np.testing.assert_allclose(table[table["model"] == "step-0"]["r_q"], alone["r_q"], rtol=0, atol=1e-5)
