"""Runs as a person starts them: what is refused, what is explained, who ends whom, and what goes on."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_driver import ROOT, Done, Run

from shardweave.train import worker

TINY = ROOT / "tests/data/hf_qwen3moe_tiny/config.json"
TEXT = "".join(
    f"{word} and {word[::-1]} are {len(word)} long. "
    for word in ["shard", "weave", "mesh", "layout", "box", "run"]
)
PROGRAM = (sys.executable, "-m", "shardweave")

multi = pytest.mark.dist
"""Starts several processes."""


@pytest.fixture
def run_file(tmp_path: Path) -> Callable[..., Path]:
    """A file of settings of a tiny model, over a text of a few parts."""

    def written(**sections: dict[str, Any]) -> Path:
        config = {**json.loads(TINY.read_text()), "vocab_size": 259}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "text.txt").write_text(TEXT)
        said: dict[str, Any] = {
            "model": {"path": str(tmp_path / "config.json"), "dtype": "float64"},
            "data": {"train": str(tmp_path / "text.txt")},
            "batch": {"documents": 4, "sequence_length": 24},
            "optimizer": {"lr": 3e-3, "warmup_steps": 1},
            "run": {"steps": 4, "timeout_s": 30.0, "log": str(tmp_path / "log.jsonl")},
        }
        for name, values in sections.items():
            said[name] = {**said.get(name, {}), **values}
        (tmp_path / "run.json").write_text(json.dumps(said))
        return tmp_path / "run.json"

    return written


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


pytestmark = pytest.mark.usefixtures("alone")


def start(
    *arguments: str | Path, program: Sequence[str] = PROGRAM, **environment: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], *, within_s: float = 100.0) -> Done:
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Done(process.returncode, out, err)


def steps(log: Path) -> dict[int, dict[str, Any]]:
    said = [json.loads(line) for line in log.read_text().splitlines()]
    found = {each["step"]: each for each in said if "loss" in each}
    assert len(found) == sum("loss" in each for each in said), "no step is told of twice"
    return found


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a launcher started."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout
    return [int(line.split()[0]) for line in found.splitlines() if "shardweave" in line]


def wait_for(what: Callable[[], Any], *, within_s: float = 60.0) -> Any:
    end = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.05)
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1].startswith("Z")
    except FileNotFoundError:
        return True


# --- refused ------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_said_at_once(
    sw: Run, run_file: Callable[..., Path], golden: Callable[..., None], tmp_path: Path
) -> None:
    shown = []
    fine = run_file()
    for command in (
        ("train", fine, "--parallel.tq", "2", "--batch.documents", "many", "--optimiser.lr=1"),
        (
            "train",
            fine,
            "--nproc",
            "12",
            "--parallel.tp",
            "3",
            "--parallel.ep=8",
            "--optimizer.warmup_steps",
            "9",
        ),
        ("train", fine, "--nproc", "5", "--parallel.tp", "2"),
        ("train", fine, "--nprocs", "5"),
        ("train", fine, "--run.steps"),
        ("train", fine, fine),
        ("train",),
        ("train", tmp_path / "no.yaml"),
        ("train", fine, "--model.path", tmp_path / "no"),
        ("evaluate", fine),
        ("evaluate", fine, "--checkpoint", tmp_path / "no"),
        ("train", fine, "--nproc", "0"),
    ):
        done = sw(*command)
        assert (done.code != 0, done.out) == (True, ""), command
        shown.append("$ shardweave " + " ".join(map(str, command)) + f"  # {done.code}\n" + done.err)
    golden("train_refusals", "\n".join(shown), tmp=tmp_path)


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=2, WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK=x"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_half_a_place_is_no_place(
    sw: Run,
    run_file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    what: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = sw("train", run_file())
    assert (done.code, done.out) == (2, "") and what in done.err


def test_nproc_is_not_given_under_torchrun(
    sw: Run, run_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    done = sw("train", run_file(), "--nproc", "2")
    assert done.code == 2 and "--nproc 2 with RANK=0" in done.err


# --- explained ----------------------------------------------------------------------------------


def test_explain(sw: Run, run_file: Callable[..., Path], golden: Callable[..., None], tmp_path: Path) -> None:
    given = (
        "--parallel.tp",
        "2",
        "--parallel.pp",
        "2",
        "--parallel.ep",
        "4",
        "--nproc",
        "16",
        "--batch.documents=8",
    )
    done = sw("train", run_file(), *given, "--explain")
    assert (done.code, done.err) == (0, "")
    golden("train_explain", done.out, tmp=tmp_path)
    found = json.loads(sw("train", run_file(), *given, "--explain", "--json").out)
    assert (found["ranks"], found["mesh"]) == (
        16,
        "tp=2,cp=1,remat=1,dp=4,pp=2 | etp=1,ep=4,eremat=1,edp=2,pp=2",
    )
    assert found["groups"]["ends"][0] == [0, 8]
    # Of a stage: embedding or head and final norm, and its layer, written out.
    attention = 2 * (64 * 64) // 2 + 2 * (32 * 64) // 2 + 2 * 16
    layer = attention + 2 * 64 + 8 * 64 + 3 * 40 * 64 * 8 // 4
    assert [stage["parameters"] for stage in found["stages"]] == [
        260 // 2 * 64 + layer,
        260 // 2 * 64 + 64 + layer,
    ]
    for stage in found["stages"]:
        size = 8 * stage["parameters"]  # replicas, float64, no masters
        assert (stage["weight_bytes"], stage["optimizer_bytes"]) == (size, 2 * size)
        assert stage["memory"] == {
            "weights": size,
            "gradients": size,
            "masters": 0,
            "moments": 2 * size,
            "wholes": 0,
            "whole_gradients": 0,
            "kept": 4 * size,
            "total": 4 * size,
        }
        assert stage["sent_bytes"] == sum(stage["sent"].values())
    # Two microbatches through two stages; the first stage sends the embedding's sums, the last one logits.
    assert (round(found["bubble"], 12), found["imbalance"]) == (round(1 / 3, 12), 1.0)
    sent = [stage["sent_bytes"] for stage in found["stages"]]
    assert 0 < sent[0] < sent[1]


SHARED = (
    "--nproc",
    "32",
    "--parallel.tp=2",
    "--parallel.cp=2",
    "--parallel.fold_cp=true",
    "--parallel.remat=2",
)
SHARED += ("--parallel.pp=2", "--parallel.ep=4", "--parallel.weight_multiple=16", "--batch.documents=8")


def test_explain_weights_in_shares(
    sw: Run, run_file: Callable[..., Path], golden: Callable[..., None], tmp_path: Path
) -> None:
    file = run_file(model={"dtype": "bfloat16", "recompute": True}, optimizer={"sharded": True})
    done = sw("train", file, *SHARED, "--explain")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 100
    golden("train_explain_shares", done.out, tmp=tmp_path)
    found = json.loads(sw("train", file, *SHARED, "--explain", "--json").out)
    weights = {each["name"]: each for each in found["weights"]}
    # 64 rows, 32 after tp, in four shares of 16: two of them have none of the model.
    q = weights["model.layers.*.self_attn.q_proj.weight"]
    assert (q["whole"], q["shape"]) == ([64, 64], [16, 64])
    assert (q["cut"], q["shared"], q["copies"]) == (["tp"], ["cp", "remat"], ["dp"])
    assert (q["filled"], q["empty"], q["ranks"]) == (64 * 64, 2, 4)
    gate = weights["model.layers.*.mlp.experts.gate_proj.weight"]
    assert (gate["whole"], gate["shape"]) == ([8, 40, 64], [2, 40, 64])
    assert (gate["cut"], gate["shared"], gate["copies"], gate["empty"]) == (["ep"], [], ["edp"], 0)
    assert weights["model.norm.weight"]["copies"] == ["tp", "cp", "remat", "dp"]
    assert "2 of 4 ranks that share model.layers.*.self_attn.q_proj.weight" in " ".join(found["warnings"])
    by_name = {each["name"]: each for each in found["schemes"]}
    assert [each["name"] for each in found["schemes"] if each["is_this"]] == ["remat and cp"]
    this, stage = by_name["remat and cp"], max(found["stages"], key=lambda stage: stage["memory"]["total"])
    assert (this["memory"], this["sent_bytes"]) == (stage["memory"], stage["sent_bytes"])
    kept = {name: each["memory"]["weights"] + each["memory"]["gradients"] for name, each in by_name.items()}
    assert kept["dp and cp (FSDP)"] < kept["dp (FSDP)"] < kept["replicas (ZeRO-1)"] == kept["replicas (DP)"]
    states = {name: each["memory"]["masters"] + each["memory"]["moments"] for name, each in by_name.items()}
    assert states["replicas (ZeRO-1)"] < states["remat (HSDP)"] < states["replicas (DP)"]
    assert by_name["replicas (DP)"]["memory"]["wholes"] == 0 < this["memory"]["wholes"]


def test_explain_of_a_large_world_starts_nothing(sw: Run, run_file: Callable[..., Path]) -> None:
    given = ("--nproc", "16384", "--parallel.tp=2", "--parallel.cp=4", "--parallel.fold_cp=true")
    given += ("--parallel.remat=4", "--parallel.ep=8", "--batch.documents=4096")
    begin = time.monotonic()
    done = sw("train", run_file(), *given, "--explain")
    assert (
        done.code == 0 and "16384 ranks" in done.out and "dense weights over cp, remat: 16 ranks" in done.out
    )
    assert time.monotonic() - begin < 60


def test_keys(sw: Run) -> None:
    done = sw("train", "--keys")
    assert (done.code, done.err) == (0, "")
    assert "parallel.tp" in done.out and "model.path" in done.out and "needed" in done.out


# --- runs on one rank ---------------------------------------------------------------------------


def test_a_run_is_told_of_and_evaluated(sw: Run, run_file: Callable[..., Path], tmp_path: Path) -> None:
    given = {
        "evaluation": {"data": str(tmp_path / "text.txt"), "every": 2},
        "checkpoint": {"folder": str(tmp_path / "out")},
    }
    done = sw("train", run_file(**given), "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert (found["steps"], found["begin"], found["stopped"]) == (4, 0, False)
    said = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(each["step"], "loss" in each) for each in said] == [
        (1, True), (2, True), (2, False), (3, True), (4, True), (4, False)
    ]  # fmt: skip
    assert said[0]["loss"] > said[-2]["loss"] == found["loss"]
    assert [round(each["lr"], 9) for each in said if "lr" in each][:3] == [0.003, 0.00225, 0.00075]
    parts = -(-len(TEXT) // 23)
    assert said[-1]["evaluation_count"] == len(TEXT), "every byte but the first, and the end"
    assert parts > 4
    done = sw("evaluate", run_file(**given), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["loss"] == pytest.approx(found["evaluation_loss"], rel=1e-14)
    done = sw("evaluate", run_file(**given))
    assert (
        f"loss        {found['evaluation_loss']:.6f}" in done.out and f"targets     {len(TEXT)}" in done.out
    )


def test_a_run_goes_on_as_if_nothing_had_been(sw: Run, run_file: Callable[..., Path], tmp_path: Path) -> None:
    assert sw("train", run_file(run={"steps": 6})).code == 0
    whole = steps(tmp_path / "log.jsonl")
    (tmp_path / "log.jsonl").unlink()
    given = {"checkpoint": {"folder": str(tmp_path / "out"), "every": 2}, "optimizer": {"decay_steps": 6}}
    assert sw("train", run_file(**given, run={"steps": 3})).code == 0
    # The checkpoint of step 3 is lost: step 3 is made once more.
    for name in (tmp_path / "out/step-00000003").iterdir():
        name.unlink()
    (tmp_path / "out/step-00000003").rmdir()
    (tmp_path / "out/latest").write_text("step-00000002\n")
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    done = sw("train", run_file(**given, run={"steps": 6}), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["begin"] == 2
    again = steps(tmp_path / "log.jsonl")
    values = ("loss", "count", "grad_norm", "lr", "zeros", "tokens")
    assert {n: [s[v] for v in values] for n, s in again.items()} == {
        n: [s[v] for v in values] for n, s in whole.items()
    }
    done = sw("train", run_file(**given, run={"steps": 6}))
    assert done.code == 0 and "steps       6, from 6" in done.out
    done = sw("train", run_file(**given, run={"steps": 6}), "--checkpoint.resume", "never")
    assert done.code == 2 and "step(6) is there" in done.err
    done = sw("train", run_file(**given, run={"steps": 8}), "--batch.documents", "8", "--run.seed", "3")
    assert done.code == 2
    assert "batch.documents(4) != batch.documents(8), run.seed(0) != run.seed(3)" in done.err


def test_a_loss_that_is_no_number_ends_the_run_before_weights_change(
    sw: Run, run_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def third_is_nan(*given: Any, step: int, **more: Any) -> Any:
        found = forward_backward(*given, step=step, **more)
        return replace(found, report=replace(found.report, loss=math.nan)) if step == 3 else found

    forward_backward = worker.forward_backward
    monkeypatch.setattr(worker, "forward_backward", third_is_nan)
    given = {"checkpoint": {"folder": str(tmp_path / "out"), "every": 1}}
    done = sw("train", run_file(**given))
    assert (done.code, done.out) == (1, "")
    assert "the loss of a step is a number: rank 0, step 3: loss(nan)" in done.err
    assert sorted(path.name for path in (tmp_path / "out").glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]
    monkeypatch.undo()
    assert sw("train", run_file(**given)).code == 0


def test_gradients_that_stay_no_numbers_end_the_run(sw: Run, run_file: Callable[..., Path]) -> None:
    done = sw(
        "train", run_file(run={"steps": 30}), "--optimizer.lr", "1e200", "--optimizer.warmup_steps", "0"
    )
    assert (done.code, done.out) == (1, "")
    assert "skipped(8 in a row) >= 8" in done.err or "loss(" in done.err


def test_other_weights_than_those_of_the_seed(sw: Run, run_file: Callable[..., Path], tmp_path: Path) -> None:
    given = {"evaluation": {"data": str(tmp_path / "text.txt")}, "run": {"steps": 1}}
    first = sw("train", run_file(**given), "--checkpoint.folder", tmp_path / "a", "--json")
    assert first.code == 0, first.err
    weights = json.loads(first.out)["checkpoint"]
    begun = sw("train", run_file(**given), "--model.weights", weights, "--run.steps", "1", "--json")
    assert begun.code == 0, begun.err
    there = sw("evaluate", run_file(**given), "--model.weights", weights, "--json")
    assert json.loads(there.out)["loss"] == json.loads(first.out)["evaluation_loss"]
    assert json.loads(begun.out)["evaluation_loss"] < json.loads(first.out)["evaluation_loss"]
    done = sw("evaluate", run_file(**given))
    assert done.code == 1 and "what is evaluated has weights" in done.err


def test_tensorboard_is_an_extra(
    sw: Run, run_file: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = sw("train", run_file(), "--run.tensorboard", tmp_path / "board")
    assert done.code == 2 and "shardweave[tensorboard]" in done.err


# --- processes ----------------------------------------------------------------------------------


@multi
def test_two_ranks_are_one_and_go_on_at_another_layout(run_file: Callable[..., Path], tmp_path: Path) -> None:
    file = run_file(
        evaluation={"data": str(tmp_path / "text.txt")},
        checkpoint={"folder": str(tmp_path / "out"), "every": 2},
        run={"steps": 2},
        optimizer={"decay_steps": 4},
    )
    two = ended(
        start("train", file, "--nproc", "2", "--parallel.tp", "2", "--optimizer.sharded", "true", "--json")
    )
    assert two.code == 0, two.err
    assert "process group" not in two.err
    more = ended(
        start("train", file, "--run.steps", "4", "--parallel.cp", "2", "--optimizer.sharded", "true")
    )
    assert more.code == 0, more.err
    found = steps(tmp_path / "log.jsonl")
    for name in ("out", "log.jsonl"):
        (tmp_path / name).rename(tmp_path / f"two-{name}")
    one = ended(start("train", file, "--run.steps", "4"))
    assert one.code == 0, one.err
    wanted = steps(tmp_path / "log.jsonl")
    assert list(found) == list(wanted) == [1, 2, 3, 4]
    for number, step in wanted.items():
        for name in ("loss", "grad_norm"):
            assert found[number][name] == pytest.approx(step[name], rel=1e-12)
        assert found[number]["count"] == step["count"]


@multi
def test_torchrun(run_file: Callable[..., Path], tmp_path: Path) -> None:
    program = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardweave")
    done = ended(start("train", run_file(run={"steps": 1}), "--parallel.pp", "2", "--json", program=program))
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 1, "one rank prints"
    done = ended(start("train", run_file(run={"steps": 1}), "--parallel.tp", "3", program=program))
    assert done.code != 0
    assert done.err.count("error: the degrees divide the number of ranks") == 1, done.err


@multi
def test_an_error_of_one_rank_is_told_once(run_file: Callable[..., Path], tmp_path: Path) -> None:
    """Its documents are gone on one rank only, after all have begun."""
    bad = tmp_path / "text.jsonl"
    bad.write_text('{"text": "abc"}\n' * 50 + "{\n")
    process = start("train", run_file(data={"train": str(bad)}), "--nproc", "2")
    done = ended(process)
    assert done.code == 1 and done.out == ""
    assert done.err.count("error:") == 1 and "text.jsonl, line 51" in done.err


@multi
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(
    run_file: Callable[..., Path], tmp_path: Path, sent: signal.Signals
) -> None:
    process = start("train", run_file(run={"steps": 100_000}), "--nproc", "2", "--parallel.tp", "2")
    ranks = wait_for(lambda: found if len(found := ranks_of(process)) == 2 else None)
    wait_for(lambda: (tmp_path / "log.jsonl").exists() and (tmp_path / "log.jsonl").read_text())
    os.kill(ranks[1], sent)
    done = ended(process, within_s=60)
    assert done.code == 1
    assert done.err.count("error:") == 1, done.err
    assert f"rank 1 was ended by {sent.name}" in done.err
    assert all(map(is_gone, ranks))


@multi
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_saves_and_goes_on(
    run_file: Callable[..., Path], tmp_path: Path, sent: signal.Signals
) -> None:
    file = run_file(
        run={"steps": 100_000}, checkpoint={"folder": str(tmp_path / "out")}, optimizer={"decay_steps": 9}
    )
    process = start("train", file, "--nproc", "2", "--parallel.tp", "2")
    wait_for(lambda: (tmp_path / "log.jsonl").exists() and (tmp_path / "log.jsonl").read_text())
    ranks = ranks_of(process)
    process.send_signal(sent)
    done = ended(process, within_s=60)
    assert done.code == 130, done
    assert done.err.endswith("error: stopped\nhint: run the same command to go on\n")
    assert done.err.count("error:") == 1 and "Traceback" not in done.err
    assert all(map(is_gone, ranks)) and len(ranks) == 2
    last = max(steps(tmp_path / "log.jsonl"))
    assert (tmp_path / f"out/step-{last:08}").is_dir()
    more = ended(start("train", file, "--run.steps", str(last + 1), "--json"))
    assert (more.code, json.loads(more.out)["begin"]) == (0, last), more.err


@multi
def test_ranks_do_not_outlive_a_launcher_that_is_killed(
    run_file: Callable[..., Path], tmp_path: Path
) -> None:
    process = start("train", run_file(run={"steps": 100_000}), "--nproc", "2", "--parallel.tp", "2")
    wait_for(lambda: (tmp_path / "log.jsonl").exists() and (tmp_path / "log.jsonl").read_text())
    ranks = ranks_of(process)
    process.kill()
    wait_for(lambda: all(map(is_gone, ranks)), within_s=40)
    assert len(ranks) == 2
    process.communicate(timeout=10)


# --- tokens -------------------------------------------------------------------------------------


def test_tokenize(sw: Run, run_file: Callable[..., Path], tmp_path: Path) -> None:
    run_file()
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab", "response": "c"}\n{"text": "def"}\n')
    done = sw("tokenize", tmp_path / "a.jsonl", tmp_path / "packed")
    assert (done.code, done.err) == (0, "")
    assert "documents  2" in done.out and "tokens     8, of which 6 count" in done.out
    done = sw("tokenize", tmp_path / "packed", tmp_path / "again", "--dtype", "int32", "--json")
    assert json.loads(done.out) == {
        "path": str(tmp_path / "again"), "form": "packed", "dtype": "int32", "documents": 2, "tokens": 8,
        "targets": 6,
    }  # fmt: skip
    assert sw("tokenize", tmp_path / "a.jsonl", tmp_path / "packed").code == 2
    done = sw("tokenize", tmp_path / "text.txt", tmp_path / "mega", "--to", "megatron")
    assert done.code == 0, done.err
    found = []
    for name in ("text.txt", "mega", "mega.bin"):
        done = sw("train", run_file(), "--data.train", tmp_path / name, "--run.steps", "1", "--json")
        assert done.code == 0, done.err
        found.append(json.loads(done.out)["loss"])
    assert len(set(found)) == 1
    for wrong in (("--to", "parquet"), ("--dtype", "float32"), ("--tokenizer", str(tmp_path / "no"))):
        assert sw("tokenize", tmp_path / "a.jsonl", tmp_path / "x", *wrong).code in (1, 2)


def test_help_of_a_run_loads_no_torch(process: Run) -> None:
    code = "import sys; from shardweave.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    for arguments in (
        ["train", "--help"],
        ["evaluate", "--help"],
        ["tokenize", "--help"],
        ["train", "--keys"],
    ):
        done = process(*arguments, program=(sys.executable, "-c", code))
        assert not {"torch", "numpy", "yaml"} & set(done.out.split())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a test outlives it."""
    yield
    left = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    mine = [
        line
        for line in left
        if "shardweave train" in line and "/run.json" in line and str(os.getpid()) in line.split()[:2]
    ]
    assert mine == []
