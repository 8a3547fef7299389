"""What the tests of the one-pass update share. Triton's interpreter runs its programs on tensors of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from nvalchemi_hooks_triton.kernels import Batch, programs

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    programs()  # interpreted from now on: what is imported first is interpreted or compiled for good


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is on for these tests, and for no others in the same process."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")  # Hypothesis wants one that stays
def make_batch() -> Callable[..., Batch]:
    """Makes weights, gradients and state of these shapes, after some steps, with averages if they are wanted."""

    def make(
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        *,
        share: float | None = 0.1,
        rounds: bool = False,
        offset: int = 0,
        steps: int = 3,
        seed: int = 0,
    ) -> Batch:
        generator = torch.Generator().manual_seed(seed)

        def column(kind: torch.dtype = dtype) -> list[torch.Tensor]:
            sizes = [torch.Size(shape).numel() for shape in shapes]
            flat = (torch.randn(size + offset, generator=generator)[offset:].to(kind) for size in sizes)
            placed = (torch.empty(one.numel() + offset, dtype=kind)[offset:].copy_(one) for one in flat)
            return [one.view(shape) for one, shape in zip(placed, shapes, strict=True)]

        return Batch(
            weights=column(),
            gradients=column(),
            firsts=column(),
            seconds=[one.square_() for one in column()],
            steps=[torch.tensor(float(steps)) for _ in shapes],
            averages=None if share is None else column(torch.float32),
            rounded=column() if rounds else None,
            share=share or 0.0,
        )

    return make
