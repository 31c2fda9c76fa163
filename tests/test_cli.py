"""The command line: exit codes, one clear message, no traceback, nothing lost."""

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pytest

from families import tiny
from qkscope.cli.arguments import GROUPS, build_parser
from qkscope.cli.main import OF_RESULTS, main
from warm import run_warm

ROOT = Path(__file__).parents[1]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    shown = capsys.readouterr().out
    assert (
        shown.index("getting started:\n  demo ")
        < shown.index("  init ")
        < shown.index("  run ")
        < shown.index("studies")
    )
    assert main([]) == 0
    assert "getting started" in capsys.readouterr().out
    for command in ("run", "report", "compare", "capture", "analyze", "inspect", "demo"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "example" in capsys.readouterr().out


@pytest.mark.slow
def test_run_says_what_it_does_in_plain_lines(world, tmp_path):
    world()
    done = run_warm("run", "study.yaml", "--out", "out", cwd=tmp_path)  # another process, output not a terminal
    assert done.returncode == 0, done.stderr
    assert re.search(r"\nresults: out/ \(\d+ tables\)\nnext: qkscope report out\n", done.stdout)
    assert "wrote" not in done.stderr
    assert "study world: 2 checkpoints, 1.92K tokens" in done.stderr
    assert "sums: " in done.stderr
    assert "[1/2] one: 6 documents x 64 tokens" in done.stderr
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stderr  # no terminal codes in a file
    assert len(pd.read_csv(tmp_path / "out/qk.csv")) == 2 * 16 * 10
    again = run_warm("run", "study.yaml", "--out", "out", cwd=tmp_path)
    assert again.stderr.count("moments already exist") == 2


@pytest.mark.slow
def test_report_says_where_the_figures_are(results, tmp_path, monkeypatch, capsys, sketches):
    results()
    monkeypatch.chdir(tmp_path)
    assert main(["report", "out", "--verbose"]) == 0
    shown = capsys.readouterr()
    assert "figures: out/figures/ (" in shown.out
    assert "wrote out/figures/01_position_signal/" in shown.err
    assert main(["report", "out", "--no-figures"]) == 0
    assert "wrote" not in capsys.readouterr().err
    for file in ("figure.png", "figure.svg", "README.md"):
        assert (tmp_path / "out/figures/01_position_signal" / file).stat().st_size > 500
    assert (tmp_path / "out/tables/means.csv").exists()
    assert main(["report", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_capture_then_analyze(world, tmp_path, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["capture", "study.yaml", "--out", "out", "--checkpoint", "two"]) == 0
    assert main(["analyze", "out"]) == 2
    assert "checkpoint 'one' has no moments yet" in capsys.readouterr().err
    assert main(["capture", "study.yaml", "--out", "out"]) == 0
    assert main(["analyze", "out", "--components", "3"]) == 0
    assert set(pd.read_csv("out/qk.csv")["pc"]) == {0, 1, 2}
    files = ["out/moments/two.safetensors", "out/moments/one.safetensors"]
    assert main(["analyze", *files, "--out", "tables", "--common-window", "33"]) == 2
    assert (
        "checkpoint 'two': window 33 is not a sum of buckets; possible windows: (1, 16, 32" in capsys.readouterr().err
    )
    assert main(["analyze", *files, "--out", "tables"]) == 0
    assert list(pd.read_csv("tables/qk.csv")["model"].unique()) == ["two", "one"]
    assert main(["analyze", *files]) == 2
    assert "need --out" in capsys.readouterr().err


def test_each_window_of_analyze_has_its_own_option(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "a.safetensors", "--out", "tables", "--window", "32"]) == 2
    assert "--window only applies to --vectors; " in (said := capsys.readouterr().err)
    assert "--common-window 32" in said
    assert main(["analyze", "--vectors", "here", "--out", "tables", "--common-window", "32"]) == 2
    assert "--common-window only applies to moments; " in (said := capsys.readouterr().err)
    assert "--window 32" in said
    assert not (tmp_path / "tables").exists()


def test_the_commands_of_a_plan_carry_what_the_plan_was_given(world, tmp_path, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    flags = "--trust-remote-code --skip-bad-documents --skip-bad-checkpoints --overwrite"
    assert main(["plan", "study.yaml", *flags.split()]) == 0
    assert capsys.readouterr().out.splitlines() == [f"qkscope shard study.yaml {number} {flags}" for number in range(2)]
    assert main(["plan", "study.yaml", "--out", "my out", "--trust-remote-code"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"qkscope shard study.yaml {number} --out 'my out' --trust-remote-code" for number in range(2)
    ]
    assert main(["plan", "study.yaml"]) == 0
    assert capsys.readouterr().out.splitlines() == ["qkscope shard study.yaml 0", "qkscope shard study.yaml 1"]


@pytest.mark.slow
def test_compare_tells_by_its_exit_code(world, results, tmp_path, monkeypatch, capsys):
    world()
    results()
    monkeypatch.chdir(tmp_path)
    assert main(["run", "study.yaml", "--out", "again"]) == 0
    assert main(["compare", "out", "--with", "again"]) == 0
    assert "comparison: " in capsys.readouterr().out
    table = pd.read_csv("again/qk.csv")
    table.loc[0, "r_q"] += 0.01
    table.to_csv("again/qk.csv", index=False)
    assert main(["compare", "out", "--with", "again"]) == 1
    assert main(["compare", "out", "--with", "published:smollm3-3b"]) == 2
    assert main(["compare", "out", "--with", "published:nothing"]) == 2
    assert "published:smollm3-3b" in capsys.readouterr().err


def test_inspect_a_study_and_a_model(world, tmp_path, checkpoints, monkeypatch, capsys):
    world()
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "study.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "2 checkpoints, 1.92K tokens in total" in shown
    assert "common window 64 tokens" in shown
    assert "on disk per checkpoint" in shown
    assert not (tmp_path / "results").exists()
    assert main(["inspect", str(checkpoints / "long")]) == 0
    shown = capsys.readouterr().out
    assert "0-2     4            2          16     rotary    full" in shown
    assert "3       4            2          16     nope      full" in shown
    assert "100 documents of 256 tokens" in shown
    assert main(["inspect", str(checkpoints / "short"), "--context", "100"]) == 2
    assert "context 100 is longer than the model's maximum of 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "missing.yaml"], "missing.yaml: there is no such study file"),
        (["run", "study.yaml", "--out", "out"], "unknown key 'bucketz'; did you mean 'buckets'?"),
        (["capture", "good.yaml", "--checkpoint", "x"], "--checkpoint 'x' is not a checkpoint"),
        (["analyze", "nothing"], "no such file"),
        (["inspect", "./nowhere"], "there is no model directory"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(world, tmp_path, monkeypatch, capsys, arguments, message):
    world().rename(tmp_path / "good.yaml")
    world(bucketz=3)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.splitlines()[-1].startswith("qkscope: ")
    assert "Traceback" not in shown.err
    assert not (tmp_path / "out").exists()


def test_an_unexpected_failure_is_exit_code_1(monkeypatch, capsys):
    def fail(options):
        raise RuntimeError("boom")

    monkeypatch.setattr("qkscope.cli.commands.run", fail)
    assert main(["run", "x"]) == 1
    assert "unexpected RuntimeError: boom (run with --debug" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="boom"):
        main(["run", "x", "--debug"])


def test_ctrl_c_is_no_traceback(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("qkscope.cli.commands.run", interrupted)
    assert main(["run", "x"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.slow
def test_bars_on_a_terminal(world, tmp_path, start):
    """A real pseudo-terminal: bars are drawn, and a label that looks like markup stays text."""
    pty = pytest.importorskip("pty")
    import os

    world()
    text = (tmp_path / "study.yaml").read_text().replace("phase: early", "phase: early\n  label: '[red]x[/red]'")
    (tmp_path / "study.yaml").write_text(text)
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = start("run", "study.yaml", "--out", "out", env=environment, terminal=child)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(parent, 65536)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(parent)
    assert process.wait() == 0, shown.decode()
    assert b"\x1b" in shown
    assert b"documents" in shown
    assert b"[red]x" in shown


# -- first use ---------------------------------------------------------------------------------------


def test_every_command_is_in_one_group_of_the_overview():
    commands = next(action for action in build_parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(commands.choices)


@pytest.mark.parametrize(
    ("typed", "told"), [("rn", "did you mean `qkscope run`?"), ("xyzzy", "`qkscope --help` lists the commands")]
)
def test_a_misspelled_command_gets_a_suggestion(capsys, typed, told):
    with pytest.raises(SystemExit) as done:
        main([typed])
    assert done.value.code == 2
    assert capsys.readouterr().err == f"qkscope: there is no command {typed!r}; {told}\n"


def told_of(capsys, *arguments):
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


def test_every_command_names_the_results_folder_where_a_study_file_is_given_instead(world, tmp_path, capsys):
    study, reading = world(), []
    commands = next(action for action in build_parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            places = [str(study) if other is action else "x" for other in parser._actions if not other.option_strings]
            options = [
                word for other in parser._actions if other.required and other.option_strings
                for word in (other.option_strings[-1], str(study) if other is action else (other.choices or "x")[0])
            ]  # fmt: skip
            if action.dest in OF_RESULTS:
                reading.append((name, action.dest))
                told = told_of(capsys, name, *places, *options)
                assert f"{study} is a study file, not a results folder; its results are in results/world/" in told
    assert {name for name, _ in reading} == {
        "analyze", "among", "collage", "compare", "export", "join", "log", "predict", "push", "report", "status"
    }  # fmt: skip
    assert ("compare", "reference") in reading


@pytest.mark.parametrize("command", ["run", "inspect", "ablate"])
def test_a_results_folder_in_the_place_of_a_study_file(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    if command != "inspect":  # which takes models, too
        assert "out: is a folder; give a study file (YAML)" in told_of(capsys, command, "out")
    (tmp_path / "out/study.yaml").write_text("study: world")
    assert "out: is a folder; give its study file: out/study.yaml --out out" in told_of(capsys, command, "out")


def test_a_key_that_should_be_a_mapping_is_explained_in_words_of_yaml(world, tmp_path, capsys):
    study = Path(world())
    text = re.sub(
        r"documents:.*?(?=^\w|\Z)", "documents: texts/*.txt\n", study.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    study.write_text(text)
    told = told_of(capsys, "run", study)
    assert "documents: should be a mapping with keys such as " in told
    assert "instance of" not in told


def test_a_checkpoint_without_a_tokenizer_is_named_with_the_way_out(tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "bare")
    (tmp_path / "a.txt").write_text("words " * 100)
    study = tmp_path / "study.yaml"
    study.write_text("study: bare\ndocuments: {files: a.txt}\ncheckpoints:\n- {name: one, model: bare, context: 16}\n")
    told = told_of(capsys, "inspect", study)
    assert "has no tokenizer files" in told
    assert "another one can be named with `tokenizer:` in the study" in told


def test_pages_of_the_documentation_are_listed_and_printed(capsys):
    assert main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert re.search(r"^study-files +Study files$", listed, re.MULTILINE)
    assert main(["docs", "study-files"]) == 0
    assert capsys.readouterr().out.startswith("# Study files\n")
    assert "did you mean 'study-files'?" in told_of(capsys, "docs", "study-file")


def test_messages_name_pages_of_the_documentation_by_the_command_that_prints_them():
    """An installed package has no docs/ folder that a path could lead to."""
    named = set()
    for path in sorted((ROOT / "src/qkscope").rglob("*.py")):
        tree = ast.parse(path.read_text())
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}
        texts = {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for text in texts - docstrings:
            assert not re.search(r"docs/[a-z]", text), f"{path}: {text}"
            named |= set(re.findall(r"qkscope docs ([a-z/-]+)", text))
    assert {"study-files", "training", "results"} <= named
    for page in named:
        assert (ROOT / f"docs/{page}.md").is_file()


@pytest.mark.slow
def test_an_installed_wheel_has_the_documentation_and_links_to_it(tmp_path):
    root = Path(__file__).parents[1]
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(root)]
    subprocess.run(build, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    metadata = next((tmp_path / "installed").glob("*.dist-info/METADATA")).read_text()
    assert "Project-URL: Documentation, " in metadata
    code = "import sys; from qkscope.cli.main import main; sys.exit(main(['docs', 'study-files']))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == (root / "docs/study-files.md").read_text()
