"""From a name to a directory here: a path, a bundled pair, or a hub id by the hub's cache."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub  # which imports each function when it is asked for

from specdec.config import EngineConfig
from weights.demo import demo_directory
from weights.errors import shown

logger = logging.getLogger("specdec")

_TEXTS = ["*.json", "*.model", "*.jinja", "*.txt"]
_WHOLE = [*_TEXTS, "*.safetensors"]
_TARGETS = {
    **{"demo": "target", "demo/target": "target"},
    **{"demo-experts": "experts/target", "demo-experts/target": "experts/target"},
}
_DRAFTS = {
    **{"demo": "eagle3", "demo/eagle3": "eagle3", "demo/eagle1": "eagle1"},
    **{"demo/dspark": "dspark", "demo-dspark": "dspark"},
    **{"demo-experts": "experts/eagle3", "demo-experts/eagle3": "experts/eagle3"},
}
DEMO_PARTS = {
    "target": _TARGETS,
    "tokenizer": _TARGETS,
    "draft": _DRAFTS,
    "checkpoint": {**_TARGETS, **_DRAFTS, **_TARGETS},  # a pair's name alone is the target
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """How hub ids are downloaded: a branch, tag or commit; a token; where to (None: the cache)."""

    revision: str | None = None
    token: str | bool | None = None
    directory: str | Path | None = None


def locate(name: str | Path, role: str, hub: Hub | None = None) -> Path:
    """Find a target, a draft, either ("checkpoint") or, without weights, a "tokenizer": the role.

    Downloads a hub id unless it is cached (HF_HUB_OFFLINE is honoured). ValueError: there is none.
    """
    directory = local_directory(name, role)
    if directory is None:
        return _downloaded(str(name), role, hub or Hub())
    if hub is not None and hub.revision is not None:
        logger.warning(
            "revision=%r has no effect: %s %s is on this machine", hub.revision, role, name
        )
    return directory


def locate_tokenizer(
    model: str | Path, config: EngineConfig, directory: Path | None = None
) -> Path:
    """Find the tokenizer of an engine. directory: the model's, if it is known already."""
    hub = hub_of(config)
    if config.tokenizer is not None or config.tokenizer_revision is not None:
        own = replace(hub, revision=config.tokenizer_revision)
        return locate(config.tokenizer or model, "tokenizer", own)
    return locate(model, "target", hub) if directory is None else directory


def hub_of(config: EngineConfig) -> Hub:
    """Say how an engine's hub ids are downloaded."""
    return Hub(revision=config.revision, token=config.hf_token, directory=config.download_dir)


def local_directory(name: str | Path, role: str) -> Path | None:
    """Return the directory of a path or of a bundled pair, None for what may be a hub id.

    ValueError for anything else.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise ValueError(f"{role} {name!r}: give {_places(role)}")
    if str(name) in DEMO_PARTS[role]:
        return demo_directory(DEMO_PARTS[role][str(name)])
    path = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no such user
    if os.path.isdir(path):
        return path
    what = f"{role} {name}"
    pair, slash, _ = str(name).partition("/")
    if slash and pair in DEMO_PARTS[role]:
        parts = (part for part in DEMO_PARTS[role] if part.partition("/")[0] == pair)
        allowed = ", ".join(parts)
        raise ValueError(f"{what}: the bundled pair has no such {role} (allowed: {allowed})")
    if os.path.lexists(path):
        needed = "give the directory that holds config.json and *.safetensors"
        raise ValueError(f"{what}: no directory; {needed}")
    owner, _, rest = str(name).partition("/")
    if not (owner and rest) or "/" in rest or owner.startswith((".", "~")):
        raise ValueError(f"{what}: no such directory (allowed: {_places(role)})")
    return None


def _places(role: str) -> str:
    *names, last = (name for name in DEMO_PARTS[role] if "/" not in name)
    return f"a directory, a hub id owner/name, {', '.join(names)} or {last}"


def _downloaded(name: str, role: str, hub: Hub) -> Path:
    try:
        directory = Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=_TEXTS if role == "tokenizer" else _WHOLE,
                revision=hub.revision,
                token=hub.token,
                cache_dir=hub.directory,
            )
        )
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        raise ValueError(
            f"{role} {name}: no such directory, and not to be had from the hub: {error}"
        ) from error
    if role != "tokenizer" and not any(directory.glob("*.safetensors")):
        _refuse_pickles(name, role, hub)
    return directory


def _refuse_pickles(name: str, role: str, hub: Hub) -> None:
    """Say how to convert a repository's weights; they were not downloaded."""
    try:
        files = huggingface_hub.list_repo_files(name, revision=hub.revision, token=hub.token)
    except (OSError, ValueError):  # offline: reading the directory says what is missing
        return
    pickles = sorted(file for file in files if file.endswith(".bin") and "/" not in file)
    if pickles:
        of = "" if hub.revision is None else f" --revision {hub.revision}"
        raise ValueError(
            f"{role} {name}: its repository has only {shown(', '.join(pickles))}: pickles are not "
            f"read. Download it (hf download {name}{of} --local-dir DIR), convert it once (specdec "
            "convert DIR) and give DIR"
        )
