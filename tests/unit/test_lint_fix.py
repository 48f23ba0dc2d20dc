"""Reads that are replaced: only where the group is at hand and set; the code does the same as before."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardweave.cli import main
from shardweave.lint.fix import Fixes, fix, write
from shardweave.lint.groups import check

HEAD = """
import torch
from torch.distributed import ProcessGroup
from megatron.core import parallel_state
"""
TP = "parallel_state.get_tensor_model_parallel_group()"


def fixed(tmp_path: Path, code: str, *, review: bool = False, head: str = HEAD) -> tuple[str, Fixes]:
    """The body of a file after the rewrite."""
    (tmp_path / "a.py").write_text(head + textwrap.dedent(code))
    report = check([tmp_path], root=tmp_path)
    fixes = fix(report.findings, root=tmp_path, review=review)
    after = fixes.files["a.py"].after.decode()
    assert after.startswith(head)
    return after.removeprefix(head), fixes


def reasons(fixes: Fixes) -> list[str]:
    return [why for _, why in fixes.left]


# --- what is safe -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("get_tensor_model_parallel_group()", "tp_group"),
        ("get_tensor_model_parallel_rank()", "tp_group.rank()"),
        ("get_tensor_model_parallel_world_size()", "tp_group.size()"),
        ("get_tensor_model_parallel_src_rank()", "torch.distributed.get_global_rank(tp_group, 0)"),
        ("get_context_parallel_rank()", "cp_group.rank()"),
        ("get_data_parallel_group()", "dp_group"),
        ("get_data_parallel_group(with_context_parallel=True)", "dp_cp_group"),
        ("get_data_parallel_group(True)", "dp_cp_group"),
        ("get_pipeline_model_parallel_rank()", "pp_group.rank()"),
        ("get_expert_model_parallel_world_size()", "ep_group.size()"),
    ],
)
def test_an_argument_of_the_function(before: str, after: str, tmp_path: Path) -> None:
    names = ("tp_group", "cp_group", "dp_group", "dp_cp_group", "pp_group", "ep_group")
    given = ", ".join(f"{name}: ProcessGroup" for name in names)
    code = f"def f(x, {given}):\n    # a remark\n    return  [ parallel_state.{before} ,x]  # kept\n"
    text, fixes = fixed(tmp_path, code)
    assert text == code.replace(f"parallel_state.{before}", after)
    assert fixes.left == ()


SAFE = {
    "field from a typed argument": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                super().__init__()
                self.tp_group = tp_group

            def f(self):
                return READ
        """,
    "field from an argument that is tested": """
        class A:
            def __init__(self, tp_group=None):
                if tp_group is None:
                    raise ValueError("tp_group")
                self.tp_group = tp_group

            def f(self):
                return READ
        """,
    "field of a collection that is tested": """
        class A:
            def __init__(self, pg_collection):
                assert pg_collection.tp is not None, "tp"
                self.tp_group = pg_collection.tp

            def f(self):
                return READ
        """,
    "field that is tested": """
        class A:
            def __init__(self, pg_collection):
                self.tp_group = pg_collection.tp
                assert self.tp_group is not None

            def f(self):
                return [READ for _ in range(2)][0]
        """,
    "later in __init__": """
        class A:
            def __init__(self, tp_group: "torch.distributed.ProcessGroup"):
                self._x = 1
                self.tensor_model_parallel_group = tp_group
                self.found = READ

            def f(self):
                return self.found
        """,
    "inner function": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                self.tp_group = tp_group

            def f(me):
                def inner():
                    return (lambda: READ)()
                return inner()
        """,
}


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Modules of the names that the code imports; the state can be taken away."""
    group, state = object(), ModuleType("megatron.core.parallel_state")
    state.get_tensor_model_parallel_group = lambda: group  # type: ignore[attr-defined]
    core, top = ModuleType("megatron.core"), ModuleType("megatron")
    core.parallel_state, top.core = state, core  # type: ignore[attr-defined]
    for module in (top, core, state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield SimpleNamespace(group=group, state=state)


def result(text: str, group: object) -> Any:
    names: dict[str, Any] = {}
    exec(compile(text, "a.py", "exec", dont_inherit=True), names)
    init = names["A"].__init__.__code__.co_varnames
    given = SimpleNamespace(tp=group) if "pg_collection" in init else group
    return names["A"](given).f()


@pytest.mark.parametrize("name", SAFE)
def test_what_the_class_holds(name: str, tmp_path: Path, stubs: SimpleNamespace) -> None:
    code = textwrap.dedent(SAFE[name]).replace("READ", TP)
    text, fixes = fixed(tmp_path, code)
    assert len(fixes.done) == 1
    assert TP not in text
    assert [len(line.split("#")) for line in text.splitlines()] == [
        len(line.split("#")) for line in code.splitlines()
    ]
    assert result(HEAD + code, stubs.group) is stubs.group
    del stubs.state.get_tensor_model_parallel_group
    assert result(HEAD + text, stubs.group) is stubs.group


def test_the_read_that_sets_the_field_stays_and_the_others_go(tmp_path: Path, stubs: SimpleNamespace) -> None:
    init = f"    def __init__(self, x):\n        self.tp_group = {TP}\n"
    code = f"class A:\n{init}\n    def f(self):\n        return {TP}\n"
    text, fixes = fixed(tmp_path, code)
    assert text == code[: code.rindex(TP)] + "self.tp_group\n"
    assert reasons(fixes) == ["no group is at hand"]
    assert result(HEAD + text, None) is stubs.group


# --- what is not --------------------------------------------------------------------------------

UNSAFE = {
    "no group is at hand": "def f(x):\n    return READ\n",
    "argument tp_group of f may be None": "def f(tp_group):\n    return READ\n",
    "argument tp_group of f may be None ": "def f(tp_group: ProcessGroup = None):\n    return READ\n",
    "argument tp_group of f may be None  ": "def f(tp_group: ProcessGroup | None):\n    return READ\n",
    "argument tp_group of f may be None   ": (
        "def f(tp_group):\n    x = READ\n    assert tp_group is not None\n    return x\n"
    ),
    "no group is at hand ": "def f(cp_group: ProcessGroup):\n    return READ\n",
    "no group is at hand  ": "def f(tp_group: ProcessGroup):\n    tp_group = 1\n    return READ\n",
    "no group is at hand   ": "def f(tp_group: ProcessGroup):\n    return lambda tp_group: READ\n",
    "no group is at hand    ": "def f(tp_group: ProcessGroup, x=READ):\n    return x\n",
    "no group is at hand     ": "d = print\n@d(READ)\ndef f(tp_group: ProcessGroup):\n    return 1\n",
    "self.tp_group may be None": """
        class A:
            def __init__(self, pg_collection):
                self.tp_group = pg_collection.tp
            def f(self):
                return READ
        """,
    "self.tp_group may be None ": """
        class A:
            def __init__(self, cp_group: ProcessGroup):
                self.tp_group = cp_group
            def f(self):
                return READ
        """,
    "self.tp_group may be None  ": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                tp_group = tp_group or None
                self.tp_group = tp_group
            def f(self):
                return READ
        """,
    "self.tp_group is set in several places": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                self.tp_group = tp_group
            def f(self):
                return READ
            def g(self):
                self.x, (self.tp_group, _) = 1, (None, 2)
        """,
    "self.tp_group is not set on every path of __init__": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                if not tp_group:
                    return
                self.tp_group = tp_group
            def f(self):
                return READ
        """,
    "self.tp_group is not set yet": """
        class A:
            def __init__(self, other, q: ProcessGroup):
                x = READ
                self.tp_group = q
        """,
    "self.tp_group is set after __init__ calls methods": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                self.f()
                self.tp_group = tp_group
            def f(self):
                return READ
        """,
    "no group is at hand      ": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                if tp_group:
                    self.tp_group = tp_group
            def f(self):
                return READ
        """,
    "no group is at hand       ": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                self.tp_group = tp_group
            @staticmethod
            def f(self):
                return READ
        """,
    "no group is at hand        ": """
        class A:
            def __init__(self, tp_group: ProcessGroup):
                self.tp_group = tp_group
            def f(self):
                self = 1
                return READ
        """,
}


@pytest.mark.parametrize("why", UNSAFE)
def test_what_may_be_unset_is_left(why: str, tmp_path: Path) -> None:
    code = textwrap.dedent(UNSAFE[why]).replace("READ", TP)
    text, fixes = fixed(tmp_path, code)
    assert text == code
    assert reasons(fixes) == [why.strip()]


@pytest.mark.parametrize(
    ("read", "why"),
    [
        ("parallel_state.get_data_parallel_group(with_context_parallel=x)", "what it gives is not known"),
        ("parallel_state.get_data_parallel_group(True, True)", "what it gives is not known"),
        (
            "parallel_state.get_tensor_model_parallel_group(check_initialized=False)",
            "what it gives is not known",
        ),
        ("parallel_state.get_tensor_model_parallel_group(*x)", "what it gives is not known"),
        ("parallel_state.get_embedding_group()", "what it gives is not known"),
    ],
)
def test_what_is_not_known_is_left(read: str, why: str, tmp_path: Path) -> None:
    given = "tp_group: ProcessGroup, dp_group: ProcessGroup, embd_group: ProcessGroup"
    _, fixes = fixed(tmp_path, f"def f(x, {given}):\n    return {read}\n")
    assert reasons(fixes) == [why]


def test_a_fallback_is_left(tmp_path: Path) -> None:
    code = f"def f(tp_group=None):\n    if tp_group is None:\n        tp_group = {TP}\n    return tp_group\n"
    for review in (False, True):
        text, fixes = fixed(tmp_path, code, review=review)
        assert text == code
        assert reasons(fixes) == ["a fallback: callers may do without the group"]


def test_a_source_rank_needs_torch(tmp_path: Path) -> None:
    read = "parallel_state.get_tensor_model_parallel_src_rank()"
    code = f"def f(tp_group: ProcessGroup):\n    return {read}\n"
    for head, says in (
        ("import torch.distributed as dist\n", "dist.get_global_rank(tp_group, 0)"),
        ("from torch import distributed\n", "distributed.get_global_rank(tp_group, 0)"),
        ("import torch as t\n", "t.distributed.get_global_rank(tp_group, 0)"),
    ):
        text, _ = fixed(tmp_path, code, head=f"{head}from megatron.core import parallel_state\n")
        assert says in text
    for head in ("", "import torch\ntorch = 1\n", "from other import torch\n"):
        text, fixes = fixed(tmp_path, code, head=f"{head}from megatron.core import parallel_state\n")
        assert text == code
        assert reasons(fixes) == ["torch.distributed is not imported by the module"]


# --- patches ------------------------------------------------------------------------------------


def test_a_patch_adds_parameters_that_are_given_by_name(tmp_path: Path) -> None:
    code = f"""
def plain(x, y=1, *args, **kwargs):
    return {TP}


def long(
    x,
    y=1,
):
    return {TP}, {TP}.size()


class A(Base):
    '''A docstring.'''

    def __init__(self, x):
        '''Another.'''
        super().__init__(x)
        self.x = x

    def f(self):
        return {TP}
"""
    text, fixes = fixed(tmp_path, code, review=True)
    kind = "torch.distributed.ProcessGroup"
    assert (
        text
        == f"""
def plain(x, y=1, *args, tp_group: {kind}, **kwargs):
    return tp_group


def long(
    x,
    y=1,
    *,
    tp_group: {kind},
):
    return tp_group, tp_group.size()


class A(Base):
    '''A docstring.'''

    def __init__(self, x, *, tp_group: {kind}):
        '''Another.'''
        super().__init__(x)
        self.tp_group = tp_group
        self.x = x

    def f(self):
        return self.tp_group
"""
    )
    assert fixes.left == ()
    assert fixes.files["a.py"].remarks == (
        "callers of A have to give tp_group",
        "callers of long have to give tp_group",
        "callers of plain have to give tp_group",
    )


def test_a_patch_takes_what_is_there_before_it_adds(tmp_path: Path) -> None:
    code = f"""
class A:
    def __init__(self, pg_collection=None):
        self.pg_collection = pg_collection

    def f(self):
        return {TP}


def g(x, pg_collection=None):
    return {TP}


def h(tp_group=None):
    return {TP}
"""
    text, fixes = fixed(tmp_path, code, review=True)
    found = [line.strip() for line in text.splitlines() if "return" in line]
    assert found == ["return self.pg_collection.tp", "return pg_collection.tp", "return tp_group"]
    assert all("never None" in remark for remark in fixes.files["a.py"].remarks)


def test_a_patch_takes_the_collection_that_a_base_of_the_file_holds(tmp_path: Path) -> None:
    code = f"""
class Base:
    def __init__(self, pg_collection=None):
        self.pg_collection = pg_collection


class Middle(Base): ...


class A(Middle):
    def __init__(self, pg_collection=None):
        super().__init__(pg_collection)

    def f(self):
        return {TP}


class B(Base):
    def f(self):
        return {TP}


class Circle(Circle, Other):
    def __init__(self):
        pass

    def f(self):
        return {TP}
"""
    text, fixes = fixed(tmp_path, code, review=True)
    found = [line.strip() for line in text.splitlines() if "return" in line]
    assert found == ["return self.pg_collection.tp", "return self.pg_collection.tp", "return self.tp_group"]
    assert fixes.files["a.py"].remarks == (
        "callers of Circle have to give tp_group",
        "self.pg_collection.tp in A has to be a group, and never None",
        "self.pg_collection.tp in B has to be a group, and never None",
    )
    assert fixed(tmp_path, code)[1].done == ()


@pytest.mark.parametrize(
    ("signature", "after"),
    [
        ("def f(a, b=1):", "def f(a, b=1, *, tp_group: torch.distributed.ProcessGroup):"),
        (
            "def f(\n    a, b=1\n):",
            "def f(\n    a, b=1, *, tp_group: torch.distributed.ProcessGroup\n):",
        ),
        (
            "def f(\n    a,\n    b=1,  # why\n):",
            "def f(\n    a,\n    b=1,\n    *,\n    tp_group: torch.distributed.ProcessGroup,  # why\n):",
        ),
        ("def f(\n    *args\n):", "def f(\n    *args, tp_group: torch.distributed.ProcessGroup\n):"),
        (
            "def f(\n    a, **more\n):",
            "def f(\n    a, *, tp_group: torch.distributed.ProcessGroup, **more\n):",
        ),
    ],
)
def test_a_new_parameter_leaves_the_layout(signature: str, after: str, tmp_path: Path) -> None:
    text, _ = fixed(tmp_path, f"import torch\n{signature}\n    return {TP}\n", review=True)
    assert after in text


def test_signatures_that_others_decide_stay(tmp_path: Path) -> None:
    code = f"""
class A:
    def __call__(self):
        return {TP}

    @property
    def p(self):
        return {TP}


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return {TP}


x = {TP}
"""
    text, fixes = fixed(tmp_path, code, review=True)
    assert text == code
    assert len(fixes.left) == 4


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_git_takes_the_patch(end: str, tmp_path: Path) -> None:
    lines = [*HEAD.strip().splitlines(), "", "def f(x):", "    # \u00e9\u4e2d", f"    return {TP}"]
    newline = end or "\n"
    before = (newline.join(lines) + end).encode()
    (tmp_path / "a.py").write_bytes(before)
    fixes = fix(check([tmp_path], root=tmp_path).findings, root=tmp_path, review=True)
    assert "# a.py: callers of f have to give tp_group\n" in fixes.patch()
    assert (tmp_path / "a.py").read_bytes() == before, "a patch changes nothing"
    subprocess.run(
        ["git", "apply", "-"],
        input=fixes.patch().encode(),
        cwd=tmp_path,
        check=True,
        timeout=60,
        capture_output=True,
    )
    assert (tmp_path / "a.py").read_bytes() == fixes.files["a.py"].after != before


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"{HEAD}\n\ndef f(tp_group: ProcessGroup):\n    return {TP}\n\n\ndef g(x):\n    return {TP}\n"
    Path("a.py").write_text(code)
    assert main(["lint", "groups", "a.py", "--no-cache", "--patch"]) == 0
    out = capsys.readouterr().out
    assert "+def g(x, *, tp_group: torch.distributed.ProcessGroup):" in out
    assert Path("a.py").read_text() == code
    assert main(["lint", "groups", "a.py", "--no-cache", "--fix"]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "1 found in 1 file"
    assert "1 read replaced in 1 file, 1 left" in err
    assert Path("a.py").read_text() == code.replace(TP, "tp_group", 1)
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.delitem(sys.modules, "shardweave.lint.rewrite")
    assert main(["lint", "groups", "a.py", "--no-cache", "--fix"]) == 2
    assert "shardweave[lint]" in capsys.readouterr().err


# --- files --------------------------------------------------------------------------------------


def test_written_files_are_whole_keep_their_mode_and_need_no_second_run(tmp_path: Path) -> None:
    text, fixes = fixed(tmp_path, f"def f(tp_group: ProcessGroup):\n    return {TP}\n")
    (tmp_path / "a.py").chmod(0o750)
    assert write(fixes, root=tmp_path) == 1
    assert (tmp_path / "a.py").read_text() == HEAD + text
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o750
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
    assert check([tmp_path], root=tmp_path).findings == ()
    assert write(fix((), root=tmp_path), root=tmp_path) == 0


def test_encodings_and_line_ends_stay(tmp_path: Path) -> None:
    lines = (
        "# -*- coding: latin-1 -*-",
        "from megatron.core import parallel_state",
        "def f(tp_group: ProcessGroup):",
        "    # \xe9",
        f"    return {TP}",
        "",
    )
    code = "\r\n".join(lines)
    (tmp_path / "a.py").write_bytes(code.encode("latin-1"))
    fixes = fix(check([tmp_path], root=tmp_path).findings, root=tmp_path)
    assert fixes.files["a.py"].after == code.replace(TP, "tp_group").encode("latin-1")
