"""Two models built alike: what one has derived is put into the other, at once or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardweave.errors import ModelError
from shardweave.refit.engines.exchange import differences, prepare, same_values
from shardweave.refit.engines.pairs import Pairs, bits_of, same_bits, storage_of

OURS = ("kv_cache",)


class Kernel:
    """What a derivation makes anew: it knows its module and keeps a packed copy."""

    def __init__(self, layer: nn.Module, packed: torch.Tensor) -> None:
        self.layer, self.packed = layer, packed
        self.parts = (layer, [packed])
        self.call = self.layer.forward


class Method:
    def __init__(self) -> None:
        self.kernel: Kernel | None = None


class Linear(nn.Module):
    """A layer whose weight is consumed into a packed copy, and whose bias becomes another dtype."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False)
        self.gate = nn.Parameter(torch.empty(rows, columns), requires_grad=False)
        self.method, self.steps, self.names = Method(), ["built"], {"built"}
        self.kv_cache = torch.empty(0)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.arange(4.0))
        self.temporary: Any = "until derived"

    def derive(self) -> None:
        packed = self.weight.detach().t().contiguous()
        self.method.kernel = Kernel(self, packed)
        self.product = lambda x: (x @ packed + self.bias.float() + x @ self.gate.float()) * self.scale
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias.data = self.bias.data.double()
        self.gate = nn.Parameter(self.gate.detach().t(), requires_grad=False)  # a view of what was staged
        self.scale.fill_(float(packed.abs().max()))
        self.steps.append("derived")
        self.names.add("derived")
        del self.temporary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.packed = torch.empty(0)

    def derive(self) -> None:
        self.packed = self.weight.detach().clone()


class Model(nn.Module):
    """An embedding, a head that is tied to it, a norm that nothing is derived of, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.embed.weight.requires_grad_(False)
        self.layers = nn.ModuleList(Linear(rows, 6) for rows in (6, 6))
        self.norm = nn.LayerNorm(6).requires_grad_(False)
        self.head = Head(self.embed.weight)
        self.all_layers = list(self.layers)
        # A part of a parameter that is held under another name, as routers hold their bias.
        self.corner = self.norm.bias.data[2:5]

    def derive(self) -> None:
        for layer in self.layers:
            layer.derive()
        self.head.derive()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.head.packed.t() + self.corner.sum()


def fill(model: Model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.detach().copy_(torch.randn(parameter.shape, generator=generator))


def fresh(seed: int) -> Model:
    """What an engine would serve that was started from these weights."""
    model = Model()
    fill(model, seed)
    model.derive()
    return model


def paired(seed: int = 1) -> Pairs:
    live, twin = fresh(seed), Model()
    for layer in live.layers:
        layer.kv_cache = torch.full((3, 5), 7.0)
    return Pairs(live, twin, staged=twin.parameters(), ours=OURS)


def refit(pairs: Pairs, seed: int) -> None:
    fill(pairs.twin, seed)  # type: ignore[arg-type]
    pairs.twin.derive()  # type: ignore[operator]
    prepare(pairs).commit()
    pairs.reset()


def unlike(model: nn.Module, seed: int) -> list[str]:
    return [str(d) for d in differences(model, fresh(seed), compare=same_values, ours=OURS)]


def tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    for layer in model.layers:  # type: ignore[union-attr]
        if layer.method.kernel is not None:
            yield layer.method.kernel.packed
    yield model.head.packed  # type: ignore[misc,union-attr]


IDS = torch.tensor([3, 0, 6])


@pytest.mark.parametrize("seeds", [(1,), (2,), (2, 3, 1), (5, 5)])
def test_what_is_served_is_what_a_fresh_model_derives(seeds: tuple[int, ...]) -> None:
    pairs = paired()
    caches = [layer.kv_cache for layer in pairs.live.layers]  # type: ignore[union-attr]
    for seed in seeds:
        refit(pairs, seed)
        assert unlike(pairs.live, seed) == []
        assert same_bits(pairs.live(IDS), fresh(seed)(IDS))
    layers = list(pairs.live.layers)  # type: ignore[arg-type]
    assert all(a.kv_cache is b and bool((b == 7).all()) for a, b in zip(layers, caches, strict=True))


def test_what_is_staged_may_be_what_was_there_at_first() -> None:
    live, twin = fresh(1), Model()
    fill(twin, 2)
    pairs = Pairs(live, twin, staged=twin.parameters(), ours=OURS)
    refit(pairs, 2)
    assert unlike(live, 2) == []


def test_a_difference_is_seen() -> None:
    found = unlike(fresh(1), 2)
    assert any("embed.weight" in each for each in found) and any(".packed" in each for each in found)
    model = fresh(1)
    model.layers[1].scale.neg_()  # type: ignore[union-attr]
    assert unlike(model, 1) == ["layers.1.scale: 1 of 1 elements differ"]


def test_what_was_derived_belongs_to_the_live_model_alone() -> None:
    pairs = paired()
    refit(pairs, 2)
    for layer in pairs.live.layers:  # type: ignore[union-attr]
        kernel = layer.method.kernel
        assert kernel.layer is layer and kernel.parts[0] is layer and kernel.call.__self__ is layer
        held = dict(zip(layer.product.__code__.co_freevars, layer.product.__closure__, strict=True))
        assert held["self"].cell_contents is layer
    assert pairs.live.head.weight is pairs.live.embed.weight  # type: ignore[union-attr]
    for model in (pairs.live, pairs.twin):
        assert storage_of(model.corner) == storage_of(model.norm.bias)  # type: ignore[arg-type,union-attr]
    assert pairs.twin.layers[0].method.kernel is None  # type: ignore[union-attr,index]
    assert pairs.twin.layers[0].steps == ["built"]  # type: ignore[union-attr,index]


def test_staging_shares_no_memory_with_what_is_served_and_is_used_again() -> None:
    pairs, addresses = paired(), []
    for seed in (2, 3, 4, 5):
        refit(pairs, seed)
        staged = {p.untyped_storage().data_ptr() for p in pairs.twin.parameters()}
        served = {t.untyped_storage().data_ptr() for t in tensors(pairs.live) if t.numel()}
        assert not staged & served
        for parameter in pairs.twin.parameters():
            parameter.detach().fill_(float("nan"))
        assert unlike(pairs.live, seed) == []
        addresses.append(staged)
    assert addresses[0] == addresses[2] and addresses[1] == addresses[3]


def test_nothing_is_touched_before_the_commit() -> None:
    pairs = paired()
    before = {name: value.clone() for name, value in pairs.live.state_dict().items()}
    for _ in range(2):
        fill(pairs.twin, 2)  # type: ignore[arg-type]
        pairs.twin.derive()  # type: ignore[operator]
        prepare(pairs)
        pairs.reset()
    assert unlike(pairs.live, 1) == []
    assert all(same_bits(pairs.live.state_dict()[name], value) for name, value in before.items())
    refit(pairs, 3)
    assert unlike(pairs.live, 3) == []


def test_a_derivation_that_breaks_off_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = paired()
    fill(pairs.twin, 2)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(Head, "derive", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pairs.twin.derive()  # type: ignore[operator]
    pairs.reset()
    assert unlike(pairs.live, 1) == []
    refit(pairs, 4)
    assert unlike(pairs.live, 4) == []


def test_a_commit_that_breaks_off_is_undone() -> None:
    pairs = paired()
    fill(pairs.twin, 2)  # type: ignore[arg-type]
    pairs.twin.derive()  # type: ignore[operator]
    exchange = prepare(pairs)

    class Broken:
        def do(self) -> None:
            raise MemoryError

    exchange.steps.append(Broken())  # type: ignore[arg-type]
    with pytest.raises(MemoryError):
        exchange.commit()
    assert unlike(pairs.live, 1) == []


def test_a_change_after_the_commit_is_known() -> None:
    pairs = paired()
    fill(pairs.twin, 2)  # type: ignore[arg-type]
    pairs.twin.derive()  # type: ignore[operator]
    exchange = prepare(pairs)
    exchange.commit()
    pairs.reset()
    assert exchange.broken() == ""
    pairs.live.norm.weight.data = torch.ones(6)  # type: ignore[union-attr]
    assert exchange.broken() == "norm.weight"


TABLE = torch.arange(6.0)
"""What all models look at, as they do at tables of angles."""


class Windowed(nn.Module):
    """A model that looks at a table of all models, and then at its own weights, by tensors made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6), requires_grad=False)

    def derive(self) -> None:
        self.table = TABLE.view(6)
        self.view = self.weight.detach().view(6)
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def test_memory_that_others_look_at_is_not_used_for_staging() -> None:
    live, twin = Windowed(), Windowed()
    fill(live, 1)  # type: ignore[arg-type]
    live.derive()
    pairs = Pairs(live, twin, staged=twin.parameters())
    for seed in (2, 3, 4):
        refit(pairs, seed)
        twin.weight.detach().fill_(float("nan"))
        assert TABLE.tolist() == [0, 1, 2, 3, 4, 5]
        wanted = Windowed()
        fill(wanted, seed)  # type: ignore[arg-type]
        assert same_bits(live.view, wanted.weight)


# --- addresses stay -----------------------------------------------------------------------------


class Plain(nn.Module):
    """A model whose derivation makes tensors of the same form each time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(6), requires_grad=False)
        self.method = Method()

    def derive(self) -> None:
        packed = self.weight.detach().t().contiguous()
        self.product = lambda x: (x * self.norm) @ packed
        self.weight = nn.Parameter(packed * 2, requires_grad=False)


class Handle:
    """Stands for memory that somebody else owns: to copy what it shows would free that twice."""

    def __init__(self) -> None:
        self.pointer = torch.tensor(7)

    def __del__(self) -> None:
        self.pointer = None  # type: ignore[assignment]


def plain_pairs() -> Pairs:
    live, twin = Plain(), Plain()
    fill(live, 1)  # type: ignore[arg-type]
    live.derive()
    return Pairs(live, twin, staged=twin.parameters())


def test_addresses_stay_where_code_holds_them() -> None:
    pairs = plain_pairs()
    held = [*pairs.live.parameters()]
    addresses, product = [p.data_ptr() for p in held], pairs.live.product
    for seed in (2, 3):
        fill(pairs.twin, seed)  # type: ignore[arg-type]
        pairs.twin.derive()  # type: ignore[operator]
        exchange = prepare(pairs, stay=True)
        exchange.commit()
        pairs.reset()
        assert exchange.broken() == ""
        assert all(step.values is None for step in exchange.steps)  # type: ignore[union-attr]
        wanted = Plain()
        fill(wanted, seed)  # type: ignore[arg-type]
        wanted.derive()
        x = torch.ones(2, 6)
        assert same_bits(product(x), wanted.product(x))
        assert list(differences(pairs.live, wanted, compare=same_values)) == []
        now = [*pairs.live.parameters()]
        assert [p.data_ptr() for p in now] == addresses and all(
            a is b for a, b in zip(now, held, strict=True)
        )


def test_what_cannot_be_copied_is_refused_where_addresses_stay() -> None:
    pairs = plain_pairs()
    fill(pairs.twin, 2)  # type: ignore[arg-type]
    pairs.twin.derive()  # type: ignore[operator]
    pairs.twin.handle = Handle()
    with pytest.raises(ModelError, match=r"'handle'.*only the second model has it.*enforce_eager=True"):
        prepare(pairs, stay=True)
    pairs.live.handle = Handle()
    with pytest.raises(ModelError, match=r"'handle'.*Handle shows nothing of what it holds"):
        prepare(pairs, stay=True)
    pairs.twin.handle = pairs.live.handle
    prepare(pairs, stay=True)


def test_what_a_model_had_at_first_is_no_weight_whatever_it_holds() -> None:
    live, twin = Plain(), Plain()
    live.lock, twin.lock = object(), object()  # as locks, events and streams are
    live.handle, twin.handle = Handle(), Handle()
    fill(live, 1)  # type: ignore[arg-type]
    live.derive()
    pairs = Pairs(live, twin, staged=twin.parameters())
    fill(twin, 2)  # type: ignore[arg-type]
    twin.derive()
    prepare(pairs, stay=True).commit()
    wanted = Plain()
    fill(wanted, 2)  # type: ignore[arg-type]
    wanted.derive()
    assert same_bits(live.weight, wanted.weight) and int(live.handle.pointer) == 7


# --- refusals -----------------------------------------------------------------------------------


def derived(pairs: Pairs) -> Pairs:
    fill(pairs.twin, 2)  # type: ignore[arg-type]
    pairs.twin.derive()  # type: ignore[operator]
    return pairs


def test_a_tensor_that_the_live_model_made_while_it_ran_is_refused() -> None:
    pairs = derived(paired())
    pairs.live.layers[1].method.cache = torch.ones(3)  # type: ignore[union-attr,index]
    with pytest.raises(ModelError, match=r"'layers.1.method.cache'.*only the served model has this tensor"):
        prepare(pairs)


def test_a_live_model_of_another_form_is_refused() -> None:
    pairs = derived(paired())
    pairs.live.norm.weight = nn.Parameter(torch.ones(5))  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"'norm.weight'.*served: Parameter\[5\].*derived: Parameter\[6\]"):
        prepare(pairs)


def test_a_live_model_that_was_wrapped_is_refused() -> None:
    live, twin = fresh(1), Model()
    live.layers[1] = nn.Sequential(live.layers[1])  # as an adapter would
    live.norm = nn.Identity()
    del live.head
    with pytest.raises(ModelError, match="built like the one that it serves"):
        Pairs(live, twin, staged=())


def test_bits_are_compared_and_not_values() -> None:
    zero = torch.zeros(2)
    assert not same_bits(zero, -zero) and same_bits(zero / zero, zero / zero)
    assert not same_bits(zero, zero.double()) and not same_bits(zero, zero[:1])
    assert bits_of(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.int16
