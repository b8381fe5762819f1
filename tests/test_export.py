"""Exported models answer as the model does: ONNX, `torch.export`, the layout of the Hugging Face hub."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ell0
from ell0.export import from_pretrained, load_program, save_onnx, save_pretrained, save_program
from ell0.export.programs import BLOCK
from ell0.ops import reference
from ell0.recipe.models import MODELS as SHIPPED
from ell0.recipe.models import build, fitted
from ell0.results import Results, Share

NAN, INF = torch.nan, torch.inf
PAIRS = [(5, 5), (3, 0), (0, 2), (18, 18)]


def by_onnxruntime(path: Path, x: Tensor) -> Tensor:
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra dev: pip install -e '.[dev]'")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"x": x.numpy()})
    return torch.from_numpy(logits)


def to_onnx(path: Path, model: nn.Module, x: Tensor) -> Path:
    pytest.importorskip("onnxscript", reason="needs the extra onnx: pip install -e '.[onnx]'")
    return save_onnx(path, model, x)


class Products(nn.Module):
    """Trimmed products with several counts, side by side: ``(n, pairs * out)``."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return ell0.ops.trimmed_linears(x, self.weight, self.bias, counts=PAIRS).permute(1, 0, 2).flatten(1)


def special_product() -> tuple[Products, Tensor]:
    """Infinities on both sides, within the trimmed terms and beyond them, NaN, zeros, ties, large numbers."""
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(21, 37, generator=draw), torch.randn(40, 37, generator=draw)
    weight[3], weight[7] = weight[3].sign(), 0.0
    weight[4, :7], weight[5, :4], weight[6, 9], weight[8, ::2] = INF, -INF, NAN, 0.0
    x[0], x[1], x[7] = 0.0, 1.0, x[7].sign()
    x[2, :3], x[3, :8], x[4, :6], x[5, 2], x[8, :3] = INF, INF, -INF, NAN, 1e30
    x[9, :5], x[9, 5:10], x[10:20] = INF, -INF, x[10:20].round()
    return Products(weight, torch.randn(21, generator=draw)), x


@pytest.fixture(scope="module")
def special_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of its own code, would worry a user
        return to_onnx(tmp_path_factory.mktemp("onnx") / "a.onnx", *special_product())


def test_the_operator_in_onnx_is_the_definition(special_onnx: Path) -> None:
    model, x = special_product()
    found = by_onnxruntime(special_onnx, x).unflatten(1, (len(PAIRS), -1))
    for (top, bottom), out in zip(PAIRS, found.unbind(1), strict=True):
        with torch.no_grad():
            true = reference.trimmed_linear(x, model.weight, model.bias, top=top, bottom=bottom).float()
            scale = reference.scale(x, model.weight, model.bias, top=top, bottom=bottom)
        assert torch.equal(out.isnan(), true.isnan())
        assert torch.equal(out[true.isinf()], true[true.isinf()])
        finite = true.isfinite()
        assert finite.sum() > 400
        assert ((out - true).abs()[finite] <= 1e-5 * scale[finite]).all()
    with torch.no_grad():
        torch.testing.assert_close(found.flatten(1), model(x), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_onnx_holds_no_more_than_a_block_of_products_of_a_row(special_onnx: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx: pip install -e '.[onnx]'")
    graph = onnx.load(special_onnx).graph
    held = [value.type.tensor_type.shape.dim for body in (graph, *bodies(graph)) for value in body.value_info]
    by_row = [prod(dim.dim_value or 1 for dim in dims) for dims in held if any(dim.dim_param for dim in dims)]
    assert max(by_row) == BLOCK * 37


def bodies(graph: Any) -> list[Any]:
    return [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]


TRANSFORMER = {"name": "transformer", "width": 8, "depth": 1, "heads": 2}
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mlp": ({"name": "mlp", "k": 3, "hidden": (20,)}, (1, 8, 8)),
    "vgg19": ({"name": "vgg19", "k": 10, "clamp": True}, (3, 32, 32)),
    "cnn": ({"name": "cnn", "widths": (4, 8), "hidden": (9,)}, (3, 8, 8)),
    "small_cnn": ({"name": "small_cnn", "k": 3, "clamp": (-2.0, 2.0)}, (3, 8, 8)),
    "resnet9": ({"name": "resnet9"}, (1, 8, 8)),
    "resnet18": ({"name": "resnet18"}, (1, 4, 4)),
    "partition": ({"name": "partition", "parts": 7, "base": {"name": "small_cnn", "k": 0}}, (1, 8, 8)),
    "ablation": ({"name": "ablation", "keep": 9, "selection": 7, "base": {"name": "small_cnn", "k": 0}}, (1, 8, 8)),
    "votes": ({"name": "votes", "strides": (2, 2), "mirrored": True, "network": TRANSFORMER}, (1, 8, 8)),
}


def shipped(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Tensor]:
    """The model with statistics unlike the first, in train mode, and rows; VGG-19 has its depth, but narrow layers."""
    monkeypatch.setattr(ell0.models, "VGG19_BLOCKS", tuple((8, depth) for _, depth in ell0.models.VGG19_BLOCKS))
    arguments, shape = MODELS[name]
    model, draw = build(fitted(arguments, shape, 3), seed=0), torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean.normal_(0, 0.1, generator=draw)
    x = torch.randn(5, *shape, generator=draw)
    x[1], x[2] = 0.0, x[2].round()
    x[3, 0, 0, :3] = 1.0 if name in ("cnn", "resnet9", "resnet18") else INF
    return model, x


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models_in_onnx(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = shipped(name, monkeypatch)
    path = to_onnx(tmp_path / "a.onnx", model, x[:1])
    assert model.training
    with torch.no_grad():
        logits = model.eval()(x)
    assert logits.isfinite().all()
    torch.testing.assert_close(by_onnxruntime(path, x), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mlp", "cnn", "votes"])  # ONNX files are made from programs
def test_shipped_models_as_programs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = shipped(name, monkeypatch)
    program = load_program(save_program(tmp_path / "a.pt2", model, x))
    with torch.no_grad():
        torch.testing.assert_close(program(x[:3]), model.eval()(x[:3]), rtol=1e-5, atol=1e-5)


def test_every_model_of_a_recipe_is_exported_but_abs(tmp_path: Path) -> None:
    assert {*MODELS, "abs"} == set(SHIPPED)
    model = build(fitted({"name": "abs", "samples": 9, "steps": 1}, (1, 8, 8), 3), seed=0)
    with pytest.raises(ValueError, match=r"torch\.export can trace, got AnalysisBySynthesis"):  # it takes gradients
        save_program(tmp_path / "a.pt2", model, torch.zeros(2, 1, 8, 8))


def test_a_program_loads_with_ell0_alone(tmp_path: Path) -> None:
    model, x = special_product()
    path = save_program(tmp_path / "a.pt2", model, x)
    with torch.no_grad():
        torch.save({"x": x, "out": model(x)}, tmp_path / "rows.pt")
    code = (
        "import ell0, sys, torch\n"
        "rows = torch.load(sys.argv[2])\n"
        "out = ell0.export.load_program(sys.argv[1])(rows['x'])\n"
        "torch.testing.assert_close(out, rows['out'], rtol=0, atol=0, equal_nan=True)\n"
    )
    done = [sys.executable, "-c", code, str(path), str(tmp_path / "rows.pt")]
    run = subprocess.run(done, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr


def test_bad_arguments(tmp_path: Path) -> None:
    model = ell0.models.mlp(2, in_features=9, hidden=(4,))
    with pytest.raises(ValueError, match=r"x must be rows, a tensor \(n, ...\) with n > 0, got .*shape \(0, 9\)"):
        save_program(tmp_path / "a.pt2", model, torch.zeros(0, 9))
    with pytest.raises(ValueError, match=r"model must be an nn\.Module, got function"):
        save_program(tmp_path / "a.pt2", lambda x: x, torch.zeros(1, 9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one that torch\.export can trace, got Sequential"):
        save_program(tmp_path / "a.pt2", model, torch.zeros(1, 8))
    with pytest.raises(OSError, match="path must be a file or a new name"):
        save_onnx(tmp_path, model, torch.zeros(1, 9))
    assert list(tmp_path.iterdir()) == []


MLP = {"name": "mlp", "k": 2, "in_features": 9, "hidden": [4], "classes": 3}
CARD: dict[str, Any] = {"model": MLP, "classifier": "F(2)"}


def measured() -> Results:
    results = Results("digits", "ell0 run digits", commit="abc", device="a CPU")
    results.add(Share(95, 100), what="clean_accuracy", classifier="F(2)")
    results.add(Share(99, 100), what="clean_accuracy", classifier="F(0)")
    results.add(Share(70, 100), what="robust_accuracy", attack="sparse_rs", budget=1, classifier="F(2)", box="[0, 1]")
    attacked: dict[str, Any] = {"what": "robust_accuracy", "attack": "worst case", "budget": 3, "unit": "pixel"}
    results.add(Share(61, 100), **attacked, classifier="F(2)", beta=100.0)
    results.add(Share(40, 100), what="certified_accuracy", classifier="F(2)", budget=2, unit="feature", method="best")
    results.add(1.5, what="final_loss", classifier="F(2)")
    return results


def test_hub_round_trip(tmp_path: Path) -> None:
    model, x = build(MLP, seed=1), torch.randn(4, 9)
    folder = save_pretrained(tmp_path / "f2", model, CARD, results=measured())
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = from_pretrained(folder)
    assert not loaded.training
    assert torch.equal(loaded(x), model(x))
    read = pytest.importorskip("safetensors.torch").load_file(folder / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())
    card = (folder / "README.md").read_text()
    lines = [line for line in card.splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "| clean | 0 |  |  | 95.0 % (88.8\N{EN DASH}97.8) | 100 |",
        "| attacked | 1 feature | [0, 1] | sparse_rs | 70.0 % (60.4\N{EN DASH}78.1) | 100 |",
        "| attacked | 3 pixels | [-100, 100] | worst case | 61.0 % (51.2\N{EN DASH}70.0) | 100 |",
        "| proven | 2 features | any value | best | 40.0 % (30.9\N{EN DASH}49.8) | 100 |",
    ]
    assert card.startswith("---\nlibrary_name: ell0\n")
    assert 'ell0.export.from_pretrained("f2")' in card
    assert "`ell0 run digits`, commit abc, a CPU" in card


def test_hub_with_a_model_of_ones_own(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    folder = save_pretrained(tmp_path / "mine", model, {})
    assert "None was measured." in (folder / "README.md").read_text()
    assert torch.equal(from_pretrained(folder, model=other).weight, model.weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model must be given: the config of .*mine' does not say"):
        from_pretrained(folder)


def test_hub_with_a_model_that_a_recipe_names_as_code(tmp_path: Path) -> None:
    model, card = nn.Linear(3, 2), {"classifier": "mine", "model": {"python": "os:abort", "width": 3}}
    folder = save_pretrained(tmp_path / "mine", model, card)
    assert 'from_pretrained("mine", model=my_model)' in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match=r"mine' names code, which is not run; write .*model=my_model"):
        from_pretrained(folder)
    assert torch.equal(from_pretrained(folder, model=nn.Linear(3, 2)).weight, model.weight)  # type: ignore[arg-type]


def test_hub_refuses(tmp_path: Path) -> None:
    model = build(MLP, seed=1)
    with pytest.raises(ValueError, match="must be of this architecture"):
        save_pretrained(tmp_path, nn.Linear(3, 2), CARD)
    with pytest.raises(ValueError, match="card must be made of JSON values"):
        save_pretrained(tmp_path, model, {"mean": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="name must be a folder of save_pretrained, got"):
        from_pretrained(tmp_path)
    folder = save_pretrained(tmp_path / "f2", model, CARD)
    for key in ("python", "name"):  # a config from elsewhere runs no code
        (folder / "config.json").write_text(json.dumps({"model": {key: "os:abort"}}))
        with pytest.raises(ValueError, match=r"which is not run; write|card must name a model that a recipe can build"):
            from_pretrained(folder)


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no folder is downloaded, if the client is there; the call is that of huggingface_hub."""
    model = build(MLP, seed=1)
    folder, calls = save_pretrained(tmp_path / "f2", model, CARD), []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append((name, options))
        return str(folder)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    from_pretrained("someone/f2", revision="v1")
    files = ["config.json", "model.safetensors", "README.md"]
    assert calls == [("someone/f2", {"revision": "v1", "allow_patterns": files})]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"or huggingface_hub must be installed.*got 'someone/f2'"):
        from_pretrained("someone/f2")
