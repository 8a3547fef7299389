"""From a description to an optimizer and its scheduler."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import nn

from nvalchemi.training.closures import refuse_closure

__all__ = ["OptimizerConfig", "checked_optimizer_configs"]


class OptimizerConfig(BaseModel):
    """How one optimizer and its scheduler are made for one model.

    Parameters
    ----------
    optimizer_cls : type of torch.optim.Optimizer or str
        The class, or its name in ``torch.optim``. Optimizers that need a closure are refused.
    optimizer_kwargs : dict
        Keyword arguments of the class: ``lr``, ``weight_decay``, ``fused``, ...
    scheduler_cls : type or str, optional
        A scheduler class, or its name in ``torch.optim.lr_scheduler``. It moves once for every step that the optimizer
        takes; ``ReduceLROnPlateau`` moves with validation instead.
    scheduler_kwargs : dict
        Keyword arguments of the scheduler.
    parameters : callable, optional
        From the model to what the optimizer gets: parameters, or groups as torch takes them. By default every parameter
        that requires a gradient.

    Raises
    ------
    pydantic.ValidationError
        A field is unknown or does not fit.

    Examples
    --------
    >>> config = OptimizerConfig(optimizer_cls="SGD", optimizer_kwargs={"lr": 0.1}, scheduler_cls="StepLR",
    ...                          scheduler_kwargs={"step_size": 10})
    >>> optimizer, scheduler = config.build(nn.Linear(2, 1), "main")
    >>> type(optimizer).__name__, type(scheduler).__name__
    ('SGD', 'StepLR')
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", frozen=True)

    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | None = None
    scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    parameters: Callable[[nn.Module], Iterable[Any]] | None = None

    if TYPE_CHECKING:  # what may be given is more than what is kept: names become classes

        def __init__(
            self,
            *,
            optimizer_cls: type[torch.optim.Optimizer] | str = ...,
            optimizer_kwargs: dict[str, Any] = ...,
            scheduler_cls: type[torch.optim.lr_scheduler.LRScheduler] | str | None = ...,
            scheduler_kwargs: dict[str, Any] = ...,
            parameters: Callable[[nn.Module], Iterable[Any]] | None = ...,
        ) -> None: ...

    @field_validator("optimizer_cls", mode="before")
    @classmethod
    def _named_optimizer(cls, value: Any) -> Any:
        return _looked_up(value, torch.optim, torch.optim.Optimizer)

    @field_validator("scheduler_cls", mode="before")
    @classmethod
    def _named_scheduler(cls, value: Any) -> Any:
        return _looked_up(value, torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)

    def build(self, model: nn.Module, key: str) -> tuple[torch.optim.Optimizer, Any]:
        """Make the optimizer and, if there is one, the scheduler.

        Parameters
        ----------
        model : torch.nn.Module
            Whose parameters are optimized.
        key : str
            The model's name, for messages.

        Returns
        -------
        (optimizer, scheduler or None)

        Raises
        ------
        ValueError
            There is no parameter to optimize.
        """
        choose = self.parameters or (lambda module: (p for p in module.parameters() if p.requires_grad))
        parameters = list(choose(model))
        if not parameters:
            raise ValueError(
                f"Model {key!r} ({type(model).__name__}) has no parameter to optimize; leave it out of "
                "optimizer_configs (it is then frozen), or let some parameter require a gradient."
            )
        optimizer = _built(self.optimizer_cls, (parameters,), self.optimizer_kwargs, key)
        if self.scheduler_cls is None:
            return optimizer, None
        return optimizer, _built(self.scheduler_cls, (optimizer,), self.scheduler_kwargs, key)


def _built(cls: type, positional: tuple[Any, ...], options: dict[str, Any], key: str) -> Any:
    try:
        return cls(*positional, **options)
    except Exception as error:  # the class's own error, noted and raised again
        error.add_note(f"While building {cls.__name__} for model {key!r} with {options}.")
        raise


def checked_optimizer_configs(
    configs: object, models: Mapping[str, nn.Module]
) -> dict[str, tuple[OptimizerConfig, ...]]:
    """Bring optimizer configurations into the form model key -> configs, or refuse them by name."""
    if isinstance(configs, OptimizerConfig) or not isinstance(configs, Mapping):
        configs = {"main": configs}
    checked: dict[str, tuple[OptimizerConfig, ...]] = {}
    for key, value in configs.items():
        if key not in models:
            closest = difflib.get_close_matches(str(key), list(models), n=1, cutoff=0.0)
            raise ValueError(
                f"optimizer_configs has an entry for {key!r}, but there is no model of that name; did you mean "
                f"{closest[0]!r}? The models are {sorted(models)}."
            )
        group = tuple(value) if isinstance(value, list | tuple) else (value,)
        for config in group:
            if not isinstance(config, OptimizerConfig):
                raise TypeError(
                    f"optimizer_configs[{key!r}] is a {type(config).__name__}, {reprlib.repr(config)}; give "
                    'OptimizerConfig(optimizer_cls="AdamW", optimizer_kwargs={"lr": 1e-3}), or a list of them.'
                )
            refuse_closure(config.optimizer_cls)
        if group:
            checked[key] = group
    if not checked:
        raise ValueError("optimizer_configs is empty, so nothing would be trained; give an OptimizerConfig.")
    return checked


def _looked_up(value: Any, module: Any, base: type) -> Any:
    if not isinstance(value, str):
        return value
    classes = {name: one for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, base)}
    if value not in classes:
        folded = {name.casefold(): name for name in classes}
        closest = difflib.get_close_matches(value.casefold(), list(folded), n=1, cutoff=0.0)
        raise ValueError(f"{module.__name__} has no class {value!r}; did you mean {folded[closest[0]]!r}?")
    return classes[value]
