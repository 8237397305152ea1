"""What ranks gather lies in their order; a rank that stops meanwhile leaves no other waiting."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from specdec.parallel import processes as module
from specdec.parallel.group import Group
from specdec.parallel.lead import Lead
from specdec.parallel.processes import NO_MULTICAST, Processes, RankError
from specdec.parallel.shared import Shared

STUB = "from tests.specdec.parallel.stub_group import main; main()"
ABSENT = "from tests.specdec.parallel.stub_absent import main; main()"


def listens():
    """Addresses at which this process waits for others, besides those within the host."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]


def gather_forever(group, found):
    while True:
        group.gather(torch.zeros(2, 3), found)


@pytest.fixture
def begin(monkeypatch):
    """begin(program): an engine of two ranks, the other one a stub."""

    def start(program):
        monkeypatch.setattr(module, "PROGRAM", program)
        shared, store = Shared.of(2), os.memfd_create("store")
        given = {"file": shared.file, "store": store, "size": 2}
        return Lead(Processes(shared, [given], [store]), store)

    return start


def test_ranks_gather_until_one_stops(begin, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 1.0)
    for name in NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    lead = begin(STUB)
    group = Group(lead._store, 0, 2, torch.device("cpu"))
    lead.tell(group.abort)
    assert os.environ.items() >= NO_MULTICAST.items()
    assert group.least(5) == 5
    found = torch.empty(2, 2, 3)
    group.gather(torch.full((2, 3), -2.0), found)
    assert torch.equal(found, torch.tensor([-2.0, 1.5])[:, None, None].expand(2, 2, 3))
    assert {address.split(":")[0] for address in listens()} == {"0100007F"}  # the host itself
    os.kill(lead.processes._all[0].popen.pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as waited:
        gather_forever(group, found)
    with pytest.raises(RankError, match="rank 1 has given no sign of life for 1 s"):
        lead.fail_after(waited.value)
    assert time.monotonic() - began < 5
    lead.end("the test is over")
    del group, lead, waited
    ends_at = time.monotonic() + 5
    while listens() and time.monotonic() < ends_at:  # the watch may look for the last time
        time.sleep(0.05)
    assert listens() == []


def test_a_rank_that_ends_while_all_connect_is_not_waited_for(begin):
    lead = begin(ABSENT)
    with pytest.raises(RankError, match="rank 1 ended with status 9"):
        lead.join(torch.device("cpu"))


FORKS = f"""
import os, sys, torch
from specdec.parallel import processes
from specdec.parallel.group import Group
from specdec.parallel.lead import Lead
from specdec.parallel.shared import Shared

processes.PROGRAM = {STUB!r}
shared, store = Shared.of(2), os.memfd_create("store")
start = {{"file": shared.file, "store": store, "size": 2}}
lead = Lead(processes.Processes(shared, [start], [store]), store)
lead._group = Group(store, 0, 2, torch.device("cpu"))
assert lead.least(5) == 5
child = os.fork()
if child == 0:
    if END:
        Group.close = None  # it would end what the parent's ranks wait for
        lead.end("it ends")
    sys.exit(42)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
lead._group.gather(torch.zeros(2, 3), torch.empty(2, 2, 3))
lead.processes.fail("the test is over")
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_forked_child_ends_like_any_other(ends):
    """It has none of the group's threads."""
    command = [sys.executable, "-c", FORKS.replace("END", str(ends))]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert found.returncode == 42, found.stderr
