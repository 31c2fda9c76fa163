"""Models that several processes train together: the same numbers on every rank, or a refusal that says why."""

from pathlib import Path

import pytest

from warm import two_ranks

pytestmark = pytest.mark.slow  # each test runs whole studies, or processes of its own

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks found for each way of wrapping a model; they meet over gloo."""
    return two_ranks(HERE / "ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "fsdp2, trained before", "fsdp2, backbone only"])
def test_every_rank_gets_the_numbers_of_the_plain_model_and_trains_on(ranks, way):
    for found in ranks:
        assert found[way] == found["plain"]
        assert found[way]["training"]


@pytest.mark.parametrize(
    ("way", "kind", "message"),
    [
        ("fsdp1", "CaptureError", "FullyShardedDataParallel (FSDP1)"),
        ("tensor parallel", "CaptureError", "tensor-parallel over 2 ranks"),
        ("fsdp2, diverged", "ModelError", "layer 2, layers.2.self_attn.q_proj.weight has 1 of 4096"),
    ],
)
def test_what_no_rank_can_capture_is_refused_with_its_reason_on_all_of_them(ranks, way, kind, message):
    for found in ranks:
        assert found[way]["error"] == kind
        assert message in found[way]["message"]
