"""Real trainers into a real engine: ``python tests/e2e/run.py [--case NAME ...] [--versions N]``.

A case is a trainer (megatron-core, or FSDP2 over transformers) as processes over gloo and a vLLM engine on
this CPU, which starts from meaningless weights. At each version the trainer takes and publishes others; then
the engine's greedy tokens and log probabilities are compared, bit for bit, with those of a fresh
engine started from a Hugging Face checkpoint of that version. The trainer's own forward pass is asked too.

Exits with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import content
import wire

from shardweave.refit.status import look

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
SOURCES = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))

CASES: dict[str, dict[str, Any]] = {
    "qwen3-tp2": {"model": "qwen3", "trainer": "megatron", "trainers": 2, "tp": 2, "engine_tp": 2},
    "qwen3-tp4": {
        "model": "qwen3", "trainer": "megatron", "trainers": 4, "tp": 4, "engine_tp": 2, "lose": True,
    },
    "qwen3-fsdp2": {"model": "qwen3", "trainer": "fsdp2", "trainers": 4, "mesh": {"dp": 4}, "engine_tp": 2},
    "qwen3_moe-tp2": {
        "model": "qwen3_moe", "trainer": "megatron", "trainers": 2, "tp": 2, "ep": 2, "etp": 1,
        "engine_tp": 2,
    },
    "qwen3_moe-tp4": {
        "model": "qwen3_moe", "trainer": "megatron", "trainers": 4, "tp": 4, "ep": 2, "etp": 2,
        "engine_tp": 2,
    },
    "qwen3_moe-fsdp2": {
        "model": "qwen3_moe", "trainer": "fsdp2", "trainers": 4, "mesh": {"dp": 4}, "engine_tp": 2,
    },
    "qwen3-tp8": {"model": "qwen3-64q", "trainer": "megatron", "trainers": 8, "tp": 8, "engine_tp": 8},
}  # fmt: skip
BY_HAND = ("qwen3-tp8",)
"""Cases that are run where they are named."""

NEAR = 5e-5
"""Two frameworks agree on a log probability to this; their kernels add up in other orders."""


def vllm_python() -> Path | None:
    """The interpreter of vLLM's environment: ``SHARDWEAVE_VLLM_PYTHON``, or that of ``make``, or ``None``."""
    named = os.environ.get("SHARDWEAVE_VLLM_PYTHON")
    found = Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"
    return found if found.exists() else None


@dataclass
class Limits:
    """How long each thing may take, in seconds."""

    start: float = 1200.0
    command: float = 400.0
    wait: float = 60.0


class Run:
    """A folder, an interpreter with vLLM, and the answers of fresh engines, which several cases share."""

    def __init__(self, folder: Path, python: Path, limits: Limits) -> None:
        self.folder, self.python, self.limits = folder, python, limits
        # Logs, sockets and stores are of this run alone: a store that was used has the ranks of before.
        self.own = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        self._serial = 0

    def checkpoint(self, model: str, number: int) -> Path:
        folder = self.folder / f"{model}-{number}"
        return folder if folder.exists() else content.write(content.CONFIGS[model], number, folder)

    @contextlib.contextmanager
    def engine(self, name: str, checkpoint: Path, tp: int, backend: str) -> Iterator[wire.Process]:
        cores = os.cpu_count() or 1
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(tp)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": SOURCES,
        }
        command = [str(self.python), str(HERE / "engine.py"), str(checkpoint), str(tp), backend]
        with self._process(name, command, env) as process:
            yield process

    @contextlib.contextmanager
    def trainers(self, name: str, case: dict[str, Any]) -> Iterator[list[wire.Process]]:
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCES, "PYTHONWARNINGS": "ignore"}
        self._serial += 1
        store = self.own / f"store{self._serial}"
        with contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(
                    self._process(
                        f"{name}-{rank}",
                        [sys.executable, str(HERE / "trainer.py"), json.dumps(case), str(rank), str(store)],
                        env,
                    )
                )
                for rank in range(case["trainers"])
            ]

    @contextlib.contextmanager
    def _process(self, name: str, command: Sequence[str], env: dict[str, str]) -> Iterator[wire.Process]:
        self._serial += 1
        process = wire.Process(f"{self._serial}-{name}", command, folder=self.own, env=env)
        try:
            yield process
        finally:
            process.end()

    def fresh(self, model: str, tp: int, number: int) -> Any:
        """What an engine answers that was started from the weights of a number."""
        kept = self.folder / f"{model}-{number}-tp{tp}.json"
        if not kept.exists():
            folder = self.checkpoint(model, number)
            with self.engine(f"fresh-{model}-{number}", folder, tp, "none") as process:
                process.call("start", within_s=self.limits.start)
                kept.write_text(json.dumps(ask(process, self.limits)))
        return json.loads(kept.read_text())


def ask(process: wire.Process, limits: Limits) -> Any:
    return process.call(
        "generate", within_s=limits.command, prompts=content.PROMPTS, num_tokens=content.NUM_TOKENS
    )


def needed_bytes(config: dict[str, Any], tp: int) -> int:
    """What the engine's ranks have to receive: each element once for every rank that computes with it."""
    total = 0
    for name, array in content.values(config, 0).items():
        holders = 1
        if array.ndim == 1 or name.endswith("mlp.gate.weight"):
            holders = tp
        elif ".k_proj." in name or ".v_proj." in name:
            holders = max(1, tp // config["num_key_value_heads"])
        total += array.nbytes * holders
    return total


def together(calls: Sequence[tuple[wire.Process, str, dict[str, Any]]], within_s: float) -> list[Any]:
    """Commands that wait for each other. All are answered or given up before the first error is raised."""
    for process, do, given in calls:
        process.send(do, **given)
    found, errors = [], []
    deadline = time.monotonic() + within_s
    for process, _, _ in calls:
        try:
            found.append(process.answer(max(1.0, deadline - time.monotonic())))
        except wire.FailedError as error:
            errors.append(str(error))
    if errors:
        raise wire.FailedError("\n".join(errors))
    return found


@dataclass
class Line:
    """What one version came to."""

    version: int
    moved: int
    needed: int
    publish_s: float
    refit_s: float
    apart: float
    equal: bool

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "DIFFERS"
        ratio = f"{self.moved / self.needed:.3f}" if self.needed else "-"
        near = "" if self.apart <= NEAR else "  THE TRAINER DISAGREES"
        return (
            f"{self.version:>7}  {self.moved:>9}  {self.needed:>9}  {ratio:>5}  "
            f"{self.publish_s:>8.3f}  {self.refit_s:>8.3f}  {self.apart:>9.1e}  {verdict}{near}"
        )

    @property
    def good(self) -> bool:
        return self.equal and self.apart <= NEAR and self.moved == self.needed


HEAD = "version      moved     needed  ratio   publish     refit  trainer    answers"


def run_case(
    run: Run, name: str, *, versions: int, contents: int, transport: str = "gloo", spoil: bool = False
) -> list[Line]:
    """One case: as many refits as versions, whose weights are those of numbers 1 to ``contents``, in turn.

    The last version is published once more; the last line tells what that came to.

    Where ``spoil`` is set, one weight of one trainer rank is another at the last version.
    """
    import torch.distributed as dist

    case = CASES[name]
    config, tp = content.CONFIGS[case["model"]], case["engine_tp"]
    numbers = [1 + (version - 1) % contents for version in range(1, versions + 1)]
    answers = {number: run.fresh(case["model"], tp, number) for number in sorted(set(numbers))}
    told_apart = {json.dumps(answer) for answer in answers.values()}
    assert len(told_apart) == len(answers), "fresh engines of different weights answer differently"

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    session = dist.PrefixStore("shardweave/refit", store)
    meeting: dict[str, Any] = {"host": "127.0.0.1", "port": store.port}
    lines: list[Line] = []
    with (
        run.trainers(name, case) as trainers,
        run.engine(f"{name}-engine", run.checkpoint(case["model"], 1), tp, "shardweave") as engine,
    ):
        engine.call("start", within_s=run.limits.start)
        meeting |= {"transport": transport, "timeout_s": run.limits.wait}
        joins = [(rank, "join", meeting) for rank in trainers]
        info = meeting | {"publishers": case["trainers"]}
        together([*joins, (engine, "join", {"info": info})], run.limits.command)
        for version, number in enumerate(numbers, 1):
            together([(rank, "take", {"version": number}) for rank in trainers], run.limits.command)
            if spoil and version == versions:
                trainers[0].call("spoil", within_s=run.limits.command)
            needed = needed_bytes(config, tp)
            lines.append(_refit(run, trainers, engine, session, version, answers[number], needed))
            print(lines[-1], flush=True)
        audits = engine.call("audit", within_s=run.limits.command)
        if any(audit["error"] or audit["different"] or not audit["compared"] for audit in audits):
            raise wire.FailedError(f"what is served is not what vLLM derives from its weights: {audits}")
        # What is served already moves nothing and changes nothing.
        lines.append(_refit(run, trainers, engine, session, versions, answers[numbers[-1]], 0))
        print(lines[-1], "(again)", flush=True)
        if case.get("lose"):
            _lose_one(run, trainers, engine, versions + 1, answers[numbers[-1]])
    return lines


def _lose_one(
    run: Run, trainers: Sequence[wire.Process], engine: wire.Process, version: int, expected: Any
) -> None:
    """A trainer's rank dies before it publishes: all others hear of it, the engine serves what it served."""
    *left, lost = trainers
    together([(rank, "take", {"version": version}) for rank in trainers], run.limits.command)
    begin = time.monotonic()
    lost.kill()
    publishes = [(rank, "publish_or_say", {"version": version}) for rank in left]
    said = together([*publishes, (engine, "refit_or_say", {})], run.limits.command)
    seconds = time.monotonic() - begin
    answer = ask(engine, run.limits)
    if not all(said) or answer != expected or seconds > 3 * run.limits.wait:
        raise wire.FailedError(f"a rank was killed: equal({answer == expected}), {seconds:.0f} s, {said}")
    print(f"{version:>7}  a rank was killed: refused by all in {seconds:.0f} s, answers equal", flush=True)


def _refit(
    run: Run,
    trainers: Sequence[wire.Process],
    engine: wire.Process,
    store: Any,
    version: int,
    expected: Any,
    needed: int,
) -> Line:
    """One version from the trainer to the engine, and what the two make of it."""
    publishes = [(rank, "publish", {"version": version}) for rank in trainers]
    *published, refitted = together([*publishes, (engine, "refit", {})], run.limits.command)
    status = look(store)
    assert {one["version"] for one in published} == {version} == {status.one_version}
    # What arrived; a one-sided transport sends nothing, every other sends just that.
    moved = sum(status.notes[rank].bytes_received for rank in status.members.receivers)
    assert sum(one["sent"] for one in published) in (0, moved)
    answer = ask(engine, run.limits)
    return Line(
        version,
        moved,
        needed,
        max(one["seconds"] for one in published),
        refitted["seconds"],
        apart(trainers, answer, run.limits),
        answer == expected,
    )


def apart(trainers: Sequence[wire.Process], answer: Any, limits: Limits) -> float:
    """How far the trainer's own forward pass is from the engine's log probabilities, and from its choices."""
    tokens = [prompt + one["tokens"] for prompt, one in zip(content.PROMPTS, answer, strict=True)]
    scores = together([(rank, "score", {"tokens": tokens}) for rank in trainers], limits.command)[0]
    most = 0.0
    for prompt, one, (mine, best) in zip(content.PROMPTS, answer, scores, strict=True):
        for at, (token, logprobs) in enumerate(zip(one["tokens"], one["logprobs"], strict=True)):
            place = len(prompt) - 1 + at
            most = max(most, abs(dict(logprobs)[token] - mine[place]), best[place] - mine[place])
    return most if math.isfinite(most) else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=[*CASES], help="all but tp8 by default")
    parser.add_argument("--versions", type=int, default=10, help="refits a case (10)")
    parser.add_argument(
        "--contents", type=int, default=0, help="different weights among them; all by default"
    )
    parser.add_argument("--transport", default="gloo")
    parser.add_argument(
        "--folder", type=Path, help="for logs, checkpoints and answers of fresh engines, which are used again"
    )
    given = parser.parse_args()
    python = vllm_python()
    if python is None:
        parser.error("no vLLM: run 'make e2e-refit', or name an interpreter in SHARDWEAVE_VLLM_PYTHON")
    cases = given.case or [name for name in CASES if name not in BY_HAND]
    folder = given.folder or Path(tempfile.mkdtemp(prefix="e2e"))
    folder.mkdir(parents=True, exist_ok=True)
    run, failed = Run(folder, python, Limits()), []
    for name in cases:
        begin = time.monotonic()
        print(f"\n{name}: {json.dumps(CASES[name])}\n{HEAD}", flush=True)
        try:
            lines = run_case(
                run,
                name,
                versions=given.versions,
                contents=given.contents or given.versions,
                transport=given.transport,
            )
            good = len(lines) == given.versions + 1 and all(line.good for line in lines)
        except wire.FailedError as error:
            print(error)
            good = False
        print(f"{name}: {'all equal' if good else 'FAILED'}, {time.monotonic() - begin:.0f} s", flush=True)
        failed += [] if good else [name]
    print(
        f"\n{len(cases) - len(failed)} of {len(cases)} cases equal"
        + (f"; failed: {failed}" if failed else "")
    )
    if given.folder is None and not failed:
        shutil.rmtree(folder)
    elif failed:
        print(f"logs: {folder}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
