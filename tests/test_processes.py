"""Worker processes: results in order, a fallback where a worker dies, and nobody left when the run is gone."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool

import psutil
import pytest

from qkscope import processes
from qkscope.processes import WorkerPool, over_cores


@pytest.fixture
def workers():
    """The processes that this test has started and that still run; those of other tests, such as a browser's, do not
    count."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


@pytest.fixture
def alone(monkeypatch):
    """As in a process without other threads, on a machine with two cores."""
    monkeypatch.setattr(processes.threading, "active_count", lambda: 1)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 2)


def test_results_come_in_order_and_functions_need_no_name(alone):
    found = list(over_cores(lambda item: (item * 2, os.getpid()), range(20)))
    assert [result for result, _ in found] == list(range(0, 40, 2))
    assert os.getpid() not in {process for _, process in found}


def test_few_items_and_a_process_with_threads_are_done_here(alone, monkeypatch):
    assert set(over_cores(lambda _: os.getpid(), range(2), fewest=3)) == {os.getpid()}
    monkeypatch.setattr(processes.threading, "active_count", lambda: 2)
    assert set(over_cores(lambda _: os.getpid(), range(5))) == {os.getpid()}


def test_an_error_is_raised_where_its_item_is_and_ends_the_workers(alone, workers):
    begun = over_cores(lambda item: 1 / (3 - item), range(100))
    assert [next(begun) for _ in range(3)] == [1 / 3, 1 / 2, 1]
    with pytest.raises(ZeroDivisionError):
        next(begun)
    assert workers() == set()


def test_what_a_worker_that_died_leaves_is_done_here(alone):
    here = os.getpid()

    def die_over_seven(item):
        if item == 7 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return item

    assert list(over_cores(die_over_seven, range(10))) == list(range(10))


def test_where_no_process_can_be_started_everything_is_done_here(alone, monkeypatch):
    def no_semaphores(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(processes, "ProcessPoolExecutor", no_semaphores)
    assert set(over_cores(lambda _: os.getpid(), range(5))) == {os.getpid()}


def test_ending_a_pool_ends_what_its_workers_do(alone, workers):
    with WorkerPool(2, fork=True) as pool:
        futures = [pool.submit(time.sleep, 1000) for _ in range(5)]
    assert workers() == set()
    for future in futures:
        with pytest.raises((BrokenProcessPool, CancelledError)):
            future.result()


SCRIPT = """
import os, signal, sys, time
from qkscope.processes import WorkerPool
print("begins", flush=True)
with WorkerPool(2, fork=sys.argv[1] == "fork") as pool:
    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)
    print(pool.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN, flush=True)
    pool.submit(time.sleep, 1000).result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_end_with_a_process_that_is_killed_and_do_not_run_its_script(tmp_path, method):
    (tmp_path / "study.py").write_text(SCRIPT)  # which has no `if __name__ == "__main__"`
    with subprocess.Popen([sys.executable, tmp_path / "study.py", method], stdout=subprocess.PIPE, text=True) as run:
        lines = [run.stdout.readline() for _ in range(3)]
        assert lines[0] == "begins\n"
        assert lines[2] == "True\n"
        workers = [psutil.Process(int(each)) for each in lines[1].split()]
        run.kill()
        assert run.stdout.read() == ""  # the script ran once
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers)
