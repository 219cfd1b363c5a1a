"""checkpoint_layers: the same bits from less memory, and the model as it was otherwise."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memtools
from memtools import checkpoint_layers


class Block(nn.Module):
    def __init__(self, width: int = 8, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.mix = nn.Linear(width, width)
        self.drop = nn.Dropout(0.3)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():  # a checkpointed graph must have no side effect
            self.forwards += 1
        return x + scale * self.drop(torch.tanh(self.mix(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 4, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm=norm) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(3))


def trained(model: nn.Module, updates: int = 2) -> list[Tensor]:
    """Losses, gradients, parameters and buffers of a few updates from the same random numbers."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for _ in range(updates):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(X).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return seen + [value.clone() for value in model.state_dict().values()]


def forwards(model: Model) -> list[int]:
    return [block.forwards for block in model.blocks]


def kept(model: nn.Module) -> int:
    """Bytes that a forward keeps for backward, outside of checkpointed layers."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, nn.Parameter):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = model(X.clone().requires_grad_())
    total = sum(storages.values())
    del result
    return total


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_training_has_the_same_bits_with_dropout_autocast_and_running_statistics(norm):
    plain = Model(norm=norm)
    model = copy.deepcopy(plain)
    checkpoint_layers(model)
    assert same(trained(model), trained(plain))
    assert forwards(plain) == [2] * 4
    assert forwards(model) == [4] * 4


def test_statistics_are_kept_when_there_is_no_momentum_and_in_evaluation():
    plain = Model(norm=nn.BatchNorm1d)
    for block in plain.blocks:
        block.norm.momentum = None
    plain.blocks[1].eval()
    model = copy.deepcopy(plain)
    checkpoint_layers(model)
    assert same(trained(model), trained(plain))
    assert int(model.blocks[0].norm.num_batches_tracked) == 2
    assert int(model.blocks[1].norm.num_batches_tracked) == 0


def test_a_layer_keeps_its_input_alone(model):
    before = kept(model)
    handle = checkpoint_layers(model)
    assert kept(model) < before / 3
    handle.remove()
    assert kept(model) == before


def test_where_gradients_are_off_a_layer_runs_as_ever(model, monkeypatch):
    checkpoint_layers(model)
    monkeypatch.delattr("torch.utils.checkpoint.checkpoint")
    with torch.no_grad():
        model(X)
    assert forwards(model) == [1] * 4
    with pytest.raises(AttributeError, match="checkpoint"):
        model(X)


def test_what_a_recomputed_forward_records_is_there_once():
    class Recording(Block):
        def __init__(self) -> None:
            super().__init__()
            self.history = memtools.GateHistory()

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.history.append(self.mix(x).softmax(-1))
            return super().forward(x, scale=scale)

    model = Model()
    model.blocks = nn.ModuleList(Recording() for _ in range(2))
    checkpoint_layers(model)
    model(X).sum().backward()
    assert forwards(model) == [2, 2]
    assert [len(block.history) for block in model.blocks] == [1, 1]


# --- which layers ---------------------------------------------------------------------------------


def test_every_counts_from_the_first_layer(model):
    handle = checkpoint_layers(model, every=3)
    assert handle.names == ("blocks.0", "blocks.3")
    assert handle.found == 4
    assert str(handle) == "2 of 4 layers compute again in backward: blocks.0, blocks.3"
    trained(model, updates=1)
    assert forwards(model) == [2, 1, 1, 2]


def test_names_are_patterns_of_parts_of_names(model):
    handle = checkpoint_layers(model, names=["blocks.[12]", "head"])
    assert handle.names == ("blocks.1", "blocks.2", "head")
    handle.remove()
    assert checkpoint_layers(model, names="blocks.*.mix").names[-1] == "blocks.3.mix"


def test_every_counts_among_the_named(model):
    assert checkpoint_layers(model, 2, names="blocks.*").names == ("blocks.0", "blocks.2")


def nested(**lists: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, value in lists.items():
        model.add_module(name, value)
    return model


def blocks(kind: Callable[[], nn.Module], count: int) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


class Decoder(Block): ...


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


MODELS = {
    "lists inside of a block are parts of it": (
        nested(layers=blocks(Experts, 3), heads=blocks(lambda: nn.Linear(8, 1), 2)),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "stages of one type belong together": (
        nested(
            stage1=nn.Sequential(Block(), Block()), stage2=nn.Sequential(Block(), Block(), Block())
        ),
        ["stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage2.2"],
    ),
    "of equally long ones all": (
        nested(encoder=blocks(Block, 2), decoder=blocks(Decoder, 2)),
        ["encoder.0", "encoder.1", "decoder.0", "decoder.1"],
    ),
    "mixed lists are looked into": (
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(Block(), Block()), nn.ReLU()),
        ["1.0", "1.1"],
    ),
    "lists of lists too": (
        nested(levels=blocks(lambda: blocks(Block, 2), 2)),
        ["levels.0.0", "levels.0.1", "levels.1.0", "levels.1.1"],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_repeated_blocks_are_found(case):
    model, wanted = MODELS[case]
    handle = checkpoint_layers(model)
    assert list(handle.names) == wanted
    handle.remove()


def test_a_layer_in_several_places_is_wrapped_once():
    block = Block()
    model = nn.Sequential(block, block, block)
    handle = checkpoint_layers(model)
    assert handle.names == ("0",)
    model(X).sum().backward()
    assert block.forwards == 6


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "model"}, TypeError, r"takes a torch.nn.Module, got str"),
        ({"every": 0}, ValueError, r"every .* at least 1, got 0"),
        ({"every": True}, TypeError, r"every .* an int, got bool"),
        ({"every": 1.5}, TypeError, r"every .* an int, got float"),
        ({"names": []}, ValueError, r"names is empty"),
        ({"names": [3]}, TypeError, r"names must be patterns .* got int"),
        ({"names": "block.*"}, ValueError, r"no module of Model is called 'block.\*'"),
        ({"names": ["head", "tail"]}, ValueError, r"no module of Model is called 'tail'"),
        ({"names": "blocks"}, ValueError, r"blocks is a ModuleList, which is never called"),
        ({"names": ["blocks.*", "blocks.1.mix"]}, ValueError, r"blocks.1.mix is inside blocks.1"),
        ({"names": ["", "head"]}, ValueError, r"head is inside the model and would be"),
        ({"model": nn.Linear(2, 2)}, ValueError, r"Linear has no ModuleList or Sequential of 2"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_wrapped(model, arguments, error, message):
    with pytest.raises(error, match=message):
        checkpoint_layers(**{"model": model, **arguments})
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("blocks.0", r"blocks.0 is checkpointed already; remove\(\) that first"),
        ("blocks.1.mix", r"blocks.1.mix is inside blocks.1"),
        ("", r"blocks.0 is inside the model"),
    ],
)
def test_what_is_wrapped_is_not_wrapped_again(model, names, message):
    checkpoint_layers(model, names="blocks.*")
    with pytest.raises(ValueError, match=message):
        checkpoint_layers(model, names=names)
    trained(model, updates=1)
    assert forwards(model) == [2] * 4


# --- the model otherwise --------------------------------------------------------------------------


def test_remove_leaves_the_model_as_it_was(model):
    before = [dict(module.__dict__) for module in model.modules()]
    handle = checkpoint_layers(model)
    assert handle.active
    handle.remove()
    handle.remove()
    assert not handle.active
    assert str(handle).startswith("4 of 4 layers run as before: blocks.0")
    assert [dict(module.__dict__) for module in model.modules()] == before
    checkpoint_layers(model).remove()


def test_a_forward_that_was_there_before_is_called_and_comes_back(model):
    calls = []
    inner = model.blocks[0].forward

    def patched(x: Tensor, *, scale: float) -> Tensor:
        calls.append("patched")
        return inner(x, scale=scale)

    model.blocks[0].forward = patched
    handle = checkpoint_layers(model)
    model(X).sum().backward()
    assert calls == ["patched"] * 2
    handle.remove()
    assert model.blocks[0].forward is patched


def test_under_a_forward_that_was_put_over_it_remove_ends_the_recomputation(model):
    handle = checkpoint_layers(model)
    ours = model.blocks[0].forward
    model.blocks[0].forward = over = lambda *args, **kwargs: ours(*args, **kwargs)
    handle.remove()
    model(X).sum().backward()
    assert forwards(model) == [1] * 4
    assert model.blocks[0].forward is over


def test_names_of_parameters_and_the_layers_type_stay(model):
    keys = list(model.state_dict())
    checkpoint_layers(model)
    assert list(model.state_dict()) == keys
    assert {type(block) for block in model.blocks} == {Block}
    model.load_state_dict(Model().state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_checkpointed_by_themselves(model, copied):
    handle = checkpoint_layers(model)
    other, its_handle = copied((model, handle))
    assert same(trained(other), trained(model))
    assert forwards(other) == [4] * 4
    its_handle.remove()
    assert handle.active
    other(X).sum().backward()
    assert forwards(other) == [5] * 4


def test_a_pickled_handle_comes_back_in_any_order_and_alone(model):
    handle = checkpoint_layers(model)
    its_handle, other = pickle.loads(pickle.dumps((handle, model)))
    assert its_handle.active
    its_handle.remove()
    assert "forward" not in other.blocks[0].__dict__
    alone = pickle.loads(pickle.dumps(handle))
    alone.remove()  # its layers are gone


def test_neither_the_wrapping_nor_the_handle_keeps_a_model(model):
    handle = checkpoint_layers(model)
    gone = weakref.ref(model.blocks[0])
    model(X).sum().backward()
    gc.disable()
    try:
        copied = copy.deepcopy(model)
        at_copy = weakref.ref(copied.blocks[0])
        del copied
        assert at_copy() is None
        model.blocks = nn.ModuleList()
        assert gone() is None
    finally:
        gc.enable()
    handle.remove()


class Keywords(nn.Module):
    """A layer with keywords that torch's checkpoint has too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, factor=None, debug=False, early_stop=1.0, preserve_rng_state=0.0):
        x = self.linear(x) * (100 if debug else 1) * early_stop + preserve_rng_state
        return x if factor is None else x * factor


@pytest.mark.parametrize("norm", [False, True])
def test_a_layers_own_keywords_reach_it(norm):
    layers = [Keywords(), Keywords()]
    if norm:
        for layer in layers:
            layer.norm = nn.BatchNorm1d(4)
    model = nn.ModuleList(layers)
    factor = torch.full((), 2.0, requires_grad=True)
    keywords = {"debug": True, "early_stop": 3.0, "preserve_rng_state": 0.5, "factor": factor}

    def run():
        x = torch.ones(2, 4)
        for layer in model:
            x = layer(x, **keywords)
        model.zero_grad()
        factor.grad = None
        x.sum().backward()
        return x.detach(), factor.grad, layers[0].linear.weight.grad

    plain = run()
    checkpoint_layers(model)
    for got, wanted in zip(run(), plain, strict=True):
        assert torch.equal(got, wanted)
