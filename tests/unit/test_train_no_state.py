"""The runtime keeps nothing in its modules and never reads a group that it was not given."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import shardweave.train

FILES = sorted(Path(shardweave.train.__file__).parent.glob("**/*.py"))
_MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_DEFAULT = {
    "init_process_group",
    "new_group",
    "is_initialized",
    "get_rank",
    "get_world_size",
    "WORLD",
    "barrier",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_has_constants_only(path: Path) -> None:
    """What a module names is never rebound, and a table that it names is never written to."""
    tree = ast.parse(path.read_text())
    tables = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, _MUTABLE)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno}: global {node.names}"
        written = []
        if isinstance(node, ast.Assign | ast.Delete):
            written = [t.value for t in node.targets if isinstance(t, ast.Subscript | ast.Attribute)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript | ast.Attribute):
            written = [node.target.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changes = ("append", "extend", "update", "setdefault", "pop", "add", "clear", "remove", "insert")
            written = [node.func.value] if node.func.attr in changes else []
        for value in written:
            assert not (isinstance(value, ast.Name) and value.id in tables), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_module_reads_no_default_group(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        if name in _DEFAULT and isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            assert "dist" not in of and "torch" not in of, f"{path.name}:{node.lineno}: {of}.{name}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            taken = {alias.name for alias in node.names}
            assert not taken & _DEFAULT, f"{path.name}:{node.lineno}: {taken & _DEFAULT}"


def test_the_check_finds_state(tmp_path: Path) -> None:
    """Both checks can fail."""
    bad = tmp_path / "bad.py"
    bad.write_text("import torch.distributed as dist\nSEEN = {}\ndef f(x):\n    SEEN[x] = dist.get_rank()\n")
    with pytest.raises(AssertionError):
        test_a_module_has_constants_only(bad)
    with pytest.raises(AssertionError):
        test_a_module_reads_no_default_group(bad)
