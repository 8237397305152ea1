"""Ray Data answers what an engine in the process answers, also when an actor is killed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.specdec.cli.test_batch import ENGINE, ENV, ROOT, check, lines_of, request

pytestmark = [pytest.mark.fleet, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DRAFT = {"model": "demo", "num_speculative_tokens": 3}
SIZES = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 512}


def batch(source: Path, output: Path, *more: str) -> tuple[int, str]:
    """The exit code and stderr of `specdec batch`."""
    command = [sys.executable, "-m", "specdec", "batch", str(source), str(output), *more]
    env = {**os.environ, **ENV, "RAY_AUTH_TOKEN_PATH": os.environ["RAY_AUTH_TOKEN_PATH"]}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == ""
    return done.returncode, done.stderr


def comparable(line: str) -> object:
    """An answer without its ids, its time, and what a cache held."""
    answer = json.loads(line)
    body = answer["response"] and answer["response"]["body"]
    if body and "choices" in body:
        usage = {**body["usage"], "prompt_tokens_details": None}
        body = [body["model"], body["object"], body["choices"], usage]
    status = answer["response"] and answer["response"]["status_code"]
    return answer["custom_id"], status, body, answer["error"]


def test_a_batch_on_a_cluster_is_that_of_one_process(cluster, tmp_path):
    source, output, here = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "here.jsonl"))
    lines, bad = lines_of(60)
    lines[10] = json.dumps(
        request(10, max_tokens=300, ignore_eos=True)
    )  # the second engine ends first
    source.write_text("\n".join(lines) + "\n")
    assert batch(source, here, *ENGINE)[0] == 0
    expected = here.read_text().splitlines()
    done = "".join(line + "\n" for line in expected[:7])
    output.write_text(done)  # it goes on with a run that was stopped

    code, err = batch(source, output, *ENGINE, "--ray", cluster, "--num-engines", "2")
    assert code == 0, err
    assert "7 of 60 lines are done" in err
    assert f"2 engines on {cluster}" in err
    assert f"60 of 60 lines in {output}, 4 of this run's with errors" in err
    assert output.read_text().startswith(done)
    check(output, lines, bad)
    found = output.read_text().splitlines()
    assert list(map(comparable, found)) == list(map(comparable, expected))


def test_lines_of_a_killed_actor_are_answered_by_another(cluster, tmp_path):
    import pyarrow
    import pyarrow.parquet
    import ray.data

    from specdec.fleet import EngineStage

    lines = [json.dumps(request(number)) for number in range(24)]
    table = pyarrow.table({"number": range(len(lines)), "request": lines})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    death = tmp_path / "an actor has died here"
    begun = tmp_path / "begun"

    class DyingOnce(EngineStage):
        def __call__(self, rows):
            answered = super().__call__(rows)
            with begun.open("a") as file:
                file.write("".join(f"{number}\n" for number in rows["number"]))
            try:
                death.touch(exist_ok=False)
            except FileExistsError:
                return answered
            os.kill(os.getpid(), signal.SIGKILL)

    read = ray.data.read_parquet(str(tmp_path / "in.parquet"))
    rows = read.repartition(6).map_batches(
        DyingOnce,
        fn_constructor_args=("demo", DRAFT),
        fn_constructor_kwargs={"column": "request", **SIZES},
        batch_size=4,
        num_cpus=0.5,  # the file is read by a task that needs a processor too
        compute=ray.data.ActorPoolStrategy(size=2),
    )
    found = sorted(rows.take_all(), key=lambda row: row["number"])
    assert death.exists()
    assert [row["number"] for row in found] == list(range(len(lines)))
    assert [row["request"] for row in found] == lines
    # some were computed twice
    assert len(begun.read_text().split()) > len(lines)

    source, here = tmp_path / "in.jsonl", tmp_path / "here.jsonl"
    source.write_text("\n".join(lines) + "\n")
    assert batch(source, here, *ENGINE)[0] == 0
    expected = [json.loads(line) for line in here.read_text().splitlines()]
    assert len(expected) == len(found)
    for row, answer in zip(found, expected, strict=True):
        assert comparable(row["answer"]) == comparable(json.dumps(answer))


def test_what_a_stage_cannot_do_is_said(cluster, tmp_path):
    from specdec.fleet import EngineStage

    with pytest.raises(ValueError, match="server does not take api_key"):
        EngineStage("demo", server={"api_key": "x"}, **SIZES)
    stage = EngineStage("demo", **SIZES)
    with pytest.raises(ValueError, match="column='text': the batch has prompt"):
        stage({"prompt": ["x"]})

    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines_of(24)[0][0] + "\n")
    code, err = batch(source, output, str(tmp_path), "--device", "cpu", "--ray", cluster)
    assert code == 2
    _, _, said = err.rpartition("specdec: error: ")  # Ray may have printed the worker's traceback
    assert said.startswith(f"{tmp_path}: 1 problem, nothing loaded\n  - neither model.safetensors")
    assert said.count("\n") == 3
    assert "0 of 1 lines" in said
    source.write_text("no JSON\n")
    code, err = batch(source, tmp_path / "bad.jsonl", *ENGINE, "--ray", cluster)
    assert (code, "1 of 1 lines in " in err) == (0, True)
    code, err = batch(source, output, "demo", "--ray", cluster)
    assert (code, err.count("\n")) == (2, 1)
    assert f"--ray {cluster}: no GPU there: give --device cpu" in err
    code, err = batch(source, output, *ENGINE, "--ray", "127.0.0.1:1")
    assert (code, err.count("\n")) == (2, 1)
    assert "--ray 127.0.0.1:1" in err
