"""How long do ranks take to exchange the parts of a product and to read them? A line for each size.

    python -m scripts.bench_exchange --ranks 2 --rows 1,6,16,64,256,512 --json FILE

Microseconds of one exchange with its reader (residual and norm), of 64 that follow each other in a
captured graph; on a CPU op by op, over gloo:

    ours      as models do it: gathered whole or dealt, written into the other GPUs' memory
    library   gathered whole by NCCL, then read
    reader    all parts are there

Ours and the library's are compared: `equal` says whether all of a row's bits are.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from specdec.bench.timing import per_call_ms
from specdec.kernels.linear import Sums
from specdec.kernels.norms import add_rms_norm
from specdec.parallel.group import Group
from specdec.parallel.transfers import gather

CHAIN, EPS = 64, 1e-5
STORE, RANK = "SPECDEC_EXCHANGE_STORE", "SPECDEC_EXCHANGE_RANK"  # of a rank's process


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", default="1,6,16,64,256,512")
    parser.add_argument("--width", type=int, default=4096, help="numbers of a row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=_device())
    parser.add_argument("--json", type=Path, help="write all rows to a file too")
    return parser.parse_args()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def measure(group: Group, num_rows: int, width: int, device: torch.device) -> dict[str, object]:
    generator = torch.Generator(device).manual_seed(group.rank)
    own_1TD = torch.randn(1, num_rows, width, device=device, generator=generator)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stream_TD = torch.zeros(num_rows, width, dtype=dtype, device=device)
    weight_D = torch.ones(width, dtype=dtype, device=device)
    all_nTD = own_1TD.new_empty(group.size, num_rows, width)
    exchange = group.exchange(poisons=False)

    def ours() -> Tensor:
        return exchange.add_rms_norm(Sums(own_1TD, None), stream_TD, weight_D, EPS, None)[0]

    def reader() -> Tensor:
        return add_rms_norm(Sums(all_nTD, None), stream_TD, weight_D, EPS)[0]

    def library() -> Tensor:
        gather(own_1TD[0], all_nTD, group.name)
        return reader()

    row: dict[str, object] = {"ranks": group.size, "rows": num_rows, "width": width}
    row["is_gathered"] = exchange.are_few(num_rows, width)
    row["equal"] = torch.equal(ours(), library())
    for call in (ours, library, reader):
        group.least(0)  # all ranks are here
        row[f"{call.__name__}_us"] = 1e3 * per_call_ms(device, [call] * CHAIN)
    return row


def run_rank(args: argparse.Namespace, rank: int) -> None:
    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    group = Group(int(os.environ[STORE]), rank, args.ranks, device)
    found = []
    with torch.inference_mode():
        for num_rows in map(int, args.rows.split(",")):
            found.append(measure(group, num_rows, args.width, device))
            if rank == 0:
                print(json.dumps(found[-1]), flush=True)
    if rank == 0 and args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    group.least(0)
    sys.stdout.flush()
    os._exit(0 if all(row["equal"] for row in found) else 1)  # the group's threads may go on


def main() -> None:
    args = parse_args()
    if RANK in os.environ:
        run_rank(args, int(os.environ[RANK]))
    store = os.memfd_create("specdec-exchange")
    command = [sys.executable, "-m", "scripts.bench_exchange", *sys.argv[1:]]
    given = {STORE: str(store)}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **given, RANK: str(rank)}, pass_fds=[store])
        for rank in range(args.ranks)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
