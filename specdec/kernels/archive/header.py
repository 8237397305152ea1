"""What an archive says of itself, and whether its kernels run on this machine."""

import json
import platform
import sysconfig
from dataclasses import asdict, dataclass, fields

import torch

import specdec
from specdec.kernels import triton

FORMAT = 1
NAME = "header.json"
MAX_BYTES = 1 << 16
MAX_TEXT = 200  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that kernels are compiled for. Between machines that are equal they can be exchanged."""

    gpu: str
    capability: str
    torch: str
    triton: str
    cuda: str
    python: str  # for the C extensions
    platform: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """num_files: after the header, so that an import knows when it has all."""

    machine: Machine
    specdec: str
    num_kernels: int
    num_files: int

    def to_json(self) -> bytes:
        """What `parse_header` reads."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()


def this_machine() -> Machine:
    """ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError("kernels are compiled for a GPU, and torch sees no CUDA device here")
    devices = range(torch.cuda.device_count())
    capabilities = [torch.cuda.get_device_capability(i) for i in devices]
    return Machine(
        gpu=" and ".join(sorted({torch.cuda.get_device_name(i) for i in devices})),
        capability=" and ".join(sorted({f"{major}.{minor}" for major, minor in capabilities})),
        torch=str(torch.__version__),
        triton=triton.__version__,
        cuda=str(torch.version.cuda),
        python=str(sysconfig.get_config_var("SOABI")),
        platform=f"{platform.system()} {platform.machine()}",
    )


def header_of(machine: Machine, num_kernels: int, num_files: int) -> Header:
    """Of an archive that this version writes."""
    version = specdec.__version__
    return Header(machine=machine, specdec=version, num_kernels=num_kernels, num_files=num_files)


def parse_header(text: bytes) -> Header:
    """ValueError for what no export writes."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{NAME} is not valid JSON") from None
    if not isinstance(values, dict) or "format" not in values:
        raise ValueError(f"{NAME} has no format")
    if values["format"] != FORMAT:
        found = str(values["format"])[:MAX_TEXT]
        raise ValueError(f"format {found!r}, and this version of specdec reads format {FORMAT}")
    return Header(
        machine=_parse_machine(values.get("machine")),
        specdec=_text("specdec", values.get("specdec")),
        num_kernels=_number("num_kernels", values.get("num_kernels")),
        num_files=_number("num_files", values.get("num_files")),
    )


def refuse_other_machines(theirs: Machine, ours: Machine) -> None:
    """ValueError with all that differs, and with both values."""
    names = [field.name for field in fields(Machine)]
    differing = [name for name in names if getattr(theirs, name) != getattr(ours, name)]
    if differing:
        compiled, here = (
            ", ".join(f"{name} {getattr(machine, name)!r}" for name in differing)
            for machine in (theirs, ours)
        )
        raise ValueError(
            f"its kernels are for {compiled}; here: {here}. Export on a machine like this one"
        )


def _parse_machine(values: object) -> Machine:
    found = values if isinstance(values, dict) else {}
    return Machine(
        **{each.name: _text(each.name, found.get(each.name)) for each in fields(Machine)}
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{NAME} has no {name}")
    return value


def _number(name: str, value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{NAME} has no {name}")
    return value
