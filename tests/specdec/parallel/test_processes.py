"""However a rank ends, all ranks do, the failure names it, and nothing is left."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.parallel import processes as module
from specdec.parallel.processes import NO_MULTICAST, Processes, RankError
from specdec.parallel.shared import Place, Shared
from tests.ranks import shared_memory

STUB = "from tests.specdec.parallel.stub_rank import main; main()"


@pytest.fixture(autouse=True)
def _stub(monkeypatch):
    monkeypatch.setattr(module, "PROGRAM", STUB)
    monkeypatch.setattr(module, "CLOSING_SECONDS", 0.2)


@pytest.fixture
def begin():
    """begin(**more): two ranks beside rank 0; rank 2 is started with these."""
    before = shared_memory()
    begun = []

    def start(**more):
        shared = Shared.of(3)
        given = {"file": shared.file, "size": 3}
        found = Processes(shared, [given | {"rank": 1}, given | {"rank": 2} | more])
        begun.append(found)
        return found

    yield start
    for found in begun:
        found.close("the test is over")
        assert all(process.popen.returncode is not None for process in found._all)
    assert shared_memory() == before


def wait_for(condition, seconds=10.0):
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "it takes too long"
        time.sleep(0.02)


def are_ready(ranks):
    return all(ranks.shared.get(rank, Place.STAGE) for rank in (1, 2))


def failure_of(ranks):
    wait_for(lambda: ranks.failure is not None)
    with pytest.raises(RankError) as raised:
        ranks.check()
    return str(raised.value)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_rank_that_is_killed_is_named_and_ends_all(begin, name):
    ranks = begin()
    told = []
    ranks.told.append(lambda: told.append(1))
    wait_for(lambda: are_ready(ranks))
    ranks.check()
    os.kill(ranks._all[1].popen.pid, getattr(signal, name))
    assert failure_of(ranks).startswith(f"rank 2 was ended by {name}\n    begins {{")
    wait_for(lambda: told == [1])
    wait_for(lambda: ranks._all[0].popen.poll() == -signal.SIGKILL)


def test_a_rank_that_raises_says_what(begin, capsys):
    ranks = begin(raises="no such layer: 7")
    found = failure_of(ranks)
    assert found.startswith("rank 2 ended with status 1\n")
    assert found.endswith("\n    ValueError: no such layer: 7")
    assert "rank 2: ValueError: no such layer: 7" in capsys.readouterr().err


def test_a_rank_that_is_stopped_ends_all(begin, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.7)
    ranks = begin()
    wait_for(lambda: are_ready(ranks))
    os.kill(ranks._all[0].popen.pid, signal.SIGSTOP)
    assert failure_of(ranks).startswith("rank 1 has given no sign of life for 0.7 s\n")


def test_a_rank_that_never_begins_ends_all(begin, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(module, "LOADING_SECONDS", 0.5)
    assert "rank 2 has given no sign of life" in failure_of(begin(is_silent=True))


def test_a_rank_that_never_ends_a_step_ends_all(begin, monkeypatch):
    monkeypatch.setattr(module, "STUCK_SECONDS", 0.5)
    ranks = begin()
    wait_for(lambda: are_ready(ranks))
    for rank in range(3):
        ranks.shared.set(rank, Place.MESSAGES, 7)
    time.sleep(1.0)  # with nothing to do
    ranks.shared.set(0, Place.MESSAGES, 8)
    time.sleep(2 * module.LOOK_SECONDS)
    ranks.check()
    ranks.shared.set(1, Place.MESSAGES, 8)
    assert failure_of(ranks).startswith("rank 2 has been at one step for 0.5 s\n")


def test_ranks_that_were_stopped_with_rank_0_go_on(begin, monkeypatch):
    """As by a container's pause: rank 0 may go on a moment earlier."""
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + slept[0])
    monkeypatch.setattr(module, "time", clock)
    ranks = begin()
    wait_for(lambda: are_ready(ranks))
    os.kill(ranks._all[0].popen.pid, signal.SIGSTOP)
    slept[0] = 60.0
    time.sleep(3 * module.LOOK_SECONDS)
    os.kill(ranks._all[0].popen.pid, signal.SIGCONT)
    ranks.check()


@pytest.mark.parametrize("path", ["", "."])
def test_ranks_import_what_lies_in_the_current_directory(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path, "/elsewhere"])
    assert module._path() == f"{tmp_path}:/elsewhere"


def test_ranks_may_not_use_multicast(begin, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    ranks = begin()
    wait_for(lambda: ranks._all[0].lines)
    assert ranks._all[0].lines[0] == f"begins {NO_MULTICAST}"
    assert {*NO_MULTICAST.values()} == {"1", "0"}


def test_ranks_end_with_what_started_them(begin):
    ranks = begin()
    popens = [process.popen for process in ranks._all]
    ranks.close("it was shut down")
    assert [popen.poll() for popen in popens] == [-signal.SIGKILL] * 2  # these do not listen
    ranks.close("again")
    with pytest.raises(RankError, match="it was shut down"):
        ranks.check()


def test_descriptors_are_given_back():
    before = len(os.listdir("/proc/self/fd"))
    shared = Shared.of(2)
    ranks = Processes(shared, [{"file": shared.file, "size": 2, "rank": 1}])
    ranks.close("it was shut down")
    del ranks, shared
    gc.collect()
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)  # a thread closes the pipe


def test_ranks_end_when_nothing_refers_to_them():
    shared = Shared.of(2)
    ranks = Processes(shared, [{"file": shared.file, "size": 2, "rank": 1}])
    popen = ranks._all[0].popen
    del ranks
    gc.collect()
    assert popen.poll() == -signal.SIGKILL


def test_a_forked_child_neither_uses_nor_ends_a_rank(begin):
    ranks = begin()
    child = os.fork()
    if child == 0:
        try:
            ranks.check()
        except RankError as error:
            ranks.close("it ends")
            os._exit(42 if "belongs to process" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert [process.popen.poll() for process in ranks._all] == [None, None]


def test_a_start_that_fails_leaves_no_rank(monkeypatch):
    shared = Shared.of(3)
    begun = []
    real = module.Process

    def second_fails(rank, *given):
        if rank == 2:
            raise OSError("no more processes")
        begun.append(real(rank, *given))
        return begun[0]

    monkeypatch.setattr(module, "Process", second_fails)
    given = {"file": shared.file, "size": 3, "rank": 1}
    with pytest.raises(OSError, match="no more"):
        Processes(shared, [given, given])
    assert begun[0].popen.poll() == -signal.SIGKILL


SCRIPT = f"""
import os, signal, time
from specdec.parallel import processes
processes.PROGRAM = {STUB!r}
shared = processes.Shared.of(2)
ranks = processes.Processes(shared, [{{"file": shared.file, "size": 2, "rank": 1}}])
print(ranks._all[0].popen.pid, flush=True)
END
"""


@pytest.mark.parametrize("end", ["signal.SIGKILL", "signal.SIGTERM", None])
def test_a_rank_ends_when_the_process_of_rank_0_does(end):
    script = SCRIPT.replace("END", f"os.kill(os.getpid(), {end})" if end else "")
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    pid = int(found.stdout)
    wait_for(lambda: not _runs(pid))


def _runs(pid):
    """Whether it runs: the dead may wait to be collected by a process that adopted them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
