"""Constructions as they happen, in every process of a command, and joined with what the code says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from shardweave.cli import main
from shardweave.lint.constructors import inventory
from shardweave.lint.inventory_report import as_json, as_text
from shardweave.lint.recorded import join, read_recording

FILES = {
    "net/__init__.py": "",
    "net/layers.py": """
        class Attention:
            def __init__(self, config, group=None):
                self.group = group
        class Own(Attention):
            def __init__(self, config, group=None):
                super().__init__(config, group=group or object())
        """,
    "net/build.py": """
        from dataclasses import dataclass
        @dataclass
        class Spec:
            module: type
        def build(spec, *args, **kwargs):
            return spec.module(*args, **kwargs)
        """,
    "test_net.py": """
        import os
        from net.build import Spec, build
        from net.layers import Attention, Own
        def test_direct():
            for _ in range(3):
                Attention(
                    1,
                    2,
                )
            Attention(1)
            Attention(1, group=None)
        def test_own():
            Own(1)
        def test_spec():
            build(Spec(module=Attention), 1, group=5)
        def test_fork():
            child = os.fork()
            if not child:
                Attention(1, 7)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        def never():
            Attention(1, 2)
        """,
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(dedent(text).lstrip(), encoding="utf-8")
    return tmp_path


def run(tree: Path, *command: str, cls: str = "net.layers:Attention") -> tuple[int, str, dict[str, Any]]:
    out = tree / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "shardweave.lint.record", "--class", cls, "--arg", "group",
         "--out", str(out), "--", *command],
        cwd=tree, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else {}


PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_net.py")


def test_a_run_of_pytest_is_joined_with_the_code(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said, held = run(tree, *PYTEST)
    assert code == 0, said
    assert "4 passed" in said and "group of net.layers:Attention: given 6, none 1, missing 1" in said
    assert held["num_processes"] == 1 and held["problems"] == []
    made = inventory("net.layers.Attention", "group", [tree], root=tree)
    joined = join(made, read_recording(tree / "seen.json", inventory=made))
    seen = {(f.path, f.line, f.kind): dict(joined.seen[n]) for n, f in enumerate(made.findings)}
    assert seen == {
        ("net/layers.py", 6, "super-keyword"): {},
        ("test_net.py", 6, "positional"): {"given": 3},
        ("test_net.py", 10, "missing"): {"missing": 1},
        ("test_net.py", 11, "none"): {"none": 1},
        ("test_net.py", 13, "missing"): {"given": 1},
        ("test_net.py", 15, "spec"): {"given": 1},
        ("test_net.py", 19, "positional"): {"given": 1},
        ("test_net.py", 23, "positional"): {},
    }
    # Own gives a group where its caller does not.
    assert [made.findings[n].line for n in joined.surprises(made)] == [13]
    assert [(c.state, c.frames[0][2]) for c in joined.elsewhere] == [("given", "build")]
    text = as_text(made, joined, every=True)
    assert "seen in the recorded run: given 1: given on the way" in text
    assert "not seen in the recorded run" in text
    assert [f["line"] for f in json.loads(as_json(made, joined))["findings"] if f["given_on_the_way"]] == [13]
    asked = ["lint", "constructors", "net.layers.Attention", str(tree), "--arg", "group", "--no-cache"]
    assert main([*asked, "--recorded", str(tree / "seen.json")]) == 0
    assert "constructed net.layers.Attention 1 times" in capsys.readouterr().out
    # A recording of something else is no evidence.
    (tree / "other.json").write_text(json.dumps({**held, "argument": "config"}))
    assert main([*asked, "--recorded", str(tree / "other.json")]) == 2
    (tree / "other.json").write_text("[]")
    assert main([*asked, "--recorded", str(tree / "other.json")]) == 2
    assert "a recording is what" in capsys.readouterr().err


def test_the_code_of_the_command_is_kept(tree: Path) -> None:
    script = "from net.layers import Attention; Attention(1); raise SystemExit(7)"
    code, _, held = run(tree, sys.executable, "-c", script)
    assert code == 7 and held["exit_code"] == 7
    assert [(row["state"], row["count"]) for row in held["constructions"]] == [("missing", 1)]


def test_spawned_and_killed_processes_have_spoken(tree: Path) -> None:
    (tree / "many.py").write_text(
        dedent("""
        import multiprocessing, os, signal
        from net.layers import Attention
        def work(n):
            for _ in range(n):
                Attention(1, n)
            if n == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        if __name__ == "__main__":
            for kind in ("spawn", "fork"):
                for n in (2, 3):
                    process = multiprocessing.get_context(kind).Process(target=work, args=(n,))
                    process.start()
                    process.join(60)
        """)
    )
    code, said, held = run(tree, sys.executable, "many.py")
    assert code == 0, said
    # Two that ended count all of theirs, two that were killed their first.
    assert sum(row["count"] for row in held["constructions"]) == 2 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        ("net.layers:Nobody", "net.layers has no class Nobody"),
        ("net.build:Spec", "does not take group"),
        ("net.absent:Attention", "no process of the command loaded net.absent:Attention"),
    ],
)
def test_what_is_not_recorded_is_said(tree: Path, cls: str, said: str) -> None:
    code, output, held = run(tree, sys.executable, "-c", "import net.layers, net.build", cls=cls)
    assert code == 2 and said in output and held["constructions"] == []


def test_an_inherited_init_stays_cooperative(tree: Path) -> None:
    (tree / "mix.py").write_text(
        dedent("""
        said = []
        class Base:
            def __init__(self, group=None):
                said.append("base")
        class Plain(Base):
            pass
        class Mixin(Base):
            def __init__(self, group=None):
                said.append("mixin")
                super().__init__(group)
        class Both(Plain, Mixin):
            pass
        """)
    )
    script = "import mix; mix.Both(1); print(mix.said)"
    code, said, held = run(tree, sys.executable, "-c", script, cls="mix:Plain")
    assert code == 0 and "['mixin', 'base']" in said
    assert [(row["class"], row["state"]) for row in held["constructions"]] == [("mix:Both", "given")]


def test_wrong_usage_is_2(tree: Path) -> None:
    for words in (["--class", "a", "--arg", "x", "--out", "f", "--", "true"],
                  ["--class", "a:B", "--arg", "x", "--out", "f"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "shardweave.lint.record", *words],
            cwd=tree, capture_output=True, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, sys.path)])},
        )  # fmt: skip
        assert done.returncode == 2
