"""A backend, its device, and a toy model whose attention is an eager break."""

import pytest
import torch
from torch import Tensor

from graphs.breakable import eager_break_during_capture
from graphs.context import ForwardContext, get_forward_context, set_forward_context
from graphs.cuda import CudaBackend
from graphs.modes import BatchDescriptor, CUDAGraphMode
from graphs.tape.backend import TapeBackend

D = 8


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    return TapeBackend() if request.param == "tape" else CudaBackend(torch.device("cuda"))


@pytest.fixture
def device(backend):
    return torch.device("cuda" if backend.name == "cuda" else "cpu")


@pytest.fixture
def tape():
    return TapeBackend()


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def in_context():
    """in_context(mode, num_tokens, **metadata) sets a forward context with its descriptor."""

    def enter(mode=CUDAGraphMode.NONE, num_tokens=4, slots=None, **metadata):
        descriptor = BatchDescriptor(num_tokens)
        return set_forward_context(
            ForwardContext(
                attn_metadata=metadata,
                slot_mapping=slots,
                num_tokens=num_tokens,
                runtime_mode=mode,
                batch_descriptor=descriptor,
            )
        )

    return enter


@eager_break_during_capture
def scale_rows(q: Tensor, out: Tensor) -> None:
    """Stands for attention: reads the context live and writes into `out`."""
    out.copy_(q * get_forward_context().attn_metadata["scale"])


@torch.library.custom_op("toy::scale_rows", mutates_args=("out",))
def scale_rows_op(q: Tensor, out: Tensor) -> None:
    scale_rows(q, out)


class Toy(torch.nn.Module):
    """Three layers of norm, product, break and residual."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(num_layers))
        self.requires_grad_(False)

    def forward(self, x_TD, out_TD):
        hidden_TD = x_TD
        for layer in self.layers:
            q_TD = torch.nn.functional.silu(layer(hidden_TD))
            mixed_TD = torch.empty_like(q_TD)
            if torch.compiler.is_compiling():
                torch.ops.toy.scale_rows(q_TD, mixed_TD)
            else:
                scale_rows(q_TD, mixed_TD)
            hidden_TD = hidden_TD + mixed_TD
        out_TD.copy_(hidden_TD)
        return hidden_TD


@pytest.fixture
def toy(device):
    torch.manual_seed(0)
    return Toy().to(device)


@pytest.fixture
def cpu_toy():
    torch.manual_seed(0)
    return Toy()


@pytest.fixture
def warm(backend):
    """warm(fn) runs it once where captures run, as every capture needs on CUDA."""

    def run(fn):
        with backend.side_stream():
            return fn()

    return run
