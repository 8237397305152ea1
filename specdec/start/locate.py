"""From a name to a directory on this machine: a path, "demo", or a hub id by the hub's cache."""

import os
from pathlib import Path

from huggingface_hub import snapshot_download

from weights.demo import demo_directory

_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
DEMO_PARTS = {
    "target": {"demo": "target", "demo/target": "target"},
    "draft": {"demo": "eagle3", "demo/eagle3": "eagle3", "demo/eagle1": "eagle1"},
}


def locate(name: str | Path, role: str) -> Path:
    """The directory of a checkpoint. role: "target" or "draft", which decides what "demo" means.

    Downloads a hub id unless it is cached (HF_HUB_OFFLINE is honoured). ValueError: there is none.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise ValueError(f"{role} {name!r}: give a directory, a hub id owner/name, or demo")
    if str(name) in DEMO_PARTS[role]:
        return demo_directory(DEMO_PARTS[role][str(name)])
    path = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no such user
    if os.path.isdir(path):
        return path
    what = f"{role} {name}"
    if str(name).startswith("demo/"):
        allowed = ", ".join(DEMO_PARTS[role])
        raise ValueError(f"{what}: the bundled pair has no such {role} (allowed: {allowed})")
    if os.path.lexists(path):
        needed = "give the directory that holds config.json and *.safetensors"
        raise ValueError(f"{what}: no directory; {needed}")
    if not _looks_like_hub_id(str(name)):
        allowed = "(allowed: a directory, a hub id owner/name, or demo)"
        raise ValueError(f"{what}: no such directory {allowed}")
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        problem = f"{what}: no such directory, and not to be had from the hub: {error}"
        raise ValueError(problem) from error


def _looks_like_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))
