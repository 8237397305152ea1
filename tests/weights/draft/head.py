"""A draft's directory that is open for changes, and what a draft of any kind must do."""

import dataclasses
import json
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.weights.formats import Format
from tests.weights.tiny import draft_tensors
from weights import CheckpointError, LoadedEagle, LoadedTarget, load_eagle
from weights.draft.config import DraftConfig


class Head:
    """keys: of config.json. tensors: of the one file of weights; both are written by `save`."""

    is_cut = False  # the file of weights, somewhere

    def __init__(self, directory: Path, format: Format, config: DraftConfig, target: LoadedTarget):
        self.directory, self.config, self.target = directory, config, target
        format.write(directory, config, draft_tensors(config), target)
        self.keys = json.loads((directory / "config.json").read_text())
        self.tensors = load_file(directory / "model.safetensors")

    def replace(self, tensors: Mapping[str, tuple[int, ...] | None]) -> None:
        """Give tensors another shape; None: leave them out."""
        for name, shape in tensors.items():
            self.tensors.pop(name, None)
            if shape is not None:
                self.tensors[name] = torch.zeros(shape)

    def save(self) -> None:
        (self.directory / "config.json").write_text(json.dumps(self.keys))
        save_file(self.tensors, self.directory / "model.safetensors")

    def load(self, target: LoadedTarget | None = None, **arguments) -> LoadedEagle:
        self.save()
        return load_eagle(self.directory, target or self.target, progress=False, **arguments)

    def refusal(self, target: LoadedTarget | None = None, **arguments) -> str:
        """The error's text. Each of its lines names a file."""
        with pytest.raises(CheckpointError) as error:
            self.load(target, **arguments)
        for problem in error.value.problems:
            assert "config.json" in problem or ".safetensors" in problem, problem
        return str(error.value)


def check_formats(directory, config, target, formats: Mapping[str, Format]) -> dict[str, str]:
    """Every format that can express the draft binds it alike; return these and their methods."""
    tensors, found = draft_tensors(config), {}
    for name, format in formats.items():
        if not format.can_express(config, target):
            continue
        format.write(directory / name, config, tensors, target)
        loaded = load_eagle(directory / name, target, progress=False)
        assert dataclasses.replace(loaded.config, format="any") == config, name
        assert loaded.tensors.keys() == tensors.keys(), name
        assert all(torch.equal(loaded.tensors[key], tensors[key]) for key in tensors), name
        found[loaded.config.format] = loaded.config.method
    return found


def check_mutated(head: Head, rng: random.Random) -> None:
    """Whatever is changed is one error, within two seconds, or loads."""
    told = mutate(head, rng)
    head.save()
    if head.is_cut:
        file = head.directory / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: rng.randrange(len(data))])
    began = time.perf_counter()
    with suppress(CheckpointError):  # any other error fails
        load_eagle(head.directory, head.target, progress=False)
    assert time.perf_counter() - began < 2, told


def mutate(head, rng):
    """Change one or two things at random; say what."""
    values = (None, 0, -1, 10**30, 1.5, "x", [], [None], {}, True, [10**12], float("nan"))
    told = []
    for _ in range(rng.choice((1, 2))):
        way = rng.choice(("key", "inner", "drop", "shape", "dtype", "rename", "cut"))
        keys = head.keys.get("dflash_config", head.keys) if way == "inner" else head.keys
        name = rng.choice(sorted(head.tensors)) if head.tensors else ""
        if way in ("key", "inner"):
            key = rng.choice(sorted(keys))
            keys[key] = rng.choice(values)
            told.append((way, key, keys[key]))
            continue
        told.append((way, name))
        tensor = head.tensors.pop(name)
        if way == "shape":
            head.tensors[name] = tensor.flatten()[: rng.randrange(1, tensor.numel() + 1)].clone()
        elif way == "dtype":
            head.tensors[name] = tensor.to(rng.choice((torch.int32, torch.bool, torch.float64)))
        elif way == "rename":
            head.tensors[f"{name}.{rng.choice(('x', 'weight_scale', 'weight'))}"] = tensor
        elif way == "cut":
            head.tensors[name] = tensor
            head.is_cut = True
    return told
