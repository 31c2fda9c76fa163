"""Are the errors right? By simulation, and on SmolLM2-135M and Gemma 3 270M; the numbers go into docs/errors.md.

`python benchmarks/errors.py` runs all parts, the simulation on two processes (a few minutes each where nothing else
runs); `--part` runs one of them. Each rewrites its own section of the page and nothing else. What is finished is kept
in `build/errors`, and a run that was stopped goes on from there; parts that other code has made are not used.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/errors.md"
KEPT = ROOT / "build/errors"
SAMPLES = 1000
AIM = (0.93, 0.97)  # how many of 95 % intervals should hold the truth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("simulated", "pretrained", "windows", "all"), default="all")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="simulated samples of documents")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    os.nice(10)
    if options.part in ("simulated", "all"):
        write_section("simulated", simulated(options.samples, options.processes))
    if options.part in ("pretrained", "all"):
        write_section("pretrained", pretrained())
    if options.part in ("windows", "all"):
        import errors_windows

        write_section("windows", errors_windows.table_of())
    return 0


def simulated(samples: int, processes: int) -> str:
    import errors_simulated as simulation

    here = ["benchmarks/errors_population.py", "benchmarks/errors_simulated.py"]
    folder = KEPT / f"simulated-{made_by(*here, 'src/qkscope/stats', 'src/qkscope/lenses', 'src/qkscope/moments')}"
    found = simulation.coverage(simulation.many_samples(samples, processes, folder), simulation.truth())
    print(found.to_string())
    return coverage_table(found, samples)


def made_by(*paths: str) -> str:
    """A name for the code in these files and folders."""
    digest = hashlib.sha256()
    for path in paths:
        place = ROOT / path
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def coverage_table(found: pd.DataFrame, samples: int) -> str:
    """The section of the page, from what `coverage` returned."""
    import errors_simulated as simulation

    inside = int(found["covered"].between(*AIM).sum())
    lines = [
        f"{samples} samples of {simulation.DOCUMENTS} documents in {simulation.GROUPS} groups. Of {len(found)} rows, "
        f"{inside} are within {AIM[0]:.0%} and {AIM[1]:.0%}.",
        "",
        "| number | truth | bias / spread | claimed error / spread | 95% intervals that contain the truth |",
        "|---|---|---|---|---|",
    ]
    for name, row in found.iterrows():
        moving = name in simulation.MOVING  # no single truth: the mean of the samples stands for it
        ratios = [_written(row[part] / row["spread"], 2) for part in ("bias", "error")]
        truth = _written(row["truth"], 3)
        cells = [f"({truth})" if moving else truth, "" if moving else ratios[0], ratios[1]]
        lines.append(f"| {name} | {' | '.join(cells)} | {row['covered']:.1%} |")
    return "\n".join(lines)


def _written(value: float, digits: int) -> str:
    return "" if pd.isna(value) else f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # never -0.00


def pretrained() -> str:
    import errors_pretrained as real

    code = made_by("benchmarks/errors_pretrained.py", "src/qkscope/capture", "src/qkscope/moments")
    moments = real.captured(KEPT / f"smollm2-{code}.safetensors")
    return ratio_table({**real.measured(moments), **real.measures_bias(moments)})


def ratio_table(found: Mapping[str, Mapping[str, float]]) -> str:
    """The section of the page, from what `measured` and `measures_bias` returned."""
    lines = [
        "| number | jackknife / bootstrap, each document a group | 8 groups | difference of halves / its error, r.m.s. "
        "| bias / error: median | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in found.items():
        names = ("one document each", "8 groups", "halves", "bias", "largest bias")
        lines.append(f"| `{name}` | {' | '.join(f'{row[part]:.2f}' if part in row else '' for part in names)} |")
    return "\n".join(lines)


def write_section(name: str, text: str) -> None:
    """Put text between the page's marks of that name."""
    page = PAGE.read_text(encoding="utf-8")
    marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise SystemExit(f"{PAGE} has no section {name!r}")
    PAGE.write_text(marks.sub(lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
