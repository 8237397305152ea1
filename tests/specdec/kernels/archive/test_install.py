"""An import brings every kernel to its place, or leaves the cache as it was."""

import errno
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager

from specdec.kernels.archive import install
from specdec.kernels.archive.entries import EXTENSIONS
from specdec.kernels.archive.export import export_kernels
from specdec.kernels.archive.header import header_of
from specdec.kernels.archive.install import import_kernels


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below it."""
    files = [file for file in directory.rglob("*") if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


@pytest.fixture
def home(tmp_path) -> Path:
    """The cache to import into, with an entry of its own."""
    (tmp_path / "importing" / "own").mkdir(parents=True)
    (tmp_path / "importing" / "own" / "file").write_text("stays")
    return tmp_path / "importing"


@pytest.fixture
def refused(home, machine):
    """refused(archive): the error; the cache is as it was."""

    def refuse(archive: Path) -> str:
        before = tree(home.parent)
        with pytest.raises(ValueError, match=re.escape(str(archive))) as raised:
            import_kernels(archive, home, machine)
        assert tree(home.parent) == before
        assert [file.name for file in home.iterdir()] == ["own"]
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return refuse


@pytest.fixture
def packed(tmp_path, machine):
    """packed(members): an archive for this machine with these members after its header."""

    def pack(*members: tarfile.TarInfo, mode: str = "w:gz") -> Path:
        file = tmp_path / "packed.tar.gz"
        with tarfile.open(file, mode) as archive:
            head = tarfile.TarInfo("header.json")
            text = header_of(machine, 1, len(members) or 2).to_json()
            head.size = len(text)
            archive.addfile(head, io.BytesIO(text))
            for member in members:
                archive.addfile(member, io.BytesIO(bytes(member.size)))
        return file

    return pack


def member(name: str, size: int = 5, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, "/etc/passwd"
    return info


def test_triton_finds_the_kernels_in_their_new_place(archive, cache, home, machine, key):
    done = import_kernels(archive, home, machine)

    assert (done.num_added, done.num_kept) == (2, 0)
    with knobs.cache.scope():
        knobs.cache.dir = str(home)
        group = FileCacheManager(key("A")).get_group("_add_kernel.json")
        assert FileCacheManager(key("G")).get_file(EXTENSIONS[0])
    names = ("_add_kernel.cubin", "_add_kernel.json")
    assert group == {name: str(home / key("A") / name) for name in names}
    for name in names:
        assert (home / key("A") / name).read_bytes() == (cache / key("A") / name).read_bytes()
    assert sorted(file.name for file in home.iterdir()) == [*map(key, "ABG"), "own"]


def is_cached(program: Path, cache: Path) -> bool:
    """Whether a fresh process finds its kernel in the cache; else it compiles it."""
    env = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return {"True\n": True, "False\n": False}[done.stdout]


def test_triton_takes_an_imported_kernel_for_its_own(tmp_path, machine):
    program = Path(__file__).with_name("compile_one.py")
    assert not is_cached(program, tmp_path / "old")
    ours = replace(machine, triton=triton.__version__)
    export_kernels(tmp_path / "old", {"_add_kernel"}, ours, tmp_path / "file")
    assert import_kernels(tmp_path / "file", tmp_path / "new", ours).num_added == 1
    shutil.rmtree(tmp_path / "old")

    elsewhere = tmp_path / "another_place.py"
    elsewhere.write_text(program.read_text())
    before = tree(tmp_path / "new")
    assert is_cached(elsewhere, tmp_path / "new")
    assert tree(tmp_path / "new") == before


def test_a_cache_that_does_not_exist_is_made(archive, tmp_path, machine, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    assert import_kernels(archive, Path("new/cache"), machine).num_added == 2
    group = tmp_path / "new" / "cache" / key("A") / "__grp___add_kernel.json"
    paths = json.loads(group.read_text())["child_paths"].values()
    assert all(Path(path).is_absolute() and Path(path).exists() for path in paths)


def test_what_is_there_is_kept_and_a_lookup_without_a_result_is_filled(archive, home, machine, key):
    mine = {"_add_kernel.cubin": b"mine", "__grp___add_kernel.json": b"{}"}
    (home / key("A")).mkdir()
    for name, content in mine.items():
        (home / key("A") / name).write_bytes(content)
    (home / key("B")).mkdir()
    done = import_kernels(archive, home, machine)
    assert (done.num_added, done.num_kept) == (1, 1)
    assert tree(home / key("A")) == mine
    assert import_kernels(archive, home, machine).num_kept == 2


def test_an_interrupted_compilation_is_completed_group_file_last(
    archive, cache, home, machine, key, monkeypatch
):
    place = home / key("A")
    place.mkdir()
    (place / "_add_kernel.cubin").write_text("half")
    (place / "_add_kernel.ptx").write_text("of the compiler")
    moved = []
    replace_file = os.replace
    monkeypatch.setattr(
        os, "replace", lambda file, to: (moved.append(to.name), replace_file(file, to))
    )
    done = import_kernels(archive, home, machine)
    assert (done.num_added, done.num_kept) == (2, 0)
    assert moved == ["_add_kernel.cubin", "_add_kernel.json", "__grp___add_kernel.json"]
    assert (place / "_add_kernel.cubin").read_bytes() == (
        cache / key("A") / "_add_kernel.cubin"
    ).read_bytes()
    assert (place / "_add_kernel.ptx").read_text() == "of the compiler"
    group = json.loads((place / "__grp___add_kernel.json").read_text())["child_paths"]
    assert group == {name: str(place / name) for name in moved[:2]}
    assert import_kernels(archive, home, machine).num_kept == 2


@pytest.mark.parametrize(
    "field", ["gpu", "capability", "torch", "triton", "cuda", "python", "platform"]
)
def test_an_archive_for_another_machine_is_refused_with_both_values(
    archive, home, machine, refused, field
):
    theirs = getattr(machine, field)
    with pytest.raises(ValueError, match=f"are for {field} .*; here: {field} 'other'") as raised:
        import_kernels(archive, home, replace(machine, **{field: "other"}))
    assert repr(theirs) in str(raised.value)
    assert [file.name for file in home.iterdir()] == ["own"]


def test_all_that_differs_is_in_one_error(archive, home, machine):
    other = replace(machine, gpu="NVIDIA L4", triton="3.6.0")
    words = "for gpu 'NVIDIA H200', triton '3.7.1'; here: gpu 'NVIDIA L4', triton '3.6.0'"
    with pytest.raises(ValueError, match=words):
        import_kernels(archive, home, other)


K = "A" * 52


@pytest.mark.parametrize(
    "info",
    [
        member("/etc/_add_kernel.json"),
        member(f"/{K}/_add_kernel.json"),
        member("../_add_kernel.json"),
        member(f"{K}/../_add_kernel.json"),
        member(f"{K}/sub/_add_kernel.json"),
        member("_add_kernel.json"),
        member(K),
        member(f"{K.lower()}/_add_kernel.json"),
        member(f"{K}A/_add_kernel.json"),
        member(f"{K}/_add_kernel.py"),
        member(f"{K}/_add_kernel.json\n"),
        member(f"{K}/a b.json"),
        member(f"{K}/libc.so"),
        member(f"{K}/..json"),
        member(f"{K}/_add_kernel.json", 0, tarfile.SYMTYPE),
        member(f"{K}/_add_kernel.json", 0, tarfile.LNKTYPE),
        member(f"{K}/_add_kernel.json", 0, tarfile.CHRTYPE),
        member(f"{K}/_add_kernel.json", 0, tarfile.FIFOTYPE),
        member(K, 0, tarfile.DIRTYPE),
        member(f"{K}/_add_kernel.json", 5, tarfile.CONTTYPE),
        member("header.json"),
    ],
    ids=lambda info: f"{info.name[-24:]!r}-{info.type.decode()}",
)
def test_a_member_that_no_export_writes_is_refused(packed, refused, info):
    assert "is not a kernel file; nothing imported" in refused(packed(info))


@pytest.mark.parametrize(
    "members, words",
    [
        ([member(f"{K}/_f.json"), member(f"{K}/_f.json")], "appears twice"),
        ([member(f"{K}/_f.json")], f"the entry {K} has _f.json only"),
        ([member(f"{K}/_f.json"), member(f"{K}/_g.cubin")], "has _f.json, _g.cubin only"),
        ([member(f"{K}/_f.json"), member(f"{K}/{EXTENSIONS[0]}")], f"the entry {K} has "),
        ([], "it is damaged: 0 of 2 files"),
    ],
)
def test_an_archive_that_is_not_whole_is_refused(packed, refused, members, words):
    assert words in refused(packed(*members))


def test_a_size_that_no_kernel_has_is_refused_before_it_is_read(tmp_path, packed, refused):
    huge = member(f"{K}/_f.cubin", 65 << 20)
    raw = gzip.decompress(packed().read_bytes())
    start = raw.rindex(b"}") // 512 * 512 + 512
    for size in (65 << 20, 1 << 40, -1, -512, -2048):
        huge.size = size
        for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
            huge.type = kind
            file = tmp_path / "huge.tar.gz"
            file.write_bytes(gzip.compress(raw[:start] + huge.tobuf(tarfile.GNU_FORMAT)))
            refused(file)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_thousands_of_headers_in_a_row_are_refused(tmp_path, packed, refused, kind):
    raw = gzip.decompress(packed().read_bytes())
    start = raw.rindex(b"}") // 512 * 512 + 512
    header = member("long", 0, kind).tobuf(tarfile.GNU_FORMAT)
    file = tmp_path / "nested.tar.gz"
    file.write_bytes(gzip.compress(raw[:start] + header * 5000))
    assert "not a kernel archive, or a damaged one" in refused(file)


def test_what_follows_the_files_is_bounded_too(archive, tmp_path, refused, monkeypatch):
    monkeypatch.setattr(install, "MAX_BYTES", 4 << 20)
    file = tmp_path / "long.tar.gz"
    file.write_bytes(archive.read_bytes() + gzip.compress(bytes(5 << 20)))
    assert "it unpacks to more than 0 GiB" in refused(file)


@pytest.mark.parametrize(
    "content",
    [b"", b"text", gzip.compress(b""), gzip.compress(b"x" * 2000)],
    ids=["empty", "text", "gzip of nothing", "gzip of text"],
)
def test_what_is_no_archive_is_refused(tmp_path, refused, content):
    file = tmp_path / "file.tar.gz"
    file.write_bytes(content)
    assert "not a kernel archive" in refused(file)


def test_a_tar_without_compression_is_refused(packed, refused):
    assert "not a kernel archive" in refused(packed(mode="w"))


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.8, 0.95, 0.999])
def test_a_cut_or_damaged_archive_is_refused(archive, tmp_path, refused, share):
    whole = archive.read_bytes()
    at = max(int(len(whole) * share), 64)  # after the header of gzip
    file = tmp_path / "damaged.tar.gz"
    file.write_bytes(whole[:at])
    refused(file)
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    refused(file)


def test_a_tar_that_ends_early_in_a_sound_file_is_refused(archive, tmp_path, refused):
    raw = gzip.decompress(archive.read_bytes())
    file = tmp_path / "cut.tar.gz"
    for at in range(0, len(raw) - 10240, 512):
        file.write_bytes(gzip.compress(raw[:at], 1))
        refused(file)


@pytest.mark.parametrize(
    "values, words",
    [
        ("{", "header.json is not valid JSON"),
        ("[" * 60000, "header.json is not valid JSON"),
        ("[]", "header.json has no format"),
        ({"format": 2}, "format '2', and this version of specdec reads format 1"),
        ({"num_kernels": "two"}, "header.json has no num_kernels"),
        ({"machine": None}, "header.json has no gpu"),
        ({"specdec": "x" * 999}, "header.json has no specdec"),
    ],
)
def test_a_header_that_no_export_writes_is_refused(tmp_path, machine, refused, values, words):
    known = json.loads(header_of(machine, 1, 2).to_json())
    text = values if isinstance(values, str) else json.dumps(known | values)
    file = tmp_path / "header.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.addfile(member("header.json", len(text)), io.BytesIO(text.encode()))
    assert words in refused(file)


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_write_that_fails_leaves_the_cache_as_it_was(archive, home, machine, monkeypatch, number):
    real = Path.write_bytes
    written = []

    def write(path: Path, content: bytes) -> int:
        written.append(path)
        if len(written) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    before = tree(home)
    with pytest.raises(OSError, match="No space left"):
        import_kernels(archive, home, machine)
    assert tree(home) == before
    assert [file.name for file in home.iterdir()] == ["own"]


def test_a_move_that_fails_leaves_whole_entries_only(archive, home, machine, monkeypatch, key):
    rename = os.rename
    moves = []

    def move(entry: Path, place: Path) -> None:
        moves.append(place)
        if len(moves) == 2:
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(entry, place)

    monkeypatch.setattr("specdec.kernels.archive.install.os.rename", move)
    with pytest.raises(PermissionError):
        import_kernels(archive, home, machine)
    assert sorted(file.name for file in home.iterdir()) == [key("A"), "own"]
    assert len(tree(home / key("A"))) == 3
