"""A small pair written at a large size, with the same behaviour: what would it cost there?

Every added channel, head, layer and vocabulary row is inert; all that may be random is. Only the
time of a pass changes: acceptance and tokens are those of the small pair (up to rounding).
"""

import json
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from weights.bars import bar
from weights.convert import write_whole
from weights.widener import NAMES, Shape, Tensors, Widener, draft_tensors, target_shards

CONTEXT = 131072  # tokens, for tests at length: the text there means nothing, the cost is real
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

LLAMA_8B = (4096, 14336, 32, 32, 8, 128, 128256, 32000)
TINY = (512, 1024, 12, 16, 4, 128, 4608, 1280)
SHAPES = {
    name: Shape(**dict(zip(NAMES, sizes, strict=True)))
    for name, sizes in (("llama-8b", LLAMA_8B), ("tiny", TINY))
}

Config = dict[str, object]


def widen_pair(source: Path, out: Path, big: Shape, dtype: str, device: torch.device) -> None:
    """Write OUT/target, OUT/eagle3 and OUT/prompts.json from the same names in `source`, and eagle1
    where it is there.
    """
    _check_empty(source, out)
    config, weights = _read(source / "target", device)
    draft_config, draft_weights = _read(source / "eagle3", device)
    sizes = draft_config | config
    small = Shape(**{name: _integer(sizes, name) for name in NAMES})
    widener = Widener(small, big, getattr(torch, dtype), device)
    L = big.num_hidden_layers
    config = widened(config, small, big, dtype)
    config |= {"num_hidden_layers": L, "tie_word_embeddings": False}
    _write(out / "target", target_shards(widener, weights), L + 1, config)
    draft_config = widened(draft_config, small, big, dtype)
    _write(out / "eagle3", iter([draft_tensors(widener, draft_weights)]), 1, draft_config)
    if (source / "eagle1").is_dir():
        config, weights = _read(source / "eagle1", device)
        config = widened(config, small, big, dtype)
        _write(out / "eagle1", iter([draft_tensors(widener, weights)]), 1, config)
    for name in TOKENIZER:
        shutil.copy(source / "target" / name, out / "target")
    shutil.copy(source / "prompts.json", out)


def _check_empty(source: Path, out: Path) -> None:
    """Old shards beside a new index would be a checkpoint of two models."""
    if out.resolve() == source.resolve():
        raise ValueError(f"{out}: the pair to widen is in it; give another directory")
    for directory in (out / "target", out / "eagle3", out / "eagle1"):
        if any(directory.glob("*.safetensors")):
            raise ValueError(f"{directory}: safetensors are there already, nothing written")


def _read(directory: Path, device: torch.device) -> tuple[Config, Tensors]:
    files = sorted(directory.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file, str(device))
        except SafetensorError as error:
            raise ValueError(f"{file}: not read: {error}") from error
    config: Config = json.loads((directory / "config.json").read_text())
    return config, tensors


def _integer(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ValueError(f"config.json: {name} is {value!r}: an integer is needed to widen a pair")
    return value


def widened(config: Config, small: Shape, big: Shape, dtype: str) -> Config:
    """config.json of the big shape; keys that the small one has not are left out."""
    kept = config.keys() - {"num_hidden_layers"}
    sizes = {name: size for name, size in asdict(big).items() if name in kept}
    eps = config["rms_norm_eps"]
    assert isinstance(eps, float), eps
    scaled = eps * small.hidden_size / big.hidden_size
    changes = {"rms_norm_eps": scaled, "max_position_embeddings": CONTEXT, "dtype": dtype}
    return config | sizes | changes


def _write(directory: Path, shards: Iterator[Tensors], count: int, config: Config) -> None:
    """Files are written while the next tensors are made."""
    directory.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    pending = deque[Future[None]]()
    total = 0
    shown = bar(shards, desc=directory.name, total=count, unit="file")
    with ThreadPoolExecutor(4) as pool:
        for i, shard in enumerate(shown):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            names |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            pending.append(pool.submit(_write_shard, shard, directory / file))
            if len(pending) > 4:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _write_shard(tensors: Tensors, file: Path) -> None:
    write_whole({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
