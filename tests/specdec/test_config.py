"""Options about graphs and memory: checked by name, refused where they would do nothing."""

import pytest

from graphs.modes import CUDAGraphMode
from specdec import LLM
from specdec.config import EngineConfig, graph_modes


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0: give a number above 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"enforce_eager": "no"}, "enforce_eager='no': allowed are False, True"),
        ({"cuda_graph_sizes": 4}, "cuda_graph_sizes=4: give a list of integers"),
        ({"cuda_graph_sizes": []}, "cuda_graph_sizes="),
        ({"cuda_graph_sizes": [1, 65]}, r"cuda_graph_sizes=\[1, 65\]: 65 is not an integer from 1 to 64"),
        ({"cuda_graph_token_sizes": [0]}, "cuda_graph_token_sizes=.* 0 is not an integer from 1 to 8192"),
        ({"cuda_graph_modes": {"draft_decod": "FULL"}}, "did you mean draft_decode"),
        ({"cuda_graph_modes": {"draft_decode": "PIECEWISE"}}, r"cuda_graph_modes\['draft_decode'\]='PIECEWISE'"),
        ({"enforce_eager": True, "cuda_graph_sizes": [1]}, "enforce_eager=True captures nothing: leave it out"),
        ({"enforce_eager": True, "compile_piecewise": True}, "compile_piecewise=True, but enforce_eager=True"),
    ],
)
def test_options_about_graphs_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph_sizes": [1]},
        {"cuda_graph_token_sizes": [8]},
        {"cuda_graph_modes": {"draft_prefill": "PIECEWISE"}},
        {"compile_piecewise": True},
    ],
)
def test_a_cpu_refuses_what_it_would_ignore(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*, but graphs are captured on a GPU only"):
        LLM("demo", device="cpu", **options)


def test_the_defaults_are_as_they_were():
    graphs = EngineConfig().graphs
    assert graphs.modes == {
        "target_prefill": CUDAGraphMode.PIECEWISE,
        "target_decode": CUDAGraphMode.FULL,
        "draft_prefill": CUDAGraphMode.FULL_AND_PIECEWISE,
        "draft_decode": CUDAGraphMode.FULL,
    }
    assert (graphs.request_sizes, graphs.token_sizes, graphs.compile_piecewise) == (None, None, False)


def test_a_family_can_be_turned_off_by_name():
    modes = graph_modes({"draft_prefill": "PIECEWISE"})
    assert modes["draft_prefill"] is CUDAGraphMode.PIECEWISE
    assert modes["target_decode"] is CUDAGraphMode.FULL
