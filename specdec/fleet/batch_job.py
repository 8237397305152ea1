"""The lines of a batch file, answered on a cluster in their order."""

import json
import logging
import os
import re
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

import ray
import ray.data
from ray.exceptions import RayError

from specdec.fleet.stage import EngineArgs, EngineStage
from specdec.serve.http.batch import Answered, BatchLine, BatchStopped
from specdec.serve.http.errors import as_json

CONNECT_SECONDS = 10
MOST_LINES = 256  # of a batch: what a killed actor loses, and what is written at a time


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Use the cluster at an address; "local" starts one here, for as long as this lasts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # an error reaches the caller as an exception
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:  # for a moment: Ray itself would try for many minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise ValueError(f"--ray {address}: {error}; give a cluster's address") from error
    with redirect_stdout(sys.stderr):  # Ray prints what happens to its workers
        try:
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError) as error:
            raise ValueError(f"--ray {address}: {_reason(error)}") from error
        try:
            yield
        finally:
            ray.shutdown()


def num_gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def answer_lines(
    lines: Sequence[BatchLine], args: EngineArgs, num_engines: int
) -> Generator[Answered]:
    """Yield one answer for each line. BatchStopped if an engine cannot go on.

    Ray restarts a killed actor, elsewhere if need be, with the lines of its batch.
    """
    if not lines:
        return
    num_batches = -(-len(lines) // min(-(-len(lines) // num_engines), MOST_LINES))
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    texts = []
    for line in lines:
        request = {"method": "POST", "url": line.url, "body": json.loads(line.body)}
        texts.append({"text": as_json({"custom_id": line.custom_id, **request}).decode()})
    rows = ray.data.from_items(texts, override_num_blocks=num_batches)
    answers = rows.map_batches(
        EngineStage,
        fn_constructor_args=(args.model, args.speculative_config),
        fn_constructor_kwargs={"server": args.server, **args.engine},
        # else the first engine that is ready takes all batches
        compute=ray.data.ActorPoolStrategy(size=num_engines, max_tasks_in_flight_per_actor=1),
        num_gpus=args.num_gpus,
    )
    try:
        for row in answers.iter_rows():
            yield Answered(row["answer"].encode(), row["is_error"], row["num_tokens"])
    except RayError as error:
        raise BatchStopped(_reason(error)) from error


def _reason(error: BaseException) -> str:
    """Cut the traceback off an error of a worker."""
    return re.split(r"^[\w.]+: ", str(error).strip(), flags=re.MULTILINE)[-1]
