"""The installed megatron-core, counted by the checker and by a search for texts."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from shardweave.lint.finding import READS, Finding, Report
from shardweave.lint.groups import Options, check
from shardweave.lint.presets import PRESETS
from shardweave.lint.report import tally

pytestmark = pytest.mark.peer("megatron.core")

THROUGH_ANOTHER_NAME = "inference/text_generation_server/run_mcore_engine.py"
"""It reads through ``mpu``, which ``megatron/core/__init__.py`` makes of ``parallel_state``."""


def core() -> Path:
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


@cache
def report() -> Report:
    return check([core()], root=core(), options=Options(presets=(PRESETS["megatron"],)))


def reads() -> list[Finding]:
    return [finding for finding in report().findings if finding.code in READS]


def version() -> str:
    from importlib.metadata import version

    return version("megatron-core")


def test_the_count_is_that_of_the_rule() -> None:
    """189 reads in 50 files, and one more through ``mpu``, which the rule does not follow."""
    if version() != "0.16.1":
        pytest.skip(f"the counts are those of megatron-core 0.16.1, and {version()} is installed")
    assert len(reads()) == 189
    assert len({finding.path for finding in reads()}) == 50
    assert Counter(finding.code for finding in reads()) == {"SW101": 168, "SW102": 7, "SW103": 14}
    (other,) = (finding for finding in report().findings if finding.code == "SW109")
    assert (other.path, other.name, other.line) == (THROUGH_ANOTHER_NAME, "is_pipeline_first_stage", 93)
    assert other.message.endswith("read through megatron.core.mpu")
    stats = report().stats
    assert (stats["reads"], stats["read_files"], stats["reads_through_reexports"]) == (189, 50, 1)
    assert tally(report()) == [
        "189 reads in 50 files: 168 accessors, 7 predicates, 14 shims",
        "1 more read in 1 file through a name that another module hands on",
    ]


def test_the_fallback_that_can_only_crash() -> None:
    if version() != "0.16.1":
        pytest.skip(f"the name is missing in megatron-core 0.16.1, and {version()} is installed")
    (dead,) = (finding for finding in report().findings if finding.code == "SW106")
    assert (dead.path, dead.line) == ("distributed/param_and_grad_buffer.py", 602)
    assert (dead.name, dead.kind) == ("get_data_and_context_parallel_group", "fallback")
    import megatron.core.parallel_state as state

    assert not hasattr(state, dead.name)


def test_every_other_name_is_really_there() -> None:
    import megatron.core.parallel_state as state

    dead = {finding.name for finding in report().findings if finding.code == "SW106"}
    names = {finding.name for finding in reads() if finding.code in ("SW101", "SW102")} - dead
    assert len(names) > 30
    assert [name for name in names if not callable(getattr(state, name, None))] == []


def test_places_are_where_a_search_for_texts_finds_the_names() -> None:
    """Every read stands on its name; every call with the module's name in it is found."""
    lines = {
        path: (core() / path).read_text(encoding="utf-8").splitlines()
        for path in {finding.path for finding in reads()}
    }
    for finding in reads():
        line = lines[finding.path][finding.end_line - 1]
        assert line[: finding.end_column - 1].endswith(finding.name), finding
        assert line[finding.end_column - 1 :].startswith("("), finding
    accessor = re.compile(
        r"(?:^|[^\w.])(?:parallel_state|mpu)\s*\.\s*"
        r"(get_(?!virtual|all_ranks)\w*(?:group|groups|rank|ranks|world_size|gloo)"
        r"|is_pipeline_\w+_stage|is_rank_in_\w+)\("
    )
    found = {(f.path, f.end_line, f.name) for f in report().findings if f.code in (*READS, "SW109")}
    missed = []
    for file in sorted(core().rglob("*.py")):
        path = file.relative_to(core()).as_posix()
        if path in ("parallel_state.py", "process_groups_config.py"):
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            code = line.partition("#")[0]
            missed += [
                (path, number, match[1])
                for match in accessor.finditer(code)
                if (path, number, match[1]) not in found
            ]
    # What is left stands in texts of documentation.
    assert all(_in_text(path, number) for path, number, _ in missed), missed


def _in_text(path: str, number: int) -> bool:
    import ast

    tree = ast.parse((core() / path).read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.lineno <= number <= (node.end_lineno or 0)
        for node in ast.walk(tree)
    )


def test_wrappers_are_those_that_give_what_they_read() -> None:
    """One function hides the most reads; the class's predicate hides others."""
    indirect = Counter(finding.name for finding in report().findings if finding.code == "SW105")
    assert indirect["get_tensor_model_parallel_group_if_none"] > 20
    import megatron.core.utils as utils

    assert callable(utils.get_tensor_model_parallel_group_if_none)


def test_hasattr_is_not_blamed_where_unset_fields_fail() -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection

    fails = not hasattr(ProcessGroupCollection(), "tp")
    blamed = [finding for finding in report().findings if finding.code == "SW107"]
    assert bool(blamed) != fails
