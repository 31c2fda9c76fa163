"""The published study file, scaled down, from `inspect` to `compare`: revisions on a hub on this machine, and a kill.

The models have the published shape (36 layers of 16 query heads, RoPE bases, maximal contexts) and heads of width 8.
There are three of the ten, contexts are short, and the dataset is a folder. Everything else is what the header says.
"""

import json
import os
import signal
import threading
import time
from http.server import ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest
import yaml
from transformers import SmolLM3Config, SmolLM3Model, set_seed

from test_documents import byte_tokenizer
from test_hub import Serving, run

pytestmark = pytest.mark.slow

FILE = Path(__file__).parent.parent / "studies/smollm3_training_progress.yaml"
CONTEXTS = {4096: 64, 32768: 96, 65536: 128}
DOCUMENTS = 6


def scaled(settings):
    """The study with short contexts and a folder of texts."""
    for phase in settings["phases"].values():
        phase["context"] = CONTEXTS[phase["context"]]
    settings["checkpoints"] = [settings["checkpoints"][number] for number in (0, 7, 9)]  # one of each context
    del settings["figure_checkpoints"]
    documents = {**settings["documents"], "dataset": "texts", "limit": DOCUMENTS}
    return {**settings, "documents": documents, "dtype": "float32", "groups": 4, "shard_tokens": 512}


def save_models(folder, settings):
    """The checkpoints of the study by revision, each with the config that it expects, and the tokenizer alone."""
    revisions = {}
    for number, checkpoint in enumerate(settings["checkpoints"]):
        set_seed(number)
        config = SmolLM3Config(
            num_hidden_layers=36, num_attention_heads=16, num_key_value_heads=4, head_dim=8, hidden_size=16,
            intermediate_size=16, vocab_size=300, **settings["phases"][checkpoint["phase"]]["expect"],
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        revisions[checkpoint["revision"]] = folder / checkpoint["name"]
        SmolLM3Model(config).save_pretrained(revisions[checkpoint["revision"]])
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    return {settings["model"]: revisions, settings["tokenizer"]: {"main": folder / "tokenizer"}}


@pytest.fixture
def hub(tmp_path):
    """The study in a folder, and the variables of a process that finds its models on a hub on this machine."""
    settings = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    small = scaled(settings)
    repositories = save_models(tmp_path / "models", small)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(small, allow_unicode=True, sort_keys=False))
    (tmp_path / "texts").mkdir()
    text = Path(yaml.__file__).with_name("scanner.py").read_text()
    rows = [json.dumps({"text": text[700 * i : 700 * i + 400]}) for i in range(DOCUMENTS)]
    (tmp_path / "texts/test.jsonl").write_text("\n".join(rows))
    handler = type("Flagship", (Serving,), {"repositories": repositories, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()
    server.server_close()


def test_the_commands_of_the_header_give_every_published_number(tmp_path, hub, start):
    home, out = tmp_path / "home", tmp_path / "out"

    inspected = run(tmp_path, home, "inspect", "study.yaml", "--out", out, **hub)
    assert inspected.returncode == 0, inspected.stderr
    assert "3 checkpoints" in inspected.stdout
    assert "below 0.01 GPU hours on an A100" in inspected.stdout
    assert "downloads: " in inspected.stdout
    assert not list(home.rglob("*.safetensors"))

    command = ("run", "study.yaml", "--out", out, "--vectors", "--evict")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    killed = start(*command, env={**clean, "HF_HOME": str(home), **hub})
    while not list(out.glob("moments/*.safetensors")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    _, errors = killed.communicate()
    assert "note: downloading HuggingFaceTB/SmolLM3-3B-checkpoints@" in errors
    assert len(list(out.glob("moments/*.safetensors"))) < 3
    again = run(tmp_path, home, *command, **hub)
    assert again.returncode == 0, again.stderr
    assert not list(home.glob("hub/models--HuggingFaceTB--SmolLM3-3B-checkpoints/snapshots/*/*.safetensors"))

    analyzed = run(tmp_path, home, "analyze", out, "--plasticity-pairs", "1000", **hub)
    assert analyzed.returncode == 0, analyzed.stderr
    compared = run(tmp_path, home, "compare", out, "--with", "published:smollm3-3b", **hub)
    assert compared.returncode == 1, compared.stderr  # these models never learned anything
    assert "of 470 published numbers" in compared.stdout
    numbers = pd.read_csv(out / "comparison/published-smollm3-3b/comparison.csv")
    assert len(numbers) == 470
    measured = numbers[numbers["model"].isin(pd.read_csv(out / "qk.csv")["model"])]
    assert len(measured) == 3 * 47
    missing = measured[measured["verdict"] == "missing"]
    # Documents of this scaled-down study are too short for the ends of the published plasticity.
    assert set(missing["cell"]) <= {"ap_first", "ap_last", "ap_drop"}, missing.to_string()


def test_a_download_that_does_not_fit_is_refused_before_it_begins(tmp_path, hub):
    """A disk of which another process says that 10 bytes are free."""
    script = tmp_path / "full.py"
    script.write_text(
        "import shutil, sys\n"
        "from collections import namedtuple\n"
        "shutil.disk_usage = lambda place: namedtuple('Usage', 'total used free')(100, 90, 10)\n"
        "from qkscope.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    from warm import Warm

    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**clean, "HF_HOME": str(tmp_path / "home"), **hub}
    process = Warm("run", "study.yaml", "--out", "out", cwd=tmp_path, script=script, env=environment)
    _, errors = process.communicate()
    process.end()
    assert process.returncode == 1, errors
    assert "its weights are " in errors
    assert "10 bytes free" in errors
    assert "--evict" in errors
