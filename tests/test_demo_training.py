"""The demo's training part: real tokenizer, clean split, ten loadable checkpoints, and nothing lost or mistaken."""

import dataclasses
import functools
import json
import random
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pandas as pd
import pytest
import yaml

from qkscope.cli.main import main
from qkscope.demo import DemoSettings, corpus, prepare_demo
from qkscope.demo.corpus import SKIPPED_FOLDERS, excerpt, read_sources, split_library
from qkscope.errors import InputError

# The real phases with the fewest steps and a smaller model: seconds instead of minutes.
TINY = dataclasses.replace(
    DemoSettings(),
    layers=4,
    hidden_size=32,
    mlp_size=32,
    query_heads=4,
    kv_heads=1,
    documents=4,
    phases=tuple(dataclasses.replace(phase, sequences=1) for phase in DemoSettings().phases),
).scaled(0.001)


def fewer_phases(settings, **changes):
    """One short phase only, for tests that train more than once."""
    return dataclasses.replace(settings, phases=settings.phases[:1], **changes)


@pytest.fixture(scope="module", autouse=True)
def _library_read_once():
    """Python's library, seven hundred files, is the same for all that train on it here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "read_sources", functools.cache(corpus.read_sources))
        yield


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    seen = []
    prepare_demo(folder, TINY, seen.append)
    return folder, seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = fewer_phases(TINY)
    folder = tmp_path_factory.mktemp("trained")
    prepare_demo(folder, settings)
    return folder, settings


@pytest.fixture
def small(trained, tmp_path):
    """A copy of its own for each test that changes something."""
    folder, settings = trained
    return shutil.copytree(folder, tmp_path, dirs_exist_ok=True), settings


def every_mtime(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


# Tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x  # plain\n",
        "  two  spaces\tand a tab\r\nand CRLF \x0c\x00",
        "naïve café Ωμέγα 漢字 🙂 e\u0301 \u200d\ufeff",
        "".join(map(chr, range(0x800))),
        "<|endoftext|> [PAD] <s>",
        "",
    ],
)
def test_one_token_per_utf8_byte(demo, text):
    from transformers import AutoTokenizer

    folder, _ = demo
    tokenizer = AutoTokenizer.from_pretrained(folder / "checkpoints" / TINY.checkpoints()[-1].name)
    expected = list(text.encode("utf-8"))
    assert tokenizer(text)["input_ids"] == expected
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.decode(expected) == text
    assert len(tokenizer) == 256
    assert tokenizer.bos_token_id is None


# Corpus


def test_corpus_is_the_same_every_time(monkeypatch):
    monkeypatch.setattr(corpus, "read_sources", corpus.read_sources.__wrapped__)  # from the disk each time
    assert split_library(TINY) == split_library(TINY)
    assert split_library(TINY).digest == split_library(TINY).digest
    other = split_library(dataclasses.replace(TINY, split_seed=1))
    assert other.digest != split_library(TINY).digest


def test_training_seed_does_not_move_the_split():
    assert split_library(TINY) == split_library(dataclasses.replace(TINY, seed=7))


def test_no_held_out_text_is_in_the_training_text():
    found = split_library(DemoSettings())
    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    training = found.training_bytes("broad")
    assert len(found.documents) == 48
    for path, text in found.documents.items():
        assert path not in found.training
        assert text in sources[path]
        assert text.encode() not in training
    assert not any(set(path.split("/")) & SKIPPED_FOLDERS for path in found.training)


def test_the_core_mix_is_part_of_the_broad_one():
    found = split_library(TINY)
    assert 1_000_000 < len(found.training_bytes("core")) < len(found.training_bytes("broad"))


def test_documents_are_longer_than_the_longest_context(demo):
    folder, _ = demo
    files = sorted((folder / "documents").glob("*.txt"))
    assert len(files) == TINY.documents
    assert all(path.stat().st_size >= 1024 for path in files)


def test_an_excerpt_starts_at_a_line_and_is_long_enough():
    text = "".join(f"line {i}\n" for i in range(200))
    for seed in range(20):
        cut = excerpt(text, 100, random.Random(seed))
        assert cut.startswith("line ")
        assert cut.endswith("\n")
        assert 100 <= len(cut) <= 110  # at most the rest of the last line more
        assert cut in text


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(InputError, match="without its library's sources"):
        split_library(TINY, library=tmp_path)


# Settings


def test_the_ten_checkpoints_are_phased_like_the_published_study():
    plans = DemoSettings().checkpoints()
    assert [plan.label.split("-")[0] for plan in plans] == ["S1"] * 4 + ["S2", "S3"] + ["LC1"] * 2 + ["LC2"] * 2
    assert (plans[0].name, plans[0].label) == ("stage1-step-40", "S1-40")
    assert plans[-1].phase.title == "LC 512→1024"
    assert [plan.phase.context for plan in plans] == [128] * 6 + [512] * 2 + [1024] * 2
    thetas = [plan.phase.rope_theta for plan in plans]
    assert thetas == sorted(thetas)


def test_total_steps_counts_every_step_once():
    # 440 through stage 3, where steps count on, and 40 in each long-context phase, where they start from zero.
    settings = DemoSettings()
    assert settings.total_steps == settings.phases[2].steps[-1] + sum(p.steps[-1] for p in settings.phases[3:])


@pytest.mark.parametrize("factor", [0.0001, 0.1, 0.5, 3.0])
def test_scaling_keeps_ten_different_checkpoints(factor):
    plans = DemoSettings().scaled(factor).checkpoints()
    assert len({plan.name for plan in plans}) == 10
    stages = [plan.step for plan in plans[:6]]
    assert stages == sorted(set(stages))


def test_scaling_by_one_changes_nothing():
    assert DemoSettings().scaled(1) == DemoSettings()


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_senseless_scales_are_refused(factor):
    with pytest.raises(InputError, match="positive"):
        DemoSettings().scaled(factor)


def test_fingerprint_follows_every_number():
    base = DemoSettings()
    assert base.fingerprint == DemoSettings().fingerprint
    changed = [
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, documents=47),
        base.scaled(0.5),
        dataclasses.replace(base, phases=(dataclasses.replace(base.phases[0], rope_theta=1.0), *base.phases[1:])),
    ]
    assert len({base.fingerprint, *(settings.fingerprint for settings in changed)}) == 5


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(InputError, match="equal, even heads"):
        DemoSettings(hidden_size=100)
    with pytest.raises(InputError, match="multiple of 16"):
        DemoSettings(phases=(dataclasses.replace(DemoSettings().phases[0], context=100),))


# Training


def test_learning_rate_warms_up_stays_and_decays():
    from qkscope.demo.train import learning_rate

    phase = dataclasses.replace(DemoSettings().phases[0], peak_lr=1.0, end_lr=1.0, warmup=4)
    assert [learning_rate(phase, step, 0, 10) for step in (1, 2, 4, 10)] == [0.25, 0.5, 1.0, 1.0]
    decay = dataclasses.replace(phase, end_lr=0.0, warmup=0)
    assert [learning_rate(decay, step, 100, 110) for step in (101, 105, 110)] == pytest.approx([0.9, 0.5, 0.0])


def test_ten_loadable_checkpoints_with_their_own_context_and_theta(demo):
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, _ = demo
    plans = TINY.checkpoints()
    assert len(plans) == 10
    for plan in plans:
        path = folder / "checkpoints" / plan.name
        config = AutoConfig.from_pretrained(path)
        assert config.model_type == "smollm3"
        assert config.max_position_embeddings == plan.phase.context
        assert config.rope_parameters["rope_theta"] == plan.phase.rope_theta
        assert config.no_rope_layers == [1, 1, 1, 0]
        assert (path / "model.safetensors").stat().st_mode == (path / "config.json").stat().st_mode  # as the umask says
    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    assert type(model).__name__ == "SmolLM3ForCausalLM"


def test_every_checkpoint_differs_from_the_one_before(demo):
    folder, _ = demo
    weights = [(folder / "checkpoints" / plan.name / "model.safetensors").read_bytes() for plan in TINY.checkpoints()]
    assert len(set(weights)) == 10


def test_study_file_names_everything(demo):
    folder, _ = demo
    study = yaml.safe_load((folder / "study.yaml").read_text(encoding="utf-8"))
    assert set(study) == {"study", "title", "head_types", "documents", "checkpoints"}
    assert study["documents"] == {"files": "documents/*.txt", "special_tokens": "none"}
    assert [entry["name"] for entry in study["checkpoints"]] == [plan.name for plan in TINY.checkpoints()]
    assert all((folder / entry["model"] / "config.json").is_file() for entry in study["checkpoints"])
    assert study["checkpoints"][-1] == {
        "name": "lc-512-to-1024-step-2",
        "model": "checkpoints/lc-512-to-1024-step-2",
        "label": "LC2-2",
        "phase": "LC 512→1024",
        "context": 1024,
        "expect": {"rope_theta": 5_000_000.0, "max_position_embeddings": 1024},
    }


def test_progress_counts_to_the_end(demo):
    _, seen = demo
    assert [report.step for report in seen] == list(range(1, TINY.total_steps + 1))
    assert {report.total_steps for report in seen} == {TINY.total_steps}
    assert list(dict.fromkeys(report.checkpoint for report in seen)) == [plan.name for plan in TINY.checkpoints()]
    assert all(0 < report.loss < 10 and report.tokens_per_second > 0 for report in seen)


def test_same_seed_same_weights_and_the_callers_random_numbers_untouched(small, tmp_path_factory):
    import torch

    folder, settings = small
    torch.manual_seed(123)
    expected = torch.rand(1)
    torch.manual_seed(123)
    again = tmp_path_factory.mktemp("again")
    prepare_demo(again, settings)
    assert torch.rand(1) == expected
    for plan in settings.checkpoints():
        weights = f"checkpoints/{plan.name}/model.safetensors"
        assert (folder / weights).read_bytes() == (again / weights).read_bytes()


def test_a_longer_phase_keeps_the_weights():
    import torch
    from transformers import SmolLM3ForCausalLM

    from qkscope.demo.train import model_config, with_phase_config

    model = SmolLM3ForCausalLM(model_config(TINY, TINY.phases[0]))
    longer = with_phase_config(model, TINY, TINY.phases[-1])
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, longer.state_dict()[name]), name
    assert longer.config.max_position_embeddings == 1024
    assert not torch.equal(model.model.rotary_emb.inv_freq, longer.model.rotary_emb.inv_freq)


# Reuse, and what is never lost


def test_running_again_writes_nothing(small):
    folder, settings = small
    before = every_mtime(folder)
    seen = []
    study = prepare_demo(folder, settings, seen.append)
    assert study == folder / "study.yaml"
    assert seen == []
    assert every_mtime(folder) == before


def test_other_settings_train_anew_and_leave_no_stale_checkpoints(small):
    folder, settings = small
    first = folder / "checkpoints" / settings.checkpoints()[0].name / "model.safetensors"
    before = first.read_bytes()
    prepare_demo(folder, dataclasses.replace(settings, seed=1))
    assert first.read_bytes() != before

    longer = settings.scaled(2)
    prepare_demo(folder, longer)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == sorted(plan.name for plan in longer.checkpoints())


@pytest.mark.parametrize("damage", ["truncated", "missing file", "no record", "only a partial folder"])
def test_a_half_written_checkpoint_is_made_again(small, damage):
    folder, settings = small
    path = folder / "checkpoints" / settings.checkpoints()[1].name
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[: len(whole) // 2])
    elif damage == "missing file":
        weights.unlink()
    elif damage == "no record":
        shutil.rmtree(path)
        path.mkdir()
    else:  # what an interruption leaves behind
        partial = path.with_name(f".{path.name}.partial")
        path.rename(partial)
        record = json.loads((partial / "demo.json").read_text())
        (partial / "demo.json").write_text(json.dumps(record | {"files": None}))
    prepare_demo(folder, settings)
    assert weights.read_bytes() == whole
    assert not list(folder.rglob("*.partial"))


def test_an_interrupted_training_leaves_only_whole_checkpoints(tmp_path):
    settings = fewer_phases(TINY)

    def interrupt(report):
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_demo(tmp_path, settings, interrupt)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
    assert not (tmp_path / "study.yaml").exists()
    prepare_demo(tmp_path, settings)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 4


@pytest.mark.parametrize(
    "place",
    [
        "checkpoints/stage1-step-1/notes.md",
        "checkpoints/stage1-step-1",
        "checkpoints",
        "documents/mine.txt",
        "study.yaml",
    ],
)
def test_foreign_files_in_the_way_stop_the_demo(tmp_path, place):
    mine = tmp_path / place
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    before = every_mtime(tmp_path)
    with pytest.raises(InputError, match="choose another folder"):
        prepare_demo(tmp_path, fewer_phases(TINY))
    assert mine.read_text() == "mine"
    assert every_mtime(tmp_path) == before


def test_a_foreign_file_in_a_made_folder_is_never_deleted(small):
    folder, settings = small
    mine = folder / "checkpoints" / settings.checkpoints()[0].name / "my-notes.txt"
    mine.write_text("mine")
    with pytest.raises(InputError, match=r"my-notes\.txt"):
        prepare_demo(folder, dataclasses.replace(settings, seed=1))
    prepare_demo(folder, settings.scaled(2))  # other names: not in the way
    assert mine.read_text() == "mine"


def test_a_stray_file_in_a_checkpoint_does_not_stop_reuse(small):
    folder, settings = small
    (folder / "checkpoints" / settings.checkpoints()[0].name / ".DS_Store").write_text("")
    before = every_mtime(folder)
    prepare_demo(folder, settings)
    assert every_mtime(folder) == before


def test_a_stray_document_stops_the_demo_as_it_would_join_the_study(small):
    folder, settings = small
    (folder / "documents" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match=r"mine\.txt"):
        prepare_demo(folder, settings)


def test_foreign_files_beside_the_checkpoints_are_left_alone(small):
    folder, settings = small
    for place in ("notes.md", "checkpoints/mine/model.safetensors", "checkpoints/readme.txt"):
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("mine")
    prepare_demo(folder, dataclasses.replace(settings, seed=2))
    for place in ("notes.md", "checkpoints/mine/model.safetensors", "checkpoints/readme.txt"):
        assert (folder / place).read_text() == "mine"


# The command


@pytest.mark.slow
def test_the_command_trains_measures_and_reports_once(tmp_path, monkeypatch, capsys, sketches):
    """With the tiny model and two phases, each with its context; `test_demo_effect.py` trains the real one."""
    short, long = (dataclasses.replace(TINY.phases[i], steps=TINY.phases[i].steps[:n]) for i, n in ((0, 2), (3, 1)))
    settings = dataclasses.replace(TINY, phases=(short, long))
    names = [plan.name for plan in settings.checkpoints()]
    assert len(names) == 3
    monkeypatch.setattr("qkscope.demo.settings.DemoSettings", lambda seed: dataclasses.replace(settings, seed=seed))
    command = ["demo", "--steps", "1", "--out", str(tmp_path / "demo")]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "training: step" in told.err
    assert told.out.startswith(f"results: {tmp_path}/demo/\n")
    assert list(pd.read_csv(tmp_path / "demo/qk.csv")["model"].unique()) == names
    assert (tmp_path / "demo/figures/01_position_signal/figure.png").is_file()
    assert (tmp_path / "demo/report.html").is_file()
    weights = sorted((tmp_path / "demo/checkpoints").rglob("model.safetensors"))
    before = [path.stat().st_mtime_ns for path in weights]
    monkeypatch.setattr("qkscope.cli.commands.draw_report", lambda folder, **_: None)  # was seen
    assert main(command) == 0
    told = capsys.readouterr().err
    assert "training: step" not in told
    assert told.count("moments already exist") == 3
    assert [path.stat().st_mtime_ns for path in weights] == before


def test_importing_the_demo_is_cheap():
    code = "import sys, qkscope.demo; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'tokenizers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
