"""Absolute paths in what is shared: each kind is found wherever it stands, and nothing else is touched."""

import pytest

from qkscope.text import PathShortener, without_local_paths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/run/model", "…/model"),
        ("/home/ann/My Documents/a.txt", "…/a.txt"),
        ("/data/corpus/*.txt", "…/corpus/*.txt"),
        ("/home/ann/*.txt", "…/*.txt"),
        ("/data/corpus/**/*.jsonl", "…/corpus/**/*.jsonl"),
        ("/home/ann", "…"),
        ("/root", "…"),
        ("~", "…"),
        ("~ann", "…"),
        ("~/runs/x.yaml", "…/x.yaml"),
        ("~ann/runs/x.yaml", "…/x.yaml"),
        ("C:\\Users\\ann\\study.yaml", "…/study.yaml"),
        ("C:/Users/ann", "…"),
        ("d:\\data\\x", "…/x"),
        ("\\\\server\\share\\x.csv", "…/x.csv"),
        ("//server/share/x.csv", "…/x.csv"),
        ("file:///home/ann/x.csv", "…/x.csv"),
        ("qkscope run /home/ann/s.yaml --out /scratch/ann/out", "qkscope run …/s.yaml --out …/out"),
        ("qkscope run '/home/ann/a b.yaml' --out=/scratch/out", "qkscope run '…/a b.yaml' --out=…/out"),
        ("run C:\\Users\\ann\\s.yaml and \\\\server\\x\\y", "run …/s.yaml and …/y"),
        ("see file:///srv/x.csv, ~bob/y and host:/export/z.", "see …/x.csv, …/y and host:…/z."),
        ("NAME=/data/vectors", "NAME=…/vectors"),
        ("[/a/b, /c/d]", "[…/b, …/d]"),
        ("documents:\n  files: /data/corpus/*.txt\n", "documents:\n  files: …/corpus/*.txt\n"),
    ],
)
def test_absolute_paths_are_shortened(text, expected):
    assert without_local_paths(text) == expected
    assert without_local_paths(expected) == expected
    assert "ann" not in expected


@pytest.mark.parametrize(
    "text",
    ["documents/*.txt", "checkpoints/step-40", "./a/b", "../a/b", "org/model", "https://hub.example/org/model/tree",
     "s3://bucket/key and hf://datasets/a/b", "tokens/s", "r_q / r_k", "1/2", "~5/10 of heads", "about ~40", "a:b", "",
     "</b>", "sha256:0a1b", "2024-01-02T03:04:05+00:00", "C", "C:", "published:models", "Linux-6.1 (x86_64)",
     "…/corpus/*.txt"],
)  # fmt: skip
def test_nothing_else_is_touched(text):
    assert without_local_paths(text) == text


def test_values_are_named_by_their_keys_and_different_paths_stay_different():
    shortener = PathShortener()
    given = {
        "command": "qkscope run /a/s.yaml --out /b/out",
        "checkpoints": [{"model": "/a/model", "context": 5}, {"model": "/b/model"}, {"model": "/a/model"}],
        "by": {"/a/x": None},
    }
    assert shortener.value(given, "provenance.json") == {
        "command": "qkscope run …/s.yaml --out …/out",
        "checkpoints": [{"model": "…/model", "context": 5}, {"model": "…/model (2)"}, {"model": "…/model"}],
        "by": {"…/x": None},
    }
    assert shortener.paths_by_key == {
        "provenance.json.command": ["/a/s.yaml", "/b/out"],
        "provenance.json.checkpoints.model": ["/a/model", "/b/model"],
        "provenance.json.by": ["/a/x"],
    }
