"""One word for each thing, and docs that say what the code says.

`python tests/test_words.py --write` writes the measures of all lenses into docs/columns.md.
"""

import ast
import contextlib
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import qkscope
from qkscope.cli.arguments import build_parser
from qkscope.lenses.base import HeadTable, Measure
from qkscope.lenses.registry import registered
from qkscope.lenses.rope.extrapolate import COLUMNS, KERNEL_COLUMNS
from qkscope.results import folder
from qkscope.results.schema import HEADS_CSV, IDENTITY_COLUMNS, LAYER_COLUMNS
from qkscope.study.schema import Checkpoint, Documents, Series, Study

ROOT = Path(__file__).parents[1]
PACKAGE = Path(qkscope.__file__).parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
RESULTS, COLUMNS_PAGE = ROOT / "docs/results.md", ROOT / "docs/columns.md"
START = "<!-- measures: `python tests/test_words.py --write` -->\n"


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- names ------------------------------------------------------------------------------------------


ALIAS = re.compile(r"_?[A-Z][a-z]\w*")  # constants are all capitals
NOT_YET_APART = {"Quantity", "Scale", "Text"}  # two meanings each, in lenses, page, results, stats and words


def types_in(source: str) -> list[tuple[str, str]]:
    """The names of a module's classes and type aliases, each with what it stands for; type variables mean nothing."""
    tree = ast.parse(source)
    named = [(node.name, "a class") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or node.col_offset:
            continue
        target, meaning = node.targets[0], ast.unparse(node.value).replace("npt.", "")
        if isinstance(target, ast.Name) and ALIAS.fullmatch(target.id) and not meaning.startswith("TypeVar("):
            named.append((target.id, meaning))
    return named


def ambiguous(named: list[tuple[str, str, str]]) -> dict[str, list[str]]:
    """From (name, meaning, module): the names that mean two things. Equal aliases in several modules are one thing."""
    places, meanings = defaultdict(list), defaultdict(list)
    for each, meaning, module in named:
        places[each].append(module)
        meanings[each].append(meaning)
    several = {each for each, those in meanings.items() if len(set(those)) > 1 or those.count("a class") > 1}
    return {each: places[each] for each in sorted(several)}


def test_no_two_classes_or_type_aliases_have_one_name():
    named = [
        (each, meaning, str(path.relative_to(PACKAGE)))
        for path in sorted(PACKAGE.rglob("*.py"))
        for each, meaning in types_in(text(path))
    ]
    assert {each: where for each, where in ambiguous(named).items() if each not in NOT_YET_APART} == {}


def test_the_test_of_types_would_notice():
    same = [("Array", "NDArray[float]", "a.py"), ("Array", "NDArray[float]", "b.py")]
    assert ambiguous(same) == {}
    assert ambiguous([*same, ("Array", "a class", "c.py")]) == {"Array": ["a.py", "b.py", "c.py"]}
    assert ambiguous([("One", "a class", "a.py"), ("One", "a class", "b.py")]) == {"One": ["a.py", "b.py"]}
    assert types_in("Keep = Callable[[int], None]\nMOST = 3\nT = TypeVar('T')\nclass Watch: pass\n") == [
        ("Watch", "a class"),
        ("Keep", "Callable[[int], None]"),
    ]


# Names that say nothing of what a thing is.
EMPTY = {"found", "given", "told"}


def empty_names(source: str) -> list[str]:
    """Where a module names a variable, parameter, attribute or function by a word that says nothing."""
    places = []
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str) and value.strip("_") in EMPTY:
                places.append(f"line {node.lineno}: {value}")
    return places


def test_names_say_what_a_thing_is():
    empty = {str(path.relative_to(PACKAGE)): empty_names(text(path)) for path in sorted(PACKAGE.rglob("*.py"))}
    assert {path: places for path, places in empty.items() if places} == {}


def test_the_test_of_empty_names_would_notice():
    source = "def _told(given, *, of):\n    self.found = [a for a in given]\n    run(told=founder, text='found')\n"
    assert sorted(empty_names(source)) == [
        "line 1: _told",
        "line 1: given",
        "line 2: found",
        "line 2: given",
        "line 3: told",
    ]


# Folders of another layout: a dataset of vectors on the Hub, and the published numbers that ship with the package.
OTHER_LAYOUT = {"validation/write.py": {"README.md"}, "join/inputs.py": {"measures.csv"}}
NAME_TABLES = "lenses/"  # lenses declare their tables


def names_of_files() -> tuple[set[str], set[str]]:
    """Files of a results folder that `results/folder.py` names, and tables that lenses name."""
    every = [each for value in vars(folder).values() for each in (value if isinstance(value, tuple) else (value,))]
    of_folder = {each for each in every if isinstance(each, str) and re.fullmatch(r"[A-Za-z_.]+\.[a-z]+", each)}
    tables = {home(table) for lens in registered() for table in lens.tables}
    tables |= {table.file for lens in registered() for study in lens.of_study for table in study.tables}
    return of_folder, tables - of_folder


def home(table: HeadTable) -> str:
    """The file with a lens's columns: of its table, or, where another command writes it, a file of its own."""
    return table.kind.file if table.rows is not None else f"{table.name}.csv"


def spelled_files(code: str, names: set[str]) -> set[str]:
    """Those of these files that a string of the code names, alone or at the end of a path; prose may name them all."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not re.search(r"\s", node.value)
    ]
    return {name for name in names if any(text == name or text.endswith(f"/{name}") for text in strings)}


def test_a_file_of_a_results_folder_is_named_in_one_place():
    of_folder, of_lenses = names_of_files()
    assert {"qk.csv", "figure.png", "join.csv", "heads.csv", "prediction.csv", "README.md"} <= of_folder
    assert of_lenses == {
        *("ablation_heads.csv", "ablation_groups.csv", "ablation_course.csv"),
        *("rope_split.csv", "rope_split_heads.csv"),
    }
    again = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        names = of_folder if place.startswith(NAME_TABLES) else of_folder | of_lenses
        spelled = spelled_files(text(path), names) - OTHER_LAYOUT.get(place, set())
        if spelled and place != "results/folder.py":
            again[place] = spelled
    assert again == {}


def test_the_test_of_file_names_would_notice():
    names = {"figure.png", "ablation.csv"}
    assert spelled_files('place / "figure.png"', names) == {"figure.png"}
    assert spelled_files('print(f"ablation: {folder}/ablation.csv")', names) == {"ablation.csv"}
    assert spelled_files('help="all ablations share ablation.csv"', names) == set()


# What was once called so is now the common window, `qk_common.csv`, and a choice of windows.
OLD = re.compile(
    r"(?i)matched_window|qk_matched|(?<!drop)_matched\b|matched window|\b(two|both|own|each|common) reading\b"
    r"|\breadings\b"
    r"|the reading comes|analysis\.(comparison|tolerance|taxonomy)|qkscope/(analysis|pipeline|figures)\b"
)
SPOKEN = [
    path
    for path in (*PACKAGE.rglob("*"), *ROOT.glob("studies/*.yaml"), *ROOT.glob("scripts/*.py"), *PAGES)
    if path.suffix in {".py", ".js", ".html", ".css", ".yaml", ".md", ".json"} and path.name != "CHANGELOG.md"
]


def violations(rule: Callable[[Path], list[str]], paths: Iterable[Path]) -> dict[str, list[str]]:
    """What breaks a rule, by file."""
    return {name(path): broken for path in paths if (broken := rule(path))}


def test_old_words_are_gone():
    assert violations(lambda path: [match[0] for match in OLD.finditer(text(path))], SPOKEN) == {}


def test_the_test_of_old_words_would_notice():
    for sentence in (
        "see qk_matched.csv",
        "tables/trajectory_matched.csv",
        "matched_window: 64",
        "both readings agree",
    ):
        assert OLD.search(sentence)
    assert not OLD.search("reading documents; heads are matched by layer and head; the reading error of a number")


# --- docs -------------------------------------------------------------------------------------------


def measures_by_file() -> dict[str, dict[str, list[Measure]]]:
    """Every measure of every lens by the file that has it, then by the title of its lens."""
    files = defaultdict(lambda: defaultdict(list))
    for lens in registered():
        sets = [(home(table), (*table.columns, *table.judged)) for table in lens.tables]
        sets += [(HEADS_CSV, lens.derived)]
        sets += [(table.file, table.columns) for build in lens.of_study for table in build.tables]
        for file, measures in sets:
            known = {each.name for each in files[file][lens.title]}  # qk.csv and components.csv have the same ones
            files[file][lens.title] += [each for each in measures if each.name not in known]
    return files


def columns_block() -> str:
    """The measures of every file with their definitions; those that differ in a number, or in q and k, in one line."""
    files, lines, defined = measures_by_file(), [], {}
    for file in (HEADS_CSV, *(file for file in files if file != HEADS_CSV)):
        lines += ["", f"## {file}"]
        for title, measures in files[file].items():
            new = [each for each in measures if defined.get((title, each.name)) != each.definition]
            old = [f"`{each.name}`" for each in measures if each not in new]
            defined |= {(title, each.name): each.definition for each in measures}
            lines += ["", f"**{title}**", ""] if measures else []
            lines += [f"- {', '.join(old)}: as above."] if old else []
            lines += [line_about(group) for group in alike(new)]
    return "\n".join(lines) + "\n"


def alike(measures: Iterable[Measure]) -> list[list[Measure]]:
    """Measures in groups whose names and definitions differ in a number, or in q and k; "the same" joins the last."""
    groups: dict[tuple[str, str, str], list[Measure]] = {}
    for each in measures:
        if each.definition.startswith("The same") and groups:
            next(reversed(groups.values())).append(each)
            continue
        without = re.sub(r"\b(keys?|queries|query|r_[qk])\b", "*", re.sub(r"\d+", "#", each.definition))
        name = re.sub(r"(^|_)k(_|$)", r"\1q\2", re.sub(r"\d+", "#", each.name))
        groups.setdefault((name, without, each.unit), []).append(each)
    return list(groups.values())


def line_about(group: list[Measure]) -> str:
    """`- `rms_q`, `rms_k` (vector): Root mean square length of queries (keys).`"""
    names = [f"`{each.name}`" for each in group]
    listed = f"{names[0]} … {names[-1]}" if len(names) > 4 else ", ".join(names)
    unit = f" ({group[0].unit})" if group[0].unit else ""
    own = [each.definition for each in group if not each.definition.startswith("The same")]
    more = [each.definition for each in group if each.definition.startswith("The same")]
    words = [varied(list(dict.fromkeys(column))) for column in zip(*(text.split(" ") for text in own), strict=True)]
    return f"- {listed}{unit}: {' '.join([*words, *more])}"


def varied(words: list[str]) -> str:
    """A word of several definitions: one for all, a range of numbers, or what it is of queries (of keys)."""
    if len(words) == 1:
        return words[0]
    ends = words[0].strip(".,;"), words[-1].strip(".,;")
    between = " … " if ends[0].isdigit() else " ("
    return f"{ends[0]}{between}{ends[1]}{')' if between == ' (' else ''}{words[0][len(ends[0]) :]}"


def test_the_columns_in_the_docs_are_those_of_the_lenses():
    assert text(COLUMNS_PAGE).partition(START)[2] == columns_block()
    page = text(RESULTS)
    for column in (*IDENTITY_COLUMNS, *LAYER_COLUMNS):
        assert f"`{column}`" in page


def test_every_measure_has_its_line_with_its_definition():
    """Lines that stand for several measures still name each of them, or the first and the last of a numbered series."""
    page = text(COLUMNS_PAGE)
    for file, lenses in measures_by_file().items():
        part = page.partition(f"## {file}\n")[2].partition("\n## ")[0]
        names = {name for line in part.splitlines() for name in re.findall(r"`([^`]+)`", line.partition(": ")[0])}
        for measure in (measure for measures in lenses.values() for measure in measures):
            stem = re.sub(r"\d+", "#", measure.name)
            assert measure.name in names or stem in {re.sub(r"\d+", "#", name) for name in names}, (file, measure.name)


def test_measures_that_differ_in_queries_and_keys_or_in_a_number_share_a_line():
    of_q, of_k = Measure("rms_q", "Length of queries.", "vector"), Measure("rms_k", "Length of keys.", "vector")
    assert [line_about(group) for group in alike([of_q, of_k])] == [
        "- `rms_q`, `rms_k` (vector): Length of queries (keys)."
    ]
    parts = [Measure(f"to_{i}", f"Score with part {i} of 6.") for i in range(6)]
    assert [line_about(group) for group in alike(parts)] == ["- `to_0` … `to_5`: Score with part 0 … 5 of 6."]
    others = [Measure("spread", "Spread of scores."), Measure("scaled", "The same as softmax sees it."), of_q]
    assert [line_about(group) for group in alike(others)] == [
        "- `spread`, `scaled`: Spread of scores. The same as softmax sees it.",
        "- `rms_q` (vector): Length of queries.",
    ]


def test_every_file_of_a_results_folder_is_in_the_docs():
    page = text(RESULTS)
    assert {file for file in folder.FILES if not file.startswith(".") and file not in page} == set()
    assert {column for column in (*COLUMNS, *KERNEL_COLUMNS) if f"`{column}`" not in page} == set()  # of predictions


def test_every_key_of_a_study_is_in_the_docs():
    page = text(ROOT / "docs/study-files.md")
    keys = {key for model in (Study, Checkpoint, Series, Documents) for key in model.model_fields}
    assert {key for key in keys if f"`{key}`" not in page} == set()


def test_every_room_has_its_line_in_the_architecture():
    page = text(ROOT / "ARCHITECTURE.md")
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {room for room in rooms if f"| `{room}` |" not in page} == set()


def broken_links(page: Path) -> list[str]:
    """Links of a page to files or headings that are not there."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        place, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", place):
            continue
        path = (page.parent / place).resolve() if place else page
        titles = re.findall(r"^#+ (.*)$", text(path), re.MULTILINE) if anchor and path.exists() else []
        anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        if not path.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    return broken


def test_links_lead_somewhere():
    assert violations(broken_links, PAGES) == {}


def test_tests_that_a_page_names_exist():
    there = {found for path in ROOT.glob("tests/*.py") for found in re.findall(r"def (test_\w+)", text(path))}
    there |= {path.stem for path in ROOT.glob("tests/*.py")}
    there.add("test_the_mean_query_of_three_four_is_five_long")  # the example of CONTRIBUTING.md

    def missing(page: Path) -> list[str]:
        return sorted(set(re.findall(r"\btest_\w+\b(?!\.py)", text(page))) - there)

    assert violations(missing, PAGES) == {}


MODULE = re.compile(r"`(?:src/)?(?:qkscope/)?([a-z_]+(?:/[a-z_]+)*\.(?:py|js))`")
HOMES = (PACKAGE, ROOT, PACKAGE / "page", ROOT / "tests", ROOT / "benchmarks")
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]


def test_modules_that_a_page_names_exist():
    def missing(page: Path) -> list[str]:
        return [place for place in MODULE.findall(text(page)) if not any((home / place).is_file() for home in HOMES)]

    assert violations(missing, CURRENT) == {}


def test_the_tests_of_pages_would_notice(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Two Words\n[a](#two-words) [b](#three) [c](gone.md) [d](https://example.org#x)")
    assert violations(broken_links, [page]) == {"page.md": ["#three", "gone.md"]}


# --- commands ---------------------------------------------------------------------------------------


def commands(written: str) -> list[list[str]]:
    """The `qkscope ...` commands of a text, without what a shell does around them."""
    found = []
    for line in re.findall(r"^\s*(?:[a-z]+: )?(qkscope .*)$", written, re.MULTILINE):
        line = re.split(r"\s+#|\s{2,}|\s\|\s|\s&&\s|\s[a-z]+: ", line)[0]
        found.append(shlex.split(re.sub(r"\$\w+", "0", line))[1:])
    return found


def refused(written: list[list[str]], capsys) -> list[str]:
    """The commands that the command line does not take."""
    broken = []
    for arguments in written:
        with contextlib.suppress(SystemExit):
            build_parser().parse_args(arguments)
        if capsys.readouterr().err:
            broken.append(shlex.join(arguments))
    return broken


COMMANDS = (
    "run", "status", "report", "compare", "inspect", "plan", "shard", "capture", "analyze", "predict", "demo", "init",
    "watch", "log", "export", "push", "ablate", "join", "among", "collage",
)  # fmt: skip


def test_examples_in_the_help_of_a_command_are_commands(capsys):
    broken = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            build_parser().parse_args([command, "--help"])
        examples = commands(capsys.readouterr().out.partition("\nexample")[2])
        if command not in {example[0] for example in examples}:
            broken[command] = ["no example of it"]
        elif wrong := refused(examples, capsys):
            broken[command] = wrong
    assert broken == {}


def test_commands_in_the_docs_are_commands(capsys):
    def wrong(page: Path) -> list[str]:
        fences = re.findall(r"^```(?:sh)?\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
        indented = re.findall(r"^    .*$", text(page), re.MULTILINE)
        return refused(commands("\n".join([*fences, *indented])), capsys)

    assert violations(wrong, CURRENT) == {}
    assert refused([["run"], ["status", "x"]], capsys) == ["run"]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    COLUMNS_PAGE.write_text(text(COLUMNS_PAGE).partition(START)[0] + START + columns_block(), encoding="utf-8")
