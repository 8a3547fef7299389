"""``nvalchemi hooks explain``: what a configuration comes to, stage by stage."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvalchemi.cli.inputs import parsed_json, parsed_toml, read_text
from nvalchemi.cli.output import coloured, print_json, warnings_told
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers
    from nvalchemi.training.assembly import Assembly

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Say what a configuration of hooks comes to: which hook is called at which stage, in which order and why, which of them
may veto, which exclude others, and from which distribution each one comes. The hooks are made, and nothing is trained.
"""

_EPILOG = """\
a configuration is one of
  auto                      every installed hook that has default arguments
  ema,grad_clip             names with commas between them
  '["ema", {"grad_clip": {"max_norm": 1.0}}]'      JSON, as it is given to a strategy
  '{"slow": {"ema": {"decay": 0.999}}}'            with labels
  hooks.json, train.toml    a file with such a value, or with one under the key "hooks"; priorities may stand beside it

a train.toml:
  hooks = ["scaler_veto", {grad_clip = {max_norm = 1.0}}, "ema"]
  priorities = {grad_clip = 45}

exit codes:
  0  explained
  1  the configuration cannot be read, or its hooks cannot be had or composed; the reason is on standard error
  2  the command line was not understood

examples:
  nvalchemi hooks explain auto
  nvalchemi hooks explain ema,grad_clip --priority grad_clip=60
  nvalchemi hooks explain train.toml --json
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "explain",
        help="what a configuration comes to: the order at every stage, and why",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("config", metavar="CONFIG", help="names, JSON, or a .json or .toml file")
    parser.add_argument(
        "--priority", action="append", default=[], metavar="KEY=N", help="another priority for a hook, by its key"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for a program: hooks (in the order of their calls), stages (keys by stage)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Assemble the hooks as a strategy would, and print what came of it."""
    from nvalchemi.training.assembly import assemble

    config, priorities = _read(options.config)
    priorities = {**priorities, **dict(map(_priority, options.priority))}
    with warnings_told():
        try:
            assembly = assemble(config, priorities or None)
        except TypeError as error:  # a configuration of the wrong form, or a hook's own: its message is what matters
            raise ValueError("\n".join([str(error), *getattr(error, "__notes__", ())])) from error
    shown = _describe(assembly)
    if options.json:
        print_json(shown)
    else:
        _print(shown)
    return 0


def _read(text: str) -> tuple[object, dict[str, int]]:
    """Return hooks and priorities of a file, of JSON, or of names."""
    path = Path(text)
    if path.suffix == ".toml":
        return _unpacked(parsed_toml(read_text(path), text))
    if path.suffix == ".json":
        return _unpacked(parsed_json(read_text(path), text))
    if text.lstrip()[:1] in ("[", "{"):
        return _unpacked(parsed_json(text, "the configuration"))
    names = [name.strip() for name in text.split(",") if name.strip()]
    return ("auto" if names == ["auto"] else names), {}


def _unpacked(value: object) -> tuple[object, dict[str, int]]:
    if isinstance(value, Mapping) and set(value) <= {"hooks", "priorities"} and "hooks" in value:
        return value["hooks"], dict(value.get("priorities", {}))
    return value, {}


def _priority(text: str) -> tuple[str, int]:
    key, _, number = text.rpartition("=")
    try:
        return key, int(number)
    except ValueError as error:
        raise ValueError(f"--priority {text}: write the key of a hook and a whole number, as in ema=60") from error


def _describe(assembly: Assembly) -> dict[str, Any]:
    from nvalchemi.training import TrainingStage

    explained = assembly.orchestrator.explain().hooks
    families = {child.state_key: child.exclusive_family for child in assembly.orchestrator.iter_hooks()}
    update = [{**asdict(hook), "exclusive_family": families[hook.key]} for hook in explained]
    plain = {id(named.hook): named for named in assembly.named_hooks() if named.key not in families}
    stages: dict[str, list[str]] = {}
    for stage in TrainingStage:
        for hook in assembly.registry.hooks_at(stage):
            named = plain.get(id(hook))
            keys = [named.key] if named else [hook.key for hook in explained if _acts(hook.stages, stage.name)]
            stages.setdefault(stage.name, []).extend(keys)
    others = [
        {"key": one.key, "hook": type(one.hook).__name__, "source": str(one.provenance or "no distribution")}
        for one in plain.values()
    ]
    return {"hooks": update, "plain_hooks": others, "stages": {name: keys for name, keys in stages.items() if keys}}


def _acts(stages: tuple[str, ...], stage: str) -> bool:
    return any(name.partition(" ")[0] == stage for name in stages)


def _print(shown: dict[str, Any]) -> None:
    update = {hook["key"]: hook for hook in shown["hooks"]}
    plain = {hook["key"]: hook for hook in shown["plain_hooks"]}
    if not shown["stages"]:
        print("No hooks: gradients are zeroed, backward runs, every optimizer steps.")
    for stage, keys in shown["stages"].items():
        print(coloured(stage, "bold"))
        for key in keys:
            print(f"  {_at_stage(stage, update[key]) if key in update else f'     {key}: a plain hook'}")
    for key, hook in {**update, **plain}.items():
        print(f"\n{coloured(key, 'bold')} is {hook['hook']} of {hook['source']}")
        if "priority" in hook:
            print(f"  priority {hook['priority']}: {hook['reason']}")
        if family := hook.get("exclusive_family"):
            print(f"  excludes any other hook of the family {family!r}")


def _at_stage(stage: str, hook: dict[str, Any]) -> str:
    gates = stage in ("BEFORE_BATCH", "DO_OPTIMIZER_STEP")
    veto = coloured(", may veto", "yellow") if gates and hook["may_veto"] else ""
    reads = ", reads gradients" if stage == "DO_OPTIMIZER_STEP" and hook["reads_grad"] else ""
    return f"{hook['priority']:>3}  {hook['key']}{veto}{reads}"
