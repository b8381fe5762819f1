"""Models and data as people have them: what they return and take becomes what attacks want, or one clear sentence."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ell0
from balls import within_one
from ell0.attacks import ATTACKS, sparse_rs
from ell0.evaluation import Entry, Evaluation, evaluate
from ell0.wrapping import Wrapped, wrap
from spied_evaluation import D, Line, Spy, assert_same, rows

RS = {"rs": partial(sparse_rs, queries=20)}
BOTH: dict[str, Any] = {"spy": Entry(Spy(), False), **RS}


class Returns(nn.Module):
    """`Line`, whose logits come back in another form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.line, self.form = Line(), form
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.form(self.line(x))


FORMS = {
    "dict": lambda z: {"logits": z, "hidden": 2 * z},
    "one entry": lambda z: {"scores": z, "loss": z.sum()},
    "tuple": lambda z: (z, 2 * z),
    "loss first": lambda z: (z.sum(), z),
    "attribute": lambda z: SimpleNamespace(logits=z, loss=None),
    "one logit": lambda z: 2 * z[:, 1],
    "one column": lambda z: 2 * z[:, 1:],
    "probabilities": lambda z: z.softmax(1),
}


def found(model: Any, *data: Any, attacks: Any = BOTH, **options: Any) -> Evaluation:
    return evaluate(model, *data, **{"ball": within_one(2), "attacks": attacks, "batch": 7, **options})


PLAIN = found(Line(), *rows())


@cache
def attacked(form: str | None) -> dict[str, Tensor]:
    """What each attack makes of a few rows."""
    model, (x, y) = Line() if form is None else Returns(FORMS[form]), rows()
    found = {name: one(model, x[:12], y[:12], within_one(2), **one.cheap) for name, one in ATTACKS.items()}
    return {name: result.x_adv for name, result in found.items()}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_model_returns_becomes_logits(form: str) -> None:
    result = found(Returns(FORMS[form]), *rows())
    for name in ("verdict", "distance", "x_adv", "queries"):
        assert torch.equal(getattr(result, name), getattr(PLAIN, name)), name
    assert [flag.split(":")[0] for flag in result.flags] == ["softmaxed outputs"] * (form == "probabilities")
    if form != "probabilities":  # one attack alone cannot know, but does not mind
        for name, x_adv in attacked(form).items():
            assert torch.equal(x_adv, attacked(None)[name]), name


def test_attacks_see_the_logarithms_of_probabilities() -> None:
    x, y = rows()

    def seeing(model: Any, x: Tensor, *rest: Any, **named: Any) -> Any:
        torch.testing.assert_close(model(x).log_softmax(1), Line()(x).log_softmax(1))
        assert (model(x) <= 0).all()
        return Spy()(model, x, *rest, **named)

    assert found(Returns(FORMS["probabilities"]), x, y, attacks={"seeing": Entry(seeing, False)}).flags


def test_a_probability_of_one_class() -> None:
    half = Returns(lambda z: (2 * z[:, 1]).sigmoid())
    with pytest.raises(ValueError, match=r"one number a row, within \[0, 1\]: ell0.wrap\(model, probabilities=True\)"):
        found(half, *rows())
    assert_same(found(wrap(half, probabilities=True), *rows(), attacks={"spy": Entry(Spy(), True)}),
                found(Line(), *rows(), attacks={"spy": Entry(Spy(), True)}))  # fmt: skip
    small = Returns(lambda z: 2 * z[:, 1] / 100)  # a logit that a batch may have within [0, 1]
    with torch.no_grad():
        first, later = wrap(small), rows()[0][:1].abs()
        assert first(rows()[0]).shape == (40, 2)
        assert first(later).shape == (1, 2)
    with pytest.raises(ValueError, match=r"model must return probabilities within \[0, 1\]: .*probabilities=False"):
        wrap(Line(), probabilities=True)(rows()[0])


def test_mean_deviation_and_channels() -> None:
    x = torch.rand(5, 3, 4, 6)
    mean, deviation = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(72, 4))
    normal = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
    wrapped = wrap(plain, mean=mean, deviation=deviation)
    torch.testing.assert_close(wrapped(x), plain(normal))
    assert not isinstance(wrapped, Wrapped)  # certificates look into it
    last = wrap(plain, mean=mean, deviation=deviation, channels_last=True)
    torch.testing.assert_close(last(x), plain(normal.permute(0, 2, 3, 1)))
    torch.testing.assert_close(wrap(plain, mean=0.5, deviation=2.0)(x), plain((x - 0.5) / 2))
    ball = ell0.L0Ball(2, "pixel", 0.0, 1.0)
    images = torch.rand(5, 8, 9, 3)
    with pytest.raises(ValueError, match=r"got channels last, \(5, 8, 9, 3\): use x.permute"):
        evaluate(plain, images, torch.zeros(5, dtype=torch.int64), ball)
    whole = nn.Sequential(nn.Flatten(), nn.Linear(216, 4))
    x, y = images.permute(0, 3, 1, 2), whole(images).argmax(1)
    result = evaluate(wrap(whole, channels_last=True), x, y, ball, {"rs": partial(sparse_rs, queries=5)})
    assert result.clean_accuracy == 1.0
    for words in ({"mean": 0.5}, {"mean": (0.5, 0.5), "deviation": (1.0,)}, {"mean": 0.5, "deviation": 0.0}):
        with pytest.raises(ValueError, match="mean and deviation must be"):
            wrap(plain, **words)


@pytest.mark.parametrize(
    "kind", ["array", "float64", "tensor", "loader", "double", "dataset", "pairs", "arrays in pairs"]
)
def test_data_of_any_kind_gives_the_same(kind: str) -> None:
    x, y = rows()
    loader = DataLoader(TensorDataset(x, y), batch_size=9)
    data: dict[str, tuple[Any, ...]] = {
        "array": (x.numpy(), y.numpy()),
        "float64": (x.double().numpy(), y.tolist()),
        "tensor": (x.double(), y),
        "loader": (loader,),
        "double": (DataLoader(TensorDataset(x.double(), y), batch_size=9),),
        "dataset": (loader.dataset,),
        "pairs": (list(loader),),
        "arrays in pairs": (((some.numpy(), labels.numpy()) for some, labels in loader),),
    }
    assert_same(found(Line(), *data[kind]), PLAIN)
    for dtype in (torch.float64, torch.float16):
        assert sparse_rs(nn.Linear(D, 2), x.to(dtype), y, within_one(1), queries=2).x_adv.dtype == torch.float32


def test_all_batches_are_read_and_checked_before_an_attack() -> None:
    x, y = rows()
    spy = Spy()
    attacks = {"spy": Entry(spy, False)}
    strange = torch.cat([y[:20], y[20:] + 2])
    with pytest.raises(ValueError, match=r"y must lie in 0 .. 1, the classes of the model, got [23]"):
        found(Line(), DataLoader(TensorDataset(x, strange), batch_size=10), attacks=attacks)
    with pytest.raises(ValueError, match=r"x must give rows of one shape, got \(8,\) and \(4,\)"):
        found(Line(), [(x, y), (x[:, :4], y)], attacks=attacks)
    assert spy.calls == []
    # A batch of few rows may have its one logit within [0, 1], where all rows together are clear.
    one = Returns(lambda z: 2 * z[:, 1])
    order = x.matmul(one.line.weight).sub(0.3).abs().argsort(descending=True)
    assert 0 < one.line(x[order[-1:]])[0, 1].item() < 0.6
    assert found(one, DataLoader(TensorDataset(x[order], y[order]), batch_size=39)).clean_accuracy < 1


def test_a_killed_evaluation_of_a_loader_goes_on(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*rows()), batch_size=9)
    whole = found(Line(), loader, attacks={"spy": Entry(Spy(), False)})
    mortal, again = Spy(dies_after=3), Spy()
    with pytest.raises(KeyboardInterrupt):
        found(Line(), loader, attacks={"spy": Entry(mortal, False)}, state_path=tmp_path / "state.npz")
    result = found(Line(), loader, attacks={"spy": Entry(again, False)}, state_path=tmp_path / "state.npz")
    assert_same(result, whole)
    assert not {row for _, some in again.calls for row in some} & {row for _, some in mortal.calls for row in some}
    shuffled = DataLoader(TensorDataset(*rows()), batch_size=9, shuffle=True)
    with pytest.raises(ValueError, match=r"same order each time for state_path: DataLoader\(shuffle=False\)"):
        found(Line(), shuffled, state_path=tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"image": 1, "label": 2}], r"x must give pairs \(x, y\), such as .* got a dict with 'image', 'label'"),
        ([3], "x must give pairs .* got int"),
        ([], "x must have at least one row, got no batch"),
        (torch.zeros(3, 2), "y must be given, or x be a DataLoader, a Dataset or batches .* got a float32 tensor"),
        ((torch.zeros(3, 2), torch.zeros(3)), r"x must give pairs \(x, y\), such as \[\(x, y\)\], got Tensor"),
        (3, "y must be given, or x be a DataLoader, a Dataset or batches"),
        ([(torch.ones(4, D), torch.ones(3).long()), (torch.ones(3, D), torch.ones(4).long())], "one label a row, got"),
        ([(torch.ones(D), torch.tensor(1))], "one label a row, got"),
    ],
)
def test_data_that_is_not_clear(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        found(Line(), data)


def test_arrays_that_are_not_numbers() -> None:
    x, y = rows()
    with pytest.raises(ValueError, match="x must be numbers, got a NumPy <U1 array"):
        found(Line(), np.full((3, D), "a"), y)
    with pytest.raises(ValueError, match="y must be integers, the classes of the model, got a NumPy float64 array"):
        found(Line(), x, y.double().numpy())
    with pytest.raises(
        ValueError, match="x must be a tensor or an array for its range to be a box; otherwise give low"
    ):
        ell0.L0Ball.of(DataLoader(TensorDataset(x, y)), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [RandomForestClassifier(20), LogisticRegression(), SVC()], ids=lambda m: type(m).__name__
)
def test_scikit_learn(model: Any) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(120, 6)).astype(np.float32)
    names = np.array(["a", "b", "c"])[np.argmax(x[:, :3], axis=1)]
    model.set_params(random_state=0).fit(x, names)
    ball = ell0.L0Ball.of(x, 2)
    assert list(evaluate(model, x, names, ell0.L0Ball.of(x, 0)).attacks) == ["sparse_rs_corners", "sparse_rs_uniform"]
    result = evaluate(model, x, names, ball, RS)
    assert result.clean_accuracy == np.mean(model.predict(x) == names)
    said = model.predict(result.x_adv.numpy())
    np.testing.assert_array_equal(said != names, result.verdict.numpy() >= 0)
    assert result.robust_accuracy < 0.8
    # Images are rows of numbers to it; its labels may be numbers of their own.
    other = evaluate(wrap(model), x.reshape(120, 1, 2, 3), names, ell0.L0Ball.of(x, 1, "pixel"), RS)
    assert other.clean_accuracy == result.clean_accuracy
    alone = sparse_rs(model, x, names, ball, queries=20)  # type: ignore[arg-type]
    np.testing.assert_array_equal(model.predict(alone.x_adv.numpy()) != names, alone.success.numpy())
    with pytest.raises(ValueError, match=r"y must be among the model's classes_, got .*'z'"):
        evaluate(model, x, np.full(120, "z"), ball)
    with pytest.raises(ValueError, match="attacks must be black-box for a model that gives no gradient, got adaptive"):
        evaluate(model, x, names, ball, ["adaptive"])
    # The default attacks with more queries leave out the same ones.
    more = evaluate(model, x, names, ell0.L0Ball.of(x, 0), ell0.evaluation.cascade(queries=3000, steps=300))
    assert list(more.attacks) == ["sparse_rs_corners", "sparse_rs_uniform"]


def test_labels_that_are_numbers_of_their_own() -> None:
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = np.where(x[:, 0] > 0, 7, 3)
    model = LogisticRegression().fit(x, y)
    for labels in (y, y.tolist(), torch.from_numpy(y > 5).long()):  # a tensor holds the numbers of classes
        assert evaluate(model, x, labels, ell0.L0Ball.of(x, 1), RS).clean_accuracy == model.score(x, y)


def test_a_function_of_arrays() -> None:
    x, y = rows()

    def model(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert isinstance(array, np.ndarray)
        score = (array * Line().weight.detach().numpy()).sum(axis=1, keepdims=True)
        return np.concatenate([-score, score], axis=1)

    result = found(wrap(model, numpy=True), x, y, attacks=RS)
    assert torch.equal(result.x_adv, found(Line(), x, y, attacks=RS).x_adv)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (3, {}, "model must be a module, a function, or a classifier with decision_function or predict_proba, got 3"),
        (Returns(lambda z: {"a": z, "b": z}), {}, r"a dict with 'a', 'b': say which holds them, ell0.wrap"),
        (Returns(lambda z: (z.sum(), z.sum())), {}, r"a tuple with 0, 1: say which holds them"),
        (Returns(lambda z: {"a": z}), {"output": "b"}, "output must name a part of what the model returns, got 'b'"),
        (Returns(lambda z: z.argmax(1)), {}, "model must return logits or probabilities, .* got a int64"),
    ],
)  # fmt: skip
def test_models_that_are_not_clear(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrap(model, **options)(rows()[0])


def test_a_part_by_its_name() -> None:
    x, _ = rows()
    for form, output in (({"a": 1, "b": 2}, "b"), ((1, 2), 1), (SimpleNamespace(a=1, b=2), "b")):
        both = Returns(lambda z, form=form: _filled(form, z))
        torch.testing.assert_close(wrap(both, output=output)(x), 2 * Line()(x))


def _filled(form: Any, z: Tensor) -> Any:
    if isinstance(form, dict):
        return {key: value * z for key, value in form.items()}
    return tuple(value * z for value in form) if isinstance(form, tuple) else SimpleNamespace(a=z, b=2 * z)


def test_a_wrapped_model_keeps_its_mode_and_its_truncation() -> None:
    inner = nn.Sequential(nn.Dropout(), ell0.nn.TruncatedLinear(D, 6, 1), nn.ReLU(), nn.Linear(6, 2))
    x, y = rows()
    wrapped = wrap(inner, output="logits", probabilities=False)
    assert wrapped.training
    model = Returns(lambda z: z)
    model.line = inner  # type: ignore[assignment]
    both = [ATTACKS["adaptive"](net, x, y, within_one(2), queries=30) for net in (inner.eval(), model)]
    assert torch.equal(both[0].x_adv, both[1].x_adv)
    assert not wrap(inner, probabilities=False).training


@pytest.mark.parametrize("options", [{"mean": 0.5, "deviation": 1.0}, {"mean": 0.5, "deviation": 1.0, "output": 0}, {}])
def test_wrapping_leaves_every_mode_as_it_is(options: dict[str, Any]) -> None:
    frozen = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    frozen[1].eval()
    assert wrap(frozen, **options).training
    assert [module.training for module in frozen] == [True, False, True]
    x, y = torch.rand(5, 4), torch.zeros(5, dtype=torch.int64)
    wrapped = wrap(frozen.eval(), **{key: value for key, value in options.items() if key != "output"})
    assert evaluate(wrapped, x, y, ell0.L0Ball(1, low=0.0, high=1.0), RS).flags == ()


def test_a_key_of_a_dict_that_dicts_have_a_method_for() -> None:
    x, _ = rows()
    both = Returns(lambda z: {"values": z, "other": 2 * z})
    torch.testing.assert_close(wrap(both, output="values")(x), Line()(x))


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda y: y.float(), r"got a float32 tensor of shape \(40,\) on cpu; use y.long\(\)"),
        (lambda y: y.bool(), r"use y.long\(\)"),
        (lambda y: y[:, None].float(), r"use y\[:, 0\].long\(\)"),
        (lambda y: y[:, None], r"use y\[:, 0\]$"),
        (lambda y: nn.functional.one_hot(y, 2), r"use y.argmax\(1\)"),
        (lambda y: y[:-1], r"got a int64 tensor of shape \(39,\) on cpu$"),
        (lambda y: y.bool().numpy(), r"got a NumPy bool array; use y.astype\(int\)"),
    ],
)
def test_labels_of_another_form(form: Any, words: str) -> None:
    x, y = rows()
    with pytest.raises(ValueError, match=words):
        found(Line(), x, form(y))


def test_rows_that_are_no_tensor_are_named_in_few_words() -> None:
    x, y = rows()
    with pytest.raises(ValueError, match=r"x must be a floating-point tensor .*; use x.float\(\)"):
        found(Line(), x.byte(), y)
    with pytest.raises(ValueError, match="x must be a floating-point tensor") as error:
        found(Line(), x.tolist(), y)
    assert len(str(error.value)) < 300


def test_a_ball_in_the_place_of_labels() -> None:
    loader = DataLoader(TensorDataset(*rows()), batch_size=9)
    with pytest.raises(ValueError, match=r"ball must be given by its name .* evaluate\(model, loader, ball=ball\)"):
        evaluate(Line(), loader, within_one(2))
