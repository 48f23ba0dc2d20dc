"""What one of several processes of a conversion does in tests, and how it is disturbed."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from shardweave.convert import Company, convert, prepare


def go(
    rank: int,
    *,
    port: int,
    size: int,
    src: Path,
    dst: Path,
    choices: dict[str, Any],
    timeout_s: float = 20.0,
    disturbed: dict[int, tuple[str, int]] | None = None,
    force: bool = False,
    serves: bool = False,
) -> dict[str, Any]:
    """Be one process. ``disturbed`` says what happens on which rank, and before which of its writes."""
    serves = serves and rank == 0
    store = TCPStore("127.0.0.1", port, is_master=serves, wait_for_workers=False)
    how, after = (disturbed or {}).get(rank, ("", 0))
    written: list[int] = []
    told: list[tuple[int, int]] = []
    write = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if how and len(written) == after:
            disturb(how, src)
        elif how in ("", "slow"):
            time.sleep(0.03 if how == "slow" else 0)
        count = write(descriptor, data, offset)
        written.append(count)
        return count

    os.pwrite = pwrite  # type: ignore[assignment]
    with Company(store, rank=rank, size=size, timeout_s=timeout_s, serves=serves) as company:
        job = prepare(src, **choices)
        report = convert(
            job,
            dst,
            fsync=False,
            workers=1,
            memory_bytes=1 << 17,
            force=force,
            progress=lambda done, total: told.append((done, total)),
            company=company,
        )
    return {"written": sum(written), "resumed": report.resumed, "told": told, "total": job.num_bytes}


def disturb(how: str, src: Path) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif how == "broken":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    elif how == "error":
        raise ZeroDivisionError("somewhere")
    elif how == "changes":
        for path in src.rglob("*"):
            if path.suffix in (".safetensors", ".distcp"):
                os.utime(path, ns=(1, 1))
