"""How long ``shardweave lint groups`` takes and what it finds, beside tools that can be asked the same.

    python benchmarks/lint.py                      a file of forms, then the installed megatron-core
    python benchmarks/lint.py --tree PATH          then another tree with a megatron/core
    python benchmarks/lint.py --tiny               the forms alone, seconds
    python benchmarks/lint.py --semgrep BIN --ast-grep BIN    tools that are not on the PATH

The question: on which lines is a function of ``megatron.core.parallel_state`` used that reads a group, or
``ProcessGroupCollection.use_mpu_process_groups``? ruff is asked with ``banned-api`` (TID251) and the dotted
name of each function, semgrep with a pattern of dotted names, ast-grep, which knows no imports, with the last
names. Lines of imports and the two files that define the state are no answers and are counted apart. *import*
is said where a tool names the line of the import and not that of the use.

Times are the best of several runs, each tool once a round: wall time over ruff's, and processor time, which
says more where others use the machine. *Cold* is without a cache, *warm* with the one of the run before.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from shardweave.lint.presets import PRESETS

STATE = "megatron.core.parallel_state"
SHIM = "megatron.core.process_groups_config.ProcessGroupCollection.use_mpu_process_groups"
DEFINITIONS = ("megatron/core/parallel_state.py", "megatron/core/process_groups_config.py")
OURS = ("SW101", "SW102", "SW103", "SW104", "SW109")

Lines = set[tuple[str, int]]
Answer = Callable[[str], Iterable[tuple[str, int]]]

TREE = {
    "megatron/core/__init__.py": "from megatron.core import parallel_state\nmpu = parallel_state\n",
    "megatron/core/parallel_state.py": "def get_tp_group():\n    return _TP\n_TP = None\n",
    "megatron/core/process_groups_config.py": """\
from megatron.core import parallel_state
class ProcessGroupCollection:
    @classmethod
    def use_mpu_process_groups(cls): return cls()
""",
    "megatron/core/words.py": "from megatron.core.parallel_state import *\n",
    "megatron/core/hides.py": """\
from megatron.core import parallel_state
def tp_or(group):
    return group if group is not None else parallel_state.get_tp_group()
""",
}
FORMS = {
    "module": "from megatron.core import parallel_state\nparallel_state.get_tp_group()  # read\n",
    "another name": "import megatron.core.parallel_state as ps\nps.get_tp_group()  # read\n",
    "bare name": "from megatron.core.parallel_state import get_tp_group\nget_tp_group()  # read\n",
    "bare name, renamed": "from megatron.core.parallel_state import get_tp_group as g\ng()  # read\n",
    "relative import": "from . import parallel_state\nparallel_state.get_tp_group()  # read\n",
    "import in a function": """\
def f():
    from megatron.core.parallel_state import get_tp_group
    return get_tp_group()  # read
""",
    "star import": "from megatron.core.parallel_state import *\nget_tp_group()  # read\n",
    "through another module": "from megatron.core.words import get_tp_group\nget_tp_group()  # read\n",
    "the package's name of it": "from megatron.core import mpu\nmpu.get_tp_group()  # read\n",
    "assigned": "from megatron.core import parallel_state\nps = parallel_state\nps.get_tp_group()  # read\n",
    "getattr": "from megatron.core import parallel_state as p\ngetattr(p, 'get_tp_group')()  # read\n",
    "handed on": "from megatron.core import parallel_state as p\nf = dict(f=p.get_tp_group)  # read\n",
    "shim": """\
from megatron.core.process_groups_config import ProcessGroupCollection
ProcessGroupCollection.use_mpu_process_groups()  # read
""",
    "caller of what hides one": "from megatron.core.hides import tp_or\ntp_or(None)  # read\n",
    "method of that name": "class A:\n    def get_tp_group(self): ...\nA().get_tp_group()\n",
    "local of that name": """\
from megatron.core import parallel_state
def f(parallel_state):
    return parallel_state.get_tp_group()
""",
    "for type checkers only": """\
from typing import TYPE_CHECKING
from megatron.core import parallel_state
if TYPE_CHECKING:
    x = parallel_state.get_tp_group()
""",
    "text": "x = 'parallel_state.get_tp_group()'  # parallel_state.get_tp_group()\n",
}


@dataclass
class Tool:
    """A command that answers, how its answer is read, and what it took."""

    name: str
    command: list[str]
    answer: Answer
    fresh: Path | None = None
    """A folder that is emptied before each run."""
    wall_s: float = float("inf")
    cpu_s: float = float("inf")
    lines: Lines = field(default_factory=set)

    def run(self, tree: Path) -> None:
        """Ask once, and keep the best times."""
        if self.fresh is not None:
            shutil.rmtree(self.fresh, ignore_errors=True)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(self.command, cwd=tree, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{self.name} failed: {done.stderr[-2000:]}")
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self.wall_s, self.cpu_s = min(self.wall_s, wall), min(self.cpu_s, cpu)
        self.lines = {(_below(path, tree), line) for path, line in self.answer(done.stdout)}


def _below(path: str, tree: Path) -> str:
    place = tree / path
    return place.resolve().relative_to(tree.resolve()).as_posix()


def accessors(tree: Path) -> list[str]:
    """The functions of the state that the preset counts, by their names in the file."""
    patterns = [target.pattern for target in PRESETS["megatron"].targets if STATE in target.modules]
    body = ast.parse((tree / DEFINITIONS[0]).read_bytes()).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    return [name for name in names if name != "get_all_ranks" and any(p.fullmatch(name) for p in patterns)]


def ours(text: str) -> Iterable[tuple[str, int]]:
    return [(f["path"], f["line"]) for f in json.loads(text)["findings"] if f["code"] in (*OURS, "SW105")]


def tools(tree: Path, scratch: Path, options: argparse.Namespace) -> list[Tool]:
    """Who is asked about a tree."""
    names = accessors(tree)
    found = []
    lint = [sys.executable, "-m", "shardweave", "lint", "groups", "megatron", "--preset", "megatron"]
    cache = scratch / "cache"
    lint += ["--format", "json", "--cache-dir", str(cache)]
    found.append(Tool("shardweave, cold", lint, ours, fresh=cache))
    found.append(Tool("shardweave, warm", lint, ours))
    if options.ruff:
        banned = {f"{STATE}.{name}": {"msg": "global"} for name in names} | {SHIM: {"msg": "global"}}
        config = scratch / "ruff.toml"
        table = "".join(f'"{name}".msg = "global"\n' for name in banned)
        spaces = "" if (tree / "megatron" / "__init__.py").exists() else 'namespace-packages = ["megatron"]\n'
        config.write_text(f"{spaces}[lint.flake8-tidy-imports.banned-api]\n{table}", encoding="utf-8")
        cold = [options.ruff, "check", "--config", str(config), "--select", "TID251", "--ignore-noqa"]
        cold += ["--output-format", "json", "--no-cache", "megatron"]
        found.append(
            Tool("ruff", cold, lambda s: [(f["filename"], f["location"]["row"]) for f in json.loads(s)])
        )
    words = "|".join(names)
    if options.semgrep:
        rule = scratch / "semgrep.yml"
        named = {"metavariable-regex": {"metavariable": "$F", "regex": f"^({words})$"}}
        either = [{"patterns": [{"pattern": f"{STATE}.$F"}, named]}, {"pattern": SHIM}]
        body = {"id": "groups", "languages": ["python"], "message": "global", "severity": "ERROR"}
        rule.write_text(json.dumps({"rules": [body | {"pattern-either": either}]}), encoding="utf-8")
        command = [options.semgrep, "scan", "--config", str(rule), "--metrics", "off", "--json", "--quiet"]
        command += ["--disable-version-check", "--no-git-ignore", "--max-target-bytes", "0", "megatron"]
        found.append(
            Tool("semgrep", command,
                 lambda s: [(f["path"], f["start"]["line"]) for f in json.loads(s)["results"]])
        )  # fmt: skip
    if options.ast_grep:
        last = f"^({words}|use_mpu_process_groups)$"
        rule = scratch / "ast-grep.yml"
        body = {"id": "groups", "language": "python", "rule": {"kind": "identifier", "regex": last}}
        rule.write_text(json.dumps(body), encoding="utf-8")
        command = [options.ast_grep, "scan", "--rule", str(rule), "--json=compact", "--no-ignore", "hidden"]
        command.append("megatron")
        found.append(
            Tool("ast-grep", command,
                 lambda s: [(f["file"], f["range"]["start"]["line"] + 1) for f in json.loads(s)])
        )  # fmt: skip
    return found


def places(tree: Path) -> tuple[Lines, Lines]:
    """Lines of imports, and lines of the files that define the state."""
    imports: Lines = set()
    for path in (tree / "megatron").rglob("*.py"):
        text = path.read_bytes()
        if b"import" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    imports.add((path.relative_to(tree).as_posix(), line))
    return imports, {(name, line) for name in DEFINITIONS for line in range(1, 20_000)}


def compare(tree: Path, scratch: Path, options: argparse.Namespace) -> None:
    """Ask everybody about a tree, and print what they found and took."""
    asked = tools(tree, scratch, options)
    for _ in range(options.repeats):
        for tool in asked:
            tool.run(tree)
    imports, definitions = places(tree)
    report = json.loads(
        subprocess.run(asked[1].command, cwd=tree, capture_output=True, text=True, check=False).stdout
    )
    found = [f for f in report["findings"] if f["code"] in (*OURS, "SW105")]
    direct = {(f["path"], f["line"]) for f in found if f["code"] in OURS}
    fallback = {(f["path"], f["line"]) for f in found if f["code"] in OURS and f["kind"] == "fallback"}
    base = next((tool.wall_s for tool in asked if tool.name == "ruff"), asked[0].wall_s)
    print(f"{report['num_files']} files, {len(direct)} lines with uses, {len(fallback)} of them fallbacks, "
          f"and {len(asked[0].lines - direct)} lines that call what hides one")  # fmt: skip
    print(f"{'tool':17} {'found':>6} {'missed':>7} {'else':>6} {'imports':>8} {'state':>6} "
          f"{'wall over ruff':>15} {'wall s':>7} {'CPU s':>6}")  # fmt: skip
    for tool in asked:
        lines = tool.lines - asked[0].lines if tool.name.startswith("shardweave") else tool.lines
        other = lines - asked[0].lines
        print(
            f"{tool.name:17} {len(tool.lines & direct):6} {len(direct - tool.lines):7} "
            f"{len(other - imports - definitions):6} {len((other & imports) - definitions):8} "
            f"{len(other & definitions):6} {tool.wall_s / base:15.1f} {tool.wall_s:7.2f} {tool.cpu_s:6.2f}",
            flush=True,
        )
    for tool in asked:
        for what, lines in (
            ("misses", direct - tool.lines),
            ("has besides", tool.lines - asked[0].lines - imports - definitions),
        ):
            if options.list and lines:
                print(f"{tool.name} {what}:")
                print("".join(f"  {path}:{line}\n" for path, line in sorted(lines)), end="")


def forms(scratch: Path, options: argparse.Namespace) -> None:
    """Which form of a read each tool sees, and what it takes for one."""
    tree = scratch / "forms"
    texts = TREE | {
        f"megatron/core/form_{number}.py": text for number, text in enumerate(FORMS.values())
    }  # fmt: skip
    for name, text in texts.items():
        place = tree / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    asked = [tool for tool in tools(tree, scratch, options) if tool.name != "shardweave, warm"]
    for tool in asked:
        tool.run(tree)
    imports, _ = places(tree)
    print(f"{'form':26} {'is one':>6} " + " ".join(f"{tool.name.partition(',')[0]:>10}" for tool in asked))
    for number, (form, text) in enumerate(FORMS.items()):
        path = f"megatron/core/form_{number}.py"
        wanted = "# read" in text
        words = []
        for tool in asked:
            lines = {line for file, line in tool.lines if file == path}
            seen = {line for line in lines if (path, line) not in imports}
            want = {n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# read")}
            if seen:
                words.append("yes" if seen == want else "wrongly" if not want else "partly")
            else:
                words.append("import" if lines else "-" if want else "")
        print(f"{form:26} {'yes' if wanted else '':>6} " + " ".join(f"{word:>10}" for word in words))


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    beside = Path(sys.executable).with_name
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="the forms alone")
    parser.add_argument("--tree", type=Path, help="a folder with megatron/core in it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--list", action="store_true", help="print the lines on which they differ")
    parser.add_argument("--ruff", default=shutil.which(str(beside("ruff"))) or shutil.which("ruff"))
    parser.add_argument("--semgrep", default=shutil.which("semgrep"))
    parser.add_argument("--ast-grep", default=shutil.which("ast-grep"))
    options = parser.parse_args(argv)
    os.environ["SEMGREP_SEND_METRICS"] = "off"
    os.environ["SEMGREP_ENABLE_VERSION_CHECK"] = "0"
    for name in ("ruff", "semgrep", "ast_grep"):
        if not getattr(options, name):
            print(f"without {name.replace('_', '-')}, which is not installed")
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        forms(scratch, options)
        if options.tiny:
            return
        if options.tree is None:
            spec = importlib.util.find_spec("megatron.core")
            if spec is None or spec.origin is None:
                raise SystemExit("install megatron-core, or name a --tree")
            options.tree = Path(spec.origin).parents[2]
        print()
        # A copy: some tools pass over folders like .venv, wherever they are told to look.
        tree = scratch / "tree"
        for path in options.tree.resolve().glob("megatron/core/**/*.py"):
            place = tree / path.relative_to(options.tree.resolve())
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        compare(tree, scratch, options)


if __name__ == "__main__":
    main(sys.argv[1:])
