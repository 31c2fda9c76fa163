"""The whole path on real files: study in, qk.csv out; and what each bad input gets."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qkscope
from families import tiny
from qkscope.capture.backbone import evaluation, run_backbone, text_backbone
from qkscope.capture.tap import Tap
from qkscope.errors import ActivationError, DocumentError, InputError, ModelError, QkscopeError, QkscopeWarning
from qkscope.moments.file import read_provenance
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.plan import make_plan
from qkscope.run.progress import Events
from qkscope.study.load import load_study
from reference import reference_rows
from written import table_of


def raw_vectors(folder, documents, context):
    """Every layer's q and k over the documents, kept whole, by a loop that shares nothing with the pipeline."""
    backbone = text_backbone(AutoModelForCausalLM.from_pretrained(folder))
    kept = {}
    for text in documents:
        ids = torch.tensor([byte_ids(text)[:context]])
        with evaluation(backbone), Tap(backbone, lambda call: kept.setdefault(call.layer, []).append(call)):
            run_backbone(backbone, ids)
    return {
        layer: tuple(
            np.concatenate([getattr(c, kind)[0].double().numpy() for c in calls], 1) for kind in ("query", "key")
        )
        for layer, calls in kept.items()
    }


def byte_ids(text):
    from test_documents import byte_tokenizer

    return byte_tokenizer()(text)["input_ids"]


def usable_texts(tmp_path, context):
    found = [p.read_text() for p in sorted((tmp_path / "docs").glob("*.txt"))]
    return [text for text in found if len(text.encode()) >= context]


@pytest.mark.slow
def test_qk_csv_is_the_reference_method_on_the_raw_vectors(world, tmp_path, checkpoints, finished):
    table = pd.read_csv(finished() / "qk.csv")
    assert list(table["model"].unique()) == ["one", "two"]
    for name, folder, context in (("one", "short", 64), ("two", "long", 256)):
        texts = usable_texts(tmp_path, context)
        assert len(texts) == 6
        vectors = raw_vectors(checkpoints / folder, texts, context)
        t = np.tile(np.arange(float(context)), len(texts))
        for layer in range(4):
            for head in range(4):
                q, k = vectors[layer][0][head], vectors[layer][1][head // 2]
                expected = reference_rows(q, k, t, t, 10)
                rows = table[(table["model"] == name) & (table["layer"] == layer) & (table["head"] == head)]
                for column in ("explained_variance", "r_q", "r_k", "alpha", "beta", "mu_q", "mu_k"):
                    np.testing.assert_allclose(rows[column], expected[column], atol=2e-6, rtol=0)
                assert set(rows["n_q"]) == {len(texts) * context}
    nope = table[table["layer"] == 3]
    assert set(nope["rotary"]) == {"nope"}
    assert set(table.loc[table["layer"] != 3, "rotary"]) == {"rotary"}
    assert set(table["window"]) == {64, 256}


@pytest.mark.slow
def test_windows_of_one_long_capture_equal_a_fresh_capture_of_cut_documents(world, tmp_path, checkpoints, finished):
    """Attention is causal, so the first 64 positions do not know what comes after them."""
    out = finished()
    common = table_of(out, "components")
    windows = table_of(out, "heads")
    assert set(common["window"]) == {64}
    assert sorted(windows.loc[windows["model"] == "two", "window"].unique()) == [16, 32, 64, 128, 256]
    cut = world(study="cut", checkpoints=[{"name": "two", "model": str(checkpoints / "long"), "context": 64}])
    fresh = pd.read_csv(run_study(cut, tmp_path / "cut") / "qk.csv")
    both = common[common["model"] == "two"].reset_index(drop=True)
    for column in ("explained_variance", "r_q", "r_k", "alpha", "beta", "n_q"):
        np.testing.assert_allclose(both[column], fresh[column], atol=1e-6, rtol=0)
    at_64 = windows[(windows["model"] == "two") & (windows["window"] == 64)]
    np.testing.assert_allclose(at_64["r_q"], both.loc[both["pc"] == 0, "r_q"], atol=1e-12)


@pytest.mark.slow
def test_provenance_says_what_produced_the_results(world, tmp_path):
    out = run_study(world(), tmp_path / "out", command="qkscope run study.yaml")
    told = json.loads((out / "provenance.json").read_text())
    assert told["command"] == "qkscope run study.yaml"
    assert told["analysis"] == {
        "components": 10, "heads": "all", "layers": "all", "common_window": 64, "skip_positions": 0,
    }  # fmt: skip
    assert told["corpus"]["documents"] == 7
    assert told["corpus"]["fingerprint"].startswith("sha256:")
    one, two = told["checkpoints"]
    assert (one["documents"], one["documents_too_short"], one["tokens"]) == (6, 1, 6 * 64)
    assert (two["context"], two["dtype"], two["kernel"], two["n_layers"]) == (256, "float32", "sdpa", 4)
    assert one["weights"] != two["weights"]
    assert two["layers"][3] == {
        "layer": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 16, "rotary": "nope", "rotary_dims": 0,
        "attention": "full", "attention_window": None, "score_scale": 0.25,
    }  # fmt: skip
    assert told["environment"]["torch"] == torch.__version__
    assert read_provenance(out / "moments/one.safetensors")["fingerprint"] == one["fingerprint"]
    assert (out / "study.yaml").read_text() == world().read_text()


@pytest.mark.slow
def test_running_again_uses_what_is_there_and_redoes_what_changed(world, results):
    out = results()
    files = {name: (out / f"moments/{name}.safetensors").stat().st_mtime_ns for name in ("one", "two")}
    before = (out / "qk.csv").read_bytes()
    run_study(world(), out)
    assert files == {name: (out / f"moments/{name}.safetensors").stat().st_mtime_ns for name in files}
    assert (out / "qk.csv").read_bytes() == before
    run_study(world(skip_positions=1), out)  # a choice of the tables: the sums hold position 0 apart
    assert files == {name: (out / f"moments/{name}.safetensors").stat().st_mtime_ns for name in files}
    assert pd.read_csv(out / "qk.csv")["n_q"].iloc[0] == 6 * 63
    run_study(world(), out)
    assert (out / "qk.csv").read_bytes() == before
    with pytest.raises(InputError, match=r"'one': .*one\.safetensors was made with groups 3 \(now 5\)\n"):
        run_study(world(groups=5), out)
    assert files == {name: (out / f"moments/{name}.safetensors").stat().st_mtime_ns for name in files}
    assert (out / "study.yaml").read_text() == world().read_text()  # still says what the results are
    run_study(world(groups=5), out, options=CaptureOptions(overwrite=True))
    assert all((out / f"moments/{name}.safetensors").stat().st_mtime_ns != then for name, then in files.items())


def test_changed_weights_are_noticed(world, tmp_path, checkpoints):
    shutil.copytree(checkpoints / "short", tmp_path / "model")
    study = world(checkpoints=[{"name": "one", "model": "model", "context": 64}])
    before = pd.read_csv(run_study(study, tmp_path / "out") / "qk.csv")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"][0, 0] += 1.0
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="was made with other weights"):
        run_study(study, tmp_path / "out")
    replaced = run_study(study, tmp_path / "out", options=CaptureOptions(overwrite=True))
    after = pd.read_csv(replaced / "qk.csv")
    assert not np.array_equal(before["r_q"], after["r_q"])


@pytest.mark.slow
def test_a_damaged_moments_file_is_refused_by_analyze_and_redone_by_run(world, results):
    from qkscope.tables.from_moments import analyze_folder

    out = results()
    expected = (out / "qk.csv").read_bytes()
    path = out / "moments/one.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"one\.safetensors: .*truncated"):
        analyze_folder(out, Events(), "x", components=None)
    run_study(world(), out)
    assert (out / "qk.csv").read_bytes() == expected
    flipped = bytearray(path.read_bytes())
    flipped[-1000] ^= 1  # one bit of a sum: the header is as it was
    path.write_bytes(bytes(flipped))
    heard = Heard()
    run_study(world(), out, heard)
    assert len(heard.reasons) == 1
    assert "checksum does not match" in heard.reasons[0]
    assert (out / "qk.csv").read_bytes() == expected


class Heard(Events):
    """Keeps why something was done again."""

    def __init__(self):
        self.reasons = []

    def examined(self, state):
        self.reasons += state.unusable


@pytest.mark.slow
def test_a_sample_of_heads(world, tmp_path):
    table = pd.read_csv(run_study(world(heads={"sample": 5, "seed": 1}), tmp_path / "out") / "qk.csv")
    chosen = table.groupby("model")[["layer", "head"]].apply(lambda rows: sorted(set(map(tuple, rows.to_numpy()))))
    import random

    expected = sorted(random.Random(1).sample([(layer, head) for layer in range(4) for head in range(4)], 5))
    assert chosen["one"] == chosen["two"] == expected


def test_overrides_change_the_model(world, tmp_path, checkpoints):
    """RoPE scaling for a longer context than the checkpoint was made for."""
    base = {"name": "one", "model": str(checkpoints / "short"), "context": 128}
    with pytest.raises(ModelError, match=r"'one'.*context 128 is longer than the model's maximum of 64"):
        run_study(world(checkpoints=[base]), tmp_path / "out")
    longer = {**base, "config": {"max_position_embeddings": 128, "rope_theta": 1e6}}
    out = run_study(world(checkpoints=[{**longer, "expect": {"rope_theta": 1e6}}]), tmp_path / "out")
    told = json.loads((out / "provenance.json").read_text())["checkpoints"][0]
    assert (told["rope_theta"], told["max_position_embeddings"]) == (1e6, 128)
    assert told["config_overrides"] == {"max_position_embeddings": 128, "rope_theta": 1e6}


def one(checkpoints, **changes):
    return [{"name": "one", "model": str(checkpoints / "short"), "context": 64, **changes}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expect": {"rope_theta": 3.0}}, r"'one': expect: rope_theta should be 3.0 but the loaded config has"),
        ({"expect": {"rope_thet": 3.0}}, "no 'rope_thet'; did you mean 'rope_theta'"),
        ({"config": {"hidden_sise": 3}}, "config: the model's config has no 'hidden_sise'; did you mean 'hidden_size'"),
        ({"model": "./missing"}, "there is no model directory"),
        ({"model": "missing.gguf"}, "there is no GGUF file"),
        ({"model": "docs"}, "has no config.json"),
        ({"model": "docs/tiny.txt"}, "is a file; give a directory"),
        ({"tokenizer": "docs"}, "it holds no tokenizer"),
    ],
)
def test_checkpoints_that_are_wrong_are_refused_before_anything_runs(world, tmp_path, checkpoints, changes, message):
    with pytest.raises(ModelError, match=message):
        run_study(world(checkpoints=one(checkpoints, **changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_pickle_only_checkpoint(world, tmp_path, checkpoints):
    shutil.copytree(checkpoints / "short", tmp_path / "model")
    torch.save(load_file(tmp_path / "model/model.safetensors"), tmp_path / "model/pytorch_model.bin")
    (tmp_path / "model/model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only as pickles \(pytorch_model.bin\).*save_pretrained"):
        run_study(world(checkpoints=one(checkpoints, model="model")), tmp_path / "out")


def test_a_model_that_needs_remote_code(world, tmp_path, checkpoints):
    shutil.copytree(checkpoints / "short", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config.update(model_type="secret", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    (tmp_path / "model/evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match=r"needs remote code: .*trust_remote_code=True"):
        run_study(world(checkpoints=one(checkpoints, model="model")), tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_a_model_that_cannot_be_captured(world, tmp_path, checkpoints):
    tiny("falcon", vocab_size=256).save_pretrained(tmp_path / "falcon")
    study = world(checkpoints=one(checkpoints, model="falcon", tokenizer=str(checkpoints / "short")))
    with pytest.raises(QkscopeError, match=r"'one': no attention call arrived from this model \(type 'falcon'"):
        run_study(study, tmp_path / "out")


def test_no_document_is_long_enough(world, tmp_path, checkpoints):
    (tmp_path / "docs2").mkdir()
    (tmp_path / "docs2/a.txt").write_text("x" * 63)
    study = world(checkpoints=one(checkpoints), documents={"files": "docs2/*", "special_tokens": "none"})
    with pytest.raises(DocumentError, match=r"'one': no document has the 64 tokens.*docs2/a\.txt, has 63"):
        run_study(study, tmp_path / "out")


def test_a_nan_is_reported_with_checkpoint_layer_head_document_and_position(world, tmp_path, checkpoints):
    """One byte's queries overflow: the first place where it stands is reported; finished checkpoints stay."""
    shutil.copytree(checkpoints / "short", tmp_path / "model")
    (tmp_path / "docs2").mkdir()
    (tmp_path / "docs2/a.txt").write_text("a" * 64)
    (tmp_path / "docs2/b.txt").write_text("a" * 41 + "b" + "a" * 22)
    weights = load_file(tmp_path / "model/model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 0.0
    weights["model.embed_tokens.weight"][byte_ids("b")[0], 0] = 9.0
    weights["model.layers.0.self_attn.q_proj.weight"][:, 0] = 3e38
    save_file(weights, tmp_path / "model/model.safetensors", {"format": "pt"})
    study = world(
        documents={"files": "docs2/*", "special_tokens": "none"},
        checkpoints=[*one(checkpoints), {"name": "broken", "model": "model", "context": 64}],
    )
    with pytest.raises(
        ActivationError, match=r"'broken': document docs2/b\.txt: \S+ in a query of layer 0, head 0, position 41"
    ):
        run_study(study, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out/moments").iterdir()] == ["one.safetensors"]


def test_different_documents_for_different_contexts_are_pointed_out(world, tmp_path):
    (tmp_path / "docs/middle.txt").write_text("x" * 100)
    same = make_plan(load_study(world()))
    assert [len(each.documents) for each in same.checkpoints] == [6, 6]
    assert any("same_documents: false lets shorter contexts see more" in note for note in same.notes())
    plan = make_plan(load_study(world(same_documents=False)))
    assert [len(each.documents) for each in plan.checkpoints] == [7, 6]
    assert any("different documents (6 to 7 of them)" in note for note in plan.notes())
    assert any("2 of 8 documents are left out at checkpoint 'two'" in note for note in plan.notes())


def test_precision_and_device_are_chosen_with_reasons():
    from qkscope.capture.load import choose_device, choose_dtype

    assert choose_dtype("auto", "cpu", None) == torch.float32
    assert choose_dtype("float32", "cpu", None) == torch.float32
    assert choose_dtype("bfloat16", "cuda", None) == torch.bfloat16
    with pytest.warns(QkscopeWarning, match="dtype bfloat16 on a CPU is slow"):
        assert choose_dtype("bfloat16", "cpu", None) == torch.bfloat16
    assert choose_device("cuda:1", here=False) == "cuda:1"
    with pytest.raises(ModelError, match="device 'gpu' is not one that torch knows"):
        choose_device("gpu")


def test_the_notebook_way(checkpoints, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "long")
    texts = ["".join(chr(97 + (i * j) % 26) for i in range(300)) for j in range(1, 6)]
    from test_documents import byte_tokenizer

    windows = qkscope.token_windows(byte_tokenizer(), [*texts, "short"], context=256)
    assert len(windows) == 5
    heard = []
    moments = qkscope.capture_moments(model, windows, batch_size=2, progress=heard.append)
    assert heard == [512, 512, 256]
    table = qkscope.analyze(moments, model="mine", components=2)
    assert len(table) == 4 * 4 * 2
    moments.save(tmp_path / "m.safetensors")
    again = qkscope.analyze(tmp_path / "m.safetensors", model="mine", components=2)
    errors = [name for name in table.columns if name.endswith("_se") or name == "category_share"]
    pd.testing.assert_frame_equal(table.drop(columns=errors), again.drop(columns=errors))
    np.testing.assert_allclose(
        table[errors], again[errors], rtol=0.02, atol=1e-6
    )  # a file keeps three digits of groups
    padded = qkscope.capture_moments(model, [window[: 200 + i] for i, window in enumerate(windows)], batch_size=5)
    alone = qkscope.capture_moments(model, [window[: 200 + i] for i, window in enumerate(windows)], batch_size=1)
    one_by_one = qkscope.analyze(alone)
    np.testing.assert_allclose(qkscope.analyze(padded)["r_q"], one_by_one["r_q"], atol=1e-5)


def test_nothing_to_capture(checkpoints):
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    with pytest.raises(InputError, match="at least one window"):
        qkscope.capture_moments(model, [])
    with pytest.raises(QkscopeError, match="no batch was given"):
        qkscope.capture_moments(model, [], context=32)
    with pytest.raises(InputError, match="window 1 is empty"):
        qkscope.capture_moments(model, [[1, 2, 3], []])


def test_a_device_map_spreads_layers_and_their_sums(checkpoints):
    """No GPU here: accelerate's hooks on two CPU 'devices' still move inputs layer by layer."""
    from accelerate import dispatch_model

    model = AutoModelForCausalLM.from_pretrained(checkpoints / "short")
    plain = qkscope.analyze(qkscope.capture_moments(model, [list(range(start, start + 64)) for start in range(3)]))
    spread = dispatch_model(model, {"": "cpu"}, force_hooks=True)
    hooked = qkscope.analyze(qkscope.capture_moments(spread, [list(range(start, start + 64)) for start in range(3)]))
    pd.testing.assert_frame_equal(plain, hooked)


@pytest.mark.slow
def test_the_report_is_about_the_common_window_only_where_contexts_differ(finished, tmp_path, checkpoints, sketches):
    from qkscope.report.write import write_report

    both, alone = finished(), finished(checkpoints=one(checkpoints))
    for results, differ in ((both, True), (alone, False)):
        out = tmp_path / ("both" if differ else "alone")
        written = {path.relative_to(out).as_posix() for path in write_report(results, out=out)}
        assert "figures/01_position_signal/figure.png" in written
        card = (out / "figures/01_position_signal/README.md").read_text(encoding="utf-8")
        assert ("Hollow: the first 64 tokens." in card) is differ
        assert ("tables/claims_common.csv" in written) is differ
        means = pd.read_csv(out / "tables/means.csv")
        assert ("common" in set(means["windows"])) is differ
