"""How to build a model: an import path and arguments, as data that can be written down."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from nvalchemi.errors import ModelImportError, ModelNotAllowedError, ModelSpecError
from nvalchemi.training.sharding import own_class

__all__ = ["Allowed", "ModelSpec", "create_model_spec"]

Allowed = Callable[..., Any] | str
_TORCH_NN = "torch.nn"
_SPEC, _DTYPE, _TUPLE = "$spec", "$dtype", "$tuple"


@dataclass(frozen=True)
class ModelSpec:
    """How to build a model.

    Attributes
    ----------
    target : str
        ``"module:qualified.name"`` of a class or function.
    kwargs : dict
        Its keyword arguments: None, booleans, numbers, strings, lists, tuples and dicts of them, dtypes, other specs.

    Examples
    --------
    >>> spec = ModelSpec("torch.nn.modules.linear:Linear", {"in_features": 2, "out_features": 1})
    >>> spec.build()
    Linear(in_features=2, out_features=1, bias=True)
    >>> ModelSpec.from_json(spec.to_json()) == spec
    True
    """

    target: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module, colon, name = self.target.partition(":") if isinstance(self.target, str) else ("", "", "")
        if not (module and colon and name):
            raise ModelSpecError(f'ModelSpec.target is {self.target!r}; write "module:name".')
        object.__setattr__(self, "kwargs", _checked_value(dict(self.kwargs), f"{name}(...)"))

    def __hash__(self) -> int:
        return hash(self.target)

    def build(self, allow: Iterable[Allowed] = ()) -> Any:
        """Build the model, and those among its arguments.

        Parameters
        ----------
        allow : iterable of type, callable or str
            What may be built besides the modules of ``torch.nn``: classes, functions, or prefixes of modules. A prefix
            allows the ``nn.Module`` classes that are defined below it, and nothing that is only imported there.

        Raises
        ------
        ModelNotAllowedError
            A ``ValueError``: something else is named; nothing of it was called.
        ModelImportError
            An ``ImportError``: what is named is not there.
        ModelSpecError
            A ``ValueError``: it does not take these arguments.
        """
        allowed = tuple(allow)
        self.check(allowed)
        target = self._resolve(allowed)
        _bind(target, self.target, self.kwargs)
        return target(**_built(self.kwargs, allowed))

    def check(self, allow: Iterable[Allowed] = ()) -> None:
        """Refuse what may not be built, without importing anything.

        Raises
        ------
        ModelNotAllowedError
            A ``ValueError`` with the target and the remedy.
        """
        allowed = tuple(allow)
        module, _, name = self.target.partition(":")
        if not (self._given(allowed) or _below(module, allowed)):
            raise ModelNotAllowedError(
                f"{self.target} is no class of torch.nn and was not allowed; nothing of it was imported. If you trust "
                f"it: allow=[{name}], or allow=[{module!r}] for the models of its module."
            )
        for spec in _specs_in(self.kwargs):
            spec.check(allowed)

    def fits(self, module: nn.Module) -> bool:
        """Whether it can be what this builds: of a target that is a class, an instance of exactly that."""
        target = _attribute(sys.modules.get(self.target.partition(":")[0]), self.target.partition(":")[2])
        return not isinstance(target, type) or own_class(module) is target

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"target": self.target, "kwargs": {key: _encoded(value) for key, value in self.kwargs.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelSpec:
        """Return what `to_json` was called on; nothing is imported."""
        try:
            return cls(data["target"], {key: _decoded(value) for key, value in data["kwargs"].items()})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelSpecError(
                f"{data!r} describes no model: {error!r}; use what ModelSpec.to_json returned."
            ) from error

    def _given(self, allowed: tuple[Allowed, ...]) -> Callable[..., Any] | None:
        return next((one for one in allowed if not isinstance(one, str) and _path(one) == self.target), None)

    def _resolve(self, allowed: tuple[Allowed, ...]) -> Callable[..., Any]:
        given = self._given(allowed)
        if given is not None:
            return given
        module, _, name = self.target.partition(":")
        found: Callable[..., Any] | None
        try:
            found = _attribute(importlib.import_module(module), name)
        except ImportError as error:
            raise ModelImportError(
                f"{self.target} cannot be imported any more: {error}. Install what it is from, or give the class by "
                "allow=[...] under its old name."
            ) from error
        if not callable(found):
            raise ModelImportError(
                f"{self.target} cannot be imported any more: {module} has no {name}. Use the version it was saved with."
            )
        if not (isinstance(found, type) and issubclass(found, nn.Module) and _below(found.__module__, allowed)):
            raise ModelNotAllowedError(
                f"{self.target} is no nn.Module that is defined in torch.nn or below a name in allow, so it was not "
                f"called. If you trust it, give it itself: allow=[{name}]."
            )
        return found


def create_model_spec(target: Callable[..., Any], /, **kwargs: Any) -> ModelSpec:
    """Describe how to build a model, for `save_checkpoint`.

    Parameters
    ----------
    target : type or function
        What builds it: importable, so no lambda and nothing that is defined inside a function.
    **kwargs
        Its keyword arguments, plain data: see `ModelSpec`.

    Raises
    ------
    ModelSpecError
        A ``ValueError``: the target cannot be imported by name, does not take an argument, or an argument is no plain
        data; the message names it and the remedy.

    Examples
    --------
    >>> create_model_spec(nn.Linear, in_features=2, out_features=1).target
    'torch.nn.modules.linear:Linear'
    >>> create_model_spec(nn.Linear, in_features=2, out_featurs=1)
    Traceback (most recent call last):
    nvalchemi.errors.ModelSpecError: Linear does not take these arguments: missing a required argument...
    """
    path = _path(target)
    module, _, name = path.partition(":")
    if not callable(target) or not module or "<" in name:
        raise ModelSpecError(
            f"{target!r} cannot be imported by name, so it could never be built again; give a class or function that "
            "is defined at the top of a module."
        )
    if _attribute(sys.modules.get(module), name) is not target:
        raise ModelSpecError(f"{path} is not {target!r}; give it under the name by which it can be imported.")
    _bind(target, name, kwargs)
    return ModelSpec(path, kwargs)


def _below(module: str, allowed: tuple[Allowed, ...]) -> bool:
    """Whether a module is ``torch.nn`` or an allowed one, or lies below."""
    prefixes = (_TORCH_NN, *(one for one in allowed if isinstance(one, str)))
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def _path(target: object) -> str:
    return f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"


def _attribute(module: object, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _bind(target: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(target).bind(**kwargs)
    except TypeError as error:
        raise ModelSpecError(
            f"{name} does not take these arguments: {error}; it is {name}{inspect.signature(target)}."
        ) from error
    except ValueError:  # a builtin without a signature: building it will tell
        return


def _checked_value(value: Any, where: str) -> Any:
    """Return a copy of an argument, or refuse it by its place."""
    if value is None or type(value) in (bool, int, str) or isinstance(value, ModelSpec | torch.dtype):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) in (list, tuple):
        return type(value)(_checked_value(item, f"{where}[{place}]") for place, item in enumerate(value))
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key in (_SPEC, _DTYPE, _TUPLE):
                raise ModelSpecError(
                    f"{where} has the key {key!r}; use strings, other than {_SPEC}, {_DTYPE}, {_TUPLE}."
                )
        return {key: _checked_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ModelSpecError(
        f"{where} is {value!r}, a {type(value).__name__}, which cannot be written down; use None, finite numbers, "
        "strings, lists, tuples, dicts, dtypes, or create_model_spec(...) for a model inside."
    )


def _encoded(value: Any) -> Any:
    if isinstance(value, ModelSpec):
        return {_SPEC: value.to_json()}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {_SPEC}:
        return ModelSpec.from_json(value[_SPEC])
    if set(value) == {_TUPLE}:
        return tuple(_decoded(item) for item in value[_TUPLE])
    if set(value) == {_DTYPE}:
        dtype = getattr(torch, str(value[_DTYPE]), None)
        if not isinstance(dtype, torch.dtype):
            raise ModelSpecError(f"{value[_DTYPE]!r} is no dtype of torch.")
        return dtype
    return {key: _decoded(item) for key, item in value.items()}


def _built(value: Any, allowed: tuple[Allowed, ...]) -> Any:
    if isinstance(value, ModelSpec):
        return value.build(allowed)
    if isinstance(value, list | tuple):
        return type(value)(_built(item, allowed) for item in value)
    if isinstance(value, dict):
        return {key: _built(item, allowed) for key, item in value.items()}
    return value


def _specs_in(value: Any) -> Iterable[ModelSpec]:
    if isinstance(value, ModelSpec):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specs_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _specs_in(item)
