"""Two revisions of git compared: what is new, what is gone, and a working tree that stays as it was."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shardweave.cli import main
from shardweave.errors import ConfigError, MissingFileError, MissingPackageError, PathError
from shardweave.lint.finding import Absent, Report
from shardweave.lint.report import FORMATS
from shardweave.lint.revisions import compare

Commit = Callable[..., str]

HEAD = "from megatron.core import parallel_state as ps\n\n\n"
GET = "get_tensor_model_parallel_group"
RANK = "get_data_parallel_rank"


def function(name: str, *reads: str) -> str:
    return f"def {name}():\n" + "".join(f"    ps.{read}()\n" for read in reads) + "    return 1\n\n\n"


def git(folder: Path, *arguments: str, given: bytes = b"") -> bytes:
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, input=given, check=True, stdout=subprocess.PIPE
    ).stdout


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Writes files of a repository, None for one that goes, and commits them; the name of the commit."""
    git(tmp_path, "init", "--quiet", "--initial-branch=main")

    def run(**files: str | None) -> str:
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_text(text, encoding="utf-8")
        git(tmp_path, "add", "--all")
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "x")
        return git(tmp_path, "rev-parse", "HEAD").decode().strip()

    return run


def said(report: Report) -> list[tuple[str, str, str]]:
    return [(finding.path, finding.qualname, finding.name) for finding in report.new]


def test_what_is_new_and_what_is_gone_wherever_lines_are(tmp_path: Path, commit: Commit) -> None:
    base = commit(
        code__a=HEAD + function("f", GET, GET) + function("g", RANK), code__same=HEAD + "ps." + GET + "()"
    )
    head = commit(
        code__a=HEAD + "# moved\n\n\n" + function("g", RANK, RANK) + function("f", GET) + function("h", GET)
    )
    report = compare(f"{base}..{head}", [Path("code")], root=tmp_path)
    assert said(report) == [("code/a.py", "g", RANK), ("code/a.py", "h", GET)]
    assert [finding.line for finding in report.new] == [9, 19]
    assert report.absent == (Absent("code/a.py", "f", "SW101", GET, 1),)
    assert (len(report.findings), len(report.known), report.revision) == (5, 3, base)
    back = compare(f"{head}..{base}", [Path("code")], root=tmp_path)
    assert said(back) == [("code/a.py", "f", GET)]
    assert back.absent == (
        Absent("code/a.py", "g", "SW101", RANK, 1),
        Absent("code/a.py", "h", "SW101", GET, 1),
    )
    assert compare(f"{head}..{head}", [Path("code")], root=tmp_path).new == ()


def test_the_working_tree_is_neither_read_nor_touched(tmp_path: Path, commit: Commit) -> None:
    commit(code__a=HEAD + function("f", GET))
    commit(code__a=HEAD + function("f", RANK))
    (tmp_path / "code" / "a.py").write_text("def f(:  # " + GET)
    (tmp_path / "code" / "b.py").write_text(HEAD + function("f", GET))
    git(tmp_path, "add", "code/b.py")
    before = git(tmp_path, "status", "--porcelain=v2", "--branch")
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    report = compare("HEAD~1..", [Path("code")], root=tmp_path)
    assert said(report) == [("code/a.py", "f", RANK)]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == stamps
    assert git(tmp_path, "status", "--porcelain=v2", "--branch") == before


def test_three_dots_compare_with_where_the_branch_began(tmp_path: Path, commit: Commit) -> None:
    began = commit(a=HEAD + function("f", GET))
    git(tmp_path, "checkout", "--quiet", "-b", "topic")
    commit(b=HEAD + function("f", RANK))
    git(tmp_path, "checkout", "--quiet", "main")
    commit(a=HEAD)
    assert said(compare("main..topic", [Path()], root=tmp_path)) == [("a.py", "f", GET), ("b.py", "f", RANK)]
    parted = compare("main...topic", [Path()], root=tmp_path)
    assert (said(parted), parted.revision) == ([("b.py", "f", RANK)], began[:12])


def test_names_are_followed_in_each_revision_as_it_was(tmp_path: Path, commit: Commit) -> None:
    """The file that reads is the same in both: what the other hands on is not."""
    use = "from .tools import get\n\n\ndef f():\n    return get()\n"
    base = commit(src__p____init__="", src__p__use=use, src__p__tools="def get():\n    return 1\n")
    tools = f"from megatron.core.parallel_state import {GET} as get\n"
    head = commit(src__p__tools=tools)
    # Only one file is named: the package around it is known all the same, the file beside it is not asked.
    assert said(compare(f"{base}..{head}", [Path("src/p")], root=tmp_path)) == [("src/p/use.py", "f", GET)]
    assert compare(f"{base}..{head}", [Path("src/p/use.py")], root=tmp_path).new == ()
    inside = compare(f"{base}..{head}", [Path()], root=tmp_path / "src" / "p")
    assert said(inside) == [("use.py", "f", GET)]


def test_files_that_come_go_and_are_renamed(tmp_path: Path, commit: Commit) -> None:
    base = commit(old__a=HEAD + function("f", GET, RANK), gone__b=HEAD + function("f", GET), none__c="")
    head = commit(
        old__a=None, new__a=HEAD + function("f", GET, RANK), gone__b=None, fresh__d=HEAD + function("h", RANK)
    )
    report = compare(f"{base}..{head}", [Path()], root=tmp_path)
    assert said(report) == [("fresh/d.py", "h", RANK)]
    assert report.absent == (Absent("gone/b.py", "f", "SW101", GET, 1),)
    # A path need be in one of the two only.
    assert compare(f"{base}..{head}", [Path("gone")], root=tmp_path).absent == report.absent
    assert said(compare(f"{base}..{head}", [tmp_path / "fresh"], root=tmp_path)) == [
        ("fresh/d.py", "h", RANK)
    ]


def test_a_file_that_is_no_python_in_both_is_nothing_new(tmp_path: Path, commit: Commit) -> None:
    base = commit(a=f"def f(:  # {GET}\n")
    head = commit(b="")
    assert compare(f"{base}..{head}", [Path()], root=tmp_path).new == ()
    worse = commit(c=f"def f(:  # {GET}\n")
    assert [f.code for f in compare(f"{base}..{worse}", [Path()], root=tmp_path).new] == ["SW001"]


def test_attributes_of_archives_hide_nothing(tmp_path: Path, commit: Commit) -> None:
    (tmp_path / ".gitattributes").write_text("*.py export-ignore\n")
    base = commit(a="")
    head = commit(a=HEAD + function("f", GET))
    assert said(compare(f"{base}..{head}", [Path()], root=tmp_path)) == [("a.py", "f", GET)]


def test_odd_names_and_links(tmp_path: Path, commit: Commit) -> None:
    base = commit(a="")
    for name in ("a b\n.py", "ä.py", os.fsdecode(b"\xff.py")):
        (tmp_path / name).write_text(HEAD + function("f", GET))
    (tmp_path / "link.py").symlink_to("ä.py")
    head = commit()
    found = compare(f"{base}..{head}", [Path()], root=tmp_path)
    assert sorted(finding.path for finding in found.new) == sorted(
        ["a b\n.py", "ä.py", os.fsdecode(b"\xff.py")]
    )


def test_a_path_that_leads_out_of_the_repository_is_refused(tmp_path: Path, commit: Commit) -> None:
    base = commit(a="")
    blob = git(tmp_path, "hash-object", "-w", "--stdin", given=b"x = 1\n").strip()
    inner = git(tmp_path, "mktree", given=b"100644 blob " + blob + b"\tevil.py\n").strip()
    outer = git(tmp_path, "mktree", given=b"040000 tree " + inner + b"\t..\n").strip().decode()
    made = git(tmp_path, "commit-tree", outer, "-m", "x").decode().strip()
    with pytest.raises(PathError):
        compare(f"{base}..{made}", [Path()], root=tmp_path)


@pytest.mark.parametrize("text", ["", "main", "..", "...", "a..b..c", "a....b"])
def test_what_is_no_pair_is_refused(tmp_path: Path, commit: Commit, text: str) -> None:
    commit(a="")
    with pytest.raises(ConfigError, match=r"BASE\.\.HEAD"):
        compare(text, [Path()], root=tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "--help", "--output=x", "main:a.py", "main^{tree}"])
def test_a_revision_that_git_does_not_know_is_named(tmp_path: Path, commit: Commit, name: str) -> None:
    commit(a="")
    with pytest.raises(ConfigError) as caught:
        compare(f"{name}..main", [Path()], root=tmp_path)
    assert f"git knows no revision {name!r}" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "a.py"]


def test_no_repository_no_ancestor_no_path_no_git(
    tmp_path: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = commit(a="")
    with pytest.raises(MissingFileError, match="nowhere"):
        compare("HEAD..HEAD", [Path("nowhere")], root=tmp_path)
    with pytest.raises(ConfigError, match="below the folder of the run"):
        compare("HEAD..HEAD", [tmp_path.parent], root=tmp_path)
    git(tmp_path, "checkout", "--quiet", "--orphan", "other")
    other = commit(b="")
    with pytest.raises(ConfigError, match="no common ancestor"):
        compare(f"{first}...{other}", [Path()], root=tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match="needs git"):
        compare("HEAD..HEAD", [Path()], root=tmp_path)


def test_outside_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ConfigError, match="not a git repository"):
        compare("a..b", [Path()], root=tmp_path)


def test_the_cache_says_the_same(tmp_path: Path, commit: Commit) -> None:
    base = commit(a=HEAD + function("f", GET), b=HEAD + function("g", GET))
    head = commit(a=HEAD + function("f", RANK))
    reports = [
        compare(f"{base}..{head}", [Path()], root=tmp_path, cache=tmp_path / ".git" / "kept")
        for _ in range(2)
    ]
    assert reports[0] == reports[1] and said(reports[0]) == [("a.py", "f", RANK)]


# --- as a command ---------------------------------------------------------------------------------


def test_the_command_and_every_form(
    tmp_path: Path, commit: Commit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(code__a=HEAD + function("f", GET) + function("g", RANK))
    commit(code__a=HEAD + function("f", RANK) + function("g", RANK))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["lint", "groups", "code", "--no-cache", *arguments])
        return code, *capsys.readouterr()

    code, out, _ = run("--diff", "HEAD~1..HEAD")
    assert code == 1
    assert out.splitlines() == [
        f"code/a.py:5:5 SW101 {RANK} of megatron.core.parallel_state is a global group's",
        "    take the group as an argument, or from the collection that the object was given",
        f"code/a.py: SW101 {GET} in f is there 1 time less than in HEAD~1",
        "2 reads in 1 file: 2 accessors",
        "1 new in 1 file, 1 as in HEAD~1, 1 fewer than in HEAD~1",
    ]
    assert run("--diff", "HEAD..HEAD")[0] == 0
    for form in FORMATS:
        code, out, _ = run("--diff", "HEAD~1..HEAD", "--format", form)
        assert code == 1 and "baseline allows" not in out
    plain = json.loads(run("--diff", "HEAD~1..HEAD", "--format", "json")[1])
    assert (plain["revision"], plain["baseline"], plain["num_new"]) == ("HEAD~1", None, 1)
    results = json.loads(run("--diff", "HEAD~1..", "--format", "sarif")[1])["runs"][0]["results"]
    assert [result["baselineState"] for result in results] == ["new", "unchanged", "absent"]
    for other in (
        ["--update"],
        ["--begin"],
        ["--baseline", "x"],
        ["--fix"],
        ["--patch"],
        ["--fail-on-slack"],
    ):
        code, _, err = run("--diff", "HEAD~1..HEAD", *other)
        assert code == 2 and f"got --diff with {other[0]}" in err
    code, _, err = run("--diff", "nowhere..HEAD")
    assert code == 2 and "nowhere" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "code"]
