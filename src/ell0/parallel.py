"""Several processes (ranks) share one task; Lightning Fabric starts them or joins those of torchrun or SLURM."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from .common import check_count

if TYPE_CHECKING:
    from lightning_fabric import Fabric

__all__ = ["ALONE", "LostError", "Team", "together"]

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)  # for a rank whose rows are harder; a lost one is noticed at once


class LostError(ConnectionError):
    """A process of the team has ended."""


class Team:
    """The processes of a run, each with a ``rank`` in 0 .. ``size`` - 1. This class is a team of one.

    All ranks must call `gather` and `once` in the same order.
    """

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def share(self, rows: Tensor) -> Tensor:
        """This rank's part of ``(n, ...)``: every size-th row, since neighbours are often alike."""
        return rows if self.size == 1 else rows[self.rank :: self.size]

    def whole(self, shares: Sequence[Tensor]) -> Tensor:
        """All rows, on the CPU, from the shares of all ranks."""
        rows = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]), device="cpu")
        for rank, share in enumerate(shares):
            rows[rank :: self.size] = share
        return rows

    def check_rows(self, name: str, rows: int) -> None:
        """Raises ValueError if there are fewer rows than ranks."""
        if rows < self.size:
            raise ValueError(f"{name} must have at least a row for each of the {self.size} ranks, got {rows}")

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Every rank does its work; returns all results, by rank. If one raises, all raise."""
        return [work()]

    def once(self, work: Callable[[], T]) -> T:
        """Rank 0 does the work; returns its result on every rank. If it raises, all raise."""
        return work()

    def by_row(self, work: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """``work(*rows)``, a value for each row ``(n, ...)``, on the CPU; every rank does its share."""
        self.check_rows("rows", len(rows[0]))
        return self.whole(self.gather(lambda: work(*map(self.share, rows)).cpu()))

    def averaged(self, model: nn.Module) -> nn.Module:
        """The model with a backward pass that averages gradients over ranks."""
        return model

    @contextmanager
    def steps(self) -> Iterator[None]:
        """Surrounds steps of the `averaged` model. Afterwards every rank has rank 0's buffers."""
        yield


ALONE = Team()


class _Ranks(Team):
    """Several processes, connected by Fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.rank, self.size = fabric, fabric.global_rank, fabric.world_size
        # TCP, also if gradients go from GPU to GPU: it reports a closed connection at once.
        self._group = torch.distributed.new_group(backend="gloo", timeout=_TIMEOUT)
        self._told: Exception | None = None
        self.stepping, self._buffers = False, list[Tensor]()

    def gather(self, work: Callable[[], T]) -> list[T]:
        return self._exchange(*_tried(work))

    def once(self, work: Callable[[], T]) -> T:
        error, value = _tried(work) if self.first else (None, None)
        # Without the value, which may be large.
        self._exchange(error, None)
        box = [value]
        with _connected():
            torch.distributed.broadcast_object_list(box, 0, self._group, device=torch.device("cpu"))
        return cast(T, box[0])

    def averaged(self, model: nn.Module) -> nn.Module:
        self._buffers = list(model.buffers())
        return self.fabric.setup_module(model, move_to_device=False)

    @contextmanager
    def steps(self) -> Iterator[None]:
        self.stepping = True
        with _connected():
            yield
            for buffer in self._buffers:
                torch.distributed.broadcast(buffer, 0)
        self.stepping = False

    def fail(self, error: Exception) -> NoReturn:
        """Ends a rank after an error: rank 0 raises it, the others exit."""
        # Other ranks learn of an error in their next exchange. During training steps there is none.
        if not (error is self._told or self.stepping or isinstance(error, LostError)):
            try:
                self._exchange(error, None)
            except LostError:
                raise error from None
            except Exception as told:
                error = told
        if self.first:
            raise error
        if error is self._told or isinstance(error, LostError):
            # Rank 0 gives the exit code. A launcher that sees another code first may end rank 0 before it prints.
            raise SystemExit(0 if error is self._told else 1) from None
        raise error

    def _exchange(self, error: Exception | None, value: T) -> list[T]:
        """The values of all ranks; raises the first error among them."""
        box: list[Any] = [None] * self.size
        with _connected():
            torch.distributed.all_gather_object(box, (_tellable(error), value), self._group)
        for rank, (its, _) in enumerate(box):
            if its is not None:
                self._told = error if rank == self.rank and error else its
                raise self._told
        return [value for _, value in box]


@contextmanager
def together(devices: int | None = None, nodes: int = 1, device: str | None = None) -> Iterator[Team]:
    """The team of a run; the work goes inside the ``with``.

        with parallel.together(devices=2) as team:
            evaluation = ell0.evaluate(model, x, y, ball, team=team)

    Starts the processes, which all run the same command up to here, or joins those of torchrun or SLURM. An error on
    one rank ends all: rank 0 raises it, the others exit silently.

    Args:
        devices: processes on each node, with one GPU each if there are GPUs. Default: one, or those of torchrun.
        nodes: machines.  device: ``"cpu"`` or ``"cuda"``. Default: GPUs if there are any.
    """
    team = _launched(devices, nodes, device)
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
        # Threads of the connection may crash a process that ends. During a step, or between GPUs, closing it would wait
        # for collectives under way.
        if not team.stepping and team.fabric.device.type == "cpu":
            torch.distributed.destroy_process_group()


def _launched(devices: int | None, nodes: int, device: str | None) -> Team:
    if devices is None and torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    devices = check_count("devices", 1 if devices is None else devices)
    if devices * check_count("nodes", nodes) == 1:
        return ALONE
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'device must be "cpu" or "cuda" for several processes, got {device!r}')
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus and devices > gpus:
        raise ValueError(f"devices must be at most the {gpus} GPUs here, got {devices}")
    try:
        from lightning_fabric import Fabric
    except ImportError as error:
        raise ImportError(f"several processes need Lightning Fabric: pip install 'ell0[dist]' ({error})") from error
    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # it reports every process that starts
    fabric = Fabric(accelerator="cuda" if gpus else "cpu", devices=devices, num_nodes=nodes, strategy="ddp")
    fabric.launch()
    return _Ranks(fabric)


def _tried(work: Callable[[], object]) -> tuple[Exception | None, Any]:
    try:
        return None, work()
    except Exception as error:
        return error, None


def _tellable(error: Exception | None) -> Exception | None:
    """The error, or its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _connected() -> Iterator[None]:
    """Turns the many errors of torch for a lost process into one sentence."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        raise LostError("a process of this run has ended, so all have; run it again to resume it") from error
