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

from ell0.nn import InputClamp, InputScale, InputTruncation, TruncatedLinear, truncate


class Backwards(nn.Module):
    """Registers its layers in the opposite order of their execution."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3)
        self.first = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.last(F.relu(self.first(x.flatten(1))))


class LinearFirst(nn.Module):
    """A CNN that names its last layer first, so that the features of a row are guessed wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(36, 3), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.body(x).flatten(1)))


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
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 3)), "0"),
]


@pytest.mark.parametrize(("build", "name"), LINEAR)
def test_the_first_linear_that_runs(build: Callable[[], nn.Module], name: str) -> None:
    model = build()
    with warnings.catch_warnings(action="error"):
        robust = truncate(model, 2, (8,))
    assert list(truncated_in(robust)) == [name]
    layer = robust.get_submodule(name)
    assert isinstance(layer, TruncatedLinear)
    assert layer.k == 2
    assert robust.state_dict().keys() == model.state_dict().keys()
    # k = 0 computes what the model computes, and loads what it saved.
    plain, x = truncate(model, 0, (8,)).eval(), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model.eval()(x))
    assert not torch.equal(robust.eval()(x), model(x))


def test_what_runs_in_training_only_does_not_count() -> None:
    class Augmented(Backwards):
        def forward(self, x: Tensor) -> Any:
            return super().forward(F.linear(x, self.first.weight[:8]) if self.training else x)

    assert list(truncated_in(truncate(Augmented(), 2, (8,)))) == ["first"]


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

    model = Noisy()
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    robust = truncate(model, 2, (8,))
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
    robust = truncate(tied, 2, (8,))
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

    model, x = Listed(nn.Linear(8, 3)), torch.randn(2, 8)
    assert torch.equal(truncate(model, 2, (8,))(x), truncate(model.first, 2, (8,))(x))
    with pytest.raises(ValueError, match=r"must only call its convolution first .* the truncation runs 0 times"):
        truncate(Listed(nn.Conv2d(2, 4, 3)), 2, (2, 6, 6))


class Custom(nn.Module):
    """Its forward is the caller's: a function of the module and its input."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def using_own(operation: Callable[[Tensor, nn.Parameter], Tensor], frozen: bool = False) -> nn.Module:
    """Uses its own weights, by this operation, before its Linear."""
    own = nn.Parameter(torch.randn(8, 8), requires_grad=not frozen)
    return Custom(lambda m, x: m.linear(operation(x, m.own)), own=own, linear=nn.Linear(8, 3))


class MyLinear(nn.Linear):
    pass


def scripted(layer: nn.Module) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        return torch.jit.script(layer)


def hooked(module: nn.Module) -> Any:
    """As accelerate does it: the instance gets its own forward."""
    module.forward = functools.partial(module.forward)
    return module


def pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "weight", 2)
    return layer


def twice(layer: nn.Module) -> nn.Module:
    return Custom(lambda m, x: m.layer(m.layer(x)), layer=layer)


def attends() -> nn.Module:
    attention, head = nn.MultiheadAttention(8, 2), nn.Linear(8, 3)
    return Custom(lambda m, x: m.head(m.attention(x, x, x)[0]), attention=attention, head=head)


HIDDEN = nn.Linear(8, 8)
NOT_COMPILED = "model must be truncated before it is compiled or scripted,"
REFUSED: list[tuple[Callable[[], Any], Any, str]] = [
    (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), (8,), "must have a Linear, Conv1d, Conv2d or Conv3d layer"),
    (lambda: flat(nn.LayerNorm(8)), (8,), "LayerNorm at 0 cannot be truncated: it runs before any Linear"),
    (lambda: nn.LayerNorm(8), (8,), "LayerNorm at the model itself"),
    (lambda: flat(nn.Softmax(1)), (8,), "Softmax at 0"),
    (lambda: nn.Sequential(nn.InstanceNorm1d(4), nn.Conv1d(4, 2, 3)), (4, 6), "InstanceNorm1d at 0"),
    (lambda: nn.Sequential(nn.LSTM(8, 4), nn.Linear(4, 3)), (5, 8), "parameter 0.weight_ih_l0 is used by lstm before"),
    (attends, (5, 8), "parameter attention.* is used by .* before any Linear or convolution"),
    (lambda: nn.TransformerEncoderLayer(8, 2), (5, 8), "parameter self_attn.* is used by .* before any Linear"),
    (lambda: flat(MyLinear(8, 8)), (8,), "MyLinear at 0 is a subclass of Linear that may compute something else"),
    (lambda: torch.compile(nn.Linear(8, 3), backend="eager"), (8,), f"{NOT_COMPILED} the model itself already is"),
    (lambda: flat(scripted(nn.Linear(8, 8))), (8,), f"{NOT_COMPILED} 0 already is"),
    (lambda: flat(hooked(nn.Linear(8, 8))), (8,), "Linear at 0 has its own forward"),
    (lambda: flat(nn.Linear(8, 8).half()), (8,), "Linear at 0 must be float32 or float64, got torch.float16"),
    (lambda: nn.Conv1d(2, 2, 3).bfloat16(), (2, 6), "Conv1d at the model itself must be float32 .* got torch.bfloat16"),
    (lambda: flat(nn.LazyLinear(8)), (8,), "model has a lazy layer, 0: run the model once"),
    (lambda: flat(parametrizations.weight_norm(nn.Linear(8, 8))), (8,), r"Linear at 0 is parametrised \(weight_norm"),
    (lambda: flat(pruned(nn.Linear(8, 8))), (8,), r"model must survive copy.deepcopy, it raised RuntimeError"),
    (lambda: twice(nn.Linear(8, 8)), (8,), "the first layer, layer, must run once in a forward, it runs 2 times"),
    (lambda: twice(nn.Conv1d(2, 2, 3, padding=1)), (2, 6), "the first layer, layer, must run once .* it runs 2 times"),
    (lambda: flat(TruncatedLinear(8, 8, 1)), (8,), "model is already truncated: 0 is TruncatedLinear with k=1"),
    (lambda: truncate(Convolutional(), 2, (2, 6, 6)), (2, 6, 6), r"truncated: conv\.0 is InputTruncation with k=2"),
    (lambda: using_own(lambda x, w: x @ w), (8,), "parameter own is used by .* before any Linear or convolution"),
    (lambda: using_own(lambda x, w: x @ w.t(), frozen=True), (8,), "parameter own is used by t before any"),
    (lambda: using_own(lambda x, w: torch.cat([x, w])), (8,), "parameter own is used by"),
    (lambda: using_own(lambda x, _: HIDDEN(x)), (8,), "parameter that is not registered is used by linear before"),
    (lambda: nn.Linear(8, 3), (9,), r"model must run on samples of input_shape=\(9,\), it raised"),
    (
        lambda: Custom(lambda m, x: m.conv(x.flatten(0, 1)), conv=nn.Conv1d(2, 2, 3)),
        (3, 2, 6),
        r"Conv1d at conv must see the samples one by one, got shape \(6, 2, 6\) for 2 samples",
    ),
    (Convolutional, None, r"input_shape must be given for this model: truncate\(model, k, input_shape="),
    (LinearFirst, None, r"input_shape must be given for this model: truncate\(model, k, input_shape=x.shape\[1:\]\)"),
    (lambda: nn.Conv2d(2, 4, 3), None, r"input_shape must be given for this model: truncate\(model, k, input_shape="),
    *((lambda: nn.Linear(8, 3), bad, "input_shape must be a shape of") for bad in ((), (8.0,), (0,), (True,), 10)),
]


@pytest.mark.parametrize(("build", "shape", "message"), REFUSED)
def test_refused(build: Callable[[], nn.Module], shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        truncate(build(), 2, shape)


def test_a_model_of_rows_needs_no_shape() -> None:
    truncated = truncate(nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)), 2)
    assert [type(layer) for layer in truncated.modules()].count(TruncatedLinear) == 1
    assert truncated(torch.zeros(4, 2, 4)).shape == (4, 3)


JOINS: list[tuple[Callable[[Any, Tensor], Any], bool]] = [
    (lambda m, x: m.a(x) + m.b(x), True),
    (lambda m, x: m.b(x + m.a(x)), True),
    (lambda m, x: {"logits": [m.a(x.relu()), m.b(x * 2)]}, True),
    (lambda m, x: m.a(x.add_(1)) + x, True),
    (lambda m, x: m.b(m.a(x)), False),
    (lambda m, x: m.b(m.a(x).relu()) + m.b.weight.sum(), False),
    (lambda m, x: m.b(m.a(x).view(x.shape)), False),
]


@pytest.mark.parametrize(("join", "warned"), JOINS)
@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: nn.Linear(8, 8), (8,)), (lambda: nn.Conv1d(2, 2, 3, padding=1), (2, 6))]
)
def test_a_way_past_the_truncation_is_warned_of(join: Any, warned: bool, layer: Any, shape: Any) -> None:
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert len(truncated_in(truncate(Custom(join, a=layer(), b=layer()), 2, shape))) == 1
    message = "only the path through a is truncated: the input also reaches the output past it"
    assert [(w.category, str(w.message), w.filename) for w in caught] == [(UserWarning, message, __file__)] * warned


def test_a_model_that_runs_without_gradients_only() -> None:
    model = Custom(lambda m, x: m.inner(torch.from_numpy(x.numpy())), inner=Backwards())
    assert list(truncated_in(truncate(model, 2, (8,)))) == ["inner.first"]


def test_a_convolution_may_have_its_own_forward() -> None:
    model, x = Convolutional().eval(), torch.randn(3, 2, 6, 6)
    expected = truncate(model, 2, (2, 6, 6))(x)
    hooked(model.conv)
    assert torch.equal(truncate(model, 2, (2, 6, 6))(x), expected)


def test_reading_the_device_of_a_weight_is_no_use_of_it() -> None:
    def read(x: Tensor, weight: nn.Parameter) -> Tensor:
        return x.to(weight.device, weight.dtype).reshape(-1, weight.shape[0]).view(-1, weight.size(1))

    assert list(truncated_in(truncate(using_own(read), 2, (8,)))) == ["linear"]


@pytest.mark.parametrize("k", [4, -1, True, 1.5])
def test_k_must_fit_the_layer(k: Any) -> None:
    for model, shape in ((Backwards(), (8,)), (nn.Conv1d(2, 3, 3), (2, 4))):
        with pytest.raises(
            ValueError, match=r"k must (be an integer|satisfy 0 <= 2\*k < (in_features|values of a channel)), got"
        ):
            truncate(model, k, shape)


def test_a_truncated_model_learns() -> None:
    for model, shape in ((Backwards(), (8,)), (Convolutional(), (2, 6, 6))):
        robust = truncate(model, 2, shape)
        loss = robust(torch.randn(4, *shape)).square().sum()
        assert all(grad.abs().sum() > 0 for grad in torch.autograd.grad(loss, tuple(robust.parameters())))
