"""Several processes at work on one thing: who this one is, its share of the rows, what the others found.

The only place that knows of Lightning Fabric, which is imported where more than one process is asked for. Fabric starts
the processes, or finds those that torchrun or SLURM started; torch's own collectives carry what they say to each other.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from .attacks.contract import check_count

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["ALONE", "LostError", "Team", "together"]

T = TypeVar("T")

_PATIENCE = timedelta(days=1)  # for a rank whose rows are harder; one that is gone is noticed at once


class LostError(ConnectionError):
    """A process of the team is gone."""


class Team:
    """The processes of a run, each with a ``rank`` of 0 .. ``size`` - 1; as it stands here, one that is alone.

    sharded: whether a rank keeps only its part of what the steps of a training need beside the model.

    What is `gather` or `once` for one rank must be so for all, in the same order.
    """

    rank = 0
    size = 1
    sharded = False

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes and speaks."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """What is this rank's of ``(n, ...)``: rows in turn, since neighbours are often alike."""
        return rows if self.size == 1 else rows[self.rank :: self.size]

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """The rows again, on the CPU, from the `share` of each rank."""
        rows = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]), device="cpu")
        for rank, share in enumerate(shares):
            rows[rank :: self.size] = share
        return rows

    def check_rows(self, name: str, rows: int) -> None:
        """Raises where there are fewer rows than ranks."""
        if rows < self.size:
            raise ValueError(f"{name} must have at least a row for each of the {self.size} ranks, got {rows}")

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Has every rank do its work, and gives what all gave, by rank; what one raises, all raise."""
        return [work()]

    def once(self, work: Callable[[], T]) -> T:
        """Has rank 0 alone do some work, and gives all what it gave; what it raises, all raise."""
        return work()

    def by_row(self, work: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """What a function gives for rows, a value for each, on the CPU; every rank does its share.

            radii = team.by_row(partial(certify.radius, model), x, y)

        rows: ``(n, ...)`` each.
        """
        self.check_rows("rows", len(rows[0]))
        return self.whole(self.gather(lambda: work(*map(self.share, rows)).cpu()))

    def averaged(self, model: nn.Module, layers: Sequence[str] = ()) -> nn.Module:  # noqa: ARG002
        """The model as one whose backward averages the gradients of all ranks; alone, the model.

        Where the team is `sharded` it is a copy, with the same buffers and the same order of parameters, of which every
        rank has a part.

        layers: the modules by name that are made whole one at a time, as they are called; the rest is so for all of a
            step.
        """
        return model

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Around steps of the `averaged` model; at the end the model itself has its weights, and the buffers of rank 0,
        on every rank."""
        yield

    def joined(self, part: Tensor) -> Tensor:
        """A parameter of the `averaged` model, or a tensor like it, whole; every rank must ask."""
        return part

    def parted(self, whole: Tensor, like: Tensor) -> Tensor:  # noqa: ARG002
        """What this rank has of a tensor, which all have whole, if it has that of ``like``."""
        return whole


ALONE = Team()


class _Ranks(Team):
    """Several processes, connected by Fabric."""

    def __init__(self, fabric: Fabric, sharded: bool) -> None:
        self._fabric, self.sharded = fabric, sharded
        self.rank, self.size = fabric.global_rank, fabric.world_size
        # Over TCP also where gradients go from GPU to GPU: a closed connection is an error there, not a wait.
        self._group = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._told: Exception | None = None
        self._stepping = False
        self._buffers: list[Tensor] = []
        self._parts: list[tuple[Tensor, Tensor]] = []

    def gather(self, work: Callable[[], T]) -> list[T]:
        return self._exchange(*_tried(work))

    def once(self, work: Callable[[], T]) -> T:
        error, value = _tried(work) if self.first else (None, None)
        # Apart from the value, which only one has and which may be large.
        self._exchange(error, None)
        box = [value]
        with _connected():
            torch.distributed.broadcast_object_list(box, 0, self._group, device=torch.device("cpu"))
        return cast(T, box[0])

    def averaged(self, model: nn.Module, layers: Sequence[str] = ()) -> nn.Module:
        self._buffers = list(model.buffers())
        if not self.sharded:
            return self._fabric.setup_module(model, move_to_device=False)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ranks = init_device_mesh(self._fabric.device.type, (self.size,))
        parts = copy.deepcopy(model, {id(buffer): buffer for buffer in self._buffers})
        for parameter in parts.parameters():
            parameter.data = parameter.data.contiguous()  # FSDP takes no other layout
        for name in layers:
            parts.get_submodule(name).register_forward_hook(_no_view)
            fully_shard(parts.get_submodule(name), mesh=ranks)
        fully_shard(parts, mesh=ranks)
        self._parts = list(zip(model.parameters(), parts.parameters(), strict=True))
        return parts

    @contextmanager
    def steps(self) -> Iterator[None]:
        self._stepping = True
        with _connected():
            yield
            with torch.no_grad():
                for whole, part in self._parts:
                    if whole.requires_grad:
                        whole.copy_(self.joined(part))
            for buffer in self._buffers:
                torch.distributed.broadcast(buffer, 0)
        self._stepping = False

    def joined(self, part: Tensor) -> Tensor:
        if not self.sharded:
            return part
        from torch.distributed.tensor import DTensor

        with _connected():
            return part.full_tensor() if isinstance(part, DTensor) else part

    def parted(self, whole: Tensor, like: Tensor) -> Tensor:
        if not self.sharded:
            return whole
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return whole
        # Without a source nobody sends anything.
        return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)

    def leave(self) -> None:
        """Ends the connection, whose threads a process that just ends may trip over.

        Not in the middle of a step, nor from GPU to GPU: what is under way there would be waited for.
        """
        if not self._stepping and self._fabric.device.type == "cpu":
            torch.distributed.destroy_process_group()

    def fail(self, error: Exception) -> NoReturn:
        """Ends a rank on which something was raised: rank 0 raises it, to be told, the others end.

        What was raised on another rank alone comes to rank 0 in its next exchange. In the steps of a training there is
        none, and the rank speaks for itself.
        """
        if not (error is self._told or self._stepping or isinstance(error, LostError)):
            try:
                self._exchange(error, None)
            except LostError:
                raise error from None
            except Exception as told:
                error = told
        if self.first:
            raise error
        if error is self._told:
            # The code of the run is that of rank 0, which a launcher that sees another first might not let speak.
            raise SystemExit(0) from None
        if isinstance(error, LostError):
            raise SystemExit(1) from None
        raise error

    def _exchange(self, error: Exception | None, value: T) -> list[T]:
        """What all ranks gave, by rank; raises the first error among them."""
        box: list[Any] = [None] * self.size
        with _connected():
            torch.distributed.all_gather_object(box, (_tellable(error), value), self._group)
        for rank, (its, _) in enumerate(box):
            if its is not None:
                self._told = error if rank == self.rank else its
                assert self._told is not None
                raise self._told
        return [value for _, value in box]


@contextmanager
def together(
    devices: int | None = None, nodes: int = 1, device: str | None = None, *, sharded: bool = False
) -> Iterator[Team]:
    """The team of a run, inside of which it is done.

        with parallel.together(devices=2) as team:
            evaluation = ell0.evaluate(model, x, y, ball, team=team)

    Starts the processes, which all come here by the same command, or joins those of torchrun or SLURM. An error on one
    rank ends all of them: rank 0 raises it, the others end quietly.

    Args:
        devices: processes on each node, with a GPU each where there are GPUs. None: one, or those of torchrun.
        nodes: machines.  device: ``"cpu"`` or ``"cuda"``; None: GPUs where there are some.
        sharded: in the steps of a training weights, gradients and the state of the optimizer are shared out (FSDP), for
            networks that leave a GPU no room for all three. The model itself, which attacks and evaluations ask, stays
            whole on every rank.
    """
    team = _launched(devices, nodes, device, sharded)
    if not isinstance(team, _Ranks):
        yield team
        return
    try:
        yield team
    except KeyboardInterrupt:
        if team.first:
            raise
        raise SystemExit(130) from None
    except Exception as error:
        team.fail(error)
    finally:
        team.leave()


def _launched(devices: int | None, nodes: int, device: str | None, sharded: bool) -> Team:
    elastic = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    if devices is None and elastic:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    devices = 1 if devices is None else devices
    check_count("devices", devices)
    check_count("nodes", nodes)
    if devices * nodes == 1:
        if sharded:
            raise ValueError("sharded must be False for one process, which has nobody to share with, got True")
        return ALONE
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda" for several processes, got {device!r}')
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus and devices > gpus:
        raise ValueError(f"devices must be at most the {gpus} GPUs here, got {devices}")
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError(
            f"more than one process needs Lightning Fabric: pip install 'ell0[dist]' ({error})"
        ) from error
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it tells of every process that starts
    fabric = Fabric(accelerator="cuda" if gpus else "cpu", devices=devices, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    return _Ranks(fabric, sharded)


def _no_view(_layer: nn.Module, _given: object, output: Any) -> Any:
    """What a layer gives, in memory of its own: FSDP waits on it for the backward, and waits in vain on a view that the
    next layer writes to."""
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _tried(work: Callable[[], object]) -> tuple[Exception | None, Any]:
    """What some work raised, and what it gave."""
    try:
        return None, work()
    except Exception as error:
        return error, None


def _tellable(error: Exception | None) -> Exception | None:
    """The error, or where another process could not read it, its words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _connected() -> Iterator[None]:
    """Says in one sentence that another process is gone, which torch tells in many ways."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise LostError(
            "a process of this run has ended, so all of it has: what was done is kept, run it again to go on"
        ) from error
