"""What the project promises about itself: typed, citable, its markers and its lowest versions."""

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import qkscope
from lowest import lowest, requirements

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_package_says_that_it_is_typed():
    assert (files("qkscope") / "py.typed").is_file()


def test_the_citation_is_of_this_version_and_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == qkscope.__version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert [author["name"] for author in citation["authors"]] == [a["name"] for a in PROJECT["project"]["authors"]]


def test_hooks_before_a_commit_are_the_projects_own():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in repos] == ["local"]
    assert [hook["entry"].split()[0] for hook in repos[0]["hooks"]] == [".venv/bin/ruff"] * 2 + [".venv/bin/mypy"]


def test_every_requirement_claims_a_lowest_version_and_what_is_installed_is_not_below_it():
    claimed = [Requirement(each) for each in requirements()]
    assert {"torch", "numpy", "gguf", "ray"} <= {each.name for each in claimed}
    for each in claimed:
        assert each.specifier.contains(Version(version(each.name)).base_version), each
    assert lowest("numpy>=2.0") == "numpy==2.0"
    for unclear in ("numpy", "numpy<3", "numpy>=2.0,<3"):
        with pytest.raises(SystemExit, match="does not claim a lowest version"):
            lowest(unclear)


@pytest.mark.slow
def test_tests_are_marked_by_the_fixtures_that_they_use(tmp_path):
    """A folder of tests with the project's conftest: what uses a browser, Ray or weights can be left out."""
    for name in ("conftest.py", "shared.py", "template.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef weights(): pass\n"
        "@pytest.fixture\ndef cluster(): pass\n"
        "def test_plain(): pass\n"
        "def test_weights(weights): pass\n"
        "def test_cluster(cluster): pass\n"
        "def test_page(chromium): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
    )

    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-c", str(ROOT / "pyproject.toml")]
    left = [str(tmp_path), "-m", "not (browser or ray or pretrained)"]
    done = subprocess.run([*command, *left], capture_output=True, text=True, check=True)
    names = [line.split("::")[1] for line in done.stdout.splitlines() if "::" in line]
    assert names == ["test_plain", "test_slow"]
