"""Documents: files of tokens and hostile ones, text, and which documents a step has at any layout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardweave.errors import (
    ExistsError,
    FormatError,
    GeometryError,
    MissingFileError,
    OutsideError,
    ShardweaveError,
    TruncatedError,
)
from shardweave.train.data import Loader, Parts, open_documents, open_tokens, shuffled
from shardweave.train.text import Bytes, read_documents, tokenizer
from shardweave.train.tokens import (
    Document,
    Tokens,
    joined,
    parts_of,
    read_megatron,
    read_packed,
    read_raw,
    write_megatron,
    write_packed,
)

LENGTHS = (7, 0, 23, 1, 2, 64, 11)


def documents(lengths: Sequence[int] = LENGTHS, *, masked: bool = False) -> list[Document]:
    """Documents whose tokens are all different, so that each can be told."""
    starts = itertools.accumulate(lengths, initial=0)
    ids = [
        np.arange(start, start + length, dtype=np.int64)
        for start, length in zip(starts, lengths, strict=False)
    ]
    return [Document(each, each % 3 != 1 if masked else np.ones(len(each), np.bool_)) for each in ids]


def same(tokens: Tokens, wanted: Sequence[Document]) -> None:
    assert tokens.lengths.tolist() == [len(each.ids) for each in wanted]
    for number, each in enumerate(wanted):
        found = tokens.part(number, 0, len(each.ids))
        np.testing.assert_array_equal(found.ids, each.ids)
        np.testing.assert_array_equal(found.mask, each.mask)
        assert found.ids.dtype == np.int64


# --- files of tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
@pytest.mark.parametrize("masked", [False, True])
def test_packed(tmp_path: Path, dtype: str, masked: bool) -> None:
    wanted = documents(masked=masked)
    same(write_packed(tmp_path / "a", wanted, dtype=dtype), wanted)
    same(open_tokens(tmp_path / "a"), wanted)
    size = np.dtype(dtype).itemsize
    assert (tmp_path / "a/tokens.bin").read_bytes() == np.arange(108).astype(dtype).tobytes()
    assert (tmp_path / "a/tokens.bin").stat().st_size == 108 * size
    assert (tmp_path / "a/targets.bin").exists() == masked


def test_nothing_at_all(tmp_path: Path) -> None:
    same(write_packed(tmp_path / "a", [], dtype="uint16"), [])
    same(write_megatron(tmp_path / "b", []), [])
    same(joined([]), [])


def test_raw_is_one_document(tmp_path: Path) -> None:
    np.arange(30, dtype="uint16").tofile(tmp_path / "a.bin")
    same(open_tokens(tmp_path / "a.bin"), documents([30]))
    assert open_tokens(tmp_path / "a.bin", dtype="uint8").lengths.tolist() == [60]
    with pytest.raises(TruncatedError, match=r"bytes\(60\) % int64\(8\) = 4 != 0"):
        read_raw(tmp_path / "a.bin", "int64")


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_megatron_bytes(tmp_path: Path, dtype: str) -> None:
    """The index written out by hand."""
    same(write_megatron(tmp_path / "a", documents([3, 0, 2]), dtype=dtype), documents([3, 0, 2]))
    size = np.dtype(dtype).itemsize
    code = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}[dtype]
    assert (tmp_path / "a.bin").read_bytes() == np.arange(5).astype(dtype).tobytes()
    wanted = (
        b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + bytes([code])
        + np.array([3, 4], "<u8").tobytes()
        + np.array([3, 0, 2], "<i4").tobytes()
        + np.array([0, 3 * size, 3 * size], "<i8").tobytes()
        + np.array([0, 1, 2, 3], "<i8").tobytes()
    )  # fmt: skip
    assert (tmp_path / "a.idx").read_bytes() == wanted
    for name in ("a", "a.bin", "a.idx"):
        same(open_tokens(tmp_path / name), documents([3, 0, 2]))


@pytest.mark.peer("megatron.core")
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_megatron_reads_and_writes_the_same(tmp_path: Path, dtype: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    wanted = documents()
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=getattr(np, dtype))
    for each in wanted:
        builder.add_document(torch.from_numpy(each.ids), [len(each.ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_megatron(tmp_path / "ours", wanted, dtype=dtype)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"ours{end}").read_bytes() == (tmp_path / f"theirs{end}").read_bytes()
    read = IndexedDataset(str(tmp_path / "ours"))
    assert [read[i].tolist() for i in range(len(wanted))] == [each.ids.tolist() for each in wanted]


@pytest.mark.peer("megatron.core")
def test_megatron_documents_of_several_sequences(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.int32)
    wanted = documents([9, 4, 6])
    for each, sizes in zip(wanted, ([2, 7], [4], [1, 0, 5]), strict=True):
        builder.add_document(torch.from_numpy(each.ids), sizes)
    builder.finalize(str(tmp_path / "a.idx"))
    same(read_megatron(tmp_path / "a"), wanted)


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_packed(tmp_path / "a", documents(), dtype="uint16")
    write_megatron(tmp_path / "b", documents())
    for again in (
        lambda: write_packed(tmp_path / "a", documents(), dtype="uint16"),
        lambda: write_megatron(tmp_path / "b", documents()),
        lambda: write_packed(tmp_path / "b.bin", documents(), dtype="uint16"),
    ):
        with pytest.raises(ExistsError):
            again()


def test_a_token_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(OutsideError, match=r"token\(300\) is not in 0..255"):
        write_packed(tmp_path / "a", documents([301]), dtype="uint8")
    with pytest.raises(MissingFileError):
        read_packed(tmp_path / "a")  # it was not finished
    with pytest.raises(FormatError, match="Megatron's form holds tokens that all count"):
        write_megatron(tmp_path / "b", documents(masked=True))


def test_a_token_beyond_the_vocabulary_is_named_where_it_is_read(tmp_path: Path) -> None:
    tokens = joined(documents(), "files")
    assert tokens.part(2, 0, 5, vocab_size=12).ids.tolist() == [7, 8, 9, 10, 11]
    with pytest.raises(OutsideError, match=r"files, document 2: token\(11\) is not in 0..10"):
        tokens.part(2, 0, 5, vocab_size=11)
    with pytest.raises(OutsideError, match=r"token\(-1\)"):
        joined([Document(np.array([3, -1]), np.ones(2, np.bool_))]).part(0, 0, 2)


def damaged(file: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(file.read_bytes())
    change(data)
    file.write_bytes(bytes(data))


def put(at: int, value: int, size: int = 8) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at : at + size] = value.to_bytes(size, "little", signed=value < 0)

    return change


INDEX = 34
"""Where the sizes of an index begin; there are 7 of 4 bytes, then 7 pointers, then 8 documents."""


@pytest.mark.parametrize(
    "change",
    [
        put(0, 0), put(9, 2), put(17, 0, 1), put(17, 7, 1), put(17, 6, 1), put(17, 99, 1), put(17, 8, 1),
        put(18, 8), put(18, 1 << 62), put(18, (1 << 64) - 1), put(26, 7), put(26, 0), put(26, 1 << 40),
        put(INDEX, -7, 4), put(INDEX, 8, 4), put(INDEX, 1 << 30, 4),
        put(INDEX + 28, 4), put(INDEX + 36, -28), put(INDEX + 44, 1 << 60),
        put(INDEX + 84, 1), put(INDEX + 92, 5), put(INDEX + 140, 6), put(INDEX + 140, 8),
        put(INDEX + 100, -1),
        lambda data: data.__delitem__(slice(40, None)), lambda data: data.__delitem__(slice(5, None)),
        lambda data: data.clear(), lambda data: data.extend(b"\0" * 8), lambda data: data.pop(),
    ],
)  # fmt: skip
def test_an_index_that_lies(tmp_path: Path, change: Callable[[bytearray], Any]) -> None:
    write_megatron(tmp_path / "a", documents())
    damaged(tmp_path / "a.idx", change)
    with pytest.raises((FormatError, TruncatedError)) as caught:
        read_megatron(tmp_path / "a")
    assert str(tmp_path / "a.") in caught.value.where


@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_half_of_megatron(tmp_path: Path, end: str) -> None:
    write_megatron(tmp_path / "a", documents())
    (tmp_path / f"a{end}").unlink()
    with pytest.raises(MissingFileError):
        read_megatron(tmp_path / "a")


@pytest.mark.parametrize("by", [-1, 1, -8])
def test_tokens_that_are_cut_off_or_go_on(tmp_path: Path, by: int) -> None:
    write_megatron(tmp_path / "a", documents())
    write_packed(tmp_path / "b", documents(masked=True), dtype="int32")
    for file in (
        tmp_path / "a.bin",
        *(tmp_path / "b" / name for name in ("tokens.bin", "ends.bin", "targets.bin")),
    ):
        data = file.read_bytes()
        file.write_bytes(data[:by] if by < 0 else data + b"\0" * by)
        with pytest.raises((FormatError, TruncatedError)):
            read_megatron(tmp_path / "a") if file.parent == tmp_path else read_packed(tmp_path / "b")
        file.write_bytes(data)
    read_packed(tmp_path / "b")


@pytest.mark.parametrize(
    "said",
    [
        {"format": "x"}, {"version": 2}, {"dtype": "float32"}, {"dtype": "object"}, {"num_tokens": -1},
        {"num_tokens": "108"}, {"num_tokens": True}, {"num_tokens": 1 << 62}, {"num_documents": -7},
        {"targets": "../../x"}, {"num_documents": 6},
    ],
)  # fmt: skip
def test_what_a_folder_says_of_itself_is_compared(tmp_path: Path, said: dict[str, Any]) -> None:
    write_packed(tmp_path / "a", documents(), dtype="uint16")
    file = tmp_path / "a/tokens.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **said}))
    with pytest.raises(FormatError):
        read_packed(tmp_path / "a")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 70_000, "null", '{"format": "shardweave tokens"}'])
def test_a_folder_that_says_nothing(tmp_path: Path, text: str) -> None:
    write_packed(tmp_path / "a", documents(), dtype="uint16")
    (tmp_path / "a/tokens.json").write_text(text)
    with pytest.raises(FormatError):
        read_packed(tmp_path / "a")


@pytest.mark.parametrize(
    "ends", [[7, 7, 30, 31, 33, 97, 107], [7, 6, 30, 31, 33, 97, 108], [-1, 7, 30, 31, 33, 97, 108]]
)
def test_ends_that_do_not_ascend(tmp_path: Path, ends: list[int]) -> None:
    write_packed(tmp_path / "a", documents(), dtype="uint16")
    np.array(ends, dtype="<i8").tofile(tmp_path / "a/ends.bin")
    with pytest.raises(FormatError, match="ends of documents ascend"):
        read_packed(tmp_path / "a")


# --- text ---------------------------------------------------------------------------------------


def lines(path: Path, *said: object) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in said))
    return path


def test_text_of_bytes(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "a.jsonl", {"text": "ab"}, {"prompt": "é", "response": "c", "id": 3}, {"text": ""}
    )
    found = list(read_documents(file, Bytes()))
    assert [each.ids.tolist() for each in found] == [[97, 98, 256], [195, 169, 99, 256], [256]]
    assert [each.mask.tolist() for each in found] == [[True] * 3, [False, False, True, True], [True]]
    (tmp_path / "a.txt").write_text('{"text"\n')
    (one,) = read_documents(tmp_path / "a.txt", Bytes())
    assert one.ids.tolist() == [*b'{"text"\n', 256]


@pytest.mark.parametrize(
    "line",
    [
        b"{", b"3", b"[]", b"null", b'{"txt": "a"}', b'{"text": 3}', b'{"text": "a", "messages": []}',
        b'{"prompt": "a"}', b'{"prompt": "a", "response": null}', b"\xff", b"[" * 70_000,
    ],
)  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(FormatError, match=r"a\.jsonl, line 3"):
        list(read_documents(tmp_path / "a.jsonl", Bytes()))


def test_conversations_need_a_template(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(FormatError, match="chat_template is not there"):
        list(read_documents(file, Bytes()))
    with pytest.raises(FormatError, match=r"offset 1: got bytes that are no UTF-8"):
        (tmp_path / "b.txt").write_bytes(b"a\xff")
        list(read_documents(tmp_path / "b.txt", Bytes()))
    with pytest.raises(MissingFileError):
        open_tokens(tmp_path / "c.txt")


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
REWRITES = (
    "{% for m in messages %}<{{ m['role'] }}> "
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else 'short' }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture
def words(tmp_path: Path) -> Callable[[str | None], Path]:
    """The folder of a tokenizer of words."""

    def made(template: str | None) -> Path:
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = ["<unk>", "<end>", "<user>", "<assistant>", *"abcdefgh", "short"]
        raw = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unk>")
        made.chat_template = template
        made.save_pretrained(tmp_path / "tokenizer")
        return tmp_path / "tokenizer"

    return made


def talk(*texts: str) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@pytest.mark.peer("transformers")
def test_answers_of_a_conversation_count(tmp_path: Path, words: Callable[[str | None], Path]) -> None:
    made = tokenizer(str(words(TEMPLATE)))
    assert (made.vocab_size, made.end) == (13, 1)
    said = lines(
        tmp_path / "a.jsonl", talk("a b", "c", "d", "e f"), talk("a"), {"text": "a b"}, {"text": "a <end>"}
    )
    found = list(read_documents(said, made))
    ids = [[2, 4, 5, 1, 3, 6, 1, 2, 7, 1, 3, 8, 9, 1], [2, 4, 1], [4, 5, 1], [4, 1]]
    assert [each.ids.tolist() for each in found] == ids
    counts = [int(each) for each in "00000110000111"]
    assert found[0].mask.astype(int).tolist() == counts
    assert [each.mask.all() for each in found[1:]] == [False, True, True] and not found[1].mask.any()


@pytest.mark.peer("transformers")
def test_a_template_that_rewrites_is_refused(tmp_path: Path, words: Callable[[str | None], Path]) -> None:
    made = tokenizer(str(words(REWRITES)))
    with pytest.raises(FormatError, match=r"line 1, message 1: template\(first 2 messages\) is no prefix"):
        list(read_documents(lines(tmp_path / "a.jsonl", talk("a b", "c", "d", "e f")), made))
    assert len(list(read_documents(lines(tmp_path / "b.jsonl", talk("a b", "c")), made))) == 1
    with pytest.raises(FormatError, match="no list of objects"):
        list(read_documents(lines(tmp_path / "c.jsonl", {"messages": [{"content": "a"}]}), made))


@pytest.mark.peer("transformers")
def test_a_tokenizer_that_is_not_there(tmp_path: Path, words: Callable[[str | None], Path]) -> None:
    with pytest.raises(MissingFileError, match="a tokenizer is a folder"):
        tokenizer(str(tmp_path / "nowhere"))
    made = tokenizer(str(words(None)))
    with pytest.raises(FormatError, match="chat_template is not there"):
        list(read_documents(lines(tmp_path / "a.jsonl", talk("a")), made))


def test_documents_of_anything(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "c"})
    found, size = open_documents(file)
    write_packed(tmp_path / "b", found, dtype="uint16")
    again, most = open_documents(tmp_path / "b")
    assert size == 257 and most == 257
    assert [each.ids.tolist() for each in again] == [[97, 98, 256], [99, 256]]


# --- parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_length", [2, 3, 5, 16, 1000])
def test_every_token_but_the_first_is_predicted_once(sequence_length: int) -> None:
    parts = Parts(joined(documents()), sequence_length, targets="responses")
    predicted: list[int] = []
    for number in range(len(parts)):
        found = parts.get(number)
        assert 2 <= len(found.ids) <= sequence_length
        assert int(parts.lengths(np.array([number]))[0]) == len(found.ids)
        assert (np.diff(found.ids) == 1).all()
        predicted += found.ids[1:].tolist()
    wanted = [token for each in documents() for token in each.ids[1:].tolist()]
    assert sorted(predicted) == wanted


def test_a_part_has_the_targets_of_its_document() -> None:
    tokens = joined(documents(masked=True))
    for number in range(len(Parts(tokens, 8))):
        found = Parts(tokens, 8, targets="responses").get(number)
        np.testing.assert_array_equal(found.mask, found.ids % 3 != 1)
        assert Parts(tokens, 8).get(number).mask.all()


def test_a_cut_without_a_shared_token_is_seen() -> None:
    """The fault: parts that do not overlap, so that the first token of each is never predicted."""
    tokens = joined(documents([9]))
    naive = [list(range(at, min(at + 4, 9))) for at in range(0, 9, 4)]
    ours = [Parts(tokens, 4).get(n).ids.tolist() for n in range(len(Parts(tokens, 4)))]
    assert sorted(t for part in ours for t in part[1:]) == list(range(1, 9))
    assert sorted(t for part in naive for t in part[1:]) != list(range(1, 9))
    assert parts_of(np.array([9]), 4).tolist() == [3]


# --- order --------------------------------------------------------------------------------------


@given(size=st.integers(1, 3000), key=st.text(max_size=5))
def test_an_order_has_everything_once(size: int, key: str) -> None:
    found = shuffled(np.arange(size), size, key)
    assert sorted(found.tolist()) == list(range(size))


def test_an_order_of_many_is_begun_at_once() -> None:
    size = 10**12
    at = np.array([0, 1, size - 1], dtype=np.int64)
    found = shuffled(at, size, "a")
    assert len(set(found.tolist())) == 3 and found.min() >= 0 and found.max() < size
    np.testing.assert_array_equal(found, shuffled(at, size, "a"))
    assert (found != shuffled(at, size, "b")).all()


def test_orders_look_drawn() -> None:
    """Where the first goes, over many keys: each place about equally often (chi-square, 99.9 %)."""
    places = [int(shuffled(np.array([0]), 10, f"key {k}")[0]) for k in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
    found = shuffled(np.arange(5000), 5000, "one")
    assert abs(np.corrcoef(np.arange(5000), found)[0, 1]) < 0.05
    assert 0.4 < (np.diff(found) > 0).mean() < 0.6
    assert (found == np.arange(5000)).sum() < 12


def test_an_order_is_pinned() -> None:
    """A run that goes on with a newer version has the same documents."""
    assert shuffled(np.arange(10), 10, "seed 0, pass 0").tolist() == PINNED


PINNED = [1, 5, 3, 7, 4, 9, 6, 0, 8, 2]

# --- steps --------------------------------------------------------------------------------------


def loader(**given: Any) -> Loader:
    parts = Parts(joined(documents(masked=True)), 12, targets="responses")
    return Loader(parts, **{"documents": 6, "seed": 5, **given})


def content(loaders: Sequence[Loader], step: int) -> list[tuple[int, list[int], list[bool]]]:
    """The documents of a step, in order of ranks and microbatches: number, tokens, targets."""
    found = []
    for each in loaders:
        for batch in each.step(step):
            at = 0
            for number, length in zip(batch.numbers, batch.layout.lengths, strict=True):
                if length:
                    ids, mask = batch.ids[at : at + length].tolist(), batch.mask[at : at + length].tolist()
                    found.append((number, ids, mask))
                at += length
    return found


LAYOUTS: list[dict[str, Any]] = [
    {"microbatch": 6}, {"microbatch": 2}, {"microbatch": 4}, {"form": "bshd", "microbatch": 3},
    {"slots": 16}, {"slots": 40, "cp": 2}, {"cp": 2, "tp": 2}, {"order": "contiguous", "cp": 3},
]  # fmt: skip


@pytest.mark.parametrize("given_", LAYOUTS)
@pytest.mark.parametrize("dp", [1, 2, 3, 6])
def test_a_step_has_the_same_documents_at_every_layout(given_: dict[str, Any], dp: int) -> None:
    ranks = [loader(**given_, dp=dp, dp_rank=rank) for rank in range(dp)]
    for step in (0, 1, 7, 1000):
        assert content(ranks, step) == content([loader()], step)
        assert len({len(each.step(step)) for each in ranks}) == 1
        total = sum(len(ids) for _, ids, _ in content(ranks, step))
        assert all(each.num_tokens(step) == total for each in ranks)


def test_an_order_over_global_ranks_is_seen() -> None:
    """The fault: each data rank takes every dp-th document, which makes other steps at other layouts."""
    one, two = loader().numbers(0), [loader(dp=2, dp_rank=rank) for rank in (0, 1)]
    strided = [*one[0::2], *one[1::2]]
    ours = [number for number, _, _ in content(two, 0)]
    assert ours == list(range(6)) and strided != one.tolist()


def test_every_pass_has_every_part_once_in_another_order() -> None:
    each = loader()
    size = len(each.parts)
    numbers = np.concatenate([each.numbers(step) for step in range(3 * size)])
    passes = numbers[: len(numbers) // size * size].reshape(-1, size)
    assert all(sorted(one.tolist()) == list(range(size)) for one in passes)
    assert len({tuple(one.tolist()) for one in passes}) == len(passes)
    assert loader(seed=None).numbers(0).tolist() == list(range(6))
    assert loader(seed=6).numbers(0).tolist() != each.numbers(0).tolist()


def test_microbatches_of_so_many_slots() -> None:
    parts = Parts(joined(documents([5, 3, 9, 2, 8, 8])), 12)
    found = Loader(parts, documents=6, slots=16, seed=None)
    assert [batch.layout.lengths for batch in found.step(0)] == [(5, 3), (9, 2), (8, 8)]
    cut = Loader(parts, documents=6, slots=16, seed=None, cp=2)  # padded to 4
    assert [batch.layout.lengths for batch in cut.step(0)] == [(5, 3), (9, 2), (8, 8)]
    assert all(sum(batch.layout.padded) <= 16 for batch in cut.step(0))
    ranks = [Loader(parts, documents=6, slots=11, seed=None, dp=2, dp_rank=rank) for rank in (0, 1)]
    assert [[batch.layout.lengths for batch in each.step(0)] for each in ranks] == [
        [(5, 3), (9,)],
        [(2, 8), (8,)],
    ]


def test_a_rank_with_less_gets_microbatches_of_nothing() -> None:
    parts = Parts(joined(documents([2, 2, 2, 9, 9, 9])), 12)
    ranks = [Loader(parts, documents=6, slots=10, seed=None, dp=2, dp_rank=rank) for rank in (0, 1)]
    found = [[batch.layout.lengths for batch in each.step(0)] for each in ranks]
    assert found == [[(2, 2, 2), (0,), (0,)], [(9,), (9,), (9,)]]
    assert ranks[0].step(0)[1].count == 0


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 1, 7, 100])
def test_an_evaluation_has_each_part_once(dp: int, most: int | None) -> None:
    ranks = [loader(seed=None, dp=dp, dp_rank=rank, microbatch=2, most=most) for rank in range(dp)]
    found: list[list[int]] = []
    for steps in zip(*(each.once() for each in ranks), strict=True):
        assert len({len(batches) for batches in steps}) == 1
        for batches in steps:
            found += [
                batch.ids[a : a + n].tolist() for batch in batches for a, n in stretches(batch.layout.lengths)
            ]
    parts = loader().parts
    wanted = [parts.get(n).ids.tolist() for n in range(min(most or len(parts), len(parts)))]
    assert [each for each in found if each] == wanted


def stretches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(itertools.accumulate(lengths, initial=0), lengths, strict=False))


def test_what_is_nothing_to_train_on() -> None:
    with pytest.raises(FormatError, match=r"documents\(3\), none of two tokens or more"):
        Loader(Parts(joined(documents([1, 0, 1])), 12), documents=6)
    with pytest.raises(GeometryError, match=r"documents\(6\) % dp\(4\) != 0"):
        loader(dp=4)
    with pytest.raises(ShardweaveError, match=r"token\(107\) is not in 0..99"):
        wide = Loader(Parts(joined(documents()), 200, vocab_size=100), documents=5, seed=None)
        wide.step(0)
