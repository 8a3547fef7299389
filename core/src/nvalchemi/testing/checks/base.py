"""What every check of the kit has: the hook's switches, runs to compare, and failures that say what to do."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor

from nvalchemi.hooks import CheckpointableHook
from nvalchemi.testing.needed import pytest
from nvalchemi.testing.tiny import poison, tiny_batches, tiny_strategy
from nvalchemi.training import TrainingStrategy
from nvalchemi.training.hooks import TrainingUpdateHook

__all__ = ["Batches", "Checks", "check", "require"]

Batches = Sequence[tuple[Tensor, Tensor]]
Method = TypeVar("Method", bound=Callable[..., None])


def require(holds: bool, otherwise: str) -> None:
    """Raise ``AssertionError(otherwise)`` unless something holds; unlike ``assert`` also under ``python -O``."""
    __tracebackhide__ = True
    if not holds:
        raise AssertionError(otherwise)


def check(todo: str) -> Callable[[Method], Method]:
    """Make a method a check: whatever it raises says what must hold (its docstring) and what to do."""

    def decorate(method: Method) -> Method:
        holds = " ".join((method.__doc__ or "").split())

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            try:
                method(*args, **kwargs)
            except Exception as error:  # the hook's own error or a failed requirement: noted and raised again
                error.add_note(f"What must hold: {holds}")
                error.add_note(f"What to do: {todo}")
                raise

        run.is_check = True  # type: ignore[attr-defined]
        return cast(Method, run)

    return decorate


class Checks:
    """The switches of a hook, and how it is made and trained; see `HookConformance`."""

    entry_point: ClassVar[str | None] = None
    factory: ClassVar[Callable[..., Any] | None] = None
    arguments: Mapping[str, Any] = {}
    vetoes: ClassVar[bool] = False
    stateful: ClassVar[bool] = False
    transforms_loss: ClassVar[bool] = False
    reads_grad: ClassVar[bool] = True
    defers_veto: ClassVar[bool] = False
    decides_alike: ClassVar[bool] = False
    sparse_gradients: ClassVar[bool] = True
    low_precision: ClassVar[bool] = True
    supports_cuda: ClassVar[bool] = False
    host_reads: ClassVar[int] = 0
    run_marks: ClassVar[tuple[str, ...]] = ()
    expected_failures: ClassVar[Mapping[str, str]] = {}

    folder: Path
    _folders: Path

    def make_hook(self) -> Any:
        """Return a new hook: by default ``factory(**arguments)``."""
        if type(self).factory is None:
            raise TypeError(
                f"{type(self).__name__} does not say how its hook is made; set `factory = MyHook` (and `arguments`), "
                "or override make_hook()."
            )
        return type(self).factory(**self.arguments)  # type: ignore[misc]  # it was just looked at

    def vetoed_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch that the hook vetoes, made from a good one: by default its first target becomes inf.

        A hook that vetoes for another reason overrides this.
        """
        x, y = batch
        return x, poison(y)

    # For the checks.

    def progress_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state of the hook without what only says which run it is."""
        return {name: value for name, value in state.items() if name not in self.run_marks}

    def fresh_hook(self) -> Any:
        """Return a hook whose `folder` is its own."""
        self.folder = self._folders / f"hook-{len(list(self._folders.iterdir()))}"
        self.folder.mkdir()
        return self.make_hook()

    def applies(self, holds: bool, otherwise: str) -> None:
        """Skip a check that does not apply, with the reason."""
        if not holds:
            pytest.skip(otherwise)

    def needs_update_hook(self) -> None:
        """Skip a check that is about the weight update."""
        self.applies(
            isinstance(self.fresh_hook(), TrainingUpdateHook), "a plain hook takes no part in the weight update"
        )

    def needs_state(self) -> None:
        """Skip a check that is about state."""
        self.applies(self.stateful, "stateful is False: there is no state to check")

    def batches(self, count: int, *, vetoed: Sequence[int] = ()) -> Batches:
        """Return good batches, some of which the hook vetoes if it vetoes at all."""
        batches = tiny_batches(count)
        return [self.vetoed_batch(batch) if self.vetoes and n in vetoed else batch for n, batch in enumerate(batches)]

    @contextlib.contextmanager
    def stepwise(self, *hooks: Any, **options: Any) -> Iterator[TrainingStrategy]:
        """Give the tiny strategy with these hooks entered, for batches that are trained one by one."""
        strategy = tiny_strategy(*hooks, **options)
        with strategy.registry:
            yield strategy

    def trained(self, *hooks: Any, batches: Batches, **options: Any) -> TrainingStrategy:
        """Return the tiny strategy with these hooks, after a run over these batches."""
        strategy = tiny_strategy(*hooks, **options)
        strategy.run(batches)
        return strategy


def weights_of(strategy: TrainingStrategy) -> dict[str, Tensor]:
    """Return a copy of all weights by name."""
    return {
        f"{key}.{name}": parameter.detach().clone()
        for key, model in strategy.models.items()
        for name, parameter in model.named_parameters()
    }


def everything_of(strategy: TrainingStrategy) -> dict[str, Any]:
    """Return a copy of what a step may change: weights, gradients, optimizers, schedulers."""
    gradients = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for model in strategy.models.values()
        for name, parameter in model.named_parameters()
    }
    return {
        "weights": weights_of(strategy),
        "gradients": gradients,
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in strategy.optimizers]),
        "schedulers": copy.deepcopy([scheduler.state_dict() for scheduler in strategy.lr_schedulers]),
    }


def state_of(hook: Any) -> dict[str, Any]:
    """Return a hook's state, empty where it has none."""
    return hook.state_dict() if isinstance(hook, CheckpointableHook) else {}
