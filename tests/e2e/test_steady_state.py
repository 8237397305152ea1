"""Rounds allocate nothing that stays, move no buffer, and read nothing back before they end."""

import gc

import pytest
import torch
from torch.overrides import TorchFunctionMode

from specdec import LLM
from specdec.rounds.upload import RowStart
from specdec.scheduling.work import PromptPart
from tests.specdec.buffer_tensors import buffer_tensors

HOST_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy,
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
    torch.Tensor.nonzero, torch.nonzero, torch.Tensor.masked_select, torch.masked_select,
    torch.Tensor.unique, torch.unique,
}  # fmt: skip


class ForbidHostReads(TorchFunctionMode):
    """Raises where a value of a tensor would travel to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in HOST_READS:
            raise AssertionError(f"host read inside a round: {func}")
        if func is torch.Tensor.__getitem__ and any(is_mask(index) for index in as_tuple(args[1])):
            raise AssertionError("host read inside a round: boolean index")
        return func(*args, **(kwargs or {}))


def as_tuple(index):
    return index if isinstance(index, tuple) else (index,)


def is_mask(index):
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


@pytest.fixture
def runner(prompts):
    """A runner with three requests past their prompts."""
    llm = LLM(
        "demo",
        {"model": "demo", "num_speculative_tokens": 3},
        max_num_seqs=3,
        max_model_len=640,
        device="cpu",
    )
    runner = llm.engine.runner
    parts = []
    for row, prompt in enumerate(prompts[:3]):
        blocks = range(row * 10, row * 10 + 10)
        runner.start_rows([(row, RowStart(blocks=blocks, num_draft_tokens=3))])
        parts.append(
            PromptPart(state_row=row, prompt=prompt, start=0, length=len(prompt), blocks=blocks)
        )
    runner.run_step(parts=parts)
    return runner


def test_rounds_read_nothing_back(runner):
    before = runner.state.num_computed_tokens[:3].tolist()
    with ForbidHostReads():
        for _ in range(3):
            runner.run_step([0, 1, 2], max_num_computed=400)
    last = runner.read(3).num_accepted
    grown = [
        int(now) - then
        for now, then in zip(runner.state.num_computed_tokens[:3], before, strict=True)
    ]
    assert all(
        2 + accepted + 1 <= each <= 3 * 4 for each, accepted in zip(grown, last, strict=True)
    )


@pytest.mark.parametrize(
    "read", [lambda t: t.item(), lambda t: t.tolist(), bool, lambda t: t[t > 0], lambda t: t.cpu()]
)
def test_the_guard_sees_host_reads(read):
    with pytest.raises(AssertionError, match="host read"), ForbidHostReads():
        read(torch.ones(1))


@pytest.mark.parametrize("num_rounds", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_rounds_leave_memory_and_addresses_as_they_were(runner, num_rounds):
    for _ in range(2):
        runner.run_step([0, 1, 2], max_num_computed=600)
    before = live_bytes(), addresses(runner)
    for _ in range(num_rounds):
        runner.run_step([0, 1, 2], max_num_computed=600)
    assert (live_bytes(), addresses(runner)) == before
    assert int(runner.state.num_computed_tokens[0]) > num_rounds


def live_bytes():
    gc.collect()
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if is_tensor(t)
    }
    return sum(storages.values())


def is_tensor(candidate):
    is_plain = type(candidate) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and candidate.device.type == "cpu" and candidate.layout is torch.strided


def addresses(runner):
    state = {
        name: value.data_ptr()
        for name, value in vars(runner.state).items()
        if isinstance(value, torch.Tensor)
    }
    buffers = {name: value.data_ptr() for name, value in buffer_tensors(runner.buffers).items()}
    return state, buffers, runner.target_cache.data_ptr(), runner.draft_cache.data_ptr()
