"""What was measured and where: the machine, the models, the bytes of a pass, the memory's speed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec.bench.pair import Pair
from specdec.bench.timing import Clock
from specdec.kernels import triton

HEAD = "lm_head.weight"
TABLES = ("embed_tokens.weight", "d2t")  # a pass reads only a few rows of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What each pass streams from memory."""

    target: int
    draft_step: int
    draft_entry: int  # read once per round: fc

    def of_round(self, num_speculative_tokens: int) -> int:
        """Count those of a round of K drafts; K = 0 is plain decoding."""
        K = num_speculative_tokens
        return self.target + (K * self.draft_step + self.draft_entry if K else 0)

    def floor_ms(self, num_speculative_tokens: int, bandwidth: float) -> float:
        """Give the least time of a round, in milliseconds; bandwidth in bytes per second."""
        return 1e3 * self.of_round(num_speculative_tokens) / bandwidth


def bytes_of(pair: Pair) -> Bytes:
    """Add up the loaded tensors. A tied or borrowed head counts for the model that reads it."""
    target = pair.target.tensors
    eagle = pair.eagle
    head = target.get(HEAD, target["embed_tokens.weight"])
    whole = _layers(target) + head.nbytes
    if eagle is None:
        return Bytes(target=whole, draft_step=0, draft_entry=0)
    has_entry = eagle.config.has_fc and eagle.config.entry == "qkv"
    entry = eagle.tensors["fc.weight"].nbytes if has_entry else 0
    step = _layers(eagle.tensors) + eagle.tensors.get(HEAD, head).nbytes
    return Bytes(target=whole, draft_step=step - entry, draft_entry=entry)


def _layers(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for name, tensor in tensors.items() if name not in (*TABLES, HEAD))


def _shown(directory: Path) -> str:
    """Write it relative to the working directory, so that figures hide where a clone lies."""
    here = Path.cwd()
    return str(directory.relative_to(here) if directory.is_relative_to(here) else directory)


def measure_bandwidth(device: torch.device) -> float:
    """Read a buffer far larger than any cache, in the better of two ways; bytes per second."""
    source = torch.ones(1 << (29 if device.type == "cuda" else 23), device=device)
    rows = source.view(-1, 4096)
    ways = [lambda: torch.sum(source), lambda: torch.amax(rows, dim=1)]
    best = min(Clock(device).repeat(call, 10).median for call in ways)
    return source.nbytes / best * 1e3


def card(pair: Pair, bandwidth: float, **settings: object) -> dict[str, object]:
    """Collect every fact that a figure depends on."""
    sizes = bytes_of(pair)
    device = pair.device
    is_gpu = device.type == "cuda"
    cpu = f"CPU, {torch.get_num_threads()} threads"
    draft = None
    if pair.eagle is not None:
        draft = f"{_shown(pair.eagle.report.directory)} ({pair.eagle.config.format})"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_gpu else None,
        "triton": triton.__version__ if triton is not None else None,
        "dtype": str(pair.target.tensors["embed_tokens.weight"].dtype).removeprefix("torch."),
        "target": _shown(pair.target.report.directory),
        "draft": draft,
        "target_bytes_per_pass": sizes.target,
        "draft_bytes_per_step": sizes.draft_step,
        "draft_bytes_once": sizes.draft_entry,
        "reading_gb_per_s": bandwidth / 1e9,
        **settings,
    }
