"""Record the constructions of a class while a command runs.

::

    python -m shardweave.lint.record --class pkg.mod:Cls --arg NAME --out FILE -- pytest tests

Every Python process that the command starts is recorded, ranks and forked ones too. The command's output and
exit code are its own. What it recorded goes into ``shardweave lint constructors --recorded FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardweave.lint import recording

__all__ = ["main", "record"]

SCHEMA = 1
"""Version of the file. It grows when a key changes its meaning or goes."""

_SITE = f"""\
import os, sys
_here = os.path.dirname(os.path.abspath(__file__))
try:
    import shardweave_lint_recording
    shardweave_lint_recording.install(os.environ[{recording.VARIABLE!r}])
except Exception as error:
    print(f"shardweave.lint.record: not recorded here: {{error}}", file=sys.stderr)
# The environment's own sitecustomize, which this one stands before.
sys.path[:] = [part for part in sys.path if os.path.abspath(part) != _here]
_mine = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = _mine
"""


def record(cls: str, argument: str, command: Sequence[str], *, out: Path) -> int:
    """Run a command and write what its processes constructed.

    Args:
        cls: The class, as ``package.module:Class``.
        argument: The name of the parameter.
        command: The command and its arguments.
        out: The file to write.

    Returns:
        The command's exit code; 2 where it is 0 and no process ever had the class.
    """
    module, _, qualname = cls.partition(":")
    with tempfile.TemporaryDirectory(prefix="shardweave-record-") as name:
        site, logs = Path(name, "site"), Path(name, "logs")
        site.mkdir()
        logs.mkdir()
        shutil.copyfile(recording.__file__, site / "shardweave_lint_recording.py")
        (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        wanted = {"folder": str(logs), "module": module, "qualname": qualname, "argument": argument}
        paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
        given = {**os.environ, recording.VARIABLE: json.dumps(wanted), "PYTHONPATH": os.pathsep.join(paths)}
        code = _run(command, given)
        rows, problems, wrapped = _merge(logs)
    made = {
        "schema": SCHEMA,
        "class": cls,
        "argument": argument,
        "command": list(command),
        "exit_code": code,
        "num_processes": wrapped,
        "problems": problems,
        "constructions": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    beside.replace(out)
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row["state"]] += row["count"]
    for problem in problems:
        print(f"shardweave.lint.record: {problem}", file=sys.stderr)
    if not wrapped:
        print(f"shardweave.lint.record: no process of the command loaded {cls}", file=sys.stderr)
        return code or 2
    said = ", ".join(f"{word} {counts[word]}" for word in ("given", "none", "missing"))
    print(f"shardweave.lint.record: {argument} of {cls}: {said}; written to {out}", file=sys.stderr)
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        print(f"shardweave.lint.record: {command[0]}: {error.strerror or error}", file=sys.stderr)
        return 2
    while True:
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            # The terminal told the command too; what it does about that is its own.
            continue


def _merge(logs: Path) -> tuple[list[dict[str, Any]], list[str], int]:
    counts: dict[str, int] = {}
    problems: dict[str, None] = {}
    wrapped = 0
    for path in sorted(logs.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            if "problem" in row:
                problems[row["problem"]] = None
            elif "wrapped" in row:
                wrapped += 1
            else:
                count = row.pop("count")
                key = json.dumps(row, sort_keys=True)
                counts[key] = counts.get(key, 0) + count
    rows = [{**json.loads(key), "count": count} for key, count in sorted(counts.items())]
    return rows, list(problems), wrapped


def main(argv: Sequence[str] | None = None) -> int:
    """The command.

    Args:
        argv: Its arguments; those of the process by default.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in given:
        at = given.index("--")
        given, command = given[:at], given[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m shardweave.lint.record",
        description="Record the constructions of a class while a command runs.",
        usage="%(prog)s --class PKG.MOD:CLASS --arg NAME --out FILE -- COMMAND ...",
    )
    parser.add_argument("--class", dest="cls", required=True, metavar="PKG.MOD:CLASS", help="the class")
    parser.add_argument("--arg", required=True, metavar="NAME", help="the parameter of its __init__")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="what to write")
    options = parser.parse_args(given)
    module, _, qualname = options.cls.partition(":")
    if not module or not qualname:
        parser.error(f"--class {options.cls!r}: write package.module:Class")
    if not command:
        parser.error("a command follows --, such as: -- pytest tests")
    return record(options.cls, options.arg, command, out=options.out)


if __name__ == "__main__":
    sys.exit(main())
