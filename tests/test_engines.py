"""The same study through every engine: other places, other orders, the same bytes."""

import contextlib
import io
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from conftest import cut_documents
from qkscope.cli.main import main
from qkscope.errors import InputError, QkscopeError
from qkscope.run.checkpoint_plan import Shard
from qkscope.run.engines import ENGINES, Placement, Schedule, Task, WorkerLost, find_engine
from qkscope.run.engines.local import share_of_gpus
from qkscope.run.execute import CaptureOptions, run_study
from qkscope.run.progress import Events
from qkscope.run.runner import Worker
from qkscope.run.status import read_status
from qkscope.validation.layout import VectorSample

TWO_WORKERS = CaptureOptions(placement=Placement(workers=2))


@pytest.fixture
def long_study(world, tmp_path):
    """Sixty documents in twelve shards, one document per batch: there is time to kill somebody in the middle."""
    cut_documents(tmp_path / "docs", 60, every=300, length=2000)
    return lambda **changes: world(shard_tokens=2560, batch_tokens=64, **changes)


class Told(Events):
    """Keeps what it is told, and does something at each batch."""

    def __init__(self, at_batch=lambda: None):
        self.notes, self.started_names, self._at_batch = [], [], at_batch

    def noted(self, message):
        self.notes.append(message)

    def started(self, plan):
        self.started_names.append(plan.checkpoint.name)

    def advanced(self, plan, documents, tokens):
        self._at_batch()


# -- which worker gets what -------------------------------------------------------------------------------


def tasks(*shards):
    """`tasks(2, 3)`: two shards of checkpoint 0, three of checkpoint 1."""
    return [Task(c, f"c{c}", (Shard(s, (s,)),)) for c, count in enumerate(shards) for s in range(count)]


def taken(task):
    return (task.checkpoint, task.shards[0].number)


def test_a_worker_keeps_to_its_checkpoint_then_takes_a_free_one_then_helps():
    schedule = Schedule(tasks(2, 3))
    a = schedule.take(None)
    b = schedule.take(None)
    assert (taken(a), taken(b)) == ((0, 0), (1, 0))  # the second worker starts the checkpoint nobody has
    schedule.finish(a)
    a = schedule.take(0)
    assert taken(a) == (0, 1)
    schedule.finish(a)
    assert taken(schedule.take(0)) == (1, 1)  # its own is used up: it helps
    schedule.finish(b)
    assert taken(schedule.take(1)) == (1, 2)
    assert schedule.take(1) is None


def test_help_goes_where_most_is_left():
    schedule = Schedule(tasks(1, 2, 4))
    for _ in range(3):
        schedule.take(None)  # one worker on each checkpoint
    assert taken(schedule.take(0)) == (2, 1)


def test_a_lost_task_is_first_in_line_and_given_up_after_three_deaths():
    schedule = Schedule(tasks(2))
    task = schedule.take(None)
    assert "attempt 2 of 3" in schedule.lose(task, "killed")
    assert schedule.take(0) == task
    schedule.lose(task, "killed")
    schedule.take(0)
    with pytest.raises(WorkerLost, match=r"checkpoint 'c0', shard 0: 3 workers died on it, the last: killed"):
        schedule.lose(task, "killed")


def test_gpus_are_shared_out():
    gpus = ["0", "1", "2", "3"]
    assert [share_of_gpus(gpus, n, 4) for n in range(4)] == [["0"], ["1"], ["2"], ["3"]]
    assert [share_of_gpus(gpus, n, 2) for n in range(2)] == [["0", "1"], ["2", "3"]]
    assert [share_of_gpus(gpus, n, 6) for n in range(6)] == [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]
    assert share_of_gpus([], 0, 2) == []


def test_engines_are_found_by_their_module():
    assert ENGINES == ("local", "ray")
    with pytest.raises(InputError, match="engine 'slurm' is not one of local, ray"):
        find_engine("slurm")


# -- worker processes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_make_the_same_bytes(study, tmp_path, expected):
    told = Told()
    out = run_study(study(), tmp_path / "out", told, options=TWO_WORKERS)
    assert (out / "qk.csv").read_bytes() == expected
    assert sorted(told.started_names) == ["one", "two"]
    assert not (out / "moments/.shards").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "workers", "stated"),
    [
        (2**40, 3, "one worker for each of the 3 GPUs"),
        (1000, 0, "its layers are spread over all 3 GPUs"),
        (0, 0, None),  # no CUDA
    ],
)
def test_each_gpu_gets_a_worker_if_it_has_room_for_a_model(
    study, tmp_path, expected, quick_workers, monkeypatch, room, workers, stated
):
    """GPUs are only pretended, so workers compute on the CPU; four shards wait."""
    from qkscope.run.engines import local

    started, plain = [], local._LocalCrew.start
    monkeypatch.setattr("qkscope.capture.load.visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr("qkscope.capture.load.smallest_gpu", lambda: room)
    monkeypatch.setattr(
        local._LocalCrew, "start", lambda crew, number: (started.append(number), plain(crew, number))[1]
    )
    told = Told()
    out = run_study(study(), tmp_path / "out", told)
    assert (out / "qk.csv").read_bytes() == expected
    assert len(started) == workers
    assert [stated in note for note in told.notes if "a GPU has" in note] == ([True] if stated else [])


@pytest.mark.slow
def test_vectors_are_kept_by_workers_too(study, tmp_path, quick_workers):
    options = CaptureOptions(vectors=VectorSample(0.5), placement=Placement(workers=2))
    here = run_study(study(), tmp_path / "here", options=CaptureOptions(vectors=VectorSample(0.5)))
    there = run_study(study(), tmp_path / "there", options=options)
    names = sorted(path.relative_to(here) for path in (here / "vectors").rglob("*.parquet"))
    assert names == sorted(path.relative_to(there) for path in (there / "vectors").rglob("*.parquet"))
    assert names
    assert (here / "qk.csv").read_bytes() == (there / "qk.csv").read_bytes()


@pytest.mark.slow
def test_an_error_in_a_worker_keeps_its_type_and_what_is_finished(study, tmp_path, expected, quick_workers):
    (tmp_path / "docs/zz.txt").write_text("a document that will be gone " * 100)
    path = study()

    class Remover(Events):
        def planned(self, plan):
            (tmp_path / "docs/zz.txt").unlink()

    with pytest.raises(InputError, match="1 document vanished while the study was running"):
        run_study(path, tmp_path / "out", Remover(), options=TWO_WORKERS)
    out = run_study(path, tmp_path / "out", options=TWO_WORKERS)
    assert (out / "qk.csv").read_bytes() == expected


def kill_once():
    """Kill one worker process at the first batch."""
    killed = []

    def kill():
        if not killed:
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    return kill


@pytest.mark.faults
def test_a_worker_that_dies_is_replaced(long_study, tmp_path, quick_workers):
    expected = (run_study(long_study(), tmp_path / "whole") / "qk.csv").read_bytes()
    told = Told(kill_once())
    out = run_study(long_study(), tmp_path / "out", told, options=TWO_WORKERS)
    assert (out / "qk.csv").read_bytes() == expected
    [note] = told.notes
    assert "died (signal SIGKILL); it is given to another worker (attempt 2 of 3)" in note


@pytest.mark.faults
def test_workers_that_die_over_one_shard_again_and_again(long_study, tmp_path, quick_workers):
    def kill_all():
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(WorkerLost, match=r"3 workers died on it, the last: worker process \d+ died"):
        run_study(long_study(), tmp_path / "out", Told(kill_all), options=TWO_WORKERS)


@pytest.mark.faults
def test_workers_end_with_a_run_that_is_killed(long_study, tmp_path, start):
    long_study()
    process = start("run", "study.yaml", "--out", "out", "--workers", "2")
    while not list((tmp_path / "out/moments").glob(".shards/*/*.running")):  # all that another process can see of it
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(children)
    assert len(children) >= 2
    assert not any(child.is_running() for child in children)


# -- batch systems ----------------------------------------------------------------------------------------


def qkscope(folder, *arguments):
    """(exit code, standard output, standard error) of a command, here: this process has imported everything."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_shards_through_xargs(study, tmp_path, expected):
    study()
    _, plan, _ = qkscope(tmp_path, "plan", "study.yaml", "--out", "out")
    assert plan.splitlines() == [f"qkscope shard study.yaml {k} --out out" for k in range(4)]
    assert qkscope(tmp_path, "plan", "study.yaml", "--count")[1] == "4\n"
    # Lines are run as they were printed: two of one checkpoint by a shell, as processes that import everything anew and
    # run at the same time, the others here.
    first, *together, last = plan.splitlines()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["xargs", "-P", "2", "-I{}", "sh", "-c", "{}"],
        input="\n".join(together),
        cwd=tmp_path,
        env=environment,
        text=True,
        check=True,
    )
    for line in (first, last):
        assert qkscope(tmp_path, *shlex.split(line)[1:])[0] == 0
    assert qkscope(tmp_path, "plan", "study.yaml", "--out", "out", "--left")[1] == ""
    _, status, _ = qkscope(tmp_path, "status", "out")
    assert "all shards are done; `qkscope run` makes the tables" in status
    assert sorted(path.name for path in (tmp_path / "out/moments").glob("[!.]*")) == [
        "one.safetensors",
        "two.safetensors",
    ]
    _, _, said = qkscope(tmp_path, "run", "study.yaml", "--out", "out")
    assert said.count("moments already exist") == 2
    assert (tmp_path / "out/qk.csv").read_bytes() == expected
    assert "finished" in qkscope(tmp_path, "status", "out")[1]


def test_a_shard_that_is_not_in_the_plan(study, tmp_path):
    study()
    code, _, said = qkscope(tmp_path, "shard", "study.yaml", "4")
    assert code == 2
    assert "shard 4: the plan has shards 0 to 3" in said


@pytest.mark.parametrize("vectors", [None, VectorSample(0.5)])
def test_status_while_it_runs_and_after_it_died(long_study, tmp_path, vectors):
    seen = []

    def look():
        if len(seen) < 40:
            seen.append(read_status(tmp_path / "out"))
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(long_study(), tmp_path / "out", Told(look), options=CaptureOptions(vectors=vectors))
    assert all(status.alive for status in seen)
    assert seen[0].seconds_left() is None
    first = seen[0].checkpoints[0]
    # 2560 // 64 = 40 documents per shard, so 60 documents are two shards of the checkpoint with 64 tokens.
    assert (first.shards, first.done, first.running, first.left, first.tokens) == (2, 0, 1, 1, 3840)
    dead = read_status(tmp_path / "out")
    assert not dead.alive
    assert [each.running for each in dead.checkpoints] == [0, 0]
    assert dead.checkpoints[0].done == 1
    assert dead.checkpoints[0].tokens_done == 2560
    pace = dead.checkpoints[0].seconds / 2560
    assert dead.seconds_left() == pytest.approx(pace * (3840 + 60 * 256 - 2560))


def test_status_of_a_folder_without_a_run(tmp_path):
    with pytest.raises(InputError, match=r"plan\.json: no such file; `qkscope run` and `qkscope shard` write it"):
        read_status(tmp_path)
    (tmp_path / "plan.json").write_text('{"schema": 1, "study": "x", "checkpoints": [{"name": "../../etc"}]}')
    with pytest.raises(InputError, match="is not a plan"):
        read_status(tmp_path)


# -- Ray --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_head():
    """A simulated Ray cluster of one node with one core, which all tests share."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def cluster(ray_head):
    """`cluster(n)`: the shared cluster with `n` nodes of one core each; those that joined leave with the test."""
    import ray

    joined = []

    def make(nodes):
        joined.extend(ray_head.add_node(num_cpus=1) for _ in range(nodes - 1))
        ray_head.wait_for_nodes()
        return ray_head, list(joined)

    yield make
    ray.shutdown()
    for node in joined:
        if node in ray_head.worker_nodes:  # a test may have killed it
            ray_head.remove_node(node)


def on_ray(cluster):
    return CaptureOptions(engine="ray", placement=Placement(address=cluster.address))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_ray_makes_the_same_bytes(study, tmp_path, expected, cluster, nodes):
    made, _ = cluster(nodes)
    told = Told()
    out = run_study(study(), tmp_path / "out", told, options=on_ray(made))
    assert (out / "qk.csv").read_bytes() == expected
    assert sorted(told.started_names) == ["one", "two"]
    assert not [note for note in told.notes if "died" in note]


@pytest.mark.slow
def test_ray_workers_that_cannot_start_are_told_and_given_up(study, tmp_path, cluster, monkeypatch):
    """They were replaced without end and without a word."""
    from qkscope.run.engines import ray as engine

    class Broken:
        def __init__(self, *arguments):
            raise RuntimeError("no driver for this device")

        def ready(self):
            return []

    monkeypatch.setattr(engine, "_Actor", Broken)
    made, _ = cluster(1)
    told = Told()
    with pytest.raises(QkscopeError, match=r"(?s)5 Ray workers in a row.*no driver for this device"):
        run_study(study(), tmp_path / "out", told, options=on_ray(made))
    assert len([note for note in told.notes if "died before it was ready" in note]) == 1


@pytest.mark.slow
def test_a_ray_node_that_dies_in_the_middle_of_a_task(long_study, tmp_path, cluster):
    expected = (run_study(long_study(), tmp_path / "whole") / "qk.csv").read_bytes()
    made, (second,) = cluster(2)

    def kill_when_both_work():
        # Workers of Ray tell of a shard when it is finished; that one is in flight only its marker says.
        while len(list((tmp_path / "out/moments").glob(".shards/*/*.running"))) < 2:
            time.sleep(0.01)
        made.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_when_both_work, daemon=True)
    killer.start()
    told = Told()
    out = run_study(long_study(), tmp_path / "out", told, options=on_ray(made))
    killer.join()
    assert (out / "qk.csv").read_bytes() == expected
    assert any("its worker or node died" in note for note in told.notes)


def run_on_ray(study, out, told=None, address=None):
    options = CaptureOptions(engine="ray", placement=Placement(address=address))
    return run_study(study, out, told or Events(), options=options)


@pytest.mark.ray
def test_no_cluster_answers(study, tmp_path):
    with pytest.raises(InputError, match=r"Ray address 127\.0\.0\.1:1: no Ray cluster answers there.*Leave it out"):
        run_on_ray(study(), tmp_path / "out", address="127.0.0.1:1")


@pytest.mark.ray
@pytest.mark.parametrize("address", [None, "auto"])
def test_no_cluster_answers_where_the_environment_says(study, tmp_path, monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(InputError, match=r"RAY_ADDRESS 127\.0\.0\.1:1: no Ray cluster answers there.*Unset it"):
        run_on_ray(study(), tmp_path / "out", address=address)


@pytest.fixture
def left_behind(monkeypatch):
    """What a cluster that was killed leaves: a file with its address, where nobody answers any more."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as place:  # short: Ray's sockets are in it
        monkeypatch.setenv("RAY_TMPDIR", place)
        Path(place, "ray").mkdir()
        Path(place, "ray/ray_current_cluster").write_text("127.0.0.1:1")
        yield


@pytest.mark.ray
@pytest.mark.slow
def test_without_an_address_a_ray_is_started_whatever_a_killed_one_left_behind(tmp_path, left_behind):
    """With nothing to do, it begins and ends; a worker would only import torch once more.

    In a process of its own: one that has had a Ray of its own gets no worker from the cluster that the tests share.
    """
    (tmp_path / "moments").mkdir()
    done = subprocess.run([sys.executable, "-c", NOTHING, tmp_path], capture_output=True, text=True, check=True)
    (note,) = done.stdout.splitlines()
    assert note.startswith("starting a Ray cluster on this machine for this run alone")


NOTHING = """
import sys
from pathlib import Path
from qkscope.run.engines import find_engine
from qkscope.run.engines import Job
from qkscope.run.runner import Worker
from qkscope.run.stopping import Stop

nothing = Job(plans=[], tasks=[], folder=Path(sys.argv[1]), worker=Worker)
find_engine("ray").run(nothing, lambda note: print(note.message), Stop())
"""


@pytest.mark.ray
def test_a_killed_cluster_that_is_asked_for_is_an_error(study, tmp_path, left_behind, monkeypatch):
    from ray._private import services

    monkeypatch.setattr(services, "find_gcs_addresses", set)  # other tests may run a cluster beside this one
    with pytest.raises(InputError, match=r"Ray address auto: no Ray cluster answers there \(.*refused"):
        run_on_ray(study(), tmp_path / "out", address="auto")


@pytest.mark.slow
def test_without_a_shared_folder_sums_come_through_the_object_store(study, tmp_path, expected, cluster, monkeypatch):
    """The workers look for the run's marker where no such folder is, as on another machine."""
    from qkscope.run.engines import ray as engine

    monkeypatch.setattr(engine, "write_text", lambda path, text: None)  # the marker, which nobody else would see
    monkeypatch.setattr(engine, "marker_path", lambda folder, token: tmp_path / "another machine" / token)
    made, _ = cluster(1)
    out = run_study(study(), tmp_path / "out", options=on_ray(made))
    assert (out / "qk.csv").read_bytes() == expected
    assert not (tmp_path / "another machine").exists()
    with pytest.raises(InputError, match="keeping vectors needs a results folder that every worker sees"):
        run_study(
            study(),
            tmp_path / "vectors",
            options=CaptureOptions(engine="ray", placement=Placement(address=made.address), vectors=VectorSample()),
        )


@pytest.mark.slow
def test_an_ablation_on_ray_makes_the_same_bytes(study, tmp_path, cluster, monkeypatch):
    from qkscope.ablate.study import AblationOptions, ablate_study
    from qkscope.ablate.work import AblationSettings, HeadChoice
    from qkscope.run.engines import ray as engine

    path, out = study(groups=4), tmp_path / "out"
    run_study(path, out)
    settings = AblationSettings(edits=("zero",), heads=HeadChoice(("L1H0",)), documents=4, tokens=32)
    ablate_study(path, out, settings)
    expected = (out / "ablation.csv").read_bytes()
    for part in (out / ".ablation").glob("*/*.json"):
        part.unlink()
    made, _ = cluster(1)
    there = AblationOptions("ray", Placement(address=made.address))
    ablate_study(path, out, settings, options=there)
    assert (out / "ablation.csv").read_bytes() == expected
    next((out / ".ablation").glob("*/*.json")).unlink()
    monkeypatch.setattr(engine, "write_text", lambda path, text: None)
    with pytest.raises(InputError, match="needs a results folder that every worker sees"):
        ablate_study(path, out, settings, options=there)


@pytest.mark.slow
def test_another_engine_is_one_class(study, tmp_path, expected, monkeypatch):
    """Backwards, with a fresh worker for each task, and every sum told as bytes: still the same table."""
    from qkscope.run import execute
    from qkscope.run.engines import BaseEngine, pack_plans, unpack_plans

    class Backwards(BaseEngine):
        def run(self, job, told, stop):
            for task in reversed(job.tasks):
                plans = unpack_plans(pack_plans(job.plans))
                Worker(plans, tmp_path / "nowhere", told, shared=False).run(task)

    monkeypatch.setattr(execute, "find_engine", lambda name: Backwards())
    out = run_study(study(), tmp_path / "out")
    assert (out / "qk.csv").read_bytes() == expected
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("end", "told"), [("os._exit(1)", True), ("pass", False), ("raise SystemExit(1)", False)])
def test_a_ray_that_ends_this_process_leaves_a_message(end, told):
    """Ray's C++ code calls exit when its node dies, as `os._exit` does here: no exception reaches Python."""
    script = (
        f"import os\nfrom qkscope.run.engines.ray import _report_if_ray_dies\nwith _report_if_ray_dies():\n    {end}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ("Ray on this machine died and ended this run; everything finished is kept" in done.stderr) is told
