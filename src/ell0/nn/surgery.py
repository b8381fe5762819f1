"""`truncate`: puts a truncation before the first layer with weights of any model."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..ops import check_k
from .layers import InputTruncation, TruncatedLinear, check_shape

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
FEATURE_WISE = (_BatchNorm, nn.PReLU)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _InstanceNorm, nn.LocalResponseNorm)
MIXING = (*NORMS, nn.Softmax, nn.Softmax2d, nn.Softmin, nn.LogSoftmax)
_EXAMPLE = "truncate(model, k, input_shape=x.shape[1:])"
SAMPLES = 2  # one sample would not survive a squeeze()


def truncate(model: nn.Module, k: int, input_shape: Sequence[int] | None = None) -> nn.Module:
    """Returns a copy of a model that truncates at its first layer with weights.

    A ``Linear`` becomes a `TruncatedLinear` with the same parameters, hooks and name. A ``Conv1d``, ``Conv2d`` or
    ``Conv3d`` is replaced by ``nn.Sequential(InputTruncation, convolution)``, which has the same parameters. Modules
    that run before that layer may have no weights, except BatchNorm and PReLU. They are not protected: a pooling, for
    example, spreads what the attacker changed. Only the path through that layer is truncated; a ``UserWarning`` says
    if the input also reaches the output by another path.

        robust = truncate(resnet, k=10, input_shape=(3, 32, 32))

    Args:
        k: terms removed on each side, ``0 <= 2k < in_features`` of the Linear; before a convolution, values removed on
            each side of every channel that it sees.
        input_shape: shape of one sample, without the batch dimension. A copy of the model runs in eval mode on two
            samples of zeros, which shows the layer that runs first. None: the features of the first Linear, for a
            model that takes rows.

    Raises:
        ValueError: the first layer with weights is not one of these, runs more than once, is neither float32 nor
            float64, or is a Linear that is parametrised or has its own forward.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise ValueError(f"model must be truncated before it is compiled or scripted, {_name(name)} already is")
        if isinstance(module, TruncatedLinear | InputTruncation):
            raise ValueError(f"model is already truncated: {_name(name)} is {type(module).__name__} with k={module.k}")
        if isinstance(module, LazyModuleMixin):
            raise ValueError(f"model has a lazy layer, {_name(name)}: run the model once to give it its shape")
    shape = _row_shape(model) if input_shape is None else check_shape("input_shape", input_shape)

    truncated = _copy(model)
    # The search runs on its own copy: a forward may change more than batch-norm statistics.
    try:
        search = _search(_copy(model), shape)
    except ValueError as error:
        guessed = input_shape is None and any(isinstance(module, CONVOLUTIONS) for module in model.modules())
        if guessed or (input_shape is None and not isinstance(error, _RefusedError)):
            raise ValueError(f"input_shape must be given for this model: {_EXAMPLE} ({error})") from error
        raise ValueError(str(error)) from error
    layer = truncated.get_submodule(search.name)
    if isinstance(layer, nn.Linear):
        check_k(k, layer.in_features)
        # As torch's own parametrisations do: hooks, flags and every reference to the layer stay.
        linear = cast(TruncatedLinear, layer)
        linear.__class__ = TruncatedLinear
        linear.k = k
    else:
        truncated = _truncate_before(cast(nn.Conv2d, layer), truncated, k, search, shape)
    if search.bypassed:
        warnings.warn(
            f"only the path through {_name(search.name)} is truncated: the input also reaches the output past it",
            stacklevel=2,
        )
    return truncated


def _row_shape(model: nn.Module) -> tuple[int, ...]:
    first = next((module for module in model.modules() if isinstance(module, (nn.Linear, *CONVOLUTIONS))), None)
    if not isinstance(first, nn.Linear):
        raise ValueError(f"input_shape must be given for this model: {_EXAMPLE}")
    return (first.in_features,)


class _RefusedError(ValueError):
    """The search found a layer that cannot be truncated; any other error is the model's own."""


class _Search(TorchFunctionMode):
    """Finds the first layer with weights while a model runs.

    `start` is told of every module that starts. A parameter that an operation uses outside a Linear or a convolution
    is a weight too, and ends the search with an error.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layer: nn.Module | None = None
        self.name, self.runs, self.bypassed = "", 0, False
        self.shape: tuple[int, ...] = ()
        self._names = {id(part): name for name, part in (*model.named_modules(), *model.named_parameters())}
        feature_wise = (module for module in model.modules() if isinstance(module, FEATURE_WISE))
        self._harmless = {id(parameter) for module in feature_wise for parameter in module.parameters(recurse=False)}

    def start(self, module: nn.Module, shape: Sequence[int]) -> None:
        """A module starts on an input of this shape."""
        if self.layer is not None:
            self.runs += module is self.layer
            return
        if isinstance(module, (nn.Linear, *CONVOLUTIONS, *MIXING)):
            name, objection = self._names[id(module)], _objection(module, shape)
            if objection:
                raise _RefusedError(f"{type(module).__name__} at {_name(name)} {objection}")
            self.layer, self.name, self.runs, self.shape = module, name, 1, tuple(shape[1:])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Reading a shape or a device is no use of the values.
        if self.layer is None and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and id(leaf) not in self._harmless:
                    name = self._names.get(id(leaf), "that is not registered")
                    used = f"is used by {getattr(func, '__name__', func)} before any Linear or convolution"
                    raise _RefusedError(f"parameter {name} {used}: it cannot be truncated")
        return result


def _objection(module: nn.Module, shape: Sequence[int]) -> str:
    """Why this layer cannot be truncated, if it is the first one with weights; empty if it can."""
    if isinstance(module, MIXING):
        return "cannot be truncated: it runs before any Linear or convolution and mixes features"
    if isinstance(module, nn.Linear):
        if "weight" not in dict(module.named_parameters(recurse=False)):
            return "is parametrised (weight_norm, pruning): make its weight a plain parameter first"
        if type(module) is not nn.Linear:
            return "is a subclass of Linear that may compute something else"
        if "forward" in module.__dict__:
            return "has its own forward (accelerate hooks), which would still run: remove it first"
    for parameter in module.parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            return f"must be float32 or float64, got {parameter.dtype}"
    if isinstance(module, CONVOLUTIONS) and (len(shape) != len(module.kernel_size) + 2 or shape[0] != SAMPLES):
        return f"must see the samples one by one, got shape {tuple(shape)} for {SAMPLES} samples"
    return ""


def _search(model: nn.Module, input_shape: tuple[int, ...]) -> _Search:
    """Finds the first layer with weights; changes the model."""
    search = _Search(model)
    with search:
        _run(model.eval(), input_shape, search.start)
    if search.layer is None:
        raise ValueError("model must have a Linear, Conv1d, Conv2d or Conv3d layer that runs, none does")
    if search.runs > 1:
        raise ValueError(
            f"the first layer, {_name(search.name)}, must run once in a forward, it runs {search.runs} times"
        )
    search.bypassed = _bypasses(model, search.layer, input_shape)
    return search


def _run(model: nn.Module, input_shape: tuple[int, ...], start: Callable[[nn.Module, Sequence[int]], None]) -> None:
    """One forward on zeros; every module is announced before it starts, and before its other hooks."""

    def announce(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        start(module, tensors[0].shape if tensors else ())

    for module in model.modules():
        module.register_forward_pre_hook(announce, prepend=True, with_kwargs=True)
    try:
        _on_zeros(model, input_shape)
    except _RefusedError:
        raise
    except Exception as error:
        raise ValueError(f"model must run on samples of input_shape={input_shape}, it raised {error!r}") from error


def _bypasses(model: nn.Module, layer: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether the output still depends on the input when this layer is cut off from it; changes the model."""
    model.requires_grad_(False)
    layer.register_forward_hook(lambda *call: call[-1].detach())
    try:
        output = _on_zeros(model, input_shape, requires_grad=True)
    except Exception:  # it ran without gradients: nothing can be told, and nothing is wrong
        return False
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))


def _truncate_before(
    layer: nn.Conv2d, model: nn.Module, k: int, search: _Search, input_shape: tuple[int, ...]
) -> nn.Module:
    """The model with a truncation before this convolution of it."""
    truncation = InputTruncation(search.shape, k)
    block = nn.Sequential(truncation, layer)
    block.training = truncation.training = layer.training
    if layer is model:
        return block
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is layer:
                parent.register_module(name, block)
    # A model that reaches its convolution by another way than its attribute would bypass the truncation.
    started: list[nn.Module] = []
    try:
        _run(_copy(model).eval(), input_shape, lambda module, _: started.append(module))
        runs = sum(isinstance(module, InputTruncation) for module in started)
        reason = f"the truncation runs {runs} times"
    except ValueError as error:
        runs, reason = 0, str(error)
    if runs != 1:
        raise ValueError(
            f"model must only call its convolution {search.name} as this attribute, to truncate before it: {reason}"
        )
    return model


def _on_zeros(model: nn.Module, input_shape: tuple[int, ...], requires_grad: bool = False) -> Any:
    """What a model returns for zeros; random numbers that it draws leave the global generators as they were."""
    like = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), torch.empty(()))
    zeros = torch.zeros(SAMPLES, *input_shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad)
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices), torch.set_grad_enabled(requires_grad):
        return model(zeros.clone())  # a model may change its input in place


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise ValueError(f"model must survive copy.deepcopy, it raised {error!r}") from error


def _name(name: str) -> str:
    return name or "the model itself"
