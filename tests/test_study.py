"""Study files: what is right is read, and each mistake is told by its key and its likely meaning."""

from pathlib import Path

import pytest
import yaml

from qkscope.errors import StudyError
from qkscope.study.load import changed, load_study, parse_study

ROOT = Path(__file__).parent.parent


def text(**changes):
    study = {
        "study": "tiny",
        "model": "some/model",
        "checkpoints": [{"name": "a", "context": 128}, {"name": "b", "context": 512}],
        "documents": {"files": "*.txt"},
    }
    return yaml.safe_dump({key: value for key, value in {**study, **changes}.items() if value is not None})


def checkpoint(**changes):
    return text(checkpoints=[{"name": "a", "context": 128, **changes}])


def test_defaults():
    study = parse_study(text())
    assert (study.buckets, study.groups, study.components, study.skip_positions) == (16, None, 10, 0)
    assert (study.dtype, study.heads, study.documents.special_tokens) == ("auto", "all", "default")
    assert study.window_in_common() == 128
    assert [c.label for c in study.resolved_checkpoints()] == ["a", "b"]


def test_the_published_study():
    study = load_study(ROOT / "studies/smollm3_training_progress.yaml").study
    assert len(study.checkpoints) == 10
    assert (study.heads.sample, study.heads.seed) == (300, 0)
    by_name = {c.name: c for c in study.resolved_checkpoints()}
    expected = {  # the table of the method's section 1
        "stage1-step-40000": ("S1-40K", "stage 1", 4096, 50_000),
        "stage1-step-1200000": ("S1-1.2M", "stage 1", 4096, 50_000),
        "stage1-step-2400000": ("S1-2.4M", "stage 1", 4096, 50_000),
        "stage1-step-3440000": ("S1-3.4M", "stage 1", 4096, 50_000),
        "stage2-step-4200000": ("S2-4.2M", "stage 2", 4096, 50_000),
        "stage3-step-4720000": ("S3-4.7M", "stage 3", 4096, 50_000),
        "lc-4k-to-32k-step-4000": ("LC1-4K", "LC 4K→32K", 32768, 2_000_000),
        "lc-4k-to-32k-step-20000": ("LC1-20K", "LC 4K→32K", 32768, 2_000_000),
        "lc-32k-to-64k-step-4000": ("LC2-4K", "LC 32K→64K", 65536, 5_000_000),
        "lc-32k-to-64k-step-20000": ("LC2-20K", "LC 32K→64K", 65536, 5_000_000),
    }
    assert list(by_name) == list(expected)
    for name, (label, phase, context, theta) in expected.items():
        found = by_name[name]
        assert (found.label, found.phase, found.context, found.revision) == (label, phase, context, name)
        assert found.expect == {"rope_theta": theta, "max_position_embeddings": context}
        assert found.tokenizer == "HuggingFaceTB/SmolLM3-3B"
        assert found.model == "HuggingFaceTB/SmolLM3-3B-checkpoints"


def test_a_checkpoint_may_bring_its_own_model_and_tokenizer():
    study = parse_study(
        text(
            model=None,
            checkpoints=[
                {"name": "a", "context": 64, "model": "x/a"},
                {"name": "b", "context": 64, "model": "x/b", "tokenizer": "x/t", "tokenizer_revision": "v1"},
            ],
        )
    )
    a, b = study.resolved_checkpoints()
    assert (a.model, a.tokenizer) == ("x/a", None)
    assert (b.model, b.tokenizer, b.tokenizer_revision) == ("x/b", "x/t", "v1")


def test_phases_fill_in_and_checkpoints_win():
    study = parse_study(
        text(
            config={"rope_theta": 1.0, "y": 1, "z": 1},
            phases={"one": {"context": 256, "expect": {"rope_theta": 1.0, "x": 2}, "config": {"y": 2, "z": 2}}},
            checkpoints=[
                {"name": "a", "phase": "one"},
                {"name": "b", "phase": "one", "context": 64, "expect": {"x": 3}, "config": {"z": 3}},
                {"name": "c", "context": 64},
            ],
        )
    )
    a, b, c = study.resolved_checkpoints()
    assert a.config == {"rope_theta": 1.0, "y": 2, "z": 2}
    assert b.config == {"rope_theta": 1.0, "y": 2, "z": 3}
    assert c.config == {"rope_theta": 1.0, "y": 1, "z": 1}
    assert (a.context, a.expect) == (256, {"rope_theta": 1.0, "x": 2})
    assert (b.context, b.expect) == (64, {"rope_theta": 1.0, "x": 3})


MISTAKES = {
    "unknown key": (text(bucket=3), "unknown key 'bucket'; did you mean 'buckets'?"),
    "unknown key far from all": (text(zzz=3), "unknown key 'zzz'; valid keys here: study, title"),
    "unknown checkpoint key": (checkpoint(contxt=3), r"unknown key 'checkpoints\[0\].contxt'; did you mean 'context'"),
    "unknown documents key": (text(documents={"file": "x"}), "unknown key 'documents.file'; did you mean 'files'"),
    "unknown heads key": (text(heads={"sample": 3, "sed": 1}), "unknown key 'heads.sed'; did you mean 'seed'"),
    "two checkpoints of one name": (
        text(checkpoints=[{"name": "a", "context": 9}, {"name": "A", "context": 9}]),
        "2 checkpoints are named 'a'",
    ),
    "two checkpoints of one label": (
        text(checkpoints=[{"name": "a", "context": 9, "label": "1"}, {"name": "b", "context": 9, "label": "1"}]),
        "checkpoints 'a' and 'b' both have the label '1'",
    ),
    "a label that is another's name": (
        text(checkpoints=[{"name": "a", "context": 9}, {"name": "b", "context": 9, "label": "a"}]),
        "checkpoints 'a' and 'b' both have the label 'a'",
    ),
    "a number that YAML takes for text": (
        text(checkpoints=[{"name": "a", "context": 9, "expect": {"rope_theta": "1e4"}}]).replace("'1e4'", "1e4"),
        r"checkpoints\[0\].expect: YAML reads 1e4 as text; write 10000.0",
    ),
    "such a number, nested": (
        text(checkpoints=[{"name": "a", "context": 9, "config": {"rope_parameters": {"factor": "2.5e0"}}}]),
        "YAML reads 2.5e0 as text; write 2.5",
    ),
    "such a number as a context": (checkpoint(context="4e3"), "got '4e3'.; YAML reads 4e3 as text; write 4000"),
    "sample of 0": (text(heads={"sample": 0}), "a sample of 0 heads"),
    "heads of another kind": (text(heads="most"), "should be `all` or a sample"),
    "layers of another kind": (text(layers="some"), "layers: should be `all`, `full` or a list"),
    "no layers": (text(layers=[]), "layers: should be `all`, `full` or a list"),
    "a negative layer": (text(layers=[-1]), r"layers.*greater than or equal to 0"),
    "unknown stage": (text(stage="rope"), "stage: Input should be 'post_rope' or 'pre_rope'"),
    "published with other heads": (
        text(protocol="published", heads={"sample": 20, "seed": 0}),
        "protocol: published has heads .*300.* but the study says",
    ),
    "no checkpoints": (text(checkpoints=[]), "checkpoints"),
    "missing documents": (text(documents=None), "missing key 'documents'"),
    "no context": (text(checkpoints=[{"name": "a"}]), "'a' has no context"),
    "no model": (text(model=None), "'a' has no model"),
    "a number as text": (checkpoint(context="128"), r"checkpoints\[0\].context: .*valid integer \(got '128'\)"),
    "a context of 1": (checkpoint(context=1), "greater than or equal to 2"),
    "an absurd context": (checkpoint(context=10**9), "less than or equal to"),
    "unlisted phase": (text(phases={"x": {}}, checkpoints=[{"name": "a", "context": 9, "phase": "y"}]), "phase 'y'"),
    "both sources": (text(documents={"files": "x", "dataset": "y", "split": "z"}), "either `files` or `dataset`"),
    "dataset without split": (text(documents={"dataset": "y"}), "needs its `split`"),
    "split of files": (text(documents={"files": "y", "split": "test"}), "belong to a `dataset`"),
    "common window too long": (text(common_window=256), "common_window 256 .* shortest context, 128"),
    "skip everything": (text(skip_positions=127), "skip_positions 127 would skip all of checkpoint 'a'"),
    "figure of no checkpoint": (text(figure_checkpoints=["z"]), "figure_checkpoints names 'z'"),
    "name with a path": (checkpoint(name="../a"), r"checkpoints\[0\].name: a name starts with"),
    "name that is a formula": (checkpoint(name="=1+1"), "a name starts with"),
    "reserved name": (checkpoint(name="con"), "a name must not be con"),
    "long name": (checkpoint(name="a" * 300), "a name starts with"),
    "label with a line break": (checkpoint(label="a\nb"), "printable text"),
    "not a mapping": ("- 1", "should be a mapping"),
    "not YAML": ("a: b: c", "not valid YAML: .*line 1, column 5"),
    "a key twice": ("study: a\nstudy: b", "key 'study' is given twice .line 2"),
    "an alias": ("a: &x [1]\nb: *x", "aliases"),
    "a Python object": ("a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    "an unknown tag": ("a: !x 1", "not valid YAML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake, tmp_path):
    content, message = MISTAKES[mistake]
    path = tmp_path / "study.yaml"
    path.write_text(content)
    with pytest.raises(StudyError, match=message) as caught:
        load_study(path)
    assert str(caught.value).startswith(str(path))


def test_files_that_are_no_study(tmp_path):
    with pytest.raises(StudyError, match="no such study file"):
        load_study(tmp_path / "missing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StudyError, match="not UTF-8"):
        load_study(tmp_path / "binary.yaml")
    (tmp_path / "huge.yaml").write_bytes(b" " * (5 * 2**20))
    with pytest.raises(StudyError, match="larger than"):
        load_study(tmp_path / "huge.yaml")


def test_a_changed_study_is_checked_again():
    study = parse_study(text())
    assert changed(study, {"components": 3}).components == 3
    with pytest.raises(StudyError, match="common_window"):
        changed(study, {"common_window": 9999})


def test_the_published_protocol_stands_for_its_samples():
    study = parse_study(text(protocol="published"))
    assert (study.heads.sample, study.heads.seed, study.layers, study.buckets) == (300, 0, "full", 16)
