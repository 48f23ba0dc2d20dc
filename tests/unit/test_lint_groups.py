"""Reads of groups: every form of import and alias is found, and nothing that only looks like one."""

from __future__ import annotations

import errno
import os
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardweave.errors import ConfigError, MissingFileError
from shardweave.lint import config, files
from shardweave.lint.finding import Finding, Report
from shardweave.lint.groups import Options, check
from shardweave.lint.presets import PRESETS
from shardweave.lint.report import tally

Look = Callable[..., list[Finding]]

STATE = """
def get_tensor_model_parallel_group(check=True): return _TP
def get_tensor_model_parallel_rank(): return 0
def get_virtual_pipeline_model_parallel_rank(): return 0
def get_global_memory_buffer(): return _BUFFER
def is_pipeline_first_stage(): return True
def is_initialized(): return True
_TP = None
"""
COLLECTION = """
class ProcessGroupCollection:
    tp: object
    cp: object

    def __getattr__(self, name):
        if name in self.__annotations__:
            return None
        raise AttributeError(name)

    @classmethod
    def use_mpu_process_groups(cls): return cls()
"""
CORE = {
    "megatron/core/__init__.py": "from megatron.core import parallel_state\nmpu = parallel_state\n",
    "megatron/core/parallel_state.py": STATE,
    "megatron/core/process_groups_config.py": COLLECTION,
}


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Findings in a file beside a small megatron-core; all but SW2xx unless codes are given."""

    def run(text: str, *, select: tuple[str, ...] = ("SW0", "SW1"), **others: str) -> list[Finding]:
        files = CORE | {"megatron/core/used/__init__.py": "", "megatron/core/used/code.py": text}
        files |= {name.replace("__", "/") + ".py": body for name, body in others.items()}
        for name, body in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(body), encoding="utf-8")
        report = check([tmp_path], root=tmp_path, options=Options(select=select))
        return [finding for finding in report.findings if "used/" in finding.path]

    return run


def said(findings: list[Finding]) -> list[tuple[str, int, str]]:
    return [(finding.code, finding.line, finding.kind) for finding in findings]


GET = "get_tensor_model_parallel_group"

FORMS = {
    "module": f"from megatron.core import parallel_state\nparallel_state.{GET}()",
    "module under another name": f"from megatron.core import parallel_state as ps\nps.{GET}()",
    "dotted import": f"import megatron.core.parallel_state\nmegatron.core.parallel_state.{GET}()",
    "dotted import under a name": f"import megatron.core.parallel_state as ps\nps.{GET}()",
    "the function": f"from megatron.core.parallel_state import {GET}\n{GET}()",
    "the function under a name": f"from megatron.core.parallel_state import {GET} as g\ng()",
    "relative module": f"from .. import parallel_state\nparallel_state.{GET}()",
    "relative function": f"from ..parallel_state import {GET}\n{GET}()",
    "star": f"from megatron.core.parallel_state import *\n{GET}()",
    "inside a function": (
        f"def f():\n    from megatron.core import parallel_state as ps\n    return ps.{GET}()"
    ),
    "another name of the module": f"from .. import parallel_state\nx = parallel_state\nx.{GET}()",
    "another name of the function": f"from .. import parallel_state\ng = parallel_state.{GET}\ng()",
    "another name in a pair": f"from .. import parallel_state\ng, n = parallel_state.{GET}, 1\ng()",
    "walrus": f"from .. import parallel_state\n(g := parallel_state.{GET})()\ng()",
    "getattr": f"from .. import parallel_state\ngetattr(parallel_state, '{GET}')()",
    "getattr under a name": f"from .. import parallel_state\ng = getattr(parallel_state, '{GET}')\ng()",
    "import_module": (
        f"import importlib\nps = importlib.import_module('megatron.core.parallel_state')\nps.{GET}()"
    ),
    "try": f"try:\n    from .. import parallel_state as ps\nexcept ImportError:\n    ps = None\nps.{GET}()",
    "condition": (
        f"import os\nif os.sep:\n    from .. import parallel_state as ps\nelse:\n    ps = 1\nps.{GET}()"
    ),
    "global": f"def a():\n    global ps\n    from .. import parallel_state as ps\ndef b():\n    ps.{GET}()",
    "nonlocal": (
        "def a():\n    p = None\n    def b():\n        nonlocal p\n"
        f"        from .. import parallel_state as p\n"
        f"    b()\n    return p.{GET}()"
    ),
    "closure": f"def a():\n    from .. import parallel_state as p\n    def b():\n        return p.{GET}()",
    "lambda": f"from .. import parallel_state\nf = lambda: parallel_state.{GET}()",
    "comprehension": f"from .. import parallel_state\nx = [parallel_state.{GET}() for i in range(2)]",
    "class body": f"class C:\n    from .. import parallel_state as p\n    g = p.{GET}()",
    "attribute of a class": (
        f"from .. import parallel_state\nclass C:\n    g = staticmethod\n    def __init__(self):\n"
        f"        self.ps = parallel_state\n    def m(self):\n        return self.ps.{GET}()"
    ),
    "default of a parameter": f"from .. import parallel_state\ndef f(g=parallel_state.{GET}()): pass",
    "decorator": f"from .. import parallel_state\n@wrap(parallel_state.{GET}())\ndef f(): pass",
    "f-string": f"from .. import parallel_state\nprint(f'{{parallel_state.{GET}()}}')",
    "loop": (
        f"x = None\nfor i in range(2):\n    if i:\n        x.{GET}()\n    from .. import parallel_state as x"
    ),
    "not only for type checkers": (
        f"from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    from .. import parallel_state as p\n"
        f"def f():\n    p.{GET}()"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_found_once(look: Look, form: str) -> None:
    found = look(FORMS[form])
    reads = [finding for finding in found if finding.code == "SW101"]
    # "walrus" reads twice: where the name is made, and after.
    assert len(reads) == (2 if form == "walrus" else 1)
    assert {finding.name for finding in reads} == {GET}


ALIKE = {
    "another object": f"class A:\n    def {GET}(self): pass\nA().{GET}()",
    "a parameter": f"from .. import parallel_state\ndef f(parallel_state):\n    parallel_state.{GET}()",
    "a local": f"from .. import parallel_state\ndef f():\n    parallel_state = 1\n    parallel_state.{GET}()",
    "unbound": f"from .. import parallel_state\ndef f():\n    parallel_state.{GET}\n    parallel_state = 1",
    "bound again": f"from .. import parallel_state\nparallel_state = 1\nparallel_state.{GET}()",
    "deleted": f"from .. import parallel_state\ndel parallel_state\ndef f():\n    parallel_state.{GET}()",
    "a target": f"from .. import parallel_state\nx = [parallel_state.{GET}() for parallel_state in y]",
    "a class body": (
        f"class C:\n    from .. import parallel_state as p\n    def m(self):\n        return p.{GET}()"
    ),
    "a class body in a comprehension": (
        f"class C:\n    from .. import parallel_state as p\n    x = [p.{GET}() for i in y]"
    ),
    "text": f'from .. import parallel_state\n"""parallel_state.{GET}()"""\nx = "parallel_state.{GET}()"',
    "a comment": f"from .. import parallel_state\n# parallel_state.{GET}()",
    "type checkers only": (
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .. import parallel_state as p\n"
        f"    p.{GET}()\ndef f():\n    p.{GET}()"
    ),
    "an annotation": f"from .. import parallel_state\ndef f(x: 'parallel_state.{GET}()'): pass",
    "the other arm": f"if x:\n    from .. import parallel_state as p\nelse:\n    p = 1\n    p.{GET}()",
    "an except's name": f"from .. import parallel_state as p\ntry: pass\nexcept E as p:\n    p.{GET}()",
    "a with's name": f"from .. import parallel_state as p\nwith x as p:\n    p.{GET}()",
    "a capture": (
        f"from .. import parallel_state as p\ndef f(x):\n    match x:\n        case p:\n            p.{GET}()"
    ),
    "another module": f"from somewhere import parallel_state\nparallel_state.{GET}()",
    "patched": f"def test(m):\n    m.setattr('megatron.core.parallel_state.{GET}', 1)",
    "virtual, lifecycle, buffers": (
        "from .. import parallel_state as p\np.get_virtual_pipeline_model_parallel_rank()\n"
        "p.is_initialized()\np.get_global_memory_buffer()"
    ),
    "imported only": f"from ..parallel_state import {GET}",
    "star hidden": f"from megatron.core.parallel_state import *\ndef {GET}(): pass\n{GET}()",
}


@pytest.mark.parametrize("form", ALIKE)
def test_what_only_looks_like_a_read_is_none(look: Look, form: str) -> None:
    assert said(look(ALIKE[form])) == []


HANDED = {
    "partial": f"from functools import partial\nf = partial(ps.{GET})",
    "dictionary": f"TABLE = {{'tp': ps.{GET}}}",
    "default": f"def f(g=ps.{GET}): pass",
    "decorator": f"@ps.{GET}\ndef f(): pass",
    "argument": f"call(ps.{GET})",
    "returned": f"def f():\n    return ps.{GET}",
    "computed name": "def f(n):\n    return getattr(ps, n)",
}


@pytest.mark.parametrize("form", HANDED)
def test_a_function_that_is_handed_on_is_a_reference(look: Look, form: str) -> None:
    found = look(f"from megatron.core import parallel_state as ps\n{HANDED[form]}")
    assert [finding.code for finding in found if finding.code != "SW105"] == ["SW104"]


def test_predicates_and_shims_have_codes_of_their_own(look: Look) -> None:
    found = look(
        """
        from megatron.core.process_groups_config import ProcessGroupCollection as Groups
        from megatron.core import parallel_state

        def f(groups=None):
            if groups is None:
                groups = Groups.use_mpu_process_groups()
            return parallel_state.is_pipeline_first_stage()
        """
    )
    assert said(found) == [("SW103", 7, "fallback"), ("SW102", 8, "unconditional")]
    assert found[0].qualname == "f"


KINDS = {
    "if g is None:\n        g = {}": "fallback",
    "if g is not None:\n        pass\n    else:\n        g = {}": "fallback",
    "if g is None and more:\n        g = {}": "fallback",
    "if not g:\n        g = {}": "fallback",
    "if g is not None:\n        return g\n    g = {}": "fallback",
    "g = g or {}": "fallback",
    "g = {} if g is None else g": "fallback",
    "g = g if g is not None else {}": "fallback",
    "if not hasattr(g, 'tp'):\n        g = {}": "fallback",
    "if g is not None:\n        g = {}": "unconditional",
    "if g is None or more:\n        g = {}": "unconditional",
    "g = {} or g": "unconditional",
    "if more:\n        g = {}": "unconditional",
    "if g is None:\n        pass\n    g = {}": "unconditional",
    "g = {}": "unconditional",
}


@pytest.mark.parametrize("body", KINDS)
def test_a_read_is_a_fallback_where_something_is_none(look: Look, body: str) -> None:
    text = body.format(f"parallel_state.{GET}()")
    found = look(f"from .. import parallel_state\ndef f(g, more):\n    {text}")
    assert [finding.kind for finding in found] == [KINDS[body]]


def test_callers_of_what_hides_a_read_are_indirect(look: Look) -> None:
    found = look(
        """
        from megatron.core.used.tools import group_or, twice, Tools, other, plain

        def f():
            return group_or(None), twice(), Tools().of(), other(), plain()
        """,
        megatron__core__used__tools="""
        from megatron.core import parallel_state

        def group_or(group):
            if group is None:
                group = parallel_state.get_tensor_model_parallel_group()
            return group

        def twice():
            return group_or(None).size()

        class Tools:
            @property
            def tp(self):
                return parallel_state.get_tensor_model_parallel_rank()

            def of(self):
                return self.tp

        def other():
            parallel_state.get_tensor_model_parallel_rank()
            return 1

        def plain():
            return 2
        """,
    )
    assert Counter(finding.code for finding in found) == {"SW101": 3, "SW105": 4}
    indirect = {
        (finding.path.rpartition("/")[2], finding.name) for finding in found if finding.code == "SW105"
    }
    assert indirect == {
        ("code.py", "group_or"),
        ("code.py", "twice"),
        ("tools.py", "group_or"),
        ("tools.py", "tp"),
    }


def test_a_name_that_goes_on_under_another_is_followed_through_files(look: Look) -> None:
    found = look(
        "from .third import fetch\nfetch()\n",
        megatron__core__used__first="from megatron.core.parallel_state import *\n",
        megatron__core__used__second=f"from .first import {GET} as grab\n__all__ = ['grab']\n",
        megatron__core__used__third="from .second import *\nfetch = grab\n",
    )
    assert [(finding.code, finding.path.rpartition("/")[2]) for finding in found] == [("SW109", "code.py")]


REEXPORTS = {
    "a name of the module": ("from megatron.core import mpu\nmpu.{}()", "megatron.core.mpu"),
    "by a dotted import": ("import megatron.core as core\ncore.mpu.{}()", "megatron.core.mpu"),
    "a name of the function": ("from .tools import {0}\n{0}()", "megatron.core.used.tools"),
    "the module of another": ("from .tools import ps\nps.{}()", "megatron.core.used.tools.ps"),
    "a star of another": ("from .tools import *\n{}()", "megatron.core.used.tools"),
}


@pytest.mark.parametrize("form", REEXPORTS)
def test_a_read_through_a_name_that_another_module_hands_on_is_apart(look: Look, form: str) -> None:
    text, through = REEXPORTS[form]
    tools = (
        f"from megatron.core import parallel_state as ps\nfrom megatron.core.parallel_state import {GET}\n"
    )
    (found,) = look(text.format(GET), megatron__core__used__tools=tools)
    assert (found.code, found.name, found.kind) == ("SW109", GET, "unconditional")
    assert (
        found.message == f"{GET} of megatron.core.parallel_state is a global group's, read through {through}"
    )


def test_reads_through_reexports_are_no_part_of_the_number(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "from megatron.core import mpu, parallel_state\n"
        f"mpu.{GET}()\nmpu.is_pipeline_first_stage()\nmpu.get_all_ranks()\nparallel_state.{GET}()\n"
    )
    report = check([tmp_path], root=tmp_path)
    assert [finding.code for finding in report.findings] == ["SW109", "SW109", "SW101"]
    assert (report.stats["reads"], report.stats["reads_through_reexports"]) == (1, 2)
    assert tally(report) == [
        "1 read in 1 file: 1 accessor",
        "2 more reads in 1 file through a name that another module hands on",
    ]


def test_star_imports_follow_what_is_public(look: Look) -> None:
    found = look(
        f"from .first import *\n{GET}()\n",
        megatron__core__used__first=f"from megatron.core.parallel_state import {GET}\n__all__ = []\n",
    )
    assert found == []


def test_circles_of_imports_end(look: Look) -> None:
    found = look(
        f"from .first import {GET}\n{GET}()\nx = y\ny = x\nx.{GET}()\n",
        megatron__core__used__first=f"from .code import {GET}\n",
    )
    assert found == []


def test_a_name_that_is_not_there_is_said(look: Look) -> None:
    found = look(
        """
        from megatron.core import parallel_state
        from megatron.core.parallel_state import get_nothing

        def f(group=None):
            if group is None:
                group = parallel_state.get_data_and_context_parallel_group()
            if hasattr(parallel_state, "get_other_group"):
                parallel_state.get_other_group()
            try:
                from megatron.core.parallel_state import get_third
            except ImportError:
                pass
            return parallel_state.__name__
        """
    )
    dead = [(finding.line, finding.name, finding.kind) for finding in found if finding.code == "SW106"]
    assert dead == [
        (3, "get_nothing", "unconditional"),
        (7, "get_data_and_context_parallel_group", "fallback"),
    ]


def test_hasattr_of_what_answers_always_and_fields_that_are_none(look: Look) -> None:
    found = look(
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        def f(pg_collection, other, groups: ProcessGroupCollection | None = None):
            assert hasattr(pg_collection, "tp") and hasattr(groups, "cp")
            assert hasattr(other, "tp")
            made = ProcessGroupCollection()
            made.tp = made.tp_dp = 1
            other.tp_dp = 2
        """
    )
    assert [(finding.code, finding.line, finding.name) for finding in found] == [
        ("SW107", 5, "tp"),
        ("SW107", 5, "cp"),
        ("SW108", 8, "tp_dp"),
    ]


def test_hasattr_is_right_where_unset_fields_fail(look: Look) -> None:
    plain = "class ProcessGroupCollection:\n    tp: object\n"
    code = "def f(pg_collection):\n    return hasattr(pg_collection, 'tp')\n"
    assert look(code, megatron__core__process_groups_config=plain) == []


DEFAULT = {
    "dist.all_reduce(x)": ("SW201", "collective"),
    "dist.all_reduce(x, group=None)": ("SW201", "collective"),
    "dist.all_reduce(x, op, None)": ("SW201", "collective"),
    "dist.all_reduce(x, async_op=True)": ("SW201", "collective"),
    "dist.barrier()": ("SW201", "collective"),
    "dist.broadcast(x, src=0)": ("SW201", "collective"),
    "n = dist.get_world_size()": ("SW201", "query"),
    "g = dist.group.WORLD": ("SW202", "unconditional"),
    "f(dist.GroupMember.WORLD)": ("SW202", "unconditional"),
    "g = dist.distributed_c10d._get_default_group()": ("SW202", "unconditional"),
    "print(f'{dist.get_rank()}: {x}')": ("SW203", "query"),
    "if dist.get_rank() == 0:\n    print(x)": ("SW203", "query"),
    "if dist.get_rank() == 0:\n    save(x)": ("SW201", "query"),
    "dist.all_reduce(x, group=g)": None,
    "dist.all_reduce(x, op, g)": None,
    "dist.all_to_all_single(a, b, c, d, g)": None,
    "dist.all_reduce(*xs)": None,
    "dist.all_reduce(x, **more)": None,
    "dist.is_initialized()": None,
    "self.dist.all_reduce(x)": None,
}


@pytest.mark.parametrize("call", DEFAULT)
@pytest.mark.parametrize(
    "imported", ["import torch.distributed as dist", "from torch import distributed as dist"]
)
def test_collectives_without_a_group(look: Look, call: str, imported: str) -> None:
    found = look(f"{imported}\n{call}\n", select=("SW2",))
    wanted = DEFAULT[call]
    assert [(finding.code, finding.kind) for finding in found] == ([wanted] if wanted else [])


def test_what_is_for_messages_is_off_unless_asked_for(look: Look) -> None:
    assert not Options().wants("SW203")
    assert Options(select=("SW2",)).wants("SW203")
    assert Options(ignore=("SW1",)).wants("SW203")
    assert not Options(ignore=("SW1",)).wants("SW106")


PRESET_READS = {
    "deepspeed": (
        "from deepspeed.utils import groups\ngroups._get_data_parallel_group()",
        "_get_data_parallel_group",
    ),
    "vllm": (
        "from vllm.distributed import get_tp_group\nget_tp_group().rank_in_group",
        "get_tp_group().rank_in_group",
    ),
    "sglang": (
        "from sglang.srt.layers.dp_attention import get_attention_tp_size\nget_attention_tp_size()",
        "get_attention_tp_size",
    ),
    "veomni": (
        "from veomni.distributed.parallel_state import get_parallel_state as s\ns().sp_group",
        "get_parallel_state().sp_group",
    ),
    "megatron": (
        "from megatron.core import parallel_state as s\ns.get_tensor_model_parallel_rank()",
        "get_tensor_model_parallel_rank",
    ),
}


@pytest.mark.parametrize("name", PRESET_READS)
def test_presets_know_names_that_are_defined_elsewhere(tmp_path: Path, name: str) -> None:
    text, wanted = PRESET_READS[name]
    (tmp_path / "code.py").write_text(text)
    report = check([tmp_path], root=tmp_path, options=Options(presets=(PRESETS[name],)))
    assert [(finding.code, finding.name) for finding in report.findings] == [("SW101", wanted)]


def test_any_other_code_is_described_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
        [tool.shardweave.lint]
        presets = ["torch"]
        exclude = ["gone"]

        [[tool.shardweave.lint.target]]
        modules = ["mine.mesh"]
        names = "current_mesh|axis_\\\\w+"
        hint = "take the mesh as an argument"
        reexports = ["mine.old"]
        """
    )
    settings = config.load(tmp_path)
    options = Options(
        presets=(*config.presets_named(settings.presets), *config.own(settings)), exclude=settings.exclude
    )
    for name, text in {
        "mine/__init__.py": "",
        "mine/mesh.py": "def current_mesh(): return _MESH\ndef axis_tp(): return current_mesh()",
        "mine/use.py": "from .mesh import *\nfrom mine import mesh, old\n"
        "mesh.current_mesh()\naxis_tp()\nold.axis_tp()",
        "gone/x.py": "from mine.mesh import current_mesh\ncurrent_mesh()",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    report = check([tmp_path], root=tmp_path, options=options)
    hint = "take the mesh as an argument"
    assert [(f.path, f.line, f.name, f.code, f.hint) for f in report.findings] == [
        ("mine/use.py", 3, "current_mesh", "SW101", hint),
        ("mine/use.py", 4, "axis_tp", "SW101", hint),
        ("mine/use.py", 5, "axis_tp", "SW109", hint),
    ]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[tool.shardweave.lint]\npreset = []", "tool.shardweave.lint.preset"),
        ("[tool.shardweave.lint]\npresets = ['megatrn']", "megatrn"),
        ("[tool.shardweave.lint]\nexclude = 'x'", "a list of texts"),
        ("[tool.shardweave.lint]\nignore = ['SW9']", "SW9"),
        ("[tool.shardweave.lint]\ntarget = 1", "array of tables"),
        ("[[tool.shardweave.lint.target]]\nmodules = ['a']", "modules and names"),
        ("[[tool.shardweave.lint.target]]\nmodules = ['a']\nnames = '('", "regular expression"),
        ("[[tool.shardweave.lint.target]]\nmodules = ['a']\nnames = 'b'\nword = 1", "target.word"),
        ("[tool.", "TOML"),
    ],
)
def test_settings_that_are_not_understood_are_refused(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path)
    assert part in str(caught.value)


def test_files_that_are_no_python_are_said_and_nothing_else_is_lost(look: Look) -> None:
    found = look(
        f"from .. import parallel_state\nparallel_state.{GET}()",
        megatron__core__used__broken=f"def f(:\n    {GET}\n",
        megatron__core__used__nothing="",
    )
    assert [(finding.code, finding.path.rpartition("/")[2], finding.line) for finding in found] == [
        ("SW001", "broken.py", 1),
        ("SW101", "code.py", 2),
    ]


def test_links_odd_bytes_and_depth_do_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(f"from megatron.core.parallel_state import {GET}\n{GET}()\n")
    (tmp_path / "same.py").symlink_to("a.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "odd.py").write_bytes(b"x = 'get_tensor_model_parallel_group \xff'\n")
    (tmp_path / "zero.py").write_bytes(b"x = '\x00'  # get_tensor_model_parallel_group\n")
    (tmp_path / "deep.py").write_text(f"# {GET}\nx = {'-' * 5000}1\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "a.py").write_text(f"from megatron.core.parallel_state import {GET}\n{GET}()\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.py").write_text("def")
    found = check([tmp_path], root=tmp_path).findings
    assert [finding.path for finding in found if finding.code == "SW101"] == ["a.py"]
    broken = {finding.path for finding in found if finding.code == "SW001"}
    assert broken - {"deep.py"} == {"gone.py", "odd.py", "zero.py"}
    with pytest.raises(MissingFileError):
        check([tmp_path / "none"], root=tmp_path)


def test_what_cannot_be_read_is_named_and_waited_for_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.py").write_text(f"from megatron.core.parallel_state import {GET}\n{GET}()\n")
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("pool.py")
    (tmp_path / "pool.py").symlink_to("loop.py")
    (tmp_path / "nowhere.py").symlink_to("gone")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".#good.py").symlink_to("me@here:1")
    (tmp_path / "secret.py").write_bytes(b"x = '\0'  # get_tensor_model_parallel_group\n")
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(100_000_000)  # a hole: it takes no room
    (tmp_path / "fleeting.py").write_text("")
    listed = files.find

    def find(*args: Any, **kwargs: Any) -> Any:
        found = listed(*args, **kwargs)
        (tmp_path / "fleeting.py").unlink()
        return found

    monkeypatch.setattr("shardweave.lint.groups.find", find)
    found = check([tmp_path], root=tmp_path).findings
    assert [(f.path, f.code) for f in found if f.code != "SW001"] == [("good.py", "SW101")]
    assert {f.path: f.message for f in found if f.code == "SW001"} == {
        "pipe.py": "it is no regular file",
        "loop.py": os.strerror(errno.ELOOP),
        "pool.py": os.strerror(errno.ELOOP),
        "nowhere.py": "it is a link that leads nowhere",
        "secret.py": "no Python: source code string cannot contain null bytes",
        "large.py": "its 100,000,000 bytes are more than are read, 16,777,216",
        "fleeting.py": "it is gone since it was listed",
    }


def test_columns_are_characters(look: Look) -> None:
    (found,) = look(f"from .. import parallel_state as p\nä, ö = 'äöü', p.{GET}()\n")
    assert (found.line, found.column) == (2, len("ä, ö = 'äöü', ") + 1)
    assert found.end_column == found.column + len(f"p.{GET}")


def test_scripts_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    for name, text in {
        "one/tools.py": f"from megatron.core.parallel_state import {GET} as g\n",
        "two/tools.py": "def g(): pass\n",
        "one/run.py": "from tools import g\ng()\n",
        "two/run.py": "from tools import g\ng()\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [f.path for f in check([tmp_path], root=tmp_path).findings] == ["one/run.py"]


def test_the_cache_says_the_same_and_sees_a_change(tmp_path: Path) -> None:
    code, kept = tmp_path / "code", tmp_path / "kept"
    code.mkdir()
    (code / "a.py").write_text(f"from megatron.core.parallel_state import {GET} as g\ndef f(): return g()\n")
    (code / "b.py").write_text("from a import f\nf()\n")

    def run() -> Report:
        return check([code], root=code, cache=kept)

    first = run()
    assert [finding.code for finding in first.findings] == ["SW101", "SW105"]
    assert run() == first and (kept / ".gitignore").read_text() == "*\n"
    (code / "a.py").write_text("def f(): return 1\n")
    assert run().findings == ()
    (code / "a.py").write_text(f"from megatron.core.parallel_state import {GET} as g\ndef f(): return g()\n")
    assert run() == first
    for file in (kept / "groups.json", kept / "facts.rows"):
        assert file.is_file()
        file.write_text("[")
    assert run() == first
    other = check([code], root=code, cache=kept, options=Options(select=("SW105",)))
    assert [finding.code for finding in other.findings] == ["SW105"]


def test_shardweave_itself_has_none_and_would_show_one(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "src" / "shardweave"
    assert check([source], root=source).findings == ()
    changed = tmp_path / "collectives.py"
    text = (source / "train" / "collectives.py").read_text(encoding="utf-8")
    changed.write_text(f"{text}\n\nimport torch\ntorch.distributed.barrier()\n", encoding="utf-8")
    assert [finding.code for finding in check([changed], root=tmp_path).findings] == ["SW201"]
