"""Putting a truncation before the first layer with weights of any model."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..ops import check_k
from .conv import TruncatedConv2d
from .layers import InputTruncation, TruncatedLinear, check_shape


def truncate(model: nn.Module, k: int, input_shape: Sequence[int] | None = None) -> nn.Module:
    """A copy of a model that truncates at its first layer with weights; the model itself is left alone.

    A ``Linear`` becomes a `TruncatedLinear` with the same parameters, hooks and name. A ``Conv1d``, ``Conv2d`` or
    ``Conv3d`` gives its place to ``nn.Sequential(InputTruncation, convolution)``. What runs before that layer may hold
    no weights but those of BatchNorm and PReLU; it is not protected: a pooling, say, spreads what the attacker changed.
    Only the path through that layer is truncated; where the input also reaches the output past it, a ``UserWarning``
    says so.

        robust = truncate(resnet, k=10, input_shape=(3, 32, 32))

    Args:
        k: terms removed on each side, ``0 <= 2k < in_features`` of the layer.
        input_shape: shape of one sample, without the batch dimension. The layer that runs first is found by running the
            copy in eval mode on two samples of zeros. Without it the model is traced with ``torch.fx``, or read as
            nested ``nn.Sequential``; a convolution needs it.

    Raises:
        ValueError: the first layer with weights is not one of these, runs more than once, is neither float32 nor
            float64, or is a Linear that is parametrised or has a forward of its own.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise ValueError(f"model must be truncated before it is compiled or scripted, {_name(name)} already is")
        if isinstance(module, TruncatedLinear | TruncatedConv2d | InputTruncation):
            raise ValueError(f"model is already truncated: {_name(name)} is {type(module).__name__} with k={module.k}")
        if isinstance(module, LazyModuleMixin):
            raise ValueError(f"model has a lazy layer, {_name(name)}: run the model once to give it its shape")
    if input_shape is not None:
        input_shape = check_shape("input_shape", input_shape)

    twin = _copy(model)
    # The search runs on a copy of its own: a forward may change more than batch-norm statistics.
    search = _search(_copy(model), input_shape)
    layer = twin.get_submodule(search.name)
    if isinstance(layer, nn.Linear):
        check_k(k, layer.in_features)
        # As torch's own parametrisations do: hooks, flags and every reference to the layer stay.
        truncated = cast(TruncatedLinear, layer)
        truncated.__class__ = TruncatedLinear
        truncated.k = k
    else:
        assert isinstance(layer, _CONVOLUTIONS)
        assert input_shape is not None  # the search asks for it before a convolution
        twin = _truncate_before(layer, twin, k, search, input_shape)
    if search.bypassed:
        warnings.warn(
            f"only the path through {_name(search.name)} is truncated: the input also reaches the output past it",
            stacklevel=2,
        )
    return twin


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FEATURE_WISE = (_BatchNorm, nn.PReLU)
_MIXING = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    _InstanceNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.Softmax,
    nn.Softmax2d,
    nn.Softmin,
    nn.LogSoftmax,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.Bilinear,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    _ConvTransposeNd,
)
_DESCRIPTIONS = {"device", "dim", "dtype", "ndim", "numel", "requires_grad", "shape", "size"}
_SAMPLES = 2  # one sample would not survive a squeeze()


class _RefusedError(ValueError):
    """The search has an answer, and it is no; unlike an error of the model, which may only mean that tracing failed."""


class _Search(TorchFunctionMode):
    """Told of every module that starts, and watching every parameter that is used: finds the first layer with weights.

    Weights that are used outside a Linear or a convolution are no less weights: they end the search with an error.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.name = ""
        self.shape: tuple[int, ...] = ()
        self.runs = 0
        self.bypassed = False
        self._layer: nn.Module | None = None
        self._names = {id(part): name for name, part in (*model.named_modules(), *model.named_parameters())}
        feature_wise = (module for module in model.modules() if isinstance(module, _FEATURE_WISE))
        self._harmless = {id(parameter) for module in feature_wise for parameter in module.parameters(recurse=False)}

    @property
    def found(self) -> bool:
        return self._layer is not None

    def start(self, module: nn.Module, shape: Sequence[int] | None = None) -> None:
        """A module starts on an input of this shape (None where shapes are not known)."""
        if self.found:
            self.runs += module is self._layer
            return
        name = _name(self._names[id(module)])
        if isinstance(module, _MIXING):
            kind = type(module).__name__
            raise _RefusedError(
                f"{kind} at {name} cannot be truncated: it runs before any Linear or convolution and mixes features"
            )
        if isinstance(module, nn.Linear):
            self._check_linear(module, name)
        elif isinstance(module, _CONVOLUTIONS):
            self._check_convolution(module, name, shape)
        else:
            return
        self._layer, self.name, self.runs = module, self._names[id(module)], 1

    def use(self, parameter: nn.Parameter, function: str) -> None:
        """An operation takes a parameter."""
        if not self.found and id(parameter) not in self._harmless:
            name = self._names.get(id(parameter), "that is not registered")
            raise _RefusedError(
                f"parameter {name} is used by {function} before any Linear or convolution: it cannot be truncated"
            )

    def _check_linear(self, module: nn.Linear, name: str) -> None:
        if "weight" not in dict(module.named_parameters(recurse=False)):
            raise _RefusedError(
                f"Linear at {name} is parametrised (weight_norm, pruning): make its weight a plain parameter first"
            )
        if type(module) is not nn.Linear:
            raise _RefusedError(
                f"{type(module).__name__} at {name} is a subclass of Linear that may compute something else"
            )
        if _has_own_forward(module):
            raise _RefusedError(
                f"Linear at {name} has a forward of its own (accelerate hooks), which would still run: remove it first"
            )
        _check_dtype(module, name)

    def _check_convolution(
        self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, name: str, shape: Sequence[int] | None
    ) -> None:
        _check_dtype(module, name)
        kind = type(module).__name__
        if shape is None:
            raise _RefusedError(
                f"input_shape must be given: the first layer is {kind} at {name}, whose input size depends on it"
            )
        if len(shape) != len(module.kernel_size) + 2 or shape[0] != _SAMPLES:
            raise _RefusedError(
                f"{kind} at {name} must see the samples one by one, got shape {tuple(shape)} for {_SAMPLES} samples"
            )
        self.shape = tuple(shape[1:])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Reading a shape or a device is no use of the values.
        if not self.found and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter):
                    self.use(leaf, getattr(func, "__name__", str(func)))
        return result


class _Tracer(fx.Tracer):
    """Tells a search of every module called and every parameter used."""

    def __init__(self, model: nn.Module, search: _Search) -> None:
        super().__init__()
        self._search = search
        self._parameters: dict[Any, nn.Parameter] = dict(model.named_parameters())

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._search.start(m)
        return super().call_module(m, forward, args, kwargs)

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **options)
        word = _word(node)
        if word not in _DESCRIPTIONS:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source.target in self._parameters:
                    self._search.use(self._parameters[source.target], word)
        return node


def _search(model: nn.Module, input_shape: tuple[int, ...] | None) -> _Search:
    """Finds the first layer with weights of a model that may be spoilt by it."""
    search = _Search(model)
    with _quiet(model.eval()):
        if input_shape is None:
            search = _trace(model, search)
        else:
            with search:
                _run(model, input_shape, search.start)
    if not search.found:
        raise ValueError("model must have a Linear, Conv1d, Conv2d or Conv3d layer that runs, none does")
    if search.runs > 1:
        raise ValueError(
            f"the first layer, {_name(search.name)}, must run once in a forward, it runs {search.runs} times"
        )
    if input_shape is not None:
        search.bypassed = _run_bypasses(model, search.name, input_shape)
    return search


def _trace(model: nn.Module, search: _Search) -> _Search:
    try:
        search.start(model)
        if _has_own_forward(model):
            raise _RefusedError("input_shape must be given: the model has a forward of its own, which cannot be traced")
        graph = _Tracer(model, search).trace(model)
        search.bypassed = _graph_bypasses(graph, search.name)
    except _RefusedError:
        raise
    except Exception as error:
        if type(model) is not nn.Sequential:
            raise ValueError(f"input_shape must be given: the model cannot be traced, it raised {error!r}") from error
        search = _Search(model)
        _read(model, search)
    return search


def _run(
    model: nn.Module, input_shape: tuple[int, ...], start: Callable[[nn.Module, Sequence[int] | None], None]
) -> None:
    """One forward on zeros; every module is announced before it starts, and before its other hooks."""

    def announce(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        start(module, tensors[0].shape if tensors else None)

    for module in model.modules():
        module.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
    try:
        model(_zeros(model, input_shape))
    except _RefusedError:
        raise
    except Exception as error:
        raise ValueError(f"model must run on samples of input_shape={input_shape}, it raised {error!r}") from error


def _zeros(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(()))
    return torch.zeros(_SAMPLES, *input_shape, dtype=like.dtype, device=like.device)


def _run_bypasses(model: nn.Module, name: str, input_shape: tuple[int, ...]) -> bool:
    """Whether the output still depends on the input when this layer is cut off from it; spoils the model."""
    model.requires_grad_(False)
    model.get_submodule(name).register_forward_hook(lambda *call: call[-1].detach())
    try:
        with _quiet(model), torch.enable_grad():
            # A copy, for a model that changes its input in place.
            output = model(_zeros(model, input_shape).requires_grad_().clone())
    except Exception:  # it ran without gradients: nothing can be told, and nothing is wrong
        return False
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))


def _graph_bypasses(graph: fx.Graph, name: str) -> bool:
    """Whether the output depends on the first input by another way than through this layer."""
    first, *nodes = graph.nodes
    raw = {first}
    for node in nodes:
        through = node.op == "call_module" and node.target == name
        if not through and _word(node) not in _DESCRIPTIONS and not raw.isdisjoint(node.all_input_nodes):
            raw.add(node)
    # A model that is the layer itself has no other way.
    return name != "" and nodes[-1] in raw


def _word(node: fx.Node) -> Any:
    """What a node does: the attribute it reads, or the function, method or module it calls."""
    return node.args[1] if node.target is getattr else getattr(node.target, "__name__", node.target)


def _read(model: nn.Sequential, search: _Search) -> None:
    """Reads the order of layers off nested ``nn.Sequential``, whose modules may be opaque."""
    for module in _flat(model):
        if search.found:
            for part in module.modules():
                search.start(part)
            continue
        search.start(module)
        if not search.found and any(True for _ in module.parameters()) and not isinstance(module, _FEATURE_WISE):
            raise _RefusedError(
                f"input_shape must be given: what {type(module).__name__} does first cannot be read off the model"
            )


def _flat(model: nn.Sequential) -> Iterator[nn.Module]:
    for module in model:
        if type(module) is nn.Sequential and not _has_own_forward(module):
            yield from _flat(module)
        else:
            yield module


def _truncate_before(
    layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, model: nn.Module, k: int, search: _Search, input_shape: tuple[int, ...]
) -> nn.Module:
    """The model with a truncation before this convolution of it."""
    truncation = InputTruncation(search.shape, k, device=layer.weight.device, dtype=layer.weight.dtype)
    truncation.requires_grad_(layer.weight.requires_grad)
    block = nn.Sequential(truncation, layer)
    block.training = truncation.training = layer.training
    if layer is model:
        return block
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is layer:
                parent.register_module(name, block)
    _check_runs(_copy(model), search.name, input_shape)
    return model


def _check_runs(model: nn.Module, name: str, input_shape: tuple[int, ...]) -> None:
    """A model that reaches its convolution by another way than its attribute would pass the truncation by."""
    started: list[nn.Module] = []
    try:
        with _quiet(model.eval()):
            _run(model, input_shape, lambda module, _: started.append(module))
        runs = sum(isinstance(module, InputTruncation) for module in started)
        reason = f"the truncation runs {runs} times"
    except ValueError as error:
        runs, reason = 0, str(error)
    if runs != 1:
        raise ValueError(
            f"model must only call its convolution {name} as this attribute, to truncate before it: {reason}"
        )


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, and random numbers that nobody misses."""
    with torch.random.fork_rng({p.device for p in model.parameters() if p.is_cuda}), torch.no_grad():
        yield


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(f"model must survive copy.deepcopy, it raised {error!r}") from error


def _has_own_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__


def _check_dtype(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, name: str) -> None:
    for parameter in module.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise _RefusedError(f"{type(module).__name__} at {name} must be float32 or float64, got {parameter.dtype}")


def _name(name: str) -> str:
    return name or "the model itself"
