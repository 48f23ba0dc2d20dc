"""The part of the recorder that runs inside the recorded processes; `shardweave.lint.record` starts them.

It is copied beside a ``sitecustomize`` and loaded by Python itself before anything else, in the environment
of whatever is recorded: it needs the standard library alone, and it must not fail. A construction is one line
of a file of the process, written when it is first seen, so that what is killed has spoken; further ones are
counted, and the count follows at the end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import multiprocessing.util as util
import os
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

__all__ = ["VARIABLE", "install"]

VARIABLE = "SHARDWEAVE_LINT_RECORD"
_FRAMES = 6


class _Log:
    """Counts of constructions of this process, and its file."""

    def __init__(self, folder: str, argument: str) -> None:
        self.folder, self.argument = folder, argument
        self.lock = threading.Lock()
        self.fresh()

    def fresh(self) -> None:
        self.lock = threading.Lock()
        self.further: dict[str, int] = {}
        self.place = Path(self.folder, f"{os.getpid()}-{os.urandom(4).hex()}.jsonl")

    def write(self, row: dict[str, Any]) -> None:
        with self.place.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(json.dumps(row) + "\n")

    def note(self, row: dict[str, Any]) -> None:
        key = json.dumps(row, sort_keys=True)
        with self.lock:
            if key in self.further:
                self.further[key] += 1
            else:
                self.further[key] = 0
                self.write({**row, "count": 1})

    def close(self) -> None:
        with self.lock:
            for key, count in self.further.items():
                if count:
                    self.write({**json.loads(key), "count": count})
            self.further = {}


def install(said: str) -> None:
    """Record one class from now on, in this process and the ones that it forks.

    Args:
        said: JSON of ``folder``, ``module``, ``qualname`` and ``argument``.
    """
    want = json.loads(said)
    log = _Log(want["folder"], want["argument"])
    atexit.register(log.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=log.fresh)
    # A child of multiprocessing leaves by os._exit, past atexit, but runs what is told here.
    util.register_after_fork(log, lambda kept: util.Finalize(None, kept.close, exitpriority=0))
    found = sys.modules.get(want["module"])
    if found is not None:
        _wrap(found, want["qualname"], log)
    else:
        sys.meta_path.insert(0, _Finder(want["module"], want["qualname"], log))


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the others find the module, and wraps its class once it is there."""

    def __init__(self, module: str, qualname: str, log: _Log) -> None:
        self.module, self.qualname, self.log = module, qualname, log

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.module:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        self.watch(spec.loader)
                    return spec
        return None

    def watch(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _wrap(module, self.qualname, self.log)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            self.log.write(
                {"problem": f"{self.module}: its loader {type(loader).__name__} cannot be watched"}
            )


def _wrap(module: ModuleType, qualname: str, log: _Log) -> None:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        log.write({"problem": f"{module.__name__} has no class {qualname}"})
        return
    has_own = "__init__" in vars(found)
    original = found.__init__  # type: ignore[misc]
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        log.write({"problem": f"{qualname}.__init__ shows no signature"})
        return
    names = [
        name
        for name, part in signature.parameters.items()
        if part.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if log.argument not in names:
        log.write({"problem": f"{qualname}.__init__{signature} does not take {log.argument}"})
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # What is recorded goes on as if nobody looked.
        with contextlib.suppress(Exception):
            log.note(_construction(self, signature, log.argument, args, kwargs, sys._getframe(1)))
        if has_own:
            original(self, *args, **kwargs)
        else:
            super(found, self).__init__(*args, **kwargs)  # type: ignore[arg-type]

    found.__init__ = __init__  # type: ignore[misc]
    log.write({"wrapped": f"{module.__name__}:{qualname}"})


def _construction(
    self: Any, signature: inspect.Signature, name: str, args: Any, kwargs: Any, frame: FrameType | None
) -> dict[str, Any]:
    given = signature.bind_partial(self, *args, **kwargs).arguments
    state = "missing" if name not in given else "none" if given[name] is None else "given"
    # The __init__ of subclasses are on the way, not the place that constructs.
    while frame is not None and _is_init_of(frame, self):
        frame = frame.f_back
    frames: list[list[Any]] = []
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        frames.append([code.co_filename, frame.f_lineno, getattr(code, "co_qualname", code.co_name)])
        frame = frame.f_back
    cls = type(self)
    return {"class": f"{cls.__module__}:{cls.__qualname__}", "state": state, "frames": frames}


def _is_init_of(frame: FrameType, self: Any) -> bool:
    code = frame.f_code
    if code.co_name not in ("__init__", "__post_init__") or not code.co_argcount + bool(code.co_flags & 4):
        return False
    first = frame.f_locals.get(code.co_varnames[0])
    return first is self or (isinstance(first, tuple) and bool(first) and first[0] is self)
