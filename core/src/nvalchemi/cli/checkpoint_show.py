"""``nvalchemi checkpoint show``: what a checkpoint holds, from whom, and whether it would load here."""

from __future__ import annotations

import argparse
import importlib.util
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from nvalchemi.cli.checkpoint_verify import problems as problems_of_files
from nvalchemi.cli.output import print_columns, print_json, printable
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers
    from nvalchemi.training.checkpoint.manifest import Manifest

__all__ = ["add_to", "describe", "run"]

_DESCRIPTION = """\
Show what a checkpoint holds: its sections, its hooks and the distributions they come from, the classes of its models,
and whether it would load here. Its manifest is read and the sizes of its files; nothing it names is imported.
"""

_EPILOG = """\
exit codes:
  0  shown
  1  there is no checkpoint, it is damaged, or it has a format that this version does not know
  2  the command line was not understood
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi checkpoint``."""
    parser = add_command(
        commands,
        "show",
        help="what is in a checkpoint, from which plugins, and whether it would load here",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("root", help="the folder of the checkpoint")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object for a program: root, kind, written_by, progress, sections, hooks, models, "
        "loads_here, problems and remarks",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is in the checkpoint."""
    from nvalchemi.training.checkpoint.manifest import read_manifest

    shown = describe(options.root, read_manifest(options.root))
    if options.json:
        print_json(shown)
    else:
        _print(shown)
    return 0


def describe(root: str, manifest: Manifest) -> dict[str, Any]:
    """Return what is shown, as JSON data."""
    problems = list(filter(None, problems_of_files(root, manifest, summed=False).values()))
    remarks: list[str] = []
    hooks = [{"key": key, **hook} for key, hook in manifest.metadata.get("hooks", {}).items()]
    for hook in hooks:
        hook["keeps_state"] = f"hooks/{hook['key']}" in manifest.sections
        hook["installed"] = _installed(hook.get("distribution"))
        remarks += _remark(hook)
    models = [{"name": name, "target": spec["target"]} for name, spec in manifest.metadata.get("specs", {}).items()]
    for model in models:
        _look_at_model(model, problems, remarks)
    return {
        "root": str(root),
        "kind": manifest.kind,
        "written_by": manifest.metadata.get("written_by"),
        "progress": manifest.metadata.get("progress", {}),
        "sections": [{"name": name, "file": one.file, "size": one.size} for name, one in manifest.sections.items()],
        "hooks": hooks,
        "models": models,
        "loads_here": not problems,
        "problems": problems,
        "remarks": remarks,
    }


def _installed(distribution: str | None) -> str | None:
    import importlib_metadata

    found = importlib_metadata.distributions(name=distribution) if distribution else ()
    return next((one.version for one in found), None)


def _remark(hook: dict[str, Any]) -> list[str]:
    key, distribution, saved, here = hook["key"], hook.get("distribution"), hook.get("version"), hook["installed"]
    if distribution is None:
        return [f"The hook {key!r} ({hook.get('class')}) comes from no installed distribution; have its code at hand."]
    if here is None:
        kept = "; without it, its state is kept and saved again" if hook["keeps_state"] else ""
        return [
            f"The hook {key!r} needs {distribution}, which is not installed: pip install {distribution}=={saved}{kept}."
        ]
    if here != saved:
        return [f"The hook {key!r} was saved by {distribution} {saved}; {here} is installed."]
    return []


def _look_at_model(model: dict[str, Any], problems: list[str], remarks: list[str]) -> None:
    module = model["target"].partition(":")[0]
    missing = _missing_module(module)
    if missing is not None:
        what = "module" if "." in missing else "package"
        problems.append(f"The model {model['name']!r} is a {model['target']}, but there is no {what} {missing!r} here.")
    elif not module.startswith("torch.nn"):
        remarks.append(f"The model {model['name']!r} is a {model['target']}: load it with allow=[{module!r}].")


def _missing_module(module: str) -> str | None:
    """Return the first part of a module's path that is not there; nothing is imported, as `find_spec` would do."""
    package, *names = module.split(".")
    if package == "__main__":
        return None
    path, found = package, importlib.util.find_spec(package) if package.isidentifier() else None
    for name in names:
        if found is None:
            return path
        path = f"{path}.{name}"
        found = PathFinder.find_spec(path, found.submodule_search_locations or ())
    return path if found is None else None


def _print(shown: dict[str, Any]) -> None:
    print(printable(f"A checkpoint of {shown['kind']}, written by {shown['written_by']}."))
    if shown["progress"]:
        print(printable(", ".join(f"{name} {count}" for name, count in shown["progress"].items())))
    print()
    print_columns(
        [("SECTION", "BYTES", "FILE"), *((s["name"], f"{s['size']:,}", s["file"]) for s in shown["sections"])]
    )
    if shown["hooks"]:
        rows = [
            (h["key"], h.get("class") or "-", f"{h.get('distribution') or '-'} {h.get('version') or ''}")
            for h in shown["hooks"]
        ]
        print()
        print_columns([("HOOK", "CLASS", "FROM"), *rows])
    if shown["models"]:
        print()
        print_columns([("MODEL", "BUILT BY"), *((m["name"], m["target"]) for m in shown["models"])])
    print(f"\nWould load here: {'yes' if shown['loads_here'] else 'no'}.")
    for sentence in (*shown["problems"], *shown["remarks"]):
        print(printable(sentence))
