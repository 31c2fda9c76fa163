"""`LightningHeadsCallback`: the same measurements where Lightning trains."""

import json

import pandas as pd
import pytest
import torch

from families import tiny, tokens
from qkscope.errors import InputError
from qkscope.train import LightningHeadsCallback

lightning = pytest.importorskip("lightning.pytorch")
DOCUMENTS = tokens(8, 48, seed=3).tolist()
QUICK = {"page": False, "groups": 1, "strict": True}


class Module(lightning.LightningModule):
    def __init__(self, inner=None):
        super().__init__()
        self.language = inner or tiny("llama", num_hidden_layers=2, attention_dropout=0.2)
        self.seen = []

    def training_step(self, batch, index):
        loss = self.language(input_ids=batch, labels=batch).loss
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("eval_loss", self.language(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Remembering(lightning.loggers.logger.DummyLogger):
    """A logger that keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


def fit(folder, *callbacks, module=None, **changes):
    lightning.seed_everything(1, verbose=False)
    logger = Remembering()
    settings = {
        "max_steps": 6,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": logger,
        **changes,
    }
    module = (module or Module()).train()
    module.language.train()
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **settings)
    loader = torch.utils.data.DataLoader(tokens(24, 24), batch_size=2)
    trainer.fit(module, loader, torch.utils.data.DataLoader(tokens(4, 24, seed=5), batch_size=2))
    return module, logger


def steps_in(folder):
    return [each["step"] for each in json.loads((folder / "qkscope/training.json").read_text())["steps"]]


def measured(logger):
    return [step for step, metrics in logger.rows if "qkscope/r_q_mean" in metrics]


@pytest.mark.slow
def test_losses_are_bit_identical_with_and_without(tmp_path):
    plain, _ = fit(tmp_path / "plain")
    callback = LightningHeadsCallback(DOCUMENTS, every=2, **QUICK)
    found, logger = fit(tmp_path / "measured", callback)
    assert found.seen == plain.seen
    assert len(plain.seen) == 6
    assert steps_in(tmp_path / "measured") == measured(logger) == [0, 2, 4, 6]


def test_at_evaluation_where_lightning_is_in_inference_mode(tmp_path):
    callback = LightningHeadsCallback(DOCUMENTS, **QUICK)
    module, logger = fit(tmp_path, callback, val_check_interval=3)
    assert measured(logger) == [0, 3, 6]
    assert len(module.seen) == 6


def test_in_mixed_precision(tmp_path):
    callback = LightningHeadsCallback(DOCUMENTS, every=3, **QUICK)
    fit(tmp_path, callback, precision="bf16-mixed")
    record = json.loads((tmp_path / "qkscope/provenance.json").read_text())["checkpoints"][0]
    assert record["autocast"] == "bfloat16"


@pytest.mark.slow
def test_accumulated_batches_count_once(tmp_path):
    callback = LightningHeadsCallback(DOCUMENTS, every=1, **{**QUICK, "page": True})
    _, logger = fit(tmp_path, callback, accumulate_grad_batches=3, max_steps=2)
    assert measured(logger) == [0, 1, 2]
    assert set(pd.read_csv(tmp_path / "qkscope/qk.csv")["model"]) == {"step-0", "step-1", "step-2"}
    assert (tmp_path / "qkscope/report.html").is_file()


@pytest.mark.parametrize(
    ("every", "changes", "message"),
    [
        ("evaluation", {"limit_val_batches": 0}, "every='evaluation', but nothing is validated"),
        ("save", {}, "every='save', but no checkpoint is saved"),
    ],
)
def test_an_event_that_never_comes_is_refused_when_the_training_begins(tmp_path, every, changes, message):
    with pytest.raises(InputError, match=message):
        fit(tmp_path, LightningHeadsCallback(DOCUMENTS, every=every, **QUICK), **changes)


def test_a_module_without_a_transformers_model_is_refused(tmp_path):
    class Other(Module):
        def __init__(self):
            super().__init__()
            self.language = torch.nn.Embedding(128, 128)

        def training_step(self, batch, index):
            return self.language(batch).sum()

        def validation_step(self, batch, index):
            pass

    callback = LightningHeadsCallback(DOCUMENTS, every=2)
    with pytest.raises(InputError, match="Other holds no transformers model"):
        fit(tmp_path, callback, module=Other())
    callback = LightningHeadsCallback(DOCUMENTS, every=2, model="transformer")
    with pytest.raises(InputError, match="has no attribute 'transformer'"):
        fit(tmp_path, callback)
