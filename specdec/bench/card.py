"""What was measured and on what: the machine, the models, the bytes a pass must read, and how fast memory is here."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.bench.pair import Pair
from specdec.bench.timing import Clock
from specdec.kernels import triton

OTHERS = ("embed_tokens.weight", "d2t")  # a pass reads a few rows of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What each pass streams from memory."""

    target: int
    draft_step: int
    draft_entry: int  # read once per round: fc

    def of_round(self, num_speculative_tokens: int) -> int:
        """A round of K drafts; K = 0 is plain decoding."""
        K = num_speculative_tokens
        return self.target + (K * self.draft_step + self.draft_entry if K else 0)

    def floor_ms(self, num_speculative_tokens: int, bandwidth: float) -> float:
        """The least time of a round at so many bytes per second."""
        return 1e3 * self.of_round(num_speculative_tokens) / bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second."""

    reading: float
    copying: float  # read and written


def bytes_of(pair: Pair) -> Bytes:
    """From the loaded tensors. A tied or borrowed head counts where it is read."""
    target, eagle = pair.target.tensors, pair.eagle
    head = target.get("lm_head.weight", target["embed_tokens.weight"])
    layers = sum(
        _size(tensor) for name, tensor in target.items() if name not in (*OTHERS, "lm_head.weight")
    )
    if eagle is None:
        return Bytes(target=layers + _size(head), draft_step=0, draft_entry=0)
    own_head = eagle.tensors.get("lm_head.weight", head)
    entry = (
        _size(eagle.tensors["fc.weight"])
        if eagle.config.has_fc and eagle.config.entry == "qkv"
        else 0
    )
    step = sum(
        _size(tensor)
        for name, tensor in eagle.tensors.items()
        if name not in (*OTHERS, "lm_head.weight")
    )
    return Bytes(
        target=layers + _size(head), draft_step=step - entry + _size(own_head), draft_entry=entry
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _shown(directory: Path) -> str:
    """As seen from here, so that a file of figures says nothing of where a clone lies."""
    here = Path.cwd()
    return str(directory.relative_to(here) if directory.is_relative_to(here) else directory)


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """The better of two ways to read, and a copy; of buffers far larger than any cache."""
    clock, elements = Clock(device), 1 << (29 if device.type == "cuda" else 23)
    source = torch.ones(elements, device=device)
    sink, size = torch.empty_like(source), source.nbytes
    rows = source.view(-1, 4096)
    reading = [lambda: torch.sum(source), lambda: torch.amax(rows, dim=1)]
    best = min(clock.repeat(call, 10).median for call in reading)
    copying = clock.repeat(lambda: sink.copy_(source), 10).median
    return Bandwidth(reading=size / best * 1e3, copying=2 * size / copying * 1e3)


def card(pair: Pair, bandwidth: Bandwidth, **settings: object) -> dict[str, object]:
    """Every fact that a figure depends on."""
    sizes, device = bytes_of(pair), pair.device
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device)
        if is_gpu
        else f"CPU, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "triton": triton.__version__ if triton is not None else None,
        "dtype": str(pair.target.tensors["embed_tokens.weight"].dtype).removeprefix("torch."),
        "target": _shown(pair.target.report.directory),
        "draft": None
        if pair.eagle is None
        else f"{_shown(pair.eagle.report.directory)} ({pair.eagle.config.format})",
        "target_bytes_per_pass": sizes.target,
        "draft_bytes_per_step": sizes.draft_step,
        "draft_bytes_once": sizes.draft_entry,
        "reading_gb_per_s": bandwidth.reading / 1e9,
        "copying_gb_per_s": bandwidth.copying / 1e9,
        **settings,
    }
