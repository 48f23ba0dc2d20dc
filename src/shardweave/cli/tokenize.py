"""``shardweave tokenize``: from text to files of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardweave.cli import options
from shardweave.cli.common import print_facts, print_json

FORMS = ("packed", "megatron")
DTYPES = ("uint8", "uint16", "int32", "int64")


def _parse_form(text: str) -> str:
    if text not in FORMS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(FORMS)}")
    return text


def _parse_dtype(text: str) -> str:
    if text not in DTYPES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(DTYPES)}")
    return text


def tokenize(
    src: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", exists=True, help="Documents: .jsonl, one a line; plain text; or files of tokens."
        ),
    ],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A new folder; with --to megatron, a prefix.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="NAME", help="bytes, or a Hugging Face tokenizer's folder.")
    ] = "bytes",
    to: Annotated[
        str, typer.Option("--to", parser=_parse_form, metavar="FORM", help="packed, or megatron.")
    ] = "packed",
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            parser=_parse_dtype,
            metavar="DTYPE",
            help="Of tokens. Default: what the tokenizer needs.",
        ),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Make files of tokens, which training maps into memory.

    A line of .jsonl has text; prompt and response; or messages. Of the last two
    it is kept which tokens are answers. DST is complete with its last file, and
    never written over.
    """
    from shardweave.train.data import open_documents
    from shardweave.train.tokens import write_megatron, write_packed

    documents, vocab_size = open_documents(src, tokenizer_name=tokenizer)
    if dtype is None:
        dtype = "uint16" if vocab_size <= 1 << 16 else "int32"
    about = f"{src.name}, tokenizer {tokenizer}"
    if to == "packed":
        made = write_packed(dst, documents, dtype=dtype, about=about)
    else:
        made = write_megatron(dst, documents, dtype=dtype)
    counted = int(made.targets.sum()) if made.targets is not None else len(made.ids)
    if as_json:
        print_json(
            {
                "path": str(dst),
                "form": to,
                "dtype": dtype,
                "documents": len(made.ends),
                "tokens": len(made.ids),
                "targets": counted,
            }
        )
        return
    print_facts(
        {
            "written": f"{dst} ({to}, {dtype})",
            "documents": f"{len(made.ends):,}",
            "tokens": f"{len(made.ids):,}, of which {counted:,} count",
        }
    )
