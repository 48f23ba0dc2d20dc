"""Two test runs compared as sets: real runs of pytest, ranks, hangs, damaged and hostile reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.cli import main
from shardweave.errors import FormatError, MissingFileError, TruncatedError
from shardweave.lint import paired_report
from shardweave.lint.junit import read_junit
from shardweave.lint.paired import Pairing, Verdict, compare
from shardweave.lint.results import Observation, Outcome, Part, Run, joined, signature_of
from shardweave.lint.runs import rank_of, read_run

PASSED, XFAILED, SKIPPED, FAILED, ERROR, CRASHED, HUNG = Outcome


def run_of(results: Mapping[str, Outcome | tuple[Outcome, str]], *, name: str = "run", **more: Any) -> Run:
    """A run of one report; an outcome may come with its signature."""
    made = [
        Observation(key, *(said if isinstance(said, tuple) else (said,))) for key, said in results.items()
    ]
    return joined(name, [Part(name, tuple(made), **more)])


def found(pairing: Pairing) -> dict[str, set[str]]:
    sets: dict[str, set[str]] = {}
    for difference in pairing.differences:
        sets.setdefault(str(difference.verdict), set()).add(difference.id)
    return sets


# --- verdicts -----------------------------------------------------------------------------------


def test_equal_counts_of_failures_are_a_regression_and_a_fix() -> None:
    base = run_of({"a": FAILED, "b": FAILED, "c": PASSED, "d": PASSED})
    head = run_of({"a": FAILED, "b": PASSED, "c": FAILED, "d": PASSED})
    pairing = compare(base, head)
    assert found(pairing) == {"REGRESSED": {"c"}, "FIXED": {"b"}}
    assert (pairing.same, pairing.same_bad) == (2, 1)
    assert pairing.worse()


def test_67_tests_in_place_of_77_are_10_lost() -> None:
    """24 failed and 43 passed look better than 20 and 57 of 77 where only counts of failures are read."""
    base = run_of({f"t{n}": FAILED if n < 20 else PASSED for n in range(77)})
    head = run_of({f"t{n}": FAILED if n < 20 else PASSED for n in range(67)})
    pairing = compare(base, head)
    assert pairing.counts == {Verdict.LOST: 10}
    assert found(pairing)["LOST"] == {f"t{n}" for n in range(67, 77)}
    assert pairing.worse()


GOOD, BAD = "", "worse"


@pytest.mark.parametrize(
    ("was", "now", "verdict"),
    [
        (PASSED, PASSED, None),
        (PASSED, FAILED, Verdict.REGRESSED),
        (PASSED, ERROR, Verdict.REGRESSED),
        (SKIPPED, FAILED, Verdict.REGRESSED),
        (XFAILED, FAILED, Verdict.REGRESSED),
        (FAILED, HUNG, Verdict.REGRESSED),
        (FAILED, CRASHED, Verdict.REGRESSED),
        (CRASHED, HUNG, Verdict.REGRESSED),
        (PASSED, SKIPPED, Verdict.LOST),
        (PASSED, XFAILED, Verdict.LOST),
        (FAILED, SKIPPED, Verdict.LOST),
        (FAILED, XFAILED, Verdict.LOST),
        (XFAILED, SKIPPED, Verdict.LOST),
        (FAILED, ERROR, Verdict.CHANGED),
        (HUNG, FAILED, Verdict.CHANGED),
        (FAILED, PASSED, Verdict.FIXED),
        (HUNG, PASSED, Verdict.FIXED),
        (XFAILED, PASSED, Verdict.FIXED),
        (SKIPPED, PASSED, Verdict.NEW),
        (SKIPPED, XFAILED, Verdict.NEW),
        ((FAILED, "assert 1 == 2"), (FAILED, "assert 1 == 3"), Verdict.CHANGED),
        ((FAILED, "assert 1 == 2"), (FAILED, "assert 1 == 2"), None),
        (PASSED, None, Verdict.LOST),
        (FAILED, None, Verdict.LOST),
        (SKIPPED, None, Verdict.LOST),
        (None, PASSED, Verdict.NEW),
        (None, SKIPPED, Verdict.NEW),
        (None, FAILED, Verdict.REGRESSED),
        (None, HUNG, Verdict.REGRESSED),
    ],
)
def test_what_becomes_of_a_test(was: Any, now: Any, verdict: Verdict | None) -> None:
    sides = [run_of({"other": PASSED} | ({"t": side} if side is not None else {})) for side in (was, now)]
    pairing = compare(*sides)
    assert [difference.verdict for difference in pairing.differences] == (
        [] if verdict is None else [verdict]
    )
    assert pairing.worse() == (verdict in (Verdict.REGRESSED, Verdict.LOST))
    assert pairing.worse(strict=True) == (verdict in (Verdict.REGRESSED, Verdict.LOST, Verdict.CHANGED))


ENDED = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([PASSED, FAILED]), min_size=1)


@given(base=ENDED, head=ENDED)
def test_verdicts_are_differences_of_sets(base: dict[str, Outcome], head: dict[str, Outcome]) -> None:
    pairing = compare(run_of(base), run_of(head))
    was, now = ({key for key, outcome in side.items() if outcome is FAILED} for side in (base, head))
    expected = {
        "REGRESSED": now - was,
        "FIXED": (was - now) & head.keys(),
        "LOST": base.keys() - head.keys(),
        "NEW": head.keys() - base.keys() - now,
    }
    assert found(pairing) == {verdict: keys for verdict, keys in expected.items() if keys}
    assert pairing.same + len(pairing.differences) == len(base.keys() | head.keys())
    assert pairing.same_bad == len(was & now)
    assert not compare(run_of(head), run_of(head)).differences


def test_every_test_of_a_module_that_was_not_collected_is_lost() -> None:
    base = run_of(
        {
            "tests/test_a.py::test_x": PASSED,
            "tests/test_a.py::T::test_y[a.b]": PASSED,
            "tests/test_ab.py::t": PASSED,
        }
    )
    head = run_of(
        {"tests/test_a.py": (ERROR, "ImportError: no b"), "tests/test_ab.py::t": PASSED},
        uncollected=("tests.test_a",),
    )
    pairing = compare(base, head)
    assert found(pairing) == {
        "LOST": {"tests/test_a.py::test_x", "tests/test_a.py::T::test_y[a.b]"},
        "REGRESSED": {"tests/test_a.py"},
    }
    assert {d.detail for d in pairing.of(Verdict.LOST)} == {"was passed, tests/test_a.py was not collected"}


def test_a_new_failure_of_a_flaky_test_is_unproven_and_not_hidden() -> None:
    base = run_of({"a": PASSED, "b": PASSED, "c": PASSED, "d": PASSED})
    again = run_of({"a": (FAILED, "late"), "b": PASSED, "c": (FAILED, "late"), "d": (FAILED, "late")})
    head = run_of({"a": (FAILED, "other"), "b": (FAILED, "other"), "c": (FAILED, "late"), "d": PASSED})
    assert found(compare(base, head)) == {"REGRESSED": {"a", "b", "c"}}
    pairing = compare(base, head, repeats=[again])
    assert found(pairing) == {"REGRESSED": {"b"}, "FLAKY": {"a", "c"}}
    assert pairing.flaky == {"a", "c", "d"}
    details = {difference.id: difference.detail for difference in pairing.of(Verdict.FLAKY)}
    assert "unproven" in details["a"]
    assert "as in a run of the base" in details["c"]
    only_flaky = compare(
        base, run_of({"a": (FAILED, "x"), "b": PASSED, "c": PASSED, "d": PASSED}), repeats=[again]
    )
    assert not only_flaky.worse()
    assert only_flaky.worse(strict=True)


def test_a_flaky_test_that_is_gone_is_lost_unless_a_run_of_the_base_did_without_it() -> None:
    base, head = run_of({"a": PASSED, "b": PASSED, "c": PASSED}), run_of({"c": PASSED})
    again = run_of({"a": FAILED, "c": PASSED})
    assert found(compare(base, head, repeats=[again])) == {"LOST": {"a"}, "FLAKY": {"b"}}


def test_what_was_removed_on_purpose_is_named_and_a_name_without_use_is_told() -> None:
    base, head = run_of({"x/t.py::a": PASSED, "x/t.py::b": PASSED, "c": PASSED}), run_of({"c": PASSED})
    pairing = compare(base, head, removed=["x/t.py::a", "y*"])
    assert found(pairing) == {"REMOVED": {"x/t.py::a"}, "LOST": {"x/t.py::b"}}
    assert pairing.unused_removed == ("y*",)
    assert not compare(base, head, removed=["x/*"]).worse()
    skipped = run_of({"x/t.py::a": SKIPPED, "x/t.py::b": PASSED, "c": PASSED})
    assert compare(base, skipped, removed=["x/*"]).worse(), "it is there, and does not run"


def test_a_base_without_tests_proves_nothing() -> None:
    with pytest.raises(FormatError, match=r"tests\(0\)"):
        compare(run_of({}), run_of({"a": PASSED}))
    assert compare(run_of({"a": PASSED}), run_of({})).counts == {Verdict.LOST: 1}


# --- ranks --------------------------------------------------------------------------------------


def ranked(*ranks: Mapping[str, Outcome | tuple[Outcome, str]]) -> Run:
    parts = []
    for rank, results in enumerate(ranks):
        made = [Observation(k, *(s if isinstance(s, tuple) else (s,))) for k, s in results.items()]
        parts.append(Part(f"rank{rank}", tuple(made), rank=rank))
    return joined("ranks", parts)


def test_the_worst_rank_counts_and_failures_of_some_ranks_are_told() -> None:
    run = ranked({"t": PASSED, "u": PASSED}, {"t": (FAILED, "x")}, {"t": PASSED, "u": PASSED})
    assert run.results["t"].outcome is FAILED
    assert run.results["t"].only_on == (1,)
    assert run.results["u"].ranks == (0, 2)
    assert run.results["u"].only_on == ()
    whole = ranked({"t": PASSED, "u": PASSED}, {"t": PASSED}, {"t": PASSED, "u": PASSED})
    (difference,) = compare(whole, run).differences
    assert difference.detail == "passed -> failed, only on rank 1"


def test_a_failure_that_spreads_to_another_rank_is_worse() -> None:
    pairing = compare(ranked({"t": FAILED}, {"t": PASSED}), ranked({"t": FAILED}, {"t": FAILED}))
    assert [d.detail for d in pairing.of(Verdict.REGRESSED)] == ["failed on rank 1 too"]
    assert not compare(ranked({"t": FAILED}, {"t": FAILED}), ranked({"t": FAILED}, {"t": PASSED})).worse()


def test_a_test_that_runs_on_fewer_ranks_is_lost_and_shards_may_move() -> None:
    pairing = compare(ranked({"t": PASSED}, {"t": PASSED}), ranked({"t": PASSED}, {}))
    assert "not on 1" in pairing.of(Verdict.LOST)[0].detail
    assert not compare(ranked({"t": PASSED}, {"u": PASSED}), ranked({"u": PASSED}, {"t": PASSED})).differences


def test_the_rank_is_in_the_name() -> None:
    assert [rank_of(stem) for stem in ("rank3", "junit_RANK-12-of-16", "a7.5", "x")] == [3, 12, 5, None]


# --- signatures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("<T object at 0x7f3a2b1c9d00>", "<T object at 0x55d0e1f2a3b4>"),
        ("connect to localhost:29500 failed", "connect to localhost:41873 failed"),
        ("127.0.0.1:1234 refused", "127.0.0.1:4321 refused"),
        ("init with port=29500", "init with port=29777"),
        ("[rank0]: NCCL error", "[rank17]: NCCL error"),
        ("Rank 2 died", "Rank 3 died"),
        ("on cuda:0", "on cuda:7"),
        ("took 1.25s", "took 0.9s"),
        ("after 30 seconds", "after 31 seconds"),
        ("/tmp/a1b2/x.pt is missing", "/tmp/zzz/x.pt is missing"),
        ("in /home/u/pytest-of-u/pytest-12/test_a0/f", "in /home/u/pytest-of-u/pytest-3/test_a0/f"),
        ("pid=123 killed", "pid=98765 killed"),
        ("at 2026-08-22T10:11:12.123Z", "at 2026-08-23 01:02:03"),
        ("worker gw0", "worker gw11"),
        ("run 1b4e28ba-2fa1-11d2-883f-0016d3cca427", "run 6fa459ea-ee8a-3ca4-894e-db77e160355e"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\n  b", "a b"),
    ],
)
def test_signatures_forget_what_changes_from_run_to_run(one: str, other: str) -> None:
    assert signature_of(one) == signature_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("assert 1.4142 == 1.7320", "assert 1.4143 == 1.7320"),
        ("world_size=4", "world_size=8"),
        ("KeyError: 'a'", "KeyError: 'b'"),
        ("assert 0x10 == 1", "assert 0x11 == 1"),
        ("TypeError: x", "ValueError: x"),
        ("frank 1", "frank 2"),
    ],
)
def test_signatures_keep_what_a_failure_is(one: str, other: str) -> None:
    assert signature_of(one) != signature_of(other)


def test_a_signature_has_a_bounded_length_and_is_made_in_bounded_time() -> None:
    start = time.perf_counter()
    for text in (
        "rank ",
        "rank",
        "1",
        "1.",
        "/",
        "C:\\",
        " ",
        "a/pytest-of",
        "0x1",
        "/tmp/",
        "\x1b[1",
        "10:10:",
    ):
        assert len(signature_of(text * 10**6)) < 500
    assert time.perf_counter() - start < 5


# --- real runs ----------------------------------------------------------------------------------

CONFTEST = """
import json, os

def pytest_addoption(parser):
    parser.addoption("--log")

def pytest_configure(config):
    config.log = open(config.getoption("--log"), "w")

def say(config, data):
    config.log.write(json.dumps(data) + "\\n")
    config.log.flush()

def pytest_sessionstart(session):
    say(session.config, {"pytest_version": "x", "$report_type": "SessionStart"})

def pytest_sessionfinish(session, exitstatus):
    say(session.config, {"exitstatus": int(exitstatus), "$report_type": "SessionFinish"})

def pytest_collection_modifyitems(config, items):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    items[:] = [i for n, i in enumerate(items) if n % size == rank or "everywhere" in i.name]

class Log:
    def __init__(self, config):
        self.config = config
    def pytest_runtest_logreport(self, report):
        say(self.config, self.config.hook.pytest_report_to_serializable(config=self.config, report=report))
    pytest_collectreport = pytest_runtest_logreport

def pytest_sessionstart(session):
    say(session.config, {"$report_type": "SessionStart"})
    session.config.pluginmanager.register(Log(session.config))
"""
MODULES = {
    "test_maths.py": """
        import os, time, pytest
        HEAD = os.environ["SIDE"] == "head"

        def test_a():
            assert 1 == 2

        def test_b():
            assert HEAD, f"at {id(object())} {object()!r}"

        def test_c(tmp_path):
            assert not HEAD, f"{tmp_path} is wrong"

        def test_other_reason():
            assert len([1]) == (2 if HEAD else 3)

        def test_same_reason(tmp_path):
            raise RuntimeError(f"rank {os.environ['RANK']} {tmp_path} {object()!r}")

        @pytest.mark.parametrize("n", ["x/y", "a[b]", "c::d"])
        def test_params(n):
            pass

        def test_becomes_skipped():
            if HEAD:
                pytest.skip("not now")

        @pytest.mark.xfail(reason="known", strict=True)
        def test_expected():
            assert False

        @pytest.fixture
        def broken():
            if HEAD:
                raise OSError("no fixture")
            yield
        def test_set_up(broken):
            pass

        @pytest.fixture
        def untidy():
            yield
            assert not HEAD
        class TestTearDown:
            def test_it(self, untidy):
                pass

        @pytest.mark.timeout(0.5, method="signal")
        def test_slow():
            time.sleep(20 if HEAD else 0)

        def test_everywhere():
            assert not HEAD or os.environ["RANK"] == "0"
    """,
    "test_gone.py": """
        import os
        if os.environ["SIDE"] == "head":
            import nothing_of_that_name

        def test_one(): pass
        class TestTwo:
            def test_two(self): pass
    """,
}
KILLED = """
    import os, signal
    def test_before(): pass
    def test_kills():
        if os.environ["SIDE"] == "head":
            os.kill(os.getpid(), signal.SIGKILL)
    def test_never(): pass
"""


def start(project: Path, out: Path, *, side: str, rank: int, size: int) -> int:
    """One rank of a run of pytest, with both reports; its exit code."""
    for kind in ("xml", "log"):
        (out / kind).mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_timeout"),
            *("--continue-on-collection-errors", f"--rootdir={project}", "--tb=short"),
            *(f"--junitxml={out}/xml/rank{rank}.xml", f"--log={out}/log/rank{rank}.jsonl", str(project)),
        ],
        env=os.environ
        | {"SIDE": side, "RANK": str(rank), "WORLD_SIZE": str(size), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTEST_ADDOPTS": "", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=project,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode


def write(project: Path, modules: Mapping[str, str]) -> Path:
    project.mkdir()
    (project / "conftest.py").write_text(CONFTEST)
    for name, text in modules.items():
        (project / name).write_text(textwrap.dedent(text))
    return project


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two ranks of a small project before and after a change: folders ``{base,head}/{xml,log}``."""
    root = tmp_path_factory.mktemp("real")
    project = write(root / "project", MODULES)
    for side in ("base", "head"):
        for rank in range(2):
            assert start(project, root / side, side=side, rank=rank, size=2) == 1
    return SimpleNamespace(base=root / "base", head=root / "head")


@pytest.mark.parametrize("kind", ["xml", "log"])
def test_real_runs_over_ranks(real: SimpleNamespace, kind: str) -> None:
    pairing = compare(read_run(real.base / kind), read_run(real.head / kind))
    names = {
        verdict: {d.key.removeprefix("test_maths.") for d in pairing.of(verdict)}
        for verdict in pairing.counts
    }
    assert names == {
        Verdict.REGRESSED: {
            *("test_c", "test_set_up", "TestTearDown.test_it", "test_slow", "test_everywhere", "test_gone"),
        },
        Verdict.LOST: {"test_becomes_skipped", "test_gone.test_one", "test_gone.TestTwo.test_two"},
        Verdict.CHANGED: {"test_other_reason"},
        Verdict.FIXED: {"test_b"},
    }
    head = pairing.head.results
    assert {key.removeprefix("test_maths."): str(head[key].outcome) for key in head if head[key].bad} == {
        "test_a": "failed",
        "test_c": "failed",
        "test_other_reason": "failed",
        "test_same_reason": "failed",
        "test_set_up": "error",
        "TestTearDown.test_it": "error",
        "test_slow": "hung",
        "test_everywhere": "failed",
        "test_gone": "error",
    }
    assert head["test_maths.test_everywhere"].only_on == (1,)
    assert head["test_maths.test_expected"].outcome is XFAILED
    assert {
        "test_maths.test_params[x/y]",
        "test_maths.test_params[a[b]]",
        "test_maths.test_params[c::d]",
    } <= {*head}
    assert "nothing_of_that_name" in head["test_gone"].signature
    assert pairing.base.ranks == pairing.head.ranks == (0, 1)


def test_both_formats_say_the_same(real: SimpleNamespace) -> None:
    for side in (real.base, real.head):
        one, other = read_run(side / "xml"), read_run(side / "log")
        assert {key: r.outcome for key, r in one.results.items()} == {
            key: r.outcome for key, r in other.results.items()
        }
        assert one.uncollected == other.uncollected
        assert not compare(one, other).worse(strict=True)


def test_a_run_equals_itself(real: SimpleNamespace, tmp_path: Path) -> None:
    for kind in ("xml", "log"):
        for side in (real.base, real.head):
            pairing = compare(read_run(side / kind), read_run(side / kind))
            assert not pairing.differences
    assert pairing.same == len(pairing.head.results)


def test_a_killed_run_is_refused_unless_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = write(tmp_path / "project", {"test_k.py": KILLED})
    assert start(project, tmp_path / "base", side="base", rank=0, size=1) == 0
    assert start(project, tmp_path / "head", side="head", rank=0, size=1) == -9
    base, head = tmp_path / "base/log", tmp_path / "head/log"
    with pytest.raises(TruncatedError, match="SessionFinish is missing"):
        read_run(head)
    assert main(["lint", "paired", str(base), str(head)]) == 2
    assert "--killed" in capsys.readouterr().err
    pairing = compare(read_run(base), read_run(head, killed=True))
    assert found(pairing) == {"REGRESSED": {"test_k.py::test_kills"}, "LOST": {"test_k.py::test_never"}}
    assert pairing.of(Verdict.REGRESSED)[0].detail == "passed -> hung"
    assert main(["lint", "paired", str(base), str(head), "--killed"]) == 1
    # pytest writes its XML at the end, so that there is none.
    with pytest.raises(MissingFileError):
        read_run(tmp_path / "head/xml")


# --- damaged and hostile reports ----------------------------------------------------------------


def test_every_prefix_of_a_report_is_refused(real: SimpleNamespace, tmp_path: Path) -> None:
    for source in (real.base / "xml/rank0.xml", real.base / "log/rank0.jsonl"):
        whole = source.read_bytes().rstrip()
        cut = tmp_path / source.name
        for size in [0, 1, 5, 40, *range(60, len(whole), max(1, len(whole) // 50)), len(whole) - 1]:
            cut.write_bytes(whole[:size])
            with pytest.raises(TruncatedError):
                read_run(cut)


def junit(tmp_path: Path, body: str, *, head: str = "") -> Path:
    path = tmp_path / "r.xml"
    path.write_text(f'<?xml version="1.0"?>{head}<testsuites><testsuite>{body}</testsuite></testsuites>')
    return path


def test_entities_are_neither_expanded_nor_fetched(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    lol = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "lol"}">' for n in range(12))
    for head in (
        f"<!DOCTYPE t [{lol}]>",
        f'<!DOCTYPE t [<!ENTITY x SYSTEM "file://{tmp_path}/secret">]>',
        f'<!DOCTYPE t SYSTEM "file://{tmp_path}/secret">',
        "<!DOCTYPE testsuites>",
    ):
        for entity in ("&l11;", "&x;", ""):
            with pytest.raises(FormatError, match="DOCTYPE"):
                read_junit(junit(tmp_path, f'<testcase name="a">{entity}</testcase>', head=head))
    with pytest.raises(FormatError, match="undefined entity"):
        read_junit(junit(tmp_path, '<testcase name="a">&x;</testcase>'))


@pytest.mark.parametrize(
    ("text", "equation"),
    [
        ("<html></html>", "root is <html>"),
        ("<testsuite><testcase/></testsuite>", "no name"),
        ('<testsuite><testcase name="a"><testcase name="b"/></testcase></testsuite>', "inside <testcase>"),
        ("<testsuite>" * 40, "depth > 32"),
        ("<testsuite></other>", "mismatched tag"),
        ('<?xml version="1.0" encoding="nope"?><testsuite/>', "unknown encoding"),
        ("<testsuite>\0</testsuite>", "invalid token"),
        ("<testsuite/><testsuite/>", "junk after document element"),
        ("hello", "first bytes"),
        ('{"a": 1}\n', "report_type is missing"),
        ('{"$report_type": "TestReport"}\n', "no texts"),
        ('{"$report_type": "TestReport", "nodeid": "a", "outcome": "great"}\n', "great"),
        ('{"a": \n{"b": 1}\n', "Expecting value"),
        ("{" + "[" * 100_000 + "\n", "report"),
    ],
)
def test_what_is_no_report_is_refused(text: str, equation: str, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(text)
    with pytest.raises(FormatError) as raised:
        read_run(path)
    assert not isinstance(raised.value, TruncatedError)
    assert equation in str(raised.value)
    assert main(["lint", "paired", str(path), str(path)]) == 2


def test_deep_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"$report_type": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(FormatError):
        read_run(path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = junit(tmp_path, '<testcase name="a"/>' * 100)
    monkeypatch.setattr("shardweave.lint.junit._MOST_TESTS", 99)
    with pytest.raises(FormatError, match="tests > 99"):
        read_junit(path)
    monkeypatch.setattr("shardweave.lint.junit.MOST_BYTES", 1000)
    with pytest.raises(FormatError, match="> 1000"):
        read_junit(path)


def test_a_message_of_many_megabytes_keeps_its_end(tmp_path: Path) -> None:
    long = "x y\n" * 500_000 + "E   ValueError: the end\n"
    path = junit(tmp_path, f'<testcase classname="c" name="a"><failure>{long}</failure></testcase>')
    (made,) = read_junit(path).observations
    assert (made.id, made.outcome, made.signature) == ("c::a", FAILED, "ValueError: the end")


def test_folders_of_ranks(tmp_path: Path) -> None:
    def put(*names: str) -> Path:
        folder = tmp_path / ("-".join(names) or "none")
        folder.mkdir()
        for name in names:
            (folder / name).write_text('<testsuite><testcase classname="m" name="t"/></testsuite>')
        return folder

    assert read_run(put("rank0.xml", "rank1.xml")).ranks == (0, 1)
    assert read_run(put("r1.xml", "r2.xml", "r3.xml")).ranks == (1, 2, 3)
    assert read_run(put("only.xml")).ranks == (0,)
    with pytest.raises(TruncatedError, match="without 1"):
        read_run(put("rank0.xml", "rank2.xml"))
    assert read_run(tmp_path / "rank0.xml-rank2.xml", killed=True).ranks == (0, 2)
    with pytest.raises(TruncatedError, match="without"):
        read_run(put("r0.xml", "r20261130.xml"))
    with pytest.raises(FormatError, match=r"a_0\.xml is 0"):
        read_run(put("a_0.xml", "b_0.xml"))
    with pytest.raises(FormatError, match=r"rank of b\.xml is none"):
        read_run(put("0.xml", "b.xml"))
    with pytest.raises(MissingFileError):
        read_run(put())
    with pytest.raises(MissingFileError):
        read_run(tmp_path / "nowhere")


# --- output -------------------------------------------------------------------------------------


def test_the_command(real: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    base, head = str(real.base / "xml"), str(real.head / "xml")
    assert main(["lint", "paired", base, base]) == 0
    same = capsys.readouterr().out
    assert "no worse: " in same
    assert main(["lint", "paired", base, head]) == 1
    text = capsys.readouterr().out
    assert "\nREGRESSED 6\n" in text
    assert "  test_maths::test_c  passed -> failed\n      AssertionError: <tmp> is wrong" in text
    assert "test_maths::test_everywhere  rank 1\n" in text
    assert text.splitlines()[-1].startswith("worse: 6 REGRESSED, 3 LOST, 1 CHANGED, 1 FIXED, ")
    assert main(["lint", "paired", base, head, "--format", "json"]) == 1
    plain = json.loads(capsys.readouterr().out)
    assert plain["schema"] == 1
    assert plain["counts"] == {"REGRESSED": 6, "LOST": 3, "CHANGED": 1, "FIXED": 1}
    assert plain["worse"] is True
    assert plain["rank_only"] == [{"id": "test_maths::test_everywhere", "ranks": [1]}]
    assert main(["lint", "paired", base, head, "--format", "markdown"]) == 1
    page = capsys.readouterr().out
    assert "**LOST** 3" in page
    assert "- `test_maths::test_b`: `failed -> passed`" in page
    assert main(["lint", "paired", base, head, "--format", "pdf"]) == 2
    capsys.readouterr()
    assert main(["lint", "paired", base, head, "--repeat", head, "--removed", "test_gone::*"]) == 0
    flaky = capsys.readouterr().out
    assert "\nFLAKY 11\n" in flaky
    assert "nothing was removed by" in flaky
    assert main(["lint", "paired", base, "/nowhere"]) == 2


@pytest.mark.parametrize("say", [paired_report.as_text, paired_report.as_markdown])
def test_texts_of_reports_stay_texts(say: Callable[[Pairing], str]) -> None:
    nasty = "t[\x1b[2J\n::error::x`|<script>]"
    pairing = compare(run_of({nasty: PASSED}), run_of({nasty: (FAILED, "\x1b]0;x\x07 | `a` <b>")}))
    shown = say(pairing)
    assert all(line.isprintable() for line in shown.splitlines())
    assert not any(line.lstrip().startswith("::") for line in shown.splitlines())
    if say is paired_report.as_markdown:
        assert "<script>" not in shown.replace("<code>", "")


def test_results_of_other_tools(tmp_path: Path) -> None:
    body = (
        '<testcase name="a" status="run" result="completed"/>'
        '<testcase name="b" status="notrun"/>'
        '<testcase name="c" result="suppressed"/>'
        '<testcase name="d"><system-out>x</system-out><flakyFailure message="late"/></testcase>'
        '<testcase name="e"><failure>boom</failure><rerunFailure message="again"/></testcase>'
        '<testcase name="f"><properties><property name="p" value="1"/></properties></testcase>'
    )
    made = {o.id: str(o.outcome) for o in read_junit(junit(tmp_path, body)).observations}
    assert made == {
        "a": "passed",
        "b": "skipped",
        "c": "skipped",
        "d": "passed",
        "e": "failed",
        "f": "passed",
    }
    with pytest.raises(FormatError, match="holds <aborted>"):
        read_junit(junit(tmp_path, '<testcase name="a"><aborted/></testcase>'))


def test_quoted_names_come_back(tmp_path: Path) -> None:
    name = 'a"<&>\u00e9\u4e2d'
    path = junit(tmp_path, f'<testcase classname="c" name={quoteattr(name)}/>')
    assert [made.id for made in read_junit(path).observations] == [f"c::{name}"]


def test_the_checks_need_typer_and_rich_only(tmp_path: Path) -> None:
    """What docs/lint.md promises to whoever installs without the other dependencies."""
    (tmp_path / "a.py").write_text("import torch\ntorch.distributed.barrier()\n")
    path = junit(tmp_path, '<testcase name="a"/>')
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'msgspec', 'fsspec', 'xxhash', 'yaml', 'libcst'):\n"
        "    sys.modules[name] = None\n"
        "from shardweave.cli import main\n"
        f"assert main(['lint', 'groups', {str(tmp_path)!r}, '--no-cache']) == 1\n"
        f"assert main(['lint', 'paired', {str(path)!r}, {str(path)!r}]) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
