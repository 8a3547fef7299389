"""The states of all random number generators that training draws from."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["capture_rng", "random_numbers_kept", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """Return the states of the generators of python, numpy, torch and CUDA as plain data; nothing is drawn.

    numpy counts if it is imported, CUDA if it is in use: otherwise nothing has drawn from them.

    Examples
    --------
    >>> state = capture_rng()
    >>> drawn = torch.rand(3)
    >>> restore_rng(state)
    >>> torch.equal(drawn, torch.rand(3))
    True
    """
    version, words, pending = random.getstate()
    state: dict[str, Any] = {"python": [version, torch.tensor(words), pending], "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, words, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [str(name), torch.tensor(words.tolist()), int(position), int(has_gauss), float(gauss)]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [one.cpu() for one in torch.cuda.get_rng_state_all()]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators to the states that `capture_rng` returned.

    States of CUDA devices that this machine lacks are passed over, as is numpy's where it is not installed.
    """
    version, words, pending = state["python"]
    random.setstate((version, tuple(words.tolist()), pending))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        _restore_numpy(state["numpy"])
    for device, one in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(one, device)


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Let code draw what it likes; afterwards all generators are where they were before.

    Examples
    --------
    >>> with random_numbers_kept():
    ...     drawn = torch.rand(3)
    >>> torch.equal(drawn, torch.rand(3))
    True
    """
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)


def _restore_numpy(state: Any) -> None:
    try:
        numpy = importlib.import_module("numpy")  # an optional companion, without which type checking works too
    except ImportError:  # then nothing here can draw from it
        return
    name, words, position, has_gauss, gauss = state
    numpy.random.set_state((name, words.tolist(), position, has_gauss, gauss))
