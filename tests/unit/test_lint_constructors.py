"""Who constructs a class: every trap in one tree, each place judged by hand and, where it runs, by Python."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest

from shardweave.cli import main
from shardweave.errors import ConfigError
from shardweave.lint.binding import bind
from shardweave.lint.class_rows import Parameter, Shape
from shardweave.lint.constructors import Inventory, inventory
from shardweave.lint.inventory_report import as_json, as_text

TREE = {
    "core/__init__.py": "",
    "core/specs.py": """
        from dataclasses import dataclass
        @dataclass
        class ModuleSpec:
            module: type
            params: dict = None
        @dataclass
        class Submodules:
            attention: type = None
        """,
    "core/attention.py": """
        class Module:
            def __init__(self, config):
                self.config = config
        class Attention(Module):
            def __init__(self, config, layer, pg_collection=None):
                super().__init__(config)
        class SelfAttention(Attention):
            def __init__(self, config, layer, mask=None, pg_collection=None):
                super().__init__(config, layer, pg_collection=pg_collection)
        class MLA(Attention):
            pass
        class FusedMLA(MLA):
            def __init__(self, config, layer, *, pg_collection=None, fused=True):
                super().__init__(config, layer, pg_collection)
        class Passing(Attention):
            def __init__(self, extra, *args, **kwargs):
                super().__init__(*args, **kwargs)
        class Forgets(Attention):
            def __init__(self, config, layer, pg_collection=None):
                super().__init__(config, layer)
        class Old(Attention):
            def __init__(self, config):
                Attention.__init__(self, config, 0, None)
        class Makes(Attention):
            def __init__(self, config, group):
                super().__init__(config, 0, pg_collection=group)
        class Cut(Attention):
            def __init__(self, config):
                self.config = config
        """,
    "core/api.py": "from .attention import FusedMLA as Fused, SelfAttention\n",
    "use/__init__.py": "",
    "use/direct.py": """
        import core.attention as attn
        from core.api import Fused, SelfAttention as SA
        from core.attention import Attention, MLA, Old, Passing, Makes, Forgets
        def run(c, pg, args, kwargs):
            Attention(c, 1)                               # missing
            Attention(c, 1, pg)                           # positional
            Attention(c, 1, None)                         # none
            Attention(c, 1, pg_collection=pg)             # keyword
            attn.Attention(c, 1, pg_collection=None)      # none
            Attention(*args)                              # args
            Attention(c, *args)                           # args
            Attention(c, layer=1, **kwargs)               # kwargs
            Attention(*(c, 1, pg))                        # positional
            Attention(c, 1, **{"pg_collection": pg})      # keyword
            Attention(c, **{"layer": 1})                  # missing
            SA(c, 1, pg)                                  # missing: the third is the mask
            SA(c, 1, None, pg)                            # positional
            MLA(c, 1, pg)                                 # positional
            MLA(c, 1)                                     # missing
            Fused(c, 1)                                   # missing
            Fused(c, 1, pg_collection=pg, fused=False)    # keyword
            Passing(0, c, 1)                              # missing
            Passing(0, c, 1, pg)                          # positional
            Passing(0, c, layer=1, pg_collection=pg)      # keyword
            Old(c)                                        # not-accepted
            Makes(c, pg)                                  # supplied
            Forgets(c, 1, pg)                             # positional
            Attention(c, 1, pg, pg_collection=pg)         # twice
            Old(c, pg_collection=pg)                      # rejected
            made = Attention
            made(c, 1)                                    # missing
            getattr(attn, "MLA")(c, 1)                    # missing
        """,
    "use/handed.py": """
        from functools import partial
        from core.attention import Attention, SelfAttention, MLA
        from core.specs import ModuleSpec, Submodules
        A = ModuleSpec(module=SelfAttention)
        B = ModuleSpec(SelfAttention, params={"pg_collection": 1})
        C = Submodules(attention=Attention)
        D = partial(Attention, 1, 2)
        E = partial(Attention, 1, pg_collection=3)
        TABLE = {"self": SelfAttention, "mla": MLA}
        KIND = MLA
        def default(kind=Attention):
            return kind
        def choose(x, registry):
            registry.add(Attention)
            if isinstance(x, Attention) or issubclass(x, (MLA, Attention)):
                return SelfAttention if x else MLA
        def annotated(x: Attention) -> MLA: ...
        """,
    "use/own.py": """
        from core.attention import Attention
        class Copies(Attention):
            def copy(self):
                type(self)(self.config, 1)
                self.__class__(self.config, 1, None)
                self(self.config)
                return helper(self)
            @classmethod
            def make(cls, c, pg):
                return cls(c, 1, pg)
        class More(Copies): ...
        """,
    "tests/test_local.py": """
        class Attention:
            def __init__(self, a): ...
        def test_it():
            Attention(1)
            class SelfAttention:
                def __init__(self, pg_collection=None): ...
            SelfAttention()
        """,
    "tests/test_text.py": '''
        """Attention(1, 2)"""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from core.attention import Attention
            Attention(1, 2)
        def test_it(Attention):
            return Attention(1, 2), "Attention(1, 2)"
        ''',
}


def grown(folder: Path, files: dict[str, str] = TREE) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text), encoding="utf-8")
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grown(tmp_path / "tree")


def found(tree: Path, cls: str = "core.attention.Attention", arg: str = "pg_collection") -> Inventory:
    return inventory(cls, arg, [tree], root=tree)


def kinds(made: Inventory, path: str) -> list[tuple[int, str]]:
    return [(f.line, f.kind) for f in made.findings if f.path == path]


def test_every_direct_call_is_what_the_line_says(tree: Path) -> None:
    lines = (tree / "use/direct.py").read_text().splitlines()
    said = [
        (number, line.partition("# ")[2].partition(":")[0].strip())
        for number, line in enumerate(lines, 1)
        if "# " in line
    ]
    assert len(said) == 27
    direct = [pair for pair in kinds(found(tree), "use/direct.py") if pair[1] != "escape"]
    assert direct == said
    # The other name of a class is a way out too; what is called by it was found above.
    assert [pair for pair in kinds(found(tree), "use/direct.py") if pair[1] == "escape"] == [(31, "escape")]


def test_the_family_is_what_inherits_and_reaches_the_init(tree: Path) -> None:
    made = found(tree)
    short = [name.rpartition(".")[2] for name in made.family]
    assert short == ["Attention", "Forgets", "FusedMLA", "MLA", "Makes", "Old", "Passing", "SelfAttention",
                     "Copies", "More"]  # fmt: skip
    assert made.apart == ("core.attention.Cut",)
    assert made.init == "core/attention.py:6"


def test_a_class_handed_on_is_told_apart(tree: Path) -> None:
    lines = kinds(found(tree), "use/handed.py")
    assert lines == [
        (5, "spec"), (6, "spec"), (7, "spec"), (8, "partial"), (9, "partial-bound"), (10, "escape"),
        (10, "escape"), (11, "escape"), (12, "escape"), (15, "escape"), (17, "escape"), (17, "escape"),
    ]  # fmt: skip
    hints = {f.line: f.hint for f in found(tree).findings if f.path == "use/handed.py"}
    assert hints[5].startswith("whoever builds it") and hints[6] == "nothing is to be added"


def test_a_class_that_constructs_itself(tree: Path) -> None:
    made = [f for f in found(tree).findings if f.path == "use/own.py"]
    assert [(f.line, f.kind) for f in made] == [(5, "missing"), (6, "none"), (11, "positional")]
    assert "1 more that inherit make" in made[2].message


def test_what_subclasses_pass_on(tree: Path) -> None:
    passed = {f.name.rpartition(".")[2]: (f.kind, f.code) for f in found(tree).findings
              if f.kind.startswith("super-")}  # fmt: skip
    assert passed == {
        "SelfAttention": ("super-keyword", "SW310"),
        "FusedMLA": ("super-positional", "SW310"),
        "Passing": ("super-args", "SW310"),
        "Forgets": ("super-missing", "SW309"),
        "Old": ("super-none", "SW309"),
        "Makes": ("super-keyword", "SW310"),
    }


def test_classes_of_the_same_name_in_tests_are_apart(tree: Path) -> None:
    assert not [f for f in found(tree).findings if f.path.startswith("tests/")]
    local = found(tree, "test_local.test_it.SelfAttention")
    assert [(f.path, f.line, f.kind) for f in local.findings] == [("tests/test_local.py", 8, "missing")]


def test_scripts_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    grown(tmp_path, {
        "a/model.py": "class Net:\n    def __init__(self, group=None): ...\n",
        "a/run.py": "from model import Net\nNet(1)\n",
        "b/model.py": "class Net:\n    def __init__(self, size, group=None): ...\n",
        "b/run.py": "from model import Net\nNet(1)\n",
        "main.py": "import a.model\n",
    })  # fmt: skip
    made = inventory("model.Net", "group", [tmp_path / "b"], root=tmp_path)
    assert [(f.path, f.kind) for f in made.findings] == [("b/run.py", "missing")]


# --- the three attempts of Megatron-LM #6293 ----------------------------------------------------


def edited(tree: Path, lines: list[tuple[str, int]]) -> None:
    """Add the keyword to the calls on some lines."""
    for path, line in lines:
        text = (tree / path).read_text().splitlines()
        text[line - 1] = text[line - 1].replace(")  ", ", pg_collection=pg)  ", 1)
        (tree / path).write_text("\n".join(text) + "\n")


def runnable(folder: Path) -> Path:
    """Sites that can be carried out one by one; each asserts that its argument arrived."""
    head = dedent(TREE["core/attention.py"]).replace(
        "        super().__init__(config)\n",
        "        super().__init__(config)\n        assert pg_collection is not None, 'assertion'\n",
    )
    return grown(folder, {
        "core/__init__.py": "",
        "core/attention.py": head,
        "sites.py": """
            from core.attention import Attention, FusedMLA, MLA, SelfAttention
            c, pg = object(), object()
            SITES = [
                lambda: Attention(c, 1)  ,
                lambda: Attention(c, 1, pg)  ,
                lambda: MLA(c, 1, pg)  ,
                lambda: MLA(c, 1)  ,
                lambda: FusedMLA(c, 1)  ,
                lambda: SelfAttention(c, 1, None, pg)  ,
                lambda: SelfAttention(c, 1, pg)  ,
            ]
            """,
    })  # fmt: skip


def outcome(tree: Path) -> dict[str, int]:
    """How the sites end, by Python itself."""
    code = dedent("""
        import collections, json, sites
        ended = collections.Counter()
        for site in sites.SITES:
            try:
                site()
                ended["fine"] += 1
            except AssertionError:
                ended["assertion"] += 1
            except TypeError as error:
                assert "multiple values" in str(error)
                ended["twice"] += 1
        print(json.dumps(ended))
        """)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=True, timeout=60
    )
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


def test_attempt_1_counting_arguments(tmp_path: Path) -> None:
    """A keyword wherever few arguments are: what was given by position gets a second value."""
    tree = runnable(tmp_path)
    assert outcome(tree) == {"fine": 3, "assertion": 4}
    edited(tree, [("sites.py", line) for line in (5, 6, 7, 8, 9, 10)])
    assert outcome(tree)["twice"] == 3
    twice = [f for f in found(tree).findings if f.kind == "twice"]
    assert [f.line for f in twice] == [6, 7, 10]
    assert all(f.code == "SW304" and f.hint.startswith("remove pg_collection=") for f in twice)


def test_attempt_2_a_list_of_names(tmp_path: Path) -> None:
    """Names without FusedMLA leave its sites as they were."""
    tree = runnable(tmp_path)
    named = {"Attention", "MLA", "SelfAttention"}
    sites = [f for f in found(tree).findings if f.kind == "missing" and f.name.rpartition(".")[2] in named]
    edited(tree, [(f.path, f.line) for f in sites])
    assert outcome(tree) == {"fine": 6, "assertion": 1}
    assert [f.name for f in found(tree).findings if f.kind == "missing"] == ["core.attention.FusedMLA"]


def test_attempt_3_what_the_inventory_says_holds(tmp_path: Path) -> None:
    tree = runnable(tmp_path)
    missing = [f for f in found(tree).findings if f.kind == "missing"]
    assert [f.line for f in missing] == [5, 8, 9, 11]
    assert all(f.hint == "add pg_collection=..." for f in missing)
    edited(tree, [(f.path, f.line) for f in missing])
    assert outcome(tree) == {"fine": 7}
    assert not [f for f in found(tree).findings if f.kind == "missing"]


def test_a_keyword_is_proposed_only_where_it_is_missing(tree: Path) -> None:
    for finding in found(tree).findings:
        assert finding.hint.startswith("add pg_collection=") == (finding.kind in ("missing", "super-missing"))
        assert finding.hint


# --- signatures ---------------------------------------------------------------------------------


SIGNATURES = [
    "def f(a, x=None): ...", "def f(x, /, a=0): ...", "def f(a, *, x=0): ...", "def f(a, *rest, x=0): ...",
    "def f(*rest, x=0, **more): ...", "def f(a, /, b, x=1, **more): ...", "def f(x): ...",
]  # fmt: skip
CALLS = ["", "1", "1, 2", "1, 2, 3", "x=5", "1, x=5", "1, 2, x=5", "1, 2, 3, x=5", "a=1, x=5", "b=2, a=1"]


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("call", CALLS)
def test_binding_agrees_with_python(signature: str, call: str) -> None:
    names: dict[str, object] = {}
    exec(signature, names)
    shown = inspect.signature(names["f"])  # type: ignore[arg-type]
    letters = {"POSITIONAL_ONLY": "p", "POSITIONAL_OR_KEYWORD": "b", "KEYWORD_ONLY": "k",
               "VAR_POSITIONAL": "a", "VAR_KEYWORD": "w"}  # fmt: skip
    parameters = [Parameter(name, letters[part.kind.name], "") for name, part in shown.parameters.items()]
    parts = [part.strip() for part in call.split(",") if part]
    shape = Shape(
        "v" * sum("=" not in part for part in parts),
        {part.partition("=")[0]: "v" for part in parts if "=" in part},
    )
    bound = bind(shape, parameters, "x")
    assert bound is not None
    try:
        given = eval(f"shown.bind_partial({call})", {"shown": shown}).arguments
    except TypeError as error:
        assert bound.kind == "twice" or "multiple values" not in str(error) or "'x'" not in str(error)
        return
    assert (bound.kind in ("keyword", "positional")) == ("x" in given)


def test_dataclasses_take_their_fields_in_python_s_order(tmp_path: Path) -> None:
    text = """
        from dataclasses import KW_ONLY, dataclass, field
        from typing import ClassVar
        @dataclass
        class Base:
            shared: ClassVar[int] = 0
            size: int
            group: object = None
        @dataclass
        class Child(Base):
            hidden: int = field(default=0, init=False)
            extra: int = 1
            _: KW_ONLY
            last: int = 2
        @dataclass(kw_only=True)
        class Named(Base):
            more: int = 0
        class Plain(Child): ...
        Base(1, 2)
        Child(1, 2, 3)
        Plain(1)
        Named(1, group=None)
        """
    grown(tmp_path, {"d.py": text})
    made = inventory("d.Base", "group", [tmp_path], root=tmp_path)
    # A generated __init__ calls no other, but takes the field that it inherits.
    given = [(19, "positional"), (20, "positional"), (21, "missing"), (22, "none")]
    assert [(f.line, f.kind) for f in made.findings] == given
    child = inventory("d.Child", "group", [tmp_path], root=tmp_path)
    assert [(f.line, f.kind) for f in child.findings] == given[1:3]
    extra = inventory("d.Child", "extra", [tmp_path], root=tmp_path)
    assert [(f.line, f.kind) for f in extra.findings] == given[1:3]
    named = inventory("d.Named", "group", [tmp_path], root=tmp_path)
    assert [(f.line, f.kind) for f in named.findings] == given[3:]
    with pytest.raises(ConfigError, match="takes the argument"):
        inventory("d.Child", "hidden", [tmp_path], root=tmp_path)


def test_the_order_of_bases_is_python_s(tmp_path: Path) -> None:
    text = """
        class A:
            def __init__(self, x=None): ...
        class B(A): ...
        class C(A):
            def __init__(self, y, x=None):
                super().__init__(x)
        class D(B, C): ...
        class Mixin:
            def __init__(self, z, **kw):
                super().__init__(**kw)
        class E(Mixin, D): ...
        D(1)
        D(1, 2)
        E(1, y=2, x=3)
        E(1, y=2)
        """
    grown(tmp_path, {"m.py": text})
    names: dict[str, type] = {"__name__": "m"}  # type: ignore[dict-item]
    exec(dedent(text), names)
    made = inventory("m.A", "x", [tmp_path], root=tmp_path)
    direct = [(f.line, f.kind) for f in made.findings if not f.kind.startswith("super")]
    assert direct == [(13, "missing"), (14, "positional"), (15, "keyword"), (16, "missing")]
    from shardweave.lint.cache import Cache
    from shardweave.lint.class_cache import load
    from shardweave.lint.files import find, read
    from shardweave.lint.hierarchy import Hierarchy
    from shardweave.lint.names import Tree

    sources = find([tmp_path], root=tmp_path)
    read(sources)
    index = load(sources, cache=Cache(None))
    hierarchy = Hierarchy(
        [(source, index[source.path].classes) for source in sources],
        Tree(sources, facts_of=lambda source: index[source.path].facts, is_target=lambda dotted: False),
    )
    for name in "ABCDE":
        order = [node.name for node in hierarchy.mro(hierarchy.by_dotted[f"m.{name}"][0])]
        assert order == [cls.__name__ for cls in names[name].__mro__[:-1]]


# --- the command --------------------------------------------------------------------------------


def test_a_cache_changes_nothing_and_sees_changes(tree: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = inventory("MLA", "pg_collection", [tree], root=tree, cache=cache)
    assert inventory("MLA", "pg_collection", [tree], root=tree, cache=cache) == first
    direct = tree / "use/direct.py"
    direct.write_text(direct.read_text().replace("MLA(c, 1, pg)", "MLA(c, 1, None)"))
    counts = Counter(
        f.kind for f in inventory("MLA", "pg_collection", [tree], root=tree, cache=cache).findings
    )
    assert counts["none"] == 1 and first.counts().get("none", 0) == 0
    (cache / "constructors.rows").write_text("{broken")
    again = inventory("MLA", "pg_collection", [tree], root=tree, cache=cache)
    assert Counter(f.kind for f in again.findings) == counts


def test_exit_codes_and_formats(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    asked = ["lint", "constructors", "core.attention.Attention", ".", "--arg", "pg_collection", "--no-cache"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert (
        "use/direct.py:6:5 SW301 Attention does not give pg_collection\n    add pg_collection=...\n" in text
    )
    assert "SW300" not in text and "\nall " in text
    assert main([*asked, "--fail-on", "missing,none"]) == 1
    assert main([*asked, "--fail-on", "partial"]) == 1
    capsys.readouterr()
    assert main([*asked, "--format", "json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["counts"]["missing"] == 9 and held["schema"] == 1
    assert main([*asked, "--format", "sarif"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"
    assert main([*asked, "--format", "github", "--fail-on", "twice"]) == 1
    assert capsys.readouterr().out.count("::error") == 1
    assert main([*asked, "--format", "markdown"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(
        "### shardweave lint constructors: `pg_collection` of `core.attention.Attention`\n"
    )
    assert (
        "| `use/direct.py:6:5` | SW301 | `Attention does not give pg_collection` | `add pg_collection=...` |"
        in page
    )
    header, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    head = [cell.strip() for cell in header.strip("|").split("|")]
    totals = [
        cell.strip() for cell in next(row for row in rows if row.startswith("| all ")).strip("|").split("|")
    ]
    assert dict(zip(head[1:], map(int, totals[1:]), strict=True)) == held["counts"]
    assert "SW300" not in page and "not listed" not in page
    assert main([*asked, "--format", "markdown", "--all"]) == 0
    assert "SW300" in capsys.readouterr().out
    assert main([*asked, "--format", "html"]) == 2


def test_a_comment_allows_a_place_and_the_count_says_so(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    (tree / "allowed.py").write_text(
        "from core.attention import Attention\n"
        "Attention(1, 2)  # shardweave: allow[SW301] it runs without groups\n"
        "Attention(1, 2)  # shardweave: allow[SW302] this is another code\n"
    )
    asked = [
        "lint",
        "constructors",
        "core.attention.Attention",
        "core",
        "allowed.py",
        "--arg",
        "pg_collection",
    ]
    asked.append("--no-cache")
    assert main([*asked, "--fail-on", "missing"]) == 1
    text = capsys.readouterr().out
    assert "allowed.py:3:" in text and "allowed.py:2:" not in text
    assert text.endswith("not listed: 1 allowed by comments\n")
    assert main([*asked, "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["findings"]
    assert [f["allowed"] for f in listed if f["path"] == "allowed.py"] == [True, False]
    for form in ("markdown", "sarif", "github"):
        assert main([*asked, "--format", form]) == 0
        assert "runs without" not in capsys.readouterr().out
    (tree / "allowed.py").write_text((tree / "allowed.py").read_text().replace("SW302", "SW301"))
    assert main([*asked, "--fail-on", "missing"]) == 0


def test_settings_leave_codes_out_and_each_check_takes_its_own(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)
    asked = ["lint", "constructors", "core.attention.Attention", ".", "--arg", "pg_collection", "--no-cache"]
    settings = tree / "pyproject.toml"
    settings.write_text("[tool.shardweave.lint]\nignore = ['SW301', 'SW201']\nselect = ['SW1']\n")
    assert main([*asked, "--fail-on", "missing"]) == 0
    text = capsys.readouterr().out
    assert "SW301" not in text and "SW302" in text and "left out by the settings" in text
    settings.write_text("[tool.shardweave.lint]\nselect = ['SW302']\n")
    assert main([*asked, "--fail-on", "missing"]) == 0
    assert main([*asked, "--fail-on", "none"]) == 1
    # Codes of the other check choose nothing here, and are refused where they are asked for.
    (tree / "read.py").write_text("from megatron.core import mpu\nmpu.get_tensor_model_parallel_rank()\n")
    assert main(["lint", "groups", "read.py", "--no-cache"]) == 1
    assert main(["lint", "groups", "read.py", "--no-cache", "--select", "SW302"]) == 2
    assert "code 'SW302' is not one of SW001, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({2: "Nobody"}, "found no class of that name"),
        ({2: "SelfAttention"}, "classes of that name = core.attention.SelfAttention, "),
        ({5: "nothing"}, "parameters = config, layer, pg_collection"),
        ({3: "nowhere"}, "nowhere"),
    ],
)
def test_what_cannot_be_asked_is_2(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: dict[int, str],
    said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tree)
    asked = ["lint", "constructors", "core.attention.Attention", ".", "--arg", "pg_collection", "--no-cache"]
    for index, word in change.items():
        asked[index] = word
    assert main(asked) == (1 if 3 in change else 2)
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_python_is_said(tree: Path) -> None:
    (tree / "broken.py").write_text("def (:\n")
    made = found(tree)
    assert len(made.unread) == 1 and made.unread[0].startswith("broken.py: line 1")
    assert "broken.py" in as_text(made) and json.loads(as_json(made))["unread"] == list(made.unread)
