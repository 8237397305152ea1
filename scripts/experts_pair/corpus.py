"""Which text trains the pair with experts? Python files of the packages installed here.

    python -m scripts.experts_pair.corpus /tmp/corpus.npy --seconds 22

Takes packages whose metadata names an open license, and Python's own library. Files are taken in
a random order until the time is over; of equal files one is taken, and none that begins as a
bundled prompt does. The result is one array of uint16: for each file <|bos|>, its tokens, <|eos|>.
"""

import argparse
import hashlib
import os
import random
import re
import sysconfig
import time
from functools import cache
from importlib.metadata import Distribution, distributions
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from weights.demo import demo_directory, demo_prompts

BOS, EOS = 0, 1
OPEN = re.compile(r"\b(apache|bsd|mit|isc|psf|python software foundation|mpl|zlib|0bsd)\b", re.I)
CLOSED = re.compile(r"^(nvidia|cuda|tensorrt)", re.I)  # their metadata is not to be relied on
SIZES = range(200, 300_000)  # bytes of a file; longer ones are tables and generated code
TASK = 32  # files


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=22.0)
    return parser.parse_args()


def make_corpus(seconds: float) -> np.ndarray:
    """Tokenize files in all processes until the time is over; returns [tokens] uint16."""
    start = time.monotonic()
    files = python_files()
    random.Random(0).shuffle(files)
    tasks = [files[i : i + TASK] for i in range(0, len(files), TASK)]
    seen: set[bytes] = set()
    parts: list[np.ndarray] = []
    num_bytes = 0
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are parallel already
    with get_context("fork").Pool(os.cpu_count()) as pool:
        for found in pool.imap(_tokenize, tasks):
            for digest, size, tokens in found:
                if digest not in seen:
                    seen.add(digest)
                    parts.append(tokens)
                    num_bytes += size
            if time.monotonic() - start > seconds:
                break  # which ends the processes
    corpus = np.concatenate(parts)
    took = time.monotonic() - start
    print(
        f"corpus: {len(parts)} of {len(files)} files, {num_bytes / 1e6:.1f} MB, "
        f"{len(corpus) / 1e6:.1f} M tokens, {took:.1f} s",
        flush=True,
    )
    return corpus


def python_files() -> list[str]:
    """List the files of packages with an open license, and of Python's library."""
    found = {str(path) for path in Path(sysconfig.get_path("stdlib")).rglob("*.py")}
    found = {path for path in found if not {"site-packages", "dist-packages"} & {*path.split("/")}}
    for package in distributions():
        if OPEN.search(_license(package)) and not CLOSED.search(package.name or "nvidia"):
            files = (file for file in package.files or () if file.suffix == ".py")
            found.update(str(package.locate_file(file)) for file in files)
    return sorted(found)


def _license(package: Distribution) -> str:
    known = package.metadata
    classifiers = [c for c in known.get_all("Classifier") or () if c.startswith("License")]
    named = [known.get("License-Expression") or "", (known.get("License") or "")[:80]]
    return " ".join(named + classifiers)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(demo_directory("target") / "tokenizer.json"))


@cache
def _prompts() -> tuple[str, ...]:
    """Decode the bundled prompts, which are how files begin."""
    return tuple(_tokenizer().decode(prompt[1:]) for prompt in demo_prompts()["prompts"])


def _tokenize(files: list[str]) -> list[tuple[bytes, int, np.ndarray]]:
    """Return digest, bytes and tokens of each file that does not begin as a prompt does."""
    found = []
    for file in files:
        try:
            raw = Path(file).read_bytes()
            text = raw.decode()
        except (OSError, UnicodeDecodeError):  # listed but not installed, or not of Python 3
            continue
        if len(raw) in SIZES and not text.startswith(_prompts()):
            ids = _tokenizer().encode(text, add_special_tokens=False).ids
            tokens = np.array([BOS, *ids, EOS], np.uint16)
            found.append((hashlib.sha256(raw).digest(), len(raw), tokens))
    return found


if __name__ == "__main__":
    given = parse_args()
    np.save(given.out, make_corpus(given.seconds))
