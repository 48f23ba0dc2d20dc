"""What an import loads: the lower layers stay free of devices, and the command line starts quickly."""

from __future__ import annotations

import subprocess
import sys

import pytest

DRIVER = """
import runpy, sys
{body}
print(*sorted(sys.modules), sep="\\n", file=sys.stderr)
"""

RUN_HELP = """
sys.argv = ["shardweave", "--help"]
try:
    runpy.run_module("shardweave", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""


def run_fresh(body: str) -> tuple[str, set[str]]:
    """Runs `body` in a new interpreter; gives its output and the names of the modules it loaded."""
    command = [sys.executable, "-c", DRIVER.format(body=body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, set(done.stderr.split())


def layers_of(modules: set[str]) -> set[str]:
    return {name.split(".")[1] for name in modules if name.startswith("shardweave.")}


def test_package_itself_loads_nothing() -> None:
    _, loaded = run_fresh("import shardweave")
    assert layers_of(loaded) == set()
    assert "numpy" not in loaded


@pytest.mark.parametrize(
    ("layer", "allowed"),
    [
        ("layout", {"layout", "errors"}),
        ("models", {"models", "layout", "errors"}),
        ("plan", {"plan", "models", "layout", "errors"}),
    ],
)
def test_lower_layer_loads_no_torch_and_nothing_above(layer: str, allowed: set[str]) -> None:
    _, loaded = run_fresh(f"import shardweave.{layer}")
    assert f"shardweave.{layer}" in loaded
    assert layers_of(loaded) <= allowed
    assert "torch" not in loaded


def test_the_driver_sees_a_module_that_is_loaded() -> None:
    _, loaded = run_fresh("import shardweave.errors, wave")
    assert layers_of(loaded) == {"errors"}
    assert "wave" in loaded


def test_help_of_the_command_loads_no_torch() -> None:
    shown, loaded = run_fresh(RUN_HELP)
    assert "shardweave" in shown
    assert "shardweave.cli" in loaded
    assert "torch" not in loaded
    assert "transformers" not in loaded
