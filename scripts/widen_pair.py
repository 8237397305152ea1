"""What would this small pair cost at a large size? Writes it at that size, same behaviour.

Every added channel, head, layer and vocabulary row is inert; all that may be random is. Only the
time of a pass changes: acceptance and tokens are those of the small pair (up to rounding). Writes
OUT_DIR/target, OUT_DIR/eagle3 and OUT_DIR/prompts.json.

    python -m scripts.widen_pair OUT_DIR [--source DIR] [--shape NAME] [--device D] [--dtype TYPE]

    python -m scripts.widen_pair /tmp/8b
    python -m scripts.widen_pair /tmp/tiny --shape tiny --dtype float32
"""

import argparse
import json
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from scripts.widener import NAMES, Shape, Tensors, Widener, draft_tensors, target_shards
from weights.demo import demo_directory

CONTEXT = 131072  # tokens, for tests at length: the text there means nothing, the cost is real
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

LLAMA_8B = (4096, 14336, 32, 32, 8, 128, 128256, 32000)
TINY = (512, 1024, 12, 16, 4, 128, 4608, 1280)
SHAPES = {
    name: Shape(**dict(zip(NAMES, sizes, strict=True)))
    for name, sizes in (("llama-8b", LLAMA_8B), ("tiny", TINY))
}


def write(
    directory: Path, shards: Iterator[Tensors], count: int, config: dict[str, object]
) -> None:
    """Files are written while the next tensors are made."""
    directory.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}
    pending = deque[Future[None]]()
    total = 0
    with ThreadPoolExecutor(4) as pool:
        for i, shard in enumerate(tqdm(shards, desc=directory.name, total=count, unit="file")):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            names |= dict.fromkeys(shard, file)
            total += sum(tensor.nbytes for tensor in shard.values())
            pending.append(pool.submit(save, shard, directory / file))
            if len(pending) > 4:
                pending.popleft().result()
        while pending:
            pending.popleft().result()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def save(tensors: Tensors, file: Path) -> None:
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)


def read(directory: Path, device: torch.device) -> tuple[dict[str, Any], Tensors]:
    files = sorted(directory.glob("*.safetensors"))
    tensors = {
        name: tensor for file in files for name, tensor in load_file(file, str(device)).items()
    }
    return json.loads((directory / "config.json").read_text()), tensors


def widened(config: dict[str, Any], small: Shape, big: Shape, dtype: str) -> dict[str, Any]:
    """config.json of the big shape; keys that the small one has not are left out."""
    kept = config.keys() - {"num_hidden_layers"}
    sizes = {name: size for name, size in asdict(big).items() if name in kept}
    eps = config["rms_norm_eps"] * small.hidden_size / big.hidden_size
    changes = {"rms_norm_eps": eps, "max_position_embeddings": CONTEXT, "dtype": dtype}
    return config | sizes | changes


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--source", default="demo", help="demo, or a directory with target/, eagle3/, prompts.json"
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if args.device == "auto" else args.device)
    source = demo_directory("target").parent if args.source == "demo" else Path(args.source)
    config, weights = read(source / "target", device)
    draft_config, draft_weights = read(source / "eagle3", device)
    small = Shape(**{name: (draft_config | config)[name] for name in NAMES})
    big = SHAPES[args.shape]
    widener = Widener(small, big, getattr(torch, args.dtype), device)
    L = big.num_hidden_layers
    config = widened(config, small, big, args.dtype)
    config |= {"num_hidden_layers": L, "tie_word_embeddings": False}
    write(args.out / "target", target_shards(widener, weights), L + 1, config)
    draft_config = widened(draft_config, small, big, args.dtype)
    write(args.out / "eagle3", iter([draft_tensors(widener, draft_weights)]), 1, draft_config)
    for name in TOKENIZER:
        shutil.copy(source / "target" / name, args.out / "target")
    shutil.copy(source / "prompts.json", args.out)


if __name__ == "__main__":
    main()
