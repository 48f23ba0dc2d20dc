"""A baseline that can only shrink: moved lines, renamed files, parts of a tree, merges."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.cli import main
from shardweave.errors import ExistsError, FormatError, MissingFileError
from shardweave.lint import baseline
from shardweave.lint.finding import Absent, Finding

Run = Callable[..., tuple[int, str, str]]


def finding(path: str, line: int, name: str, qualname: str = "f", code: str = "SW101") -> Finding:
    return Finding(path, line, 1, line, 9, code, "m", qualname, name, "unconditional")


def there(*paths: str) -> Callable[[str], bool]:
    return lambda path: path in paths


def test_as_many_as_before_are_known_wherever_their_lines_are() -> None:
    before = [finding("a.py", 3, "get_tp"), finding("a.py", 9, "get_tp"), finding("a.py", 5, "get_dp", "C.m")]
    allowed = {("a.py", "f", "SW101", "get_tp"): 2, ("a.py", "C.m", "SW101", "get_dp"): 1}
    assert baseline.judge(sorted(before), allowed).known == {0, 1, 2}
    moved = sorted(finding("a.py", f.line + 100, f.name, f.qualname) for f in before)
    judged = baseline.judge(moved, allowed)
    assert (judged.known, judged.absent, dict(judged.moved)) == ({0, 1, 2}, (), {})


def test_one_more_of_the_same_is_new_and_one_fewer_is_slack() -> None:
    allowed = {("a.py", "f", "SW101", "get_tp"): 2}
    three = [finding("a.py", line, "get_tp") for line in (1, 2, 3)]
    assert baseline.judge(three, allowed).known == {0, 1}
    judged = baseline.judge(three[:1], allowed)
    assert judged.absent == (Absent("a.py", "f", "SW101", "get_tp", 1),)
    assert baseline.shrunk(three[:1], allowed, judged) == {("a.py", "f", "SW101", "get_tp"): 1}
    assert baseline.shrunk(three, allowed, baseline.judge(three, allowed)) == allowed  # nothing is added


@pytest.mark.parametrize("other", [("b.py", "f", "get_tp"), ("a.py", "g", "get_tp"), ("a.py", "f", "get_dp")])
def test_another_path_function_or_name_is_new(other: tuple[str, str, str]) -> None:
    path, qualname, name = other
    allowed = {("a.py", "f", "SW101", "get_tp"): 1}
    judged = baseline.judge([finding(path, 1, name, qualname)], allowed, is_there=there("a.py", "b.py"))
    assert judged.known == frozenset()
    assert len(judged.absent) == 1


def test_a_renamed_file_keeps_its_entries_and_gets_its_new_name() -> None:
    names = ("get_tp", "get_dp", "get_pp")
    allowed = {("old.py", "f", "SW101", name): 1 for name in names}
    now = [finding("new.py", line, name) for line, name in enumerate(names[:2], 1)] + [
        finding("new.py", 9, "get_ep")
    ]
    judged = baseline.judge(now, allowed, is_there=there("new.py"))
    assert judged.known == {0, 1} and judged.moved == {"old.py": "new.py"}
    assert judged.absent == (Absent("old.py", "f", "SW101", "get_pp", 1),)
    assert baseline.shrunk(now, allowed, judged) == {("new.py", "f", "SW101", n): 1 for n in names[:2]}
    # A copy is no renaming: the old file is still there.
    assert baseline.judge(now, allowed, is_there=there("new.py", "old.py")).known == frozenset()
    # Nor is a file that shares less than half.
    few = [finding("new.py", 1, "get_tp"), finding("new.py", 2, "get_ep")]
    assert baseline.judge(few, allowed, is_there=there("new.py")).known == frozenset()


def test_two_files_never_take_the_entries_of_one() -> None:
    allowed = {("old.py", "f", "SW101", "get_tp"): 2}
    now = [finding(path, line, "get_tp") for path in ("x.py", "y.py") for line in (1, 2)]
    judged = baseline.judge(now, allowed, is_there=there("x.py", "y.py"))
    assert judged.moved == {"old.py": "x.py"} and judged.known == {0, 1}


def test_what_a_run_does_not_look_at_is_not_missed_and_stays() -> None:
    allowed = {("a/x.py", "f", "SW101", "get_tp"): 1, ("b/y.py", "f", "SW101", "get_tp"): 1}
    judged = baseline.judge([], allowed, covers=lambda path: path.startswith("a/"))
    assert judged.absent == (Absent("a/x.py", "f", "SW101", "get_tp", 1),)
    assert baseline.shrunk([], allowed, judged) == {("b/y.py", "f", "SW101", "get_tp"): 1}


def test_files_that_are_no_python_are_never_allowed(tmp_path: Path) -> None:
    broken = finding("a.py", 1, "x", code="SW001")
    assert baseline.judge([broken], {broken.key: 1}).known == frozenset()
    assert baseline.begin(tmp_path / "b.txt", [broken]) == {}


KEYS = st.tuples(
    st.sampled_from(["a.py", "b/c d.py", "e::f.py", "ü.py"])
    | st.text(min_size=1)
    | st.binary(min_size=1).map(os.fsdecode),
    st.sampled_from(["<module>", "f", "C.m"]),
    st.sampled_from(["SW101", "SW201"]),
    st.sampled_from(["get_tp", "get_tp().rank"]),
)


@given(st.dictionaries(KEYS, st.integers(1, 1000)))
def test_a_file_holds_what_was_written_a_sorted_line_an_entry(
    tmp_path_factory: Any, entries: dict[baseline.Key, int]
) -> None:
    path = tmp_path_factory.mktemp("b") / "baseline.txt"
    baseline.save(path, entries)
    assert baseline.load(path) == entries
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    assert len(lines) == len(entries)


@given(st.dictionaries(KEYS, st.integers(1, 5)), st.lists(KEYS, max_size=30))
def test_a_number_never_rises(allowed: dict[baseline.Key, int], now: list[baseline.Key]) -> None:
    found = sorted(finding(path, n, name, qual, code) for n, (path, qual, code, name) in enumerate(now, 1))
    judged = baseline.judge(found, allowed)
    after = baseline.shrunk(found, allowed, judged)
    assert sum(after.values()) <= sum(allowed.values())
    assert sum(after.values()) == len(judged.known)
    again = baseline.judge(found, after)
    assert len(again.known) == len(judged.known) and again.absent == ()


def test_odd_names_of_files_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    names = [os.fsdecode(b"a/\xff\n.py"), "#b.py", " c.py", "d\\x41.py", "e\u2028.py", "ü.py"]
    entries = {(name, "f", "SW101", "get_tp"): 1 for name in names}
    baseline.save(path, entries)
    words = {line.partition("::")[0] for line in path.read_text(encoding="utf-8").splitlines()[1:]}
    assert words == {
        r"a/\xff\u00000a.py", r"\u000023b.py", r"\u000020c.py", r"d\u00005cx41.py", r"e\u002028.py", "ü.py",
    }  # fmt: skip
    assert baseline.load(path) == entries


def test_a_line_that_is_twice_after_a_merge_counts_once_and_the_less(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("# x\n\na.py::f SW101 get_tp 3\na.py::f SW101 get_tp 2\n")
    assert baseline.load(path) == {("a.py", "f", "SW101", "get_tp"): 2}


@pytest.mark.parametrize(
    "line",
    [
        "<<<<<<< HEAD",
        "a.py::f SW101 get_tp",
        "a.py::f SW101 get_tp 0",
        "a.py f SW101 get_tp 1",
        "::f SW101 x 1",
    ],
)
def test_a_line_that_is_none_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "b.txt"
    path.write_text(f"# x\na.py::f SW101 get_tp 3\n{line}\n")
    with pytest.raises(FormatError, match="line 3"):
        baseline.load(path)


def test_a_baseline_begins_once(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    with pytest.raises(MissingFileError, match="--begin"):
        baseline.load(path)
    assert baseline.begin(path, [finding("a.py", 1, "get_tp")] * 2) == {("a.py", "f", "SW101", "get_tp"): 2}
    with pytest.raises(ExistsError):
        baseline.begin(path, [])


# --- as a command ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in a folder with the file code/a.py, which reads a group twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    write(tmp_path, "a", 2)

    def go(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["lint", "groups", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return go


def write(folder: Path, name: str, times: int) -> None:
    text = "from megatron.core import parallel_state as ps\n\n\ndef f():\n    return 1\n"
    text += "    ps.get_tensor_model_parallel_rank()\n" * times
    (folder / "code" / f"{name}.py").write_text(text)


def test_a_life_of_a_baseline(run: Run, tmp_path: Path) -> None:
    assert run("code")[0] == 1
    assert run("code", "--baseline", "allowed.txt")[0] == 1  # it is not there
    assert run("code", "--baseline", "allowed.txt", "--begin")[0] == 0
    entry = "code/a.py::f SW101 get_tensor_model_parallel_rank"
    assert f"{entry} 2\n" in (tmp_path / "allowed.txt").read_text()
    assert run("code", "--baseline", "allowed.txt")[0] == 0
    write(tmp_path, "a", 3)
    code, out, _ = run("code", "--baseline", "allowed.txt", "--update")
    assert code == 1 and "code/a.py:8:5 SW101" in out and "code/a.py:7" not in out
    assert f"{entry} 2\n" in (tmp_path / "allowed.txt").read_text()
    write(tmp_path, "a", 1)
    code, out, _ = run("code", "--baseline", "allowed.txt")
    assert code == 0 and "1 fewer than the baseline allows" in out
    assert run("code", "--baseline", "allowed.txt", "--fail-on-slack")[0] == 1
    assert run("code", "--baseline", "allowed.txt", "--update", "--fail-on-slack")[0] == 0
    assert f"{entry} 1\n" in (tmp_path / "allowed.txt").read_text()
    (tmp_path / "code" / "a.py").rename(tmp_path / "code" / "b.py")
    assert run("code", "--baseline", "allowed.txt", "--fail-on-slack")[0] == 0
    assert run("code", "--baseline", "allowed.txt", "--update")[0] == 0
    assert "code/b.py::f" in (tmp_path / "allowed.txt").read_text()
    write(tmp_path, "c", 0)
    assert run("code/c.py", "--baseline", "allowed.txt", "--fail-on-slack")[0] == 0  # a part of the tree
    (tmp_path / "code" / "b.py").unlink()
    assert run("code", "--baseline", "allowed.txt", "--fail-on-slack")[0] == 1
    assert run("code", "--baseline", "allowed.txt", "--update")[0] == 0
    assert len((tmp_path / "allowed.txt").read_text().splitlines()) == 1


def test_a_baseline_of_a_file_whose_name_is_no_text(run: Run, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff\n.py"
    with open(odd, "w") as file:  # noqa: PTH123 - a path of bytes
        file.write("from megatron.core.parallel_state import get_tensor_model_parallel_group as g\ng()\n")
    for options in (["--begin"], [], ["--update"]):
        assert run(".", "--baseline", "b.txt", *options)[0] == 0
    os.rename(odd, os.fsencode(tmp_path) + b"/\xfe.py")  # noqa: PTH104 - paths of bytes
    assert run(".", "--baseline", "b.txt", "--update")[0] == 0
    assert r"\xfe.py::<module> SW101" in (tmp_path / "b.txt").read_text(encoding="utf-8")
    for form in ("json", "sarif", "github", "gitlab", "markdown", "junit", "stats", "text"):
        code, text, _ = run(".", "--format", form)
        assert code == 1 and text.encode("utf-8")


def test_settings_name_paths_and_the_baseline(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.shardweave.lint]\npaths = ['code']\nbaseline = 'allowed.txt'\ncache = 'kept'\n"
    )
    assert run("--begin")[0] == 0
    assert run()[0] == 0
    assert (tmp_path / "kept" / "groups.json").exists()


def test_wrong_usage(run: Run) -> None:
    assert run()[0] == 2
    assert run("code", "--begin")[0] == 2
    assert run("code", "--format", "yaml")[0] == 2
    assert run("code", "--preset", "megatrn")[0] == 2
    assert run("code", "--select", "X")[0] == 2
