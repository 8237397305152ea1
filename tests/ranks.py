"""What ranks of an engine may leave behind: processes, found by a word, and shared memory."""

from pathlib import Path


def marked_processes(mark: str) -> list[int]:
    """Find the processes that run with this word in their environment."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            is_marked = mark.encode() in (directory / "environ").read_bytes()
            state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended, or is not ours
            continue
        if is_marked and state != "Z":
            found.append(int(directory.name))
    return found


def shared_memory() -> set[str]:
    """List what lies in /dev/shm, without semaphores of multiprocessing, which ranks do not use."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith("sem.mp-")}
