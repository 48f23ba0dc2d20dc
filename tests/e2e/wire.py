"""Commands between the run and its processes: JSON over a local socket, every wait bounded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


class FailedError(RuntimeError):
    """A process reported an error, died, or did not answer in time."""


class Process:
    """A process that carries out commands, in a session of its own so that what it starts ends with it."""

    def __init__(self, name: str, command: Sequence[str], *, folder: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        address = str(folder / f"{name}.s")
        self._listener = Listener(address, "AF_UNIX")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, address],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._pipe: Connection | None = None

    def send(self, do: str, **given: Any) -> None:
        """Start a command; the first waits for the process to come."""
        if self._pipe is None:
            self._accept(60.0)
        assert self._pipe is not None
        self._pipe.send_bytes(json.dumps([do, given]).encode())

    def answer(self, within_s: float) -> Any:
        """What the command came to."""
        assert self._pipe is not None
        deadline = time.monotonic() + within_s
        while not self._pipe.poll(0.2):
            if self._process.poll() is not None:
                self._fail(f"ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                self._fail(f"gave no answer in {within_s:.0f} s")
        try:
            error, value = json.loads(self._pipe.recv_bytes())
        except EOFError:
            self._fail("closed its end")
        if error:
            raise FailedError(f"{self.name}: {error}")
        return value

    def call(self, do: str, *, within_s: float, **given: Any) -> Any:
        self.send(do, **given)
        return self.answer(within_s)

    def kill(self) -> None:
        """As a machine that fails: nobody is told."""
        self._process.kill()
        self._process.wait(10)

    def end(self) -> None:
        """End it and what it started."""
        if self._pipe is not None:
            self._pipe.close()
        self._listener.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10 if self._pipe is not None else 0)
        # The group is this process' own; its children may outlive it.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.5)
        self._process.wait(10)

    def _accept(self, within_s: float) -> None:
        # The listener has no timeout of its own; its socket does.
        self._listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        deadline = time.monotonic() + within_s
        while self._pipe is None:
            try:
                self._pipe = self._listener.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    self._fail(f"ended with {self._process.returncode}")
                if time.monotonic() > deadline:
                    self._fail(f"did not come in {within_s:.0f} s")

    def _fail(self, what: str) -> None:
        raise FailedError(f"{self.name} {what}:\n{self.log.read_text(errors='replace')[-3000:]}")


def serve(address: str, commands: Mapping[str, Callable[..., Any]]) -> None:
    """Carry out commands until the other end closes."""
    with Client(address, "AF_UNIX") as pipe:
        while True:
            try:
                do, given = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            try:
                answer = None, commands[do](**given)
            except Exception as error:
                traceback.print_exc()
                answer = f"{type(error).__name__}: {error}", None
            pipe.send_bytes(json.dumps(answer).encode())
