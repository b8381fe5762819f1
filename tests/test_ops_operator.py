"""The trimmed product as a torch operator: registration, gradients, compilers, prepared weights, bad arguments."""

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.library import opcheck

from ell0.ops import kernel, operator, prepare, trimmed_linear, trimmed_linears, truncated_linear
from trimmed_cases import numbers


def leaves(batch: int, out: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = (
        numbers(batch, d, dtype=dtype),
        numbers(out, d, seed=1, dtype=dtype),
        numbers(out, seed=2, dtype=dtype),
    )
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(t.detach().float()) for t in leaves(1, 6, 40)[1:])

    def forward(self, x: Tensor) -> Tensor:
        return truncated_linear(x, self.weight, self.bias, k=3).relu()


@pytest.mark.parametrize(("k", "dtype"), [(2, torch.float32), (18, torch.float64)])
def test_operators_are_registered_soundly(backend: str, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = leaves(5, 3, 40, dtype)
    prepared = torch.ops.ell0.prepare(weight.detach())
    assert bool(prepared[0].numel()) == (backend != "none")
    opcheck(torch.ops.ell0.prepare.default, (weight.detach(),))
    opcheck(torch.ops.ell0.trimmed_linear.default, (x, weight, bias, *prepared, [k, 1], True))
    opcheck(torch.ops.ell0.trimmed_linear.default, (x.detach(), weight.detach(), None, *prepared, [k, 1], False))
    _, cuts, ties, walked = torch.ops.ell0.trimmed_linear(x, weight, bias, *prepared, [k, 1], True)
    saved = x.detach(), weight.detach(), prepared[0], prepared[2], cuts, ties, walked
    for to_x, to_weight in ((True, True), (True, False), (False, True)):
        arguments = (numbers(1, 5, 3, dtype=dtype), *saved, to_x, to_weight)
        opcheck(torch.ops.ell0.trimmed_linear_backward.default, arguments)


@pytest.mark.parametrize(("top", "bottom"), [(1, 1), (3, 0), (0, 7), (9, 16), (18, 20), (39, 0)])
def test_gradients_are_the_slopes(backend: str, top: int, bottom: int) -> None:
    def product(*inputs: Tensor) -> Tensor:
        return trimmed_linear(*inputs, top=top, bottom=bottom)

    assert torch.autograd.gradcheck(product, leaves(3, 2, 40)), backend


def test_other_derivatives_are_refused(backend: str) -> None:
    x, weight, bias = leaves(3, 2, 20)
    plain = x.detach()

    def layer(x: Tensor) -> Tensor:
        return trimmed_linear(x, weight, bias, top=2, bottom=1)

    for loss in (layer(x).square().sum(), layer(x).sum()):
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        assert slope.requires_grad, backend
        with pytest.raises(RuntimeError, match="trimmed_linear_backward"):
            slope.square().sum().backward()
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(layer, (plain,), (torch.ones_like(plain),))
    with pytest.raises(NotImplementedError, match="no forward-mode"), forward_ad.dual_level():
        layer(forward_ad.make_dual(plain, torch.ones_like(plain)))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda x: layer(x).sum())(plain)
    prepared = torch.ops.ell0.prepare(weight.detach())
    out, *_ = torch.ops.ell0.trimmed_linear(x, weight, bias, *prepared, [2, 1], False)
    with pytest.raises(RuntimeError, match="keep_cuts=False"):
        out.sum().backward()


def test_cuts_are_kept_only_for_a_gradient(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = leaves(3, 2, 20)
    asked: list[bool] = []
    call = operator._forward

    def spy(*args: Any, **options: Any) -> Any:
        asked.append(args[7])
        return call(*args, **options)

    monkeypatch.setattr(operator, "_forward", spy)
    trimmed_linear(x, weight, bias, top=2, bottom=1)
    trimmed_linear(x, weight.detach(), top=2, bottom=1)
    trimmed_linear(x.detach(), weight, top=2, bottom=1)
    assert asked == [True] * 3, backend
    with torch.no_grad():
        trimmed_linear(x, weight, bias, top=2, bottom=1)
    trimmed_linear(x.detach(), weight.detach(), top=2, bottom=1)
    assert asked[3:] == [False] * 2


def test_what_nobody_watches_goes_past_the_dispatcher(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(*args: Any) -> tuple[Tensor, ...]:
        out = trimmed_linear(*args, top=3, bottom=2)
        return (out.detach(), *torch.autograd.grad(out.square().sum(), args))

    inputs = leaves(5, 3, 40)
    short = calls(*inputs)
    monkeypatch.setattr(operator, "_is_plain", lambda *_: False)
    for mine, registered in zip(short, calls(*inputs), strict=True):
        assert torch.equal(mine, registered), backend
    monkeypatch.undo()
    with torch.utils._python_dispatch.TorchDispatchMode():
        assert not operator._is_plain(*inputs)
    assert operator._is_plain(*inputs, None)
    assert not operator._is_plain(inputs[0].detach().to("meta"))


def test_what_follows_may_write_into_the_output(backend: str) -> None:
    inputs = leaves(5, 3, 40)
    for x in (inputs[0], inputs[0].view(5, 1, 40)):
        out, other = (trimmed_linear(x, *inputs[1:], top=3, bottom=2) for _ in range(2))
        written = out.relu_()
        torch.testing.assert_close(written, other.relu())
        found, wanted = (torch.autograd.grad(o.square().sum(), inputs) for o in (written, other.relu()))
        torch.testing.assert_close(found, wanted)
    assert backend == kernel.build()


def test_gradients_come_in_batches(backend: str) -> None:
    x, weight, bias = leaves(3, 2, 20)

    def product(x: Tensor) -> Tensor:
        return trimmed_linear(x, weight, bias, top=2, bottom=1)

    one, many = (torch.autograd.functional.jacobian(product, x, vectorize=batched) for batched in (False, True))
    torch.testing.assert_close(one, many)
    assert backend == kernel.build()


@pytest.mark.parametrize("counts", [[(3, 2)], [(4, 2), (2, 4)], [(0, 0), (5, 0), (0, 5), (20, 19)]])
def test_several_pairs_are_each_one(backend: str, counts: list[tuple[int, int]]) -> None:
    inputs = leaves(6, 3, 40)
    together = trimmed_linears(inputs[0].view(2, 3, 40), *inputs[1:], counts=counts)
    assert together.shape == (len(counts), 2, 3, 3)
    each = [trimmed_linear(*inputs, top=top, bottom=bottom).view(2, 3, 3) for top, bottom in counts]
    torch.testing.assert_close(together, torch.stack(each), rtol=1e-12, atol=1e-12)
    share = numbers(*together.shape, seed=3)
    found, wanted = (torch.autograd.grad((out * share).sum(), inputs) for out in (together, torch.stack(each)))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert backend == kernel.build()


def test_meta_tensors_have_shapes() -> None:
    x, weight, bias = (t.detach().to("meta") for t in leaves(3, 2, 20))
    out = trimmed_linear(x, weight, bias, top=2, bottom=1)
    assert (out.shape, out.device.type, out.dtype) == ((3, 2), "meta", torch.float64)


# Compilers.


def compiler_works(folder: Path) -> bool:
    """Whether inductor's C++ compiler is there and really builds a library."""
    source = folder / "probe.cpp"
    source.write_text("#include <Python.h>\n#include <omp.h>\nint main() { return 0; }\n")
    flags = ["-fopenmp", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    command = [*shlex.split(os.environ.get("CXX") or "g++"), *flags, str(source), "-o", str(folder / "probe.so")]
    try:
        done = subprocess.run(command, capture_output=True, timeout=1200, check=False)
    except OSError:
        return False
    return done.returncode == 0 and (folder / "probe.so").exists()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_whole_it_is_the_same(backend: str, compiler: str, tmp_path: Path) -> None:
    if compiler == "inductor" and backend != "none":
        pytest.skip("inductor compiles around the operator: one backend is enough")
    if compiler == "inductor" and not compiler_works(tmp_path):
        pytest.skip("no working C++ compiler")
    torch._dynamo.reset()
    layer, x = Layer(), numbers(7, 40, dtype=torch.float32).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    results = []
    for run in (layer, compiled):
        out = run(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, layer.weight, layer.bias))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
        torch.testing.assert_close(compiled(x[:2]), layer(x[:2]))


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_with_a_prepared_weight(backend: str, inside: bool) -> None:
    torch._dynamo.reset()
    x, weight, _ = (t.detach() for t in leaves(3, 2, 20))
    prepared = prepare(weight)

    def layer(x: Tensor) -> Tensor:
        return trimmed_linear(x, weight, top=2, bottom=1, prepared=prepare(weight) if inside else prepared)

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)), backend


def test_compiled_it_refuses_what_was_prepared_for_another_shape(backend: str) -> None:
    torch._dynamo.reset()
    x, weight, _ = (t.detach() for t in leaves(3, 30, 20))
    prepared = prepare(weight[:2].clone())

    def layer(x: Tensor) -> Tensor:
        return trimmed_linear(x, weight, top=2, bottom=1, prepared=prepared)

    if backend == "none":
        pytest.skip("nothing is prepared without a kernel")
    with pytest.raises(ValueError, match="prepared must come from this weight"):
        torch.compile(layer, backend="aot_eager")(x)


# Autocast.


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_product_in_the_precision_of_the_weight(backend: str, lower: torch.dtype) -> None:
    x, weight, bias = (t.detach().float() for t in leaves(32, 40, 100))
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=lower):
        outs = [truncated_linear(t, weight, bias, k=3) for t in (x, x.to(lower))]
        grads = [torch.autograd.grad(out.sum(), weight)[0] for out in outs]
    for t, out, grad in zip((x, x.to(lower).float()), outs, grads, strict=True):
        expected = truncated_linear(t, weight, bias, k=3)
        assert out.dtype == torch.float32, backend
        assert torch.equal(out, expected)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), weight)[0])


def test_exported_it_is_the_same(backend: str) -> None:
    layer, x = Layer(), numbers(7, 40, dtype=torch.float32)
    fixed = torch.export.export(layer, (x,))
    assert torch.equal(fixed.module()(x), layer(x)), backend
    open_batch = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.equal(open_batch.module()(x[:3]), layer(x[:3]))


# Prepared weights.


@pytest.mark.parametrize("k", [2, 18])
def test_a_prepared_weight_gives_the_same(backend: str, k: int) -> None:
    x, weight, bias = leaves(20, 3, 40)
    prepared = prepare(weight)
    results = []
    for given in (None, prepared, prepared):
        out = truncated_linear(x, weight, bias, k=k, prepared=given)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, weight, bias))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), backend
    with torch.no_grad():
        unprepared = truncated_linear(x, weight, bias, k=k)
        assert torch.equal(truncated_linear(x, weight, bias, k=k, prepared=prepared), unprepared)
    assert torch.equal(truncated_linear(x.detach(), weight.detach(), bias, k=k, prepared=prepared), unprepared)


def in_place(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.mul_(2)


STALE: dict[str, Callable[[Tensor], Tensor]] = {
    "changed in place": in_place,
    "copy": lambda weight: weight.detach().clone(),
    "transposed": lambda weight: weight.T,
    "part": lambda weight: weight[:2],
    "other dtype": lambda weight: weight.float(),
}


@pytest.mark.parametrize("change", STALE)
def test_a_stale_prepared_weight_is_refused(backend: str, change: str) -> None:
    x, weight, _ = (t.detach() for t in leaves(3, 20, 20))
    prepared = prepare(weight)
    other = STALE[change](weight)
    with pytest.raises(ValueError, match="prepared must come from this weight as it is now"):
        trimmed_linear(x.to(other.dtype), other, top=2, bottom=1, prepared=prepared)
    trimmed_linear(x.to(other.dtype), other, top=2, bottom=1, prepared=prepare(other))
    assert backend == kernel.build()


def test_a_new_weight_in_the_memory_of_the_old_one_is_refused() -> None:
    x = numbers(3, 100)
    for seed in range(100):
        weight = numbers(64 + seed, 100, seed=seed)
        prepared = prepare(weight)
        del weight  # the allocator may now give its memory to the next one
        weight = numbers(64 + seed, 100, seed=seed + 1)
        with pytest.raises(ValueError, match="prepared must come from this weight as it is now"):
            trimmed_linear(x, weight, top=2, bottom=1, prepared=prepared)


# Bad arguments. Each message names the argument, the rule and the value.

GOOD: dict[str, Any] = {"x": torch.ones(3, 20), "weight": torch.ones(2, 20), "bias": torch.ones(2)}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"top": -1}, "top must be >= 0, got top=-1"),
    ({"top": 20, "bottom": 0}, r"top \+ bottom must be smaller than .* terms, got top=20 and bottom=0 with 20 terms"),
    ({"top": 10, "bottom": 10}, r"top \+ bottom must be smaller .* got top=10 and bottom=10"),
    ({"bottom": "2"}, "bottom must be an integer, got '2'"),
    ({"top": True}, "top must be an integer, got True"),
    ({"x": torch.ones(3, 19)}, r"x must have shape \(\.\.\., 20\) to match weight, got \(3, 19\)"),
    ({"x": torch.tensor(1.0)}, r"x must have shape \(\.\.\., 20\) .* got \(\)"),
    ({"weight": torch.ones(20)}, r"weight must have shape \(out, in\), got \(20,\)"),
    ({"bias": torch.ones(1)}, r"bias must have shape \(2,\) to match weight, got \(1,\)"),
    ({"bias": torch.ones(1, 2)}, r"bias must have shape \(2,\) to match weight, got \(1, 2\)"),
    ({"weight": torch.ones(2, 20).half()}, "weight must be float32 or float64, got torch.float16"),
    ({"x": torch.ones(3, 20).double()}, r"x must have the dtype of weight \(torch.float32\), got torch.float64"),
    ({"bias": torch.ones(2).double()}, r"bias must have the dtype of weight \(torch.float32\), got torch.float64"),
    ({"x": torch.ones(3, 20, device="meta")}, r"x must be on the device of weight \(cpu\), got meta"),
    ({"bias": torch.ones(2, device="meta")}, r"bias must be on the device of weight \(cpu\), got meta"),
    ({"x": [[1.0] * 20]}, "x must be a tensor, got list"),
    ({"weight": [[1.0] * 20]}, "weight must be a tensor, got list"),
    ({"bias": 0.0}, "bias must be a tensor, got float"),
    ({"prepared": 3}, "prepared must come from ops.prepare, got int"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    options = {"top": 2, "bottom": 1} | changes
    with pytest.raises(ValueError, match=message):
        trimmed_linear(**(GOOD | options))
    pair = [(1, 1), (options.pop("top"), options.pop("bottom"))]
    with pytest.raises(ValueError, match=message):
        trimmed_linears(**(GOOD | options), counts=pair)


@pytest.mark.parametrize(("k", "message"), [(-1, "in_features, got k=-1"), (10, "got k=10"), (True, "integer, got")])
def test_bad_k_is_named(k: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        truncated_linear(GOOD["x"], GOOD["weight"], k=k)


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="counts must hold at least one pair"):
        trimmed_linears(**GOOD, counts=[])
    with pytest.raises(ValueError, match=r"weight must have shape \(out, in\), got \(20,\)"):
        prepare(torch.ones(20))


def test_the_registered_operator_refuses_what_would_lead_out_of_its_arrays() -> None:
    x, weight, bias = torch.randn(5, 40), torch.randn(7, 40), torch.randn(7)
    made = prepare(weight)
    arrays = made.order, made.ranked, made.bound
    call = torch.ops.ell0.trimmed_linear
    out, *kept = call(x, weight, bias, *arrays, [2, 3], True)
    torch.testing.assert_close(out[0], trimmed_linear(x, weight, bias, top=2, bottom=3))
    cases: list[tuple[str, tuple[Any, ...]]] = [
        ("bias must have shape", (x, weight, bias[:3], *arrays, [2, 3], True)),
        ("x must have shape", (x[:, :39], weight, bias, *arrays, [2, 3], True)),
        ("x must have shape", (x[0], weight, bias, *arrays, [2, 3], True)),
        (r"top \+ bottom must be smaller", (x, weight, bias, *arrays, [20, 20], True)),
        ("top must be >= 0", (x, weight, bias, *arrays, [-1, 3], True)),
        ("counts be pairs", (x, weight, bias, *arrays, [1, 2, 3], True)),
        ("counts be pairs", (x, weight, bias, *arrays, [], True)),
    ]
    if made.order.numel():
        cases += [
            ("order must lie in", (x, weight, bias, made.order + 10**6, *arrays[1:], [2, 3], True)),
            ("order must lie in", (x, weight, bias, made.order - 1, *arrays[1:], [2, 3], True)),
            ("its order must be", (x, weight, bias, made.order[:3], *arrays[1:], [2, 3], True)),
        ]
    for said, given in cases:
        with pytest.raises(ValueError, match=said):
            call(*given)
    back = torch.ops.ell0.trimmed_linear_backward
    right: list[Any] = [torch.ones_like(out), x, weight, made.order, made.bound, *kept, True, True]
    back(*right)
    wrong: list[tuple[str, int, Tensor]] = [("grad must be", 0, right[0][:, :3])]
    wrong += [("cuts must be", 5, kept[0][..., :-1]), ("ties must be", 6, kept[1][..., :-1])]
    wrong += [("walked must be", 7, kept[2].new_zeros(1, 3))]
    wrong += [("walked must lie in", 7, kept[2] + 10**6)] if kept[2].numel() else []
    for said, place, tensor in wrong:
        with pytest.raises(ValueError, match=said):
            back(*right[:place], tensor, *right[place + 1 :])
