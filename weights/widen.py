"""A small pair written at a large size, with the same behaviour: what would it cost there?

Every added channel, head, layer and vocabulary row is inert; all that may be random is. Only the
time of a pass changes: acceptance and tokens are those of the small pair (up to rounding).
"""

import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from weights.bars import bar, size_text
from weights.convert import write_whole
from weights.families.experts import NUM as NUM_EXPERTS
from weights.fields import read_json_object
from weights.files.reader import Reader
from weights.widener import NAMES, Shape, Tensors, Widener, draft_tensors, target_shards

CONTEXT = 131072  # tokens, for tests at length: the text there means nothing, the cost is real
MODELS = ("target", "eagle3", "eagle1")
NOT_WIDENED = dict.fromkeys(NUM_EXPERTS, "experts") | {"attention_multiplier": "a scale of scores"}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

LLAMA_8B = (4096, 14336, 32, 32, 8, 128, 128256, 32000)
LLAMA_14B = (5120, 17408, 40, 40, 8, 128, 151936, 32000)  # Qwen3-14B's sizes
LLAMA_1B = (2048, 8192, 16, 32, 8, 64, 128256, 32000)
TINY = (512, 1024, 12, 16, 4, 128, 4608, 1280)
SHAPES = {
    name: Shape(**dict(zip(NAMES, sizes, strict=True)))
    for name, sizes in (
        ("llama-8b", LLAMA_8B),
        ("llama-14b", LLAMA_14B),
        ("llama-1b", LLAMA_1B),
        ("tiny", TINY),
    )
}

Config = dict[str, object]
Model = tuple[Config, Tensors]


def widen_pair(source: Path, out: Path, big: Shape, dtype: str, device: torch.device) -> None:
    """Write OUT/target, OUT/eagle3 and OUT/prompts.json from the same names in `source`, and eagle1
    where it is there: all of them, or none if an error or Ctrl-C breaks it off.

    OSError if there is too little space.
    """
    _check_empty(source, out)
    names = [name for name in MODELS if name != "eagle1" or (source / name).is_dir()]
    small = {name: _read(source / name, device) for name in names}
    _check_known(small)
    total = _num_bytes(small, big, dtype)
    _check_space(out, total)
    print(f"writes {size_text(total)} to {out}", file=sys.stderr)
    with _all_or_none(out) as part:
        for name in names:
            (part / name).mkdir()
        for file in TOKENIZER:
            shutil.copy(source / "target" / file, part / "target")
        shutil.copy(source / "prompts.json", part)
        widener = Widener(_small_shape(small), big, getattr(torch, dtype), device)
        with bar(total=total, desc="written", unit="B", unit_scale=True) as progress:
            for name, (config, weights) in small.items():
                count = big.num_hidden_layers + 1 if name == "target" else 1
                _write(part / name, _shards(name, widener, weights), count, progress)
                config = widened(config, widener.small, big, dtype)
                if name == "target":
                    layers = {"num_hidden_layers": big.num_hidden_layers}
                    config |= layers | {"tie_word_embeddings": False}
                (part / name / "config.json").write_text(json.dumps(config, indent=1))


def _check_known(small: Mapping[str, Model]) -> None:
    """Refuse what widening would change: experts' choices, or a scale that no width decides."""
    for key, what in NOT_WIDENED.items():
        if key in small["target"][0]:
            raise ValueError(f"config.json: {key}: a target with {what} cannot be widened")


def _small_shape(small: Mapping[str, Model]) -> Shape:
    sizes = small["eagle3"][0] | small["target"][0]
    return Shape(**{name: _integer(sizes, name) for name in NAMES})


def _shards(name: str, widener: Widener, weights: Tensors) -> Iterator[Tensors]:
    if name == "target":
        return target_shards(widener, weights)
    return iter([draft_tensors(widener, weights)])


def _num_bytes(small: Mapping[str, Model], big: Shape, dtype: str) -> int:
    meta = torch.device("meta")
    widener = Widener(_small_shape(small), big, getattr(torch, dtype), meta)
    total = 0
    for name, (_, weights) in small.items():
        without_data = {key: tensor.to(meta) for key, tensor in weights.items()}
        shards = _shards(name, widener, without_data)
        total += sum(tensor.nbytes for shard in shards for tensor in shard.values())
    return total


def _check_space(out: Path, total: int) -> None:
    there = next(each for each in (out, *out.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    if total > free:
        sizes = f"{size_text(total)} are to be written, and {size_text(free)} are free"
        raise OSError(f"{out}: {sizes}: give a directory on another disk")


@contextmanager
def _all_or_none(out: Path) -> Iterator[Path]:
    """A directory whose files move to `out` at the end. After an error all is as it was."""
    created = [each for each in (out, *out.parents) if not each.exists()]
    part = out / f".part-{os.getpid()}"
    moved: list[Path] = []
    try:
        part.mkdir(parents=True)
        yield part
        for each in sorted(part.iterdir()):
            moved.append(each.rename(out / each.name))
        part.rmdir()
    except BaseException:
        for each in moved:
            each.rename(part / each.name)
        shutil.rmtree(part, ignore_errors=True)
        for directory in created:
            with suppress(OSError):  # it is not empty: another process uses it
                directory.rmdir()
        raise


def _check_empty(source: Path, out: Path) -> None:
    """Old shards beside a new index would be a checkpoint of two models."""
    if out.resolve() == source.resolve():
        raise ValueError(f"{out}: the pair to widen is in it; give another directory")
    for directory in (out / name for name in MODELS):
        if any(directory.glob("*.safetensors")):
            raise ValueError(f"{directory}: safetensors are there already, nothing written")
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise ValueError(f"{directory}: is there already, nothing written")


def _read(directory: Path, device: torch.device) -> Model:
    reader = Reader(directory)
    config = read_json_object(directory / "config.json", reader.problems)
    reader.problems.raise_if_any()
    return config, {name: reader.read(name, device) for name in reader.entries}


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


def _write(directory: Path, shards: Iterator[Tensors], count: int, progress: tqdm) -> None:
    """Files are written while the next tensors are made."""
    names: dict[str, str] = {}
    pending = deque[Future[int]]()
    total = 0
    with ThreadPoolExecutor(4) as pool:
        for i, shard in enumerate(shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            names |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            pending.append(pool.submit(_write_shard, shard, directory / file))
            if len(pending) > 4:
                progress.update(pending.popleft().result())
        while pending:
            progress.update(pending.popleft().result())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_shard(tensors: Tensors, file: Path) -> int:
    write_whole({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    return sum(tensor.nbytes for tensor in tensors.values())
