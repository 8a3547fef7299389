"""Which models learn during a run and which stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluation_mode", "training_modes"]


@contextmanager
def training_modes(models: Mapping[str, nn.Module], trained: Collection[str]) -> Iterator[None]:
    """Put trained models into train mode, freeze the others in eval mode, and give all their modes back.

    Parameters
    ----------
    models : mapping of str to torch.nn.Module
        All models of a run.
    trained : collection of str
        Names of those that learn.

    Examples
    --------
    >>> teacher = nn.Dropout()
    >>> with training_modes({"teacher": teacher}, trained=()):
    ...     teacher.training
    False
    >>> teacher.training
    True
    """
    frozen = [model for key, model in models.items() if key not in trained]
    learning = [model for key, model in models.items() if key in trained]
    kept = {id(parameter) for model in learning for parameter in model.parameters()}  # a part may have two names
    wanted = [p for model in frozen for p in model.parameters() if p.requires_grad and id(p) not in kept]
    with _modes_restored(models.values()):
        for model in (*frozen, *learning):  # in this order: what two models share is trained
            model.train(model in learning)
        for parameter in wanted:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in wanted:
                parameter.requires_grad_(True)


@contextmanager
def evaluation_mode(models: Iterable[nn.Module]) -> Iterator[None]:
    """Put models into eval mode and give every submodule its own mode back."""
    models = list(models)
    with _modes_restored(models):
        for model in models:
            model.eval()
        yield


@contextmanager
def _modes_restored(models: Iterable[nn.Module]) -> Iterator[None]:
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
