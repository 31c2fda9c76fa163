"""Numbers agree with their nouns."""

import re
from pathlib import Path

import pytest

from qkscope.cli.describe import describe_plan
from qkscope.run.plan import make_plan
from qkscope.study.load import load_study
from qkscope.text import counted
from qkscope.words.phrases import plus_minus, significant


def test_a_number_agrees_with_its_noun():
    assert [counted(n, "document") for n in (0, 1, 2, 1200)] == [
        "0 documents", "1 document", "2 documents", "1,200 documents",
    ]  # fmt: skip
    assert counted(2, "query", "queries") == "2 queries"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.5, "1.5"), (-123.4, "−123"), (1460.0, "1,460"), (11_712.0, "11,700"), (-2e6, "−2,000,000"),
     (3.2e12, "3.2e+12"), (1.2e-7, "1.2e−07"), (float("nan"), "undefined")],
)  # fmt: skip
def test_a_number_of_three_digits_is_written_as_people_write_it(value, text):
    assert significant(value) == plus_minus(value, float("nan")) == text


def test_a_number_with_its_sign():
    assert plus_minus(11_712.0, float("nan"), signed=True) == "+11,700"
    assert plus_minus(0.25, 0.04, signed=True) == "+0.25 ± 0.04"
    assert plus_minus(-0.25, float("nan"), signed=True) == "−0.25"


def test_a_plan_of_one_document_and_one_checkpoint_is_told_in_the_singular(world, checkpoints):
    one = {"name": "one", "model": str(checkpoints / "short"), "context": 64}
    documents = {"files": "docs/*.txt", "special_tokens": "none", "limit": 1}
    plan = make_plan(load_study(world(checkpoints=[one], documents=documents, components=1)))
    text = "\n".join([*describe_plan(plan, Path("results"))])
    assert "checkpoint 'one' reads 1 document in 1 of 3 document groups: it has no standard errors" in text
    assert "1 checkpoint, 64 tokens in total\ndocuments: 1 document in docs/*.txt, all long enough" in text
    assert not re.search(r"\b1 (documents|checkpoints|components|groups)\b", text), text
