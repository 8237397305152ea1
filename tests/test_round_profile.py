"""What a profile of rounds says: kernels by phase, launches by kind, and idle time."""

from types import SimpleNamespace

import pytest

from scripts.profile_round import profile_rounds
from scripts.round_profile import read_profile
from specdec.bench.pair import EngineSpec, load_pair
from specdec.start.speculation import Drafting


def event(name, start, end, device="CUDA"):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=start, end=end),
        cpu_children=[],
    )


def test_overlapping_kernels_are_busy_once_and_belong_to_the_innermost_range():
    events = [
        event("round: verify", 0, 30),
        event("gemm", 0, 10),
        event("gemm", 8, 20),
        event("norm", 12, 18),
        event("round: draft decode", 40, 60),
        event("gemm", 40, 50),
        event("gemm", 53, 55),
        event("cudaGraphLaunch", 0, 1, device="CPU"),
        event("cuLaunchKernelEx", 2, 3, device="CPU"),
        event("aten::mm", 2, 3, device="CPU"),
    ]

    found = read_profile(events, 1, is_gpu=True)

    columns = "count", "us", "added_us"
    rows = {(row["phase"], row["kernel"]): tuple(map(row.get, columns)) for row in found.kernels}
    assert rows == {
        ("verify", "gemm"): (2, 22, 20),
        ("verify", "norm"): (1, 6, 0),
        ("draft decode", "gemm"): (2, 12, 35),
    }
    assert (found.busy_us, found.span_us, found.num_kernels) == (32, 55, 5)
    assert found.gap_share == pytest.approx(23 / 55)
    assert found.gaps_us == {"verify > draft decode": 20, "draft decode": 3}
    assert found.launches == {"cuLaunchKernelEx": 1, "cudaGraphLaunch": 1}


def test_rounds_are_profiled_on_the_cpu():
    pair = load_pair("demo", "demo", "cpu", "auto")
    spec = EngineSpec(drafting=Drafting(2), max_num_seqs=1, max_tokens=300, max_model_len=512)

    found = profile_rounds(pair.engine(spec), pair.prompts[1:2], 2)

    assert {"forward", "prefill_draft", "decode_draft"} <= {row["phase"] for row in found.kernels}
    assert 0 < found.busy_us < found.span_us
