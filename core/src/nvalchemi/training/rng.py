"""The states of all random number generators that training draws from."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nvalchemi.errors import CheckpointMismatchError

__all__ = ["capture_rng", "check_rng", "random_numbers_kept", "restore_rng"]


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
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [one.cpu() for one in torch.cuda.get_rng_state_all()]
    return state


def check_rng(state: Mapping[str, Any], where: str) -> None:
    """Refuse states that the generators would not take, by giving them to others of the same kind.

    Raises
    ------
    CheckpointMismatchError
        A ``ValueError`` with the place, what the generator says to it, and the remedy.
    """
    for name, attempt in {"python": _restore_python, "torch": _restore_torch, "numpy": _restore_numpy}.items():
        if name == "numpy" and name not in state:
            continue
        try:
            attempt(state[name], trial=True)
        except Exception as error:  # each generator has errors of its own for what is no state of it
            raise CheckpointMismatchError(
                f"{where} holds no state that the random numbers of {name} can go on from here ({error!r}); use the "
                "same version, and the generator that was in use when the state was taken."
            ) from error


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set all generators to the states that `capture_rng` returned.

    States of CUDA devices that this machine lacks are passed over, as is numpy's where it is not installed.
    """
    _restore_python(state["python"])
    _restore_torch(state["torch"])
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


def _restore_python(state: Any, *, trial: bool = False) -> None:
    version, words, pending = state
    (random.Random() if trial else random).setstate((version, tuple(words.tolist()), pending))


def _restore_torch(state: Any, *, trial: bool = False) -> None:
    (torch.Generator() if trial else torch.default_generator).set_state(state)


def _restore_numpy(state: Any, *, trial: bool = False) -> None:
    try:
        numpy = importlib.import_module("numpy")  # an optional companion, without which type checking works too
    except ImportError:  # then nothing here can draw from it
        return
    saved, here = state["bit_generator"], numpy.random.get_state(legacy=False)["bit_generator"]
    if saved != here:
        raise ValueError(f"numpy.random draws from {here} here, but drew from {saved}: numpy.random.set_bit_generator")
    generator = numpy.random.RandomState(getattr(numpy.random, here)()) if trial else numpy.random
    generator.set_state(_unsigned(state))


def _plain(value: Any) -> Any:
    """Return a state of numpy with tensors for its arrays; signed ones, as torch can do little with others."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if hasattr(value, "dtype"):
        return torch.from_numpy(value.view(f"i{value.itemsize}").copy())
    return value


def _unsigned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unsigned(one) for key, one in value.items()}
    if isinstance(value, Tensor):
        return value.numpy().view(f"u{value.itemsize}")
    return value
