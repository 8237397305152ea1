"""Options about graphs and memory: checked by name, refused where they would do nothing."""

import logging

import pytest
import torch

from graphs.modes import CUDAGraphMode
from specdec import LLM
from specdec.config import EngineConfig, graph_modes
from specdec.start import runners

NO_PIECES = {"target_prefill": "NONE", "draft_prefill": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization=0: give a number from 0.01"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"enforce_eager": "no"}, "enforce_eager='no': allowed are False, True"),
        ({"cuda_graph_sizes": 4}, "cuda_graph_sizes=4: give a list of integers"),
        ({"cuda_graph_sizes": []}, "cuda_graph_sizes="),
        (
            {"cuda_graph_sizes": [1, 65]},
            r"cuda_graph_sizes=\[1, 65\]: 65 is not an integer from 1 to 64",
        ),
        (
            {"cuda_graph_token_sizes": [0]},
            "cuda_graph_token_sizes=.* 0 is not an integer from 1 to 10304",
        ),
        ({"cuda_graph_modes": {"draft_decod": "FULL"}}, "did you mean draft_decode"),
        (
            {"cuda_graph_modes": {"draft_decode": "PIECEWISE"}},
            r"cuda_graph_modes\['draft_decode'\]='PIECEWISE'",
        ),
        (
            {"enforce_eager": True, "cuda_graph_sizes": [1]},
            "enforce_eager=True captures nothing: leave it out",
        ),
        (
            {"enforce_eager": True, "compile_piecewise": True},
            "compile_piecewise=True, but enforce_eager=True",
        ),
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
    with pytest.raises(
        ValueError, match=f"{next(iter(options))}=.*, but graphs are captured on a GPU only"
    ):
        LLM("demo", device="cpu", **options)


@pytest.mark.parametrize(
    "options, has_draft, words",
    [
        (
            {"cuda_graph_modes": {"draft_prefill": "NONE"}},
            False,
            r"\['draft_prefill'\]='NONE', but nothing is drafted",
        ),
        (
            {"cuda_graph_modes": {"target_prefill": "NONE"}, "compile_piecewise": True},
            False,
            "compile_piecewise=True, but",
        ),
        (
            {"cuda_graph_modes": NO_PIECES, "cuda_graph_token_sizes": [8]},
            True,
            "token_sizes=.* no graphs in pieces",
        ),
        (
            {"cuda_graph_modes": {"target_decode": "NONE"}, "cuda_graph_sizes": [1]},
            False,
            "sizes=.* no full graphs",
        ),
    ],
)
def test_a_gpu_refuses_what_no_family_would_read(options, has_draft, words):
    with pytest.raises(ValueError, match=words):
        runners.graph_backend(EngineConfig(**options), torch.device("cuda"), has_draft)


@pytest.mark.parametrize(
    "options, has_draft, taken",
    [
        (
            {
                "cuda_graph_modes": {"draft_prefill": "NONE"},
                "cuda_graph_token_sizes": [8],
                "compile_piecewise": True,
            },
            True,
            (None, (8,), True),
        ),
        (
            {
                "cuda_graph_modes": {"target_prefill": "NONE"},
                "cuda_graph_sizes": [1],
                "compile_piecewise": True,
            },
            True,
            ((1,), None, True),
        ),
        (
            {"cuda_graph_modes": {"target_decode": "NONE"}, "cuda_graph_token_sizes": [8]},
            False,
            (None, (8,), False),
        ),
    ],
)
def test_options_that_one_family_reads_are_taken(options, has_draft, taken, monkeypatch):
    monkeypatch.setattr(runners, "CudaBackend", lambda device: ("graphs", device))
    config, device = EngineConfig(**options), torch.device("cuda")
    assert runners.graph_backend(config, device, has_draft) == ("graphs", device)
    graphs = config.graphs
    assert (graphs.request_sizes, graphs.token_sizes, graphs.compile_piecewise) == taken
    assert {name: graphs.modes[name].name for name in options["cuda_graph_modes"]} == (
        options["cuda_graph_modes"]
    )


def test_a_share_of_a_gpu_has_no_effect_on_a_cpu_and_says_so(caplog):
    LLM("demo", device="cpu", gpu_memory_utilization=0.8, max_model_len=64)
    assert "gpu_memory_utilization=0.8 has no effect on device cpu" in caplog.text


def test_a_share_of_a_gpu_is_nine_tenths_unless_it_is_given():
    assert (EngineConfig().utilization, EngineConfig(gpu_memory_utilization=0.5).utilization) == (
        0.9,
        0.5,
    )


def test_a_cache_of_a_given_size_says_that_it_overrides_the_share(caplog):
    config = EngineConfig(num_kv_blocks=4, gpu_memory_utilization=0.5)
    with caplog.at_level(logging.INFO, "specdec"):
        for each, said in ((EngineConfig(num_kv_blocks=4), 0), (config, 1)):
            assert runners._num_blocks(each, None, 1024, 1 << 40) == 4
            assert len(caplog.messages) == said
    assert caplog.messages == ["num_kv_blocks=4 overrides gpu_memory_utilization=0.5"]


def test_the_defaults_are_as_they_were():
    graphs = EngineConfig().graphs
    assert graphs.modes == {
        "target_prefill": CUDAGraphMode.FULL_AND_PIECEWISE,
        "target_decode": CUDAGraphMode.FULL,
        "draft_prefill": CUDAGraphMode.FULL_AND_PIECEWISE,
        "draft_decode": CUDAGraphMode.FULL,
    }
    assert (graphs.request_sizes, graphs.token_sizes, graphs.compile_piecewise) == (
        None,
        None,
        False,
    )


def test_a_family_can_be_turned_off_by_name():
    modes = graph_modes({"draft_prefill": "PIECEWISE"})
    assert modes["draft_prefill"] is CUDAGraphMode.PIECEWISE
    assert modes["target_decode"] is CUDAGraphMode.FULL
