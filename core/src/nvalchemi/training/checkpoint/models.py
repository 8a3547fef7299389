"""Models on disk, each with the description by which it is built again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from nvalchemi.errors import CheckpointMismatchError, ModelSpecError, NotPlainDataError
from nvalchemi.metadata import CORE_DISTRIBUTION, core_version
from nvalchemi.training.arguments import global_rank
from nvalchemi.training.checkpoint.files import write_sections
from nvalchemi.training.checkpoint.reading import open_sections
from nvalchemi.training.model_spec import Allowed, ModelSpec
from nvalchemi.training.plain import check_json, check_plain, host_copy
from nvalchemi.training.rng import random_numbers_kept
from nvalchemi.training.saved_tensor import placed, take_out
from nvalchemi.training.sharding import has_shards
from nvalchemi.training.trained_state import check_model, refuse_lazy
from nvalchemi.training.unwrap import bare_module

__all__ = ["LoadedModels", "load_checkpoint", "save_checkpoint"]

KIND = "models"


@dataclass(frozen=True)
class LoadedModels:
    """What `load_checkpoint` found.

    Attributes
    ----------
    models : dict of str to (torch.nn.Module, ModelSpec)
        The models, built and loaded, in train mode as any new module is.
    metadata : dict
        What `save_checkpoint` was given.
    """

    models: dict[str, tuple[nn.Module, ModelSpec]]
    metadata: dict[str, Any]


def save_checkpoint(
    root: str | Path,
    *,
    models: Mapping[str, tuple[nn.Module, ModelSpec]],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Save models with their descriptions; no model is built and no random number drawn.

    An earlier checkpoint in `root` stays whole until the new one is complete. Of several ranks the first one writes. If
    a model is spread over them, as FSDP2 does it, every rank has to call, and writes what it holds.

    Parameters
    ----------
    root : path
        The folder of this checkpoint; it is made.
    models : mapping of str to (torch.nn.Module, ModelSpec)
        Wrappers by DDP and ``torch.compile`` are taken off; of an ``AveragedModel`` give its ``.module``.
    metadata : mapping, optional
        JSON data of your own, given back by `load_checkpoint`: dicts by strings, lists, strings, numbers, None.

    Raises
    ------
    ModelSpecError
        A ``ValueError``: a description is not that of the model's class.
    NotPlainDataError
        A ``TypeError``: a state could not be loaded safely, or `metadata` is no JSON data; the place is named.
    CheckpointWriteError
        An ``OSError``: the disk is full, for instance. The earlier checkpoint is as it was.

    Examples
    --------
    >>> import tempfile
    >>> from nvalchemi.training import create_model_spec
    >>> spec = create_model_spec(nn.Linear, in_features=2, out_features=1)
    >>> with tempfile.TemporaryDirectory() as root:
    ...     save_checkpoint(root, models={"main": (spec.build(), spec)})
    ...     model, loaded_spec = load_checkpoint(root).models["main"]
    >>> model, loaded_spec == spec
    (Linear(in_features=2, out_features=1, bias=True), True)
    """
    check_json(dict(metadata or {}), "metadata")
    shards: dict[str, Tensor] = {}
    spread = any(isinstance(pair, tuple) and has_shards(pair[:1]) for pair in models.values())
    sections, specs = {}, {}
    for name, pair in models.items():
        module, spec = _checked_pair(name, pair)
        refuse_lazy(name, module, NotPlainDataError)
        sections[f"models/{name}"] = take_out(host_copy(dict(module.state_dict())), f"models/{name}", shards)
        check_plain(sections[f"models/{name}"], f"models/{name}")
        specs[name] = spec.to_json()
    written_by = f"{CORE_DISTRIBUTION} {core_version()}"
    manifest = {"written_by": written_by, "specs": specs, "user": dict(metadata or {})}
    if spread:
        from nvalchemi.training.checkpoint.sharded import write_sharded

        write_sharded(root, sections, shards, kind=KIND, metadata=manifest)
    elif global_rank() == 0:
        write_sections(root, sections, kind=KIND, metadata=manifest)


def load_checkpoint(root: str | Path, *, allow: Iterable[Allowed] = ()) -> LoadedModels:
    """Build the models of a checkpoint and load them; the random numbers of the run are left as they are.

    Every sum, every description and every shape is checked. A file can build classes of ``torch.nn``, and what `allow`
    holds; that is checked before anything is imported.

    Parameters
    ----------
    root : path
        The folder of the checkpoint.
    allow : iterable of type, callable or str
        Classes, functions, or prefixes of modules whose own ``nn.Module`` classes may be built.

    Returns
    -------
    LoadedModels
        Its ``.models[name]`` is ``(module, spec)``.

    Raises
    ------
    ModelNotAllowedError
        A ``ValueError``: it names something else; nothing of that was called.
    ModelImportError
        An ``ImportError``: what it names is allowed and not there any more.
    CheckpointMismatchError
        A ``ValueError``: what was built has other names or shapes than what was saved.
    CheckpointError
        As for `nvalchemi.training.load_training`: missing, damaged, of another format.
    """
    allowed = tuple(allow)
    with open_sections(root, kind=KIND) as (sections, manifest):
        specs = {name: ModelSpec.from_json(spec) for name, spec in manifest.metadata.get("specs", {}).items()}
        for spec in specs.values():
            spec.check(allowed)
        with random_numbers_kept():
            loaded = {name: (_built(name, spec, sections, allowed, root), spec) for name, spec in specs.items()}
    return LoadedModels(loaded, manifest.metadata.get("user", {}))


def _built(
    name: str, spec: ModelSpec, sections: Mapping[str, Any], allowed: tuple[Allowed, ...], root: Any
) -> nn.Module:
    module, state = spec.build(allowed), placed(sections.get(f"models/{name}"))
    if not isinstance(module, nn.Module) or state is None:
        raise CheckpointMismatchError(
            f"{root}: the model {name!r} is described, but {spec.target} builds no nn.Module."
        )
    check_model(name, module, state)
    module.load_state_dict(state)
    return module


def _checked_pair(name: str, pair: object) -> tuple[nn.Module, ModelSpec]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
        raise TypeError(f"models[{name!r}] is {pair!r}; give (module, spec), with spec = create_model_spec(...).")
    if not isinstance(pair[1], ModelSpec):
        raise TypeError(f"models[{name!r}] has a {type(pair[1]).__name__} for its spec; make one by create_model_spec.")
    module, spec = bare_module(pair[0]), pair[1]
    if not spec.fits(module):
        inside = (
            "; of an AveragedModel give its .module"
            if isinstance(module, nn.Module) and hasattr(module, "module")
            else ""
        )
        raise ModelSpecError(
            f"models[{name!r}] is a {type(module).__name__}, but its spec builds {spec.target}; give the module "
            f"that the spec describes{inside}."
        )
    return module, spec
