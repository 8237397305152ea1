"""What ranks gather lies in their order; a rank that stops meanwhile leaves no other waiting."""

import os
import signal
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


def test_ranks_gather_until_one_stops(monkeypatch):
    monkeypatch.setattr(module, "PROGRAM", STUB)
    monkeypatch.setattr(module, "SILENT_SECONDS", 1.0)
    for name in NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    shared, store = Shared.of(2), os.memfd_create("store")
    start = {"file": shared.file, "store": store, "size": 2}
    lead = Lead(Processes(shared, [start], [store]), store)
    group = Group(store, 0, 2, torch.device("cpu"))
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


def test_a_rank_that_ends_while_all_connect_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(module, "PROGRAM", ABSENT)
    shared, store = Shared.of(2), os.memfd_create("store")
    start = {"file": shared.file, "store": store, "size": 2}
    lead = Lead(Processes(shared, [start], [store]), store)
    with pytest.raises(RankError, match="rank 1 ended with status 9"):
        lead.join(torch.device("cpu"))
