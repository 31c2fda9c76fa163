"""A whole small world on disk: tiny checkpoints, a byte tokenizer, real documents, a study file."""

import hashlib
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # tests share helper modules

# Some machines advertise matrix instructions that they may not use, and a process that tries dies (bfloat16, float16).
# This holds oneDNN to the level below; it is read when torch is first imported, here and in processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Ray makes its workers give way to all other processes: beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

import shared
import template

# What is written is made to last through a loss of power, which no test can cause: each file would wait for the disk.
os.fsync = lambda descriptor: None

# A machine with much to do may take long over anything: no example of Hypothesis and no wait for the page is too slow.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
PATIENCE = 300_000  # milliseconds; pytest's own limit is longer, and says less about what was waited for

# What a test needs says what it is: nobody has to remember the marker.
MARKED_BY_FIXTURE = {"chromium": "browser", "cluster": "ray", "weights": "pretrained"}

# Seconds of a core, roughly: by marker, of a test that takes or waits long, and of any other.
WEIGHTS = {"ray": 15.0, "pretrained": 30.0, "slow": 4.0, "faults": 5.0, "browser": 1.5}
QUICK = 0.05


def pytest_configure(config: pytest.Config) -> None:
    """One folder for all test processes, made by the one that starts them."""
    if not hasattr(config, "workerinput"):
        os.environ[shared.FOLDER] = tempfile.mkdtemp(prefix="qkscope-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """All test processes have ended."""
    if not hasattr(config, "workerinput"):
        os.environ.pop(template.FOLDER, None)
        shutil.rmtree(os.environ.pop(shared.FOLDER), ignore_errors=True)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_setupnodes(config: pytest.Config, specs: list) -> None:
    """Test processes are forks of one that has imported what they need (`template.py`)."""
    folder = Path(os.environ[shared.FOLDER]) / "template"
    if template.works_in(folder):
        folder.mkdir()
        running = template.start(folder)
        config.add_cleanup(running.communicate)  # closes its input, which ends it
        os.environ[template.FOLDER] = str(folder)
        for spec in specs:
            spec.python = str(folder / template.LAUNCHER)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at `-m`
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests by their fixtures."""
    for fixture, marker in MARKED_BY_FIXTURE.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(marker)


@pytest.hookimpl(trylast=True)  # when pytest has looked at `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take long come first: test processes take whole files, and none should be left with a long one."""
    weights: Counter[Path] = Counter()
    for item in items:
        markers = [mark.name for mark in item.iter_markers()]
        weights[item.path] += max((WEIGHTS.get(name, QUICK) for name in markers), default=QUICK)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Two saved SmolLM3 checkpoints (`short`, `long`) with a byte tokenizer each; not to be changed."""
    from families import tiny
    from test_documents import byte_tokenizer

    def save(folder: Path) -> None:
        for name, seed, longest in (("short", 0, 64), ("long", 1, 256)):
            model = tiny("smollm3", seed, vocab_size=256, max_position_embeddings=longest)
            model.save_pretrained(folder / name)
            byte_tokenizer().save_pretrained(folder / name)

    return shared.once("checkpoints", save)


TOKEN_TEXTS = (  # with what markup, spreadsheets and readers of tables stumble over
    'the cat "zero" <i>\n=-1, sat on the mat. ', "NA,nan;null\tand -5 apples, or +7 pears! ",
    "A quick brown fox\njumps over 13 dogs. ", "@home & <script>alert(3)</script> said ",
    "It's 'quoted' \\ and \\n is not a line. ", "Numbers: 0.25, 1e9, 77, -3 and 0x5F end. ",
)  # fmt: skip


@pytest.fixture(scope="session")
def kept_tokens(checkpoints, tmp_path_factory) -> Path:
    """Results of one tiny checkpoint whose run kept every token with its text; not to be changed."""
    from qkscope.run.execute import CaptureOptions, run_study
    from qkscope.validation.layout import VectorSample

    folder = tmp_path_factory.mktemp("tokens")
    for number, text in enumerate(TOKEN_TEXTS):
        (folder / f"{number}.txt").write_text(text * 60, encoding="utf-8")
    study = {
        "study": "tokens",
        "buckets": 4,
        "documents": {"files": "*.txt"},
        "checkpoints": [{"name": "one", "model": str(checkpoints / "short"), "context": 32}],
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study), encoding="utf-8")
    return run_study(path, folder / "out", options=CaptureOptions(vectors=VectorSample(1.0, tokens=True)))


@pytest.fixture(scope="session")
def chromium():
    """A browser, one per test process. Without one the tests of the page fail: a skip would hide that nothing ran.

    While it is open, this thread counts as inside an event loop: a test that wants `asyncio.run` needs its own thread.
    """
    from playwright.sync_api import expect, sync_playwright

    from browser import ARGUMENTS, find_chromium

    executable = find_chromium()
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens a page from disk; afterwards there must have been no error and no request but the file itself."""

    @contextmanager
    def opened(path, fragment="", **context):
        how = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
        place = chromium.new_context(**how)
        place.set_default_timeout(PATIENCE)
        page = place.new_page()
        problems, requests = [], []
        page.on(
            "console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        address = Path(path).resolve().as_uri()
        page.goto(address + fragment)
        page.wait_for_selector("html[data-ready]")
        yield page
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")  # all is drawn
        assert problems == []
        assert [u for u in requests if not u.startswith(("data:", "blob:"))] == [address]
        place.close()

    return opened


@pytest.fixture
def start(tmp_path):
    """`start("run", ...)`: a command as a process in the test's folder, which ends with the test at the latest."""
    from warm import Warm

    started = []

    def begin(*arguments, **options):
        started.append(Warm(*arguments, **{"cwd": tmp_path, **options}))
        return started[-1]

    yield begin
    for process in started:
        process.end()


@pytest.fixture
def quick_workers(monkeypatch):
    """Workers are forked off a process that has imported torch, where it is not their start that a test is about."""
    import multiprocessing

    from warm import started

    forking = started()
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: forking)


def cut_documents(folder: Path, count: int, every: int, length: int) -> None:
    """Replace a folder's documents by more and shorter ones: one begins after `every` characters of all."""
    documents = sorted(folder.glob("*.txt"))
    text = "".join(path.read_text() for path in documents)
    for path in documents:
        path.unlink()
    for number in range(count):
        (folder / f"{number:03d}.txt").write_text(text[number * every : number * every + length])


def small_world(folder: Path, checkpoints: Path) -> Callable[..., Path]:
    """Documents in a folder, and a function that writes a study there with changes."""
    sources = [p for p in sorted(Path(yaml.__file__).parent.glob("*.py")) if p.stat().st_size >= 2000][:6]
    (folder / "docs").mkdir()
    for path in sources:
        (folder / "docs" / f"{path.stem}.txt").write_bytes(path.read_bytes())
    (folder / "docs" / "tiny.txt").write_text("too short")

    def write(**changes) -> Path:
        study = {
            "study": "world",
            "title": "Tiny",
            "documents": {"files": "docs/*.txt", "special_tokens": "none"},
            "groups": 3,
            "checkpoints": [
                {"name": "one", "model": str(checkpoints / "short"), "context": 64, "phase": "early"},
                {"name": "two", "model": str(checkpoints / "long"), "context": 256, "phase": "late"},
            ],
            **changes,
        }
        path = folder / "study.yaml"
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        return path

    return write


@pytest.fixture
def world(tmp_path, checkpoints):
    """A folder with documents, and a function that writes a study there with changes."""
    return small_world(tmp_path, checkpoints)


@pytest.fixture(scope="session")
def finished(checkpoints):
    """`finished(shard_tokens=512)`: the results of the world's study with that change, run once; not to be changed.

    Once for each set of lenses: within `with_lens` they have the lens's tables, and nobody else's have.
    """
    from qkscope.lenses.registry import registered
    from qkscope.run.execute import run_study

    def run(**changes) -> Path:
        def make(folder: Path) -> None:
            run_study(small_world(folder, checkpoints)(**changes), folder / "out")

        lenses = "-".join(lens.name for lens in registered())
        name = hashlib.sha256(f"{sorted(changes.items())} {lenses}".encode()).hexdigest()
        return shared.once(f"finished {name}", make) / "out"

    return run


@pytest.fixture
def results(finished, tmp_path):
    """`results(shard_tokens=512)`: a copy of what `finished` gives, in the test's folder `out`, free to change."""
    return lambda **changes: shutil.copytree(finished(**changes), tmp_path / "out")


SHARDS = {"shard_tokens": 512, "batch_tokens": 64}


@pytest.fixture
def study(world):
    """The world in shards: three of two documents at the second checkpoint, one at the first, a document per batch."""
    return lambda **changes: world(**{**SHARDS, **changes})


@pytest.fixture
def expected(finished, tmp_path):
    """The bytes of a run of `study` that nothing happened to, which is in `whole`."""
    whole = shutil.copytree(finished(**SHARDS), tmp_path / "whole")
    return (whole / "qk.csv").read_bytes()


@pytest.fixture(scope="session")
def published_folder():
    """Tables of the size and with the numbers of the published run; not to be changed."""
    from published_table import write_published

    return shared.once("published", lambda folder: write_published(folder, common=True, windows=True))


@pytest.fixture(scope="session")
def published_page(published_folder):
    """The same tables with their page."""
    from qkscope.report.write import write_report

    def make(folder: Path) -> None:
        shutil.copytree(published_folder, folder, dirs_exist_ok=True)
        write_report(folder, figures=False)

    return shared.once("published page", make)


@pytest.fixture(scope="session")
def grown_page():
    """A made-up study as large as the demo's, ten checkpoints of 64 heads, every lens, and its page without cards."""

    def make(folder: Path) -> None:
        from page_study import grow, source
        from qkscope.lenses.views import build_tables
        from qkscope.page.write import write_page
        from qkscope.report.summary import summarize
        from qkscope.results.read import load_results

        results = load_results(grow(source(folder / "source"), folder / "grown"))
        tables = build_tables(results)
        write_page(tables, summarize(tables).to_page(), [])

    return shared.once("grown_page", make) / "grown"


def sketch(_figure, _tables):
    """A figure of one line, in place of any other: drawing all takes seconds, most of it for the places of labels."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(1, 1))
    figure.add_artist(Line2D([0, 1], [0, 1]))
    return figure


@pytest.fixture
def sketches(monkeypatch):
    """Each figure is one line: for tests of which files a report writes and what it says, not of what is drawn.

    `test_cards.py` draws a whole report.
    """
    monkeypatch.setattr("qkscope.report.figures.draw_chart", sketch)
