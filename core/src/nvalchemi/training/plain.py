"""Plain data: what a file may hold so that it can be read without running any code of its own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nvalchemi.errors import NotPlainDataError
from nvalchemi.training.sharding import is_sharded

__all__ = ["Copied", "check_json", "check_plain", "host_copy", "on_host"]

Copied: TypeAlias = dict[Any, tuple[Tensor, Tensor]]

_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS = (Tensor, torch.nn.Parameter)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set)


def check_plain(value: Any, where: str) -> None:
    """Refuse anything that ``torch.load(weights_only=True)`` would not give back.

    Parameters
    ----------
    value : Any
        Tensors, numbers, strings, bytes, None, dtypes, devices, and lists, tuples, sets and dicts of them. Types count
        exactly: a numpy scalar is no float, although it is an instance of one.
    where : str
        What to call it in the message.

    Raises
    ------
    NotPlainDataError
        A ``TypeError`` that names the place of the first offender and the remedy.

    Examples
    --------
    >>> check_plain({"weights": [torch.zeros(2), 1.0]}, "state")
    >>> check_plain({"weights": [object()]}, "state")
    Traceback (most recent call last):
    nvalchemi.errors.NotPlainDataError: state['weights'][0] is a object (<object object at ...>), ...
    """
    kind = type(value)
    if kind in _LEAVES or kind in _TENSORS:
        return
    if kind in _MAPPINGS:
        for key, item in value.items():
            check_plain(key, f"the key {key!r} of {where}")
            check_plain(item, f"{where}[{key!r}]")
    elif kind in _SEQUENCES:
        for place, item in enumerate(value):
            check_plain(item, f"{where}[{place}]")
    else:
        raise NotPlainDataError(
            f"{where} is a {kind.__name__} ({_short(value)}), which could not be loaded safely; a checkpoint holds "
            f"tensors, numbers, strings, lists, tuples and dicts: {_remedy(value)}."
        )


def check_json(value: Any, where: str) -> None:
    """Refuse anything that JSON would not give back as it is: tuples and keys other than strings too.

    Parameters
    ----------
    value : Any
        None, booleans, numbers, strings, and lists and dicts of them. Types count exactly.
    where : str
        What to call it in the message.

    Raises
    ------
    NotPlainDataError
        A ``TypeError`` that names the place of the first offender and the remedy.

    Examples
    --------
    >>> check_json({"losses": {"10": [0.5, None]}}, "metadata")
    >>> check_json({"losses": {10: 0.5}}, "metadata")
    Traceback (most recent call last):
    nvalchemi.errors.NotPlainDataError: metadata['losses'] has the key 10, a int, ...
    """
    kind = type(value)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise NotPlainDataError(
                    f"{where} has the key {key!r}, a {type(key).__name__}, which JSON would give back as a string; "
                    "use strings."
                )
            check_json(item, f"{where}[{key!r}]")
    elif kind is list:
        for place, item in enumerate(value):
            check_json(item, f"{where}[{place}]")
    elif kind not in (bool, int, float, str, type(None)):
        raise NotPlainDataError(
            f"{where} is a {kind.__name__} ({_short(value)}), which is no JSON data; use None, booleans, numbers, "
            "strings, lists and dicts of them: x.tolist() for a tensor or an array, list(x) for a tuple or a set."
        )


def host_copy(value: Any, *, copied: Copied | None = None) -> Any:
    """Return plain data with every tensor copied to the host; tensors that share memory share it in the copy too.

    Of a tensor that is spread over ranks the part that this rank holds is copied.

    Parameters
    ----------
    value : Any
        What is neither a tensor nor a dict, list or tuple is returned as it is.
    copied : dict, optional
        Originals and copies so far, for values that are copied one after the other and share tensors.

    Examples
    --------
    >>> weight = torch.zeros(2)
    >>> kept = host_copy({"weight": weight, "tied": weight})
    >>> _ = weight.add_(1)
    >>> kept["weight"], kept["tied"] is kept["weight"]
    (tensor([0., 0.]), True)
    """
    copied = {} if copied is None else copied
    if type(value) in _TENSORS:
        return _copied_tensor(value.detach(), copied)
    if isinstance(value, Counter):
        return Counter(value)
    if is_sharded(value):
        return value.detach().to("cpu", copy=True)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, host_copy(item, copied=copied)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(host_copy(item, copied=copied) for item in value)
    return value


def on_host(value: Any) -> Any:
    """Return plain data with the tensors of other devices moved to the host; the others stay the very same."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) in (dict, OrderedDict):
        return type(value)((key, on_host(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    return value


def _copied_tensor(tensor: Tensor, copied: Copied) -> Tensor:
    if not tensor.numel() or tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    storage = tensor.untyped_storage().data_ptr()
    key = storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    if key not in copied:
        copied[key] = tensor, tensor.to("cpu", copy=True)  # kept, the original's memory is given to no other tensor
    return copied[key][1]


def _remedy(value: Any) -> str:
    if type(value).__module__ == "numpy":
        return "use .item() for a numpy scalar, torch.from_numpy(...) for an array"
    if isinstance(value, Tensor):
        return "give a plain torch.Tensor instead of a subclass"
    if isinstance(value, Mapping):
        return "use dict(...)"
    return "write it as such, a path as str(path) or an enum member as its value, for instance"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
