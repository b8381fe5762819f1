"""`truncate`: the right layer of any model, everything else as it was, and a clear no where it cannot be done."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from ell0.nn import InputClamp, InputScale, InputTruncation, TruncatedConv2d, TruncatedLinear, truncate


class Backwards(nn.Module):
    """Registers its layers in the opposite order of their execution."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.first(x.flatten(1))))


class Branching(nn.Module):
    """Cannot be traced: it looks at its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x) if x.sum() > -1e9 else x


class Convolutional(nn.Module):
    def __init__(self, first: nn.Module | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(4 * 6 * 6, 3)
        self.conv = first or nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.relu(self.conv(self.norm(x))).flatten(1))


def flat(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.Linear(8, 3))


def truncated_in(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, TruncatedLinear | InputTruncation)}


LINEAR: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(8, 3), ""),
    (lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)), "1"),
    (
        lambda: nn.Sequential(
            nn.Sequential(nn.BatchNorm1d(8), nn.Dropout()), nn.Sequential(nn.PReLU(), nn.Linear(8, 3))
        ),
        "1.1",
    ),
    (Backwards, "first"),
    (lambda: nn.Sequential(nn.Tanh(), Backwards()), "1.first"),
    (lambda: nn.Sequential(InputClamp(-1.0, -0.8), InputScale(-1.0, -0.8), nn.Linear(8, 3)), "2"),
]


@pytest.mark.parametrize(("build", "name"), LINEAR)
@pytest.mark.parametrize("shape", [None, (8,)])
def test_the_first_linear_that_runs(build: Callable[[], nn.Module], name: str, shape: tuple[int] | None) -> None:
    model = build()
    robust = truncate(model, 2, shape)
    assert list(truncated_in(robust)) == [name]
    layer = robust.get_submodule(name)
    assert isinstance(layer, TruncatedLinear)
    assert layer.k == 2
    assert robust.state_dict().keys() == model.state_dict().keys()
    # k = 0 computes what the model computes, and loads what it saved.
    plain, x = truncate(model, 0, shape).eval(), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model.eval()(x))
    assert not torch.equal(robust.eval()(x), model(x))


@pytest.mark.parametrize("shape", [None, (8,)])
def test_what_runs_in_training_only_does_not_count(shape: tuple[int] | None) -> None:
    class Augmented(Backwards):
        def forward(self, x: Tensor) -> Any:
            return super().forward(F.linear(x, self.first.weight[:8]) if self.training else x)

    assert list(truncated_in(truncate(Augmented(), 2, shape))) == ["first"]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_convolution_gets_an_input_truncation_of_the_size_it_sees(dims: int) -> None:
    convolution = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](2, 4, 3)
    size = (7, 6, 5)[:dims]
    pool = [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][dims - 1](1)
    robust = truncate(nn.Sequential(pool, convolution, nn.Flatten(), nn.ReLU()), 2, (2, *size))
    (name, truncation), *rest = truncated_in(robust).items()
    assert (name, rest) == ("1.0", [])
    assert isinstance(truncation, InputTruncation)
    assert (truncation.features, truncation.k) == ((2, *size), 2)
    x = torch.randn(3, 2, *size)
    assert torch.equal(robust(x), convolution(truncation(x)).flatten(1).relu())


def test_a_convolution_inside_a_model() -> None:
    model = Convolutional()
    robust = truncate(model, 3, (2, 6, 6))
    assert list(truncated_in(robust)) == ["conv.0"]
    x = torch.randn(3, 2, 6, 6)
    assert torch.equal(truncate(model, 0, (2, 6, 6)).eval()(x), model.eval()(x))
    assert not torch.equal(robust.eval()(x), model(x))


def test_a_convolution_that_is_the_model() -> None:
    convolution, x = nn.Conv2d(2, 4, 3), torch.randn(3, 2, 6, 6)
    robust = truncate(convolution, 3, (2, 6, 6))
    assert torch.equal(robust(x), convolution(InputTruncation((2, 6, 6), 3)(x)))


def test_a_linear_before_a_convolution_is_the_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3))
    assert list(truncated_in(truncate(model, 2, (8,)))) == list(truncated_in(truncate(model, 2))) == ["0"]


def test_a_convolution_may_be_a_subclass_or_parametrised() -> None:
    class Padded(nn.Conv2d):
        pass

    for convolution in (Padded(2, 4, 3), parametrizations.weight_norm(nn.Conv2d(2, 4, 3))):
        assert list(truncated_in(truncate(nn.Sequential(convolution), 2, (2, 6, 6)))) == ["0.0"]


def test_the_model_and_the_generator_are_left_alone() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            assert isinstance(self.calls, Tensor)
            self.calls += 1
            return self.linear(self.norm(x + torch.rand(8)))

    for shape in (None, (8,)):
        model = Noisy()
        before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        robust = truncate(model, 2, shape)
        assert torch.equal(torch.get_rng_state(), generator)
        assert type(model.linear) is nn.Linear
        for state in (model.state_dict(), robust.state_dict()):
            assert all(torch.equal(state[key], before[key]) for key in before)
        for owned, original in zip(robust.parameters(), model.parameters(), strict=True):
            assert owned.data_ptr() != original.data_ptr()
        assert not any(module._forward_pre_hooks for tree in (model, robust) for module in tree.modules())


@pytest.mark.parametrize("training", [True, False])
def test_modes_flags_dtypes_and_hooks_are_kept(training: bool) -> None:
    seen: list[str] = []
    for build, shape in ((Backwards, (8,)), (Convolutional, (2, 6, 6))):
        model = build().double().train(training)
        model.get_submodule("last" if shape == (8,) else "norm").train(not training)
        layer = model.get_submodule("first" if shape == (8,) else "conv")
        layer.requires_grad_(False)
        layer.register_forward_hook(lambda *_: seen.append("hook"))
        robust = truncate(model, 2, shape)
        for name, module in model.named_modules():
            assert robust.get_submodule(name).training == module.training
        assert {m.training for m in truncated_in(robust).values()} == {training}
        flags = {name.replace("conv.1.", "conv."): p.requires_grad for name, p in robust.named_parameters()}
        flags.pop("conv.0.weight", None)
        assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        assert {parameter.dtype for parameter in robust.parameters()} == {torch.float64}
        assert all(not p.requires_grad for m in truncated_in(robust).values() for p in m.parameters())
        seen.clear()
        robust(torch.zeros(2, *shape, dtype=torch.float64))
        assert seen == ["hook"]


def test_a_model_on_another_device() -> None:
    robust = truncate(Convolutional().to("meta"), 2, (2, 6, 6))
    assert {parameter.device.type for parameter in robust.parameters()} == {"meta"}


def test_one_layer_under_two_names_and_tied_weights() -> None:
    model = Convolutional()
    model.alias = model.conv
    robust = truncate(model, 2, (2, 6, 6))
    assert robust.alias is robust.conv
    tied = Backwards()
    tied.first, tied.last = nn.Linear(8, 8), nn.Linear(8, 8)
    tied.last.weight = tied.first.weight
    robust = truncate(tied, 2)
    assert isinstance(robust, Backwards)
    assert robust.last.weight is robust.first.weight
    assert type(robust.last) is nn.Linear


def test_layers_reached_through_a_plain_list() -> None:
    class Listed(nn.Module):
        def __init__(self, first: nn.Module) -> None:
            super().__init__()
            self.first = first
            self.steps = [first]

        def forward(self, x: Tensor) -> Any:
            return self.steps[0](x)

    model = Listed(nn.Linear(8, 3))
    x = torch.randn(2, 8)
    assert torch.equal(truncate(model, 2, (8,))(x), truncate(model.first, 2)(x))
    with pytest.raises(ValueError, match=r"must only call its convolution first .* the truncation runs 0 times"):
        truncate(Listed(nn.Conv2d(2, 4, 3)), 2, (2, 6, 6))


def test_a_sequential_that_cannot_be_traced_is_read() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm1d(8), Branching(nn.ReLU())), nn.Linear(8, 5), Branching(nn.Linear(5, 3))
    )
    assert list(truncated_in(truncate(model, 2))) == ["1"]
    with pytest.raises(ValueError, match="input_shape must be given: what Branching does first"):
        truncate(nn.Sequential(Branching(nn.Linear(8, 8)), nn.Linear(8, 3)), 2)
    shared = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="the first layer, 0, must run once in a forward, it runs 2 times"):
        truncate(nn.Sequential(shared, Branching(shared)), 2)
    assert list(truncated_in(truncate(nn.Sequential(Branching(nn.Linear(8, 8)), nn.Linear(8, 3)), 2, (8,)))) == [
        "0.inner"
    ]


class Functional(nn.Module):
    """Uses weights of its own, by this operation, before its Linear."""

    def __init__(self, operation: Callable[[Tensor, nn.Parameter], Tensor], frozen: bool = False) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8), requires_grad=not frozen)
        self.linear = nn.Linear(8, 3)
        self.operation = operation

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.operation(x, self.own))


class MyLinear(nn.Linear):
    pass


def weight_normed() -> nn.Module:
    """As the hook of the old ``weight_norm`` leaves a layer, without the history that deepcopy refuses."""
    with pytest.warns(FutureWarning), torch.no_grad():
        return nn.utils.weight_norm(nn.Linear(8, 8))


def compiled(layer: nn.Module) -> nn.Module:
    wrapped = torch.compile(layer, backend="eager")
    assert isinstance(wrapped, nn.Module)
    return wrapped


def scripted(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        wrapped = torch.jit.script(layer)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def hooked(module: nn.Module) -> Any:
    """As accelerate does it: the instance gets a forward of its own."""
    module.forward = functools.partial(module.forward)
    return module


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 2)
    return layer


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.layer(x))


HIDDEN = nn.Linear(8, 8)
BOTH = [None, (8,)]
REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (
        lambda: nn.Sequential(nn.ReLU(), nn.Flatten()),
        BOTH,
        "model must have a Linear, Conv1d, Conv2d or Conv3d layer that runs",
    ),
    (lambda: flat(nn.LayerNorm(8)), BOTH, "LayerNorm at 0 cannot be truncated: it runs before any Linear"),
    (lambda: flat(nn.LayerNorm(8, elementwise_affine=False)), BOTH, "LayerNorm at 0"),
    (lambda: nn.LayerNorm(8), BOTH, "LayerNorm at the model itself"),
    (lambda: flat(nn.RMSNorm(8)), BOTH, "RMSNorm at 0"),
    (lambda: flat(nn.GroupNorm(2, 8)), BOTH, "GroupNorm at 0"),
    (lambda: flat(nn.Softmax(1)), BOTH, "Softmax at 0"),
    (lambda: flat(nn.Embedding(4, 8)), BOTH, "Embedding at 0"),
    (lambda: nn.Sequential(nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 3)), [None, (4, 6)], "InstanceNorm1d at 0"),
    (lambda: nn.Sequential(nn.ConvTranspose1d(4, 2, 3), nn.Conv1d(2, 2, 3)), [None, (4, 6)], "ConvTranspose1d at 0"),
    (lambda: nn.Sequential(nn.LSTM(8, 4), nn.Linear(4, 3)), [None, (5, 8)], "LSTM at 0"),
    (lambda: Attends(), [None, (5, 8)], "MultiheadAttention at attention"),
    (lambda: nn.TransformerEncoderLayer(8, 2), [None, (5, 8)], "TransformerEncoderLayer at the model itself"),
    (
        lambda: flat(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)),
        [(5, 8)],
        "TransformerEncoderLayer at 0.layers.0",
    ),
    (lambda: flat(MyLinear(8, 8)), BOTH, "MyLinear at 0 is a subclass of Linear that may compute something else"),
    (lambda: compiled(nn.Linear(8, 3)), BOTH, "truncated before it is compiled or scripted, the model itself already"),
    (lambda: flat(compiled(nn.Linear(8, 8))), BOTH, "truncated before it is compiled or scripted, 0 already is"),
    (lambda: scripted(nn.Linear(8, 3)), BOTH, "truncated before it is compiled or scripted, the model itself already"),
    (lambda: flat(scripted(nn.Linear(8, 8))), BOTH, "truncated before it is compiled or scripted, 0 already is"),
    (lambda: flat(hooked(nn.Linear(8, 8))), BOTH, "Linear at 0 has a forward of its own"),
    (lambda: hooked(nn.Linear(8, 3)), BOTH, "Linear at the model itself has a forward of its own"),
    (lambda: hooked(Backwards()), [None], "input_shape must be given: the model has a forward of its own"),
    (
        lambda: nn.Sequential(Branching(nn.ReLU()), hooked(flat())),
        [None],
        "input_shape must be given: what Sequential does first",
    ),
    (lambda: nn.Linear(8, 3).bfloat16(), BOTH, "Linear at the model itself must be float32 or float64, got .*bfloat16"),
    (lambda: flat(nn.Linear(8, 8).half()), [None], "Linear at 0 must be float32 or float64, got torch.float16"),
    (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 3).bfloat16()),
        [(2, 6)],
        "Conv1d at 0 must be float32 or float64, got torch.bfloat16",
    ),
    (lambda: flat(nn.LazyLinear(8)), BOTH, "model has a lazy layer, 0: run the model once"),
    (lambda: flat(parametrizations.weight_norm(nn.Linear(8, 8))), BOTH, r"Linear at 0 is parametrised \(weight_norm"),
    (lambda: flat(weight_normed()), BOTH, r"Linear at 0 is parametrised \(weight_norm"),
    (lambda: flat(pruned(nn.Linear(8, 8))), BOTH, r"model must survive copy.deepcopy, it raised RuntimeError"),
    (lambda: Twice(nn.Linear(8, 8)), BOTH, "the first layer, layer, must run once in a forward, it runs 2 times"),
    (
        lambda: Twice(nn.Conv1d(2, 2, 3, padding=1)),
        [(2, 6)],
        "the first layer, layer, must run once .* it runs 2 times",
    ),
    (lambda: flat(TruncatedLinear(8, 8, 1)), BOTH, "model is already truncated: 0 is TruncatedLinear with k=1"),
    (
        lambda: nn.Sequential(nn.ReLU(), nn.Conv1d(2, 2, 3)),
        [None],
        "input_shape must be given: the first layer is Conv1d at 1",
    ),
    (lambda: Branching(nn.Linear(8, 3)), [None], "input_shape must be given: the model cannot be traced, it raised"),
    (lambda: Functional(lambda x, w: x @ w), BOTH, "parameter own is used by .* before any Linear or convolution"),
    (lambda: Functional(lambda x, w: x @ w.t(), frozen=True), BOTH, "parameter own is used by t before any"),
    (lambda: Functional(lambda x, w: x @ w.T), BOTH, "parameter own is used by"),
    (lambda: Functional(lambda x, w: F.linear(x, weight=w)), BOTH, "parameter own is used by"),
    (lambda: Functional(lambda x, w: torch.cat([x, w])), BOTH, "parameter own is used by"),
    (lambda: Functional(lambda x, _: HIDDEN(x)), [(8,)], "parameter that is not registered is used by linear before"),
    (lambda: nn.Linear(8, 3), [(9,)], r"model must run on samples of input_shape=\(9,\), it raised"),
    (
        lambda: Frames(),
        [(3, 2, 6)],
        r"Conv1d at conv must see the samples one by one, got shape \(6, 2, 6\) for 2 samples",
    ),
    (lambda: nn.Linear(8, 3), [(), (8.0,), (0,), (True,), 10, 8.0], "input_shape must be a shape of positive ints"),
]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.attention(x, x, x)[0])


class Frames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x.flatten(0, 1))


@pytest.mark.parametrize(("build", "shape", "message"), [(b, s, m) for b, shapes, m in REFUSED for s in shapes])
def test_refused(build: Callable[[], nn.Module], shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        truncate(build(), 2, shape)


class TwoWays(nn.Module):
    """Its input meets two layers; what becomes of it is the caller's."""

    def __init__(self, join: Callable[[Any, Tensor], Any], layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.join, self.a, self.b = join, layer(), layer()

    def forward(self, x: Tensor) -> Any:
        return self.join(self, x)


JOINS: list[tuple[Callable[[Any, Tensor], Any], bool]] = [
    (lambda m, x: m.a(x) + m.b(x), True),
    (lambda m, x: m.b(x + m.a(x)), True),
    (lambda m, x: {"logits": [m.a(x.relu()), m.b(x * 2)]}, True),
    (lambda m, x: m.a(x) + x.sum() * m.b.weight.sum(), True),
    (lambda m, x: m.a(x) + x, True),
    (lambda m, x: m.a(x.add_(1)) + x, True),
    (lambda m, x: m.b(m.a(x)), False),
    (lambda m, x: m.b(m.a(x).relu()) + m.b.weight.sum(), False),
    (lambda m, x: m.b(m.a(x).view(x.shape)), False),
]


@pytest.mark.parametrize(("join", "warned"), JOINS)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(8, 8), None),
        (lambda: nn.Linear(8, 8), (8,)),
        (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 6)),
    ],
)
def test_a_way_past_the_truncation_is_warned_of(join: Any, warned: bool, layer: Any, shape: Any) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert len(truncated_in(truncate(TwoWays(join, layer), 2, shape))) == 1
    message = "only the path through a is truncated: the input also reaches the output past it"
    assert [(w.category, str(w.message), w.filename) for w in caught] == [(UserWarning, message, __file__)] * warned


@pytest.mark.parametrize("shape", [None, (8,)])
def test_a_layer_that_is_the_model_has_no_way_past_it(shape: tuple[int] | None) -> None:
    with warnings.catch_warnings(action="error"):
        truncate(nn.Linear(8, 3), 2, shape)


def test_a_model_that_runs_without_gradients_only() -> None:
    class Detour(Backwards):
        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.from_numpy(x.numpy()))

    assert list(truncated_in(truncate(Detour(), 2, (8,)))) == ["first"]


def test_a_convolution_may_have_a_forward_of_its_own() -> None:
    model, x = Convolutional().eval(), torch.randn(3, 2, 6, 6)
    expected = truncate(model, 2, (2, 6, 6))(x)
    hooked(model.conv)
    assert torch.equal(truncate(model, 2, (2, 6, 6))(x), expected)


def test_reading_the_device_of_a_weight_is_no_use_of_it() -> None:
    def read(x: Tensor, weight: nn.Parameter) -> Tensor:
        return x.to(weight.device, weight.dtype).reshape(-1, weight.shape[0]).view(-1, weight.size(1))

    for shape in (None, (8,)):
        assert list(truncated_in(truncate(Functional(read), 2, shape))) == ["linear"]


@pytest.mark.parametrize("k", [4, -1, True, 1.5])
def test_k_must_fit_the_layer(k: Any) -> None:
    with pytest.raises(ValueError, match=r"k must (be an integer|satisfy 0 <= 2\*k < in_features), got"):
        truncate(Backwards(), k)
    with pytest.raises(ValueError, match=r"k must (be an integer|satisfy 0 <= 2\*k < in_features), got"):
        truncate(nn.Conv1d(2, 3, 3), k, (2, 4))


def test_a_truncated_convolution_cannot_be_truncated_again() -> None:
    with pytest.raises(ValueError, match=r"model is already truncated: conv\.0 is InputTruncation with k=2"):
        truncate(truncate(Convolutional(), 2, (2, 6, 6)), 2, (2, 6, 6))
    with pytest.raises(ValueError, match=r"model is already truncated: 0 is TruncatedConv2d with k=2"):
        truncate(nn.Sequential(TruncatedConv2d(2, 2, 3, 2)), 2, (2, 6, 6))


def test_a_truncated_model_learns() -> None:
    for robust, shape in ((truncate(Backwards(), 2), (8,)), (truncate(Convolutional(), 2, (2, 6, 6)), (2, 6, 6))):
        loss = robust(torch.randn(4, *shape)).square().sum()
        assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss, tuple(robust.parameters())))
