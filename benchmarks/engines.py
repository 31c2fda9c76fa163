"""The demo's study through every engine, and killed and resumed: one sha256, or an error.

usage: python benchmarks/engines.py results/demo   (after `make demo`)
"""

import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = [sys.executable, "-m", "qkscope", "run"]


def on_ray(nodes: int, arguments: list[str]) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        subprocess.run([*RUN, *arguments, "--engine", "ray", "--ray-address", cluster.address], check=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def killed_and_resumed(arguments: list[str]) -> None:
    """Killed a second after work begins, again and again, until it is through."""
    kills = 0
    while True:
        process = subprocess.Popen([*RUN, *arguments], stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        next((line for line in process.stderr if line.startswith("study ")), None)
        if kills < 5:
            time.sleep(1.0)
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, told = process.communicate()
        if process.returncode == 0:
            return
        if process.returncode != -signal.SIGKILL:
            sys.exit(told)


def main() -> None:
    study = str(Path(sys.argv[1]) / "study.yaml") if len(sys.argv) == 2 else sys.exit(__doc__)
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        ways = {
            "in this process": lambda arguments: subprocess.run([*RUN, *arguments], check=True),
            "two worker processes": lambda arguments: subprocess.run([*RUN, *arguments, "--workers", "2"], check=True),
            "Ray, one node": lambda arguments: on_ray(1, arguments),
            "Ray, two nodes": lambda arguments: on_ray(2, arguments),
            "killed five times and resumed": killed_and_resumed,
        }
        for number, (name, run) in enumerate(ways.items()):
            out = Path(scratch) / str(number)
            run([study, "--out", str(out)])
            found[name] = hashlib.sha256((out / "qk.csv").read_bytes()).hexdigest()
    for name, digest in found.items():
        print(f"{digest}  {name}")
    if len(set(found.values())) != 1:
        sys.exit("the tables differ")


if __name__ == "__main__":
    main()
