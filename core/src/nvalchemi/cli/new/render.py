"""The template of a hook's distribution, rendered with jinja2, and written all at once."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

__all__ = ["refuse_occupied", "rendered", "write_all"]

_PACKAGE = "PACKAGE"  # the folder of the template that is called as the package
_SUFFIX = ".jinja"


def rendered(values: Mapping[str, str]) -> dict[str, str]:
    """Return the files of a new distribution: path to text.

    Parameters
    ----------
    values : mapping of str to str
        What the template asks for; a name that is missing is an error.

    Raises
    ------
    ImportError
        jinja2 is not installed.
    """
    try:
        import jinja2
    except ModuleNotFoundError as error:  # it is no dependency of the core
        raise ImportError(
            "nvalchemi hooks new renders its template with jinja2, which is not installed: "
            "pip install 'nvalchemi-hooks[new]'",
            name="jinja2",
        ) from error
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    files = {}
    for path, text in sorted(_templates(resources.files(__package__) / "template").items()):
        target = path.removesuffix(_SUFFIX).replace(_PACKAGE, values["package"])
        files[target] = environment.from_string(text).render(values)
    return files


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder that is not empty, or a file in its place.

    Raises
    ------
    FileExistsError
        Something is there already; nothing of it was touched.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        what = "is not empty" if folder.is_dir() else "is no folder"
        raise FileExistsError(f"{folder} {what}, so nothing was written; give another folder with --output")


def write_all(files: Mapping[str, str], folder: Path) -> None:
    """Write all files, or none: first aside, then moved to their place.

    An empty folder that is there stays the same folder: somebody may be working in it.

    Raises
    ------
    OSError
        It could not be written; what was there is as it was.
    """
    folder = folder.absolute()
    refuse_occupied(folder)
    made = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".new-hook-", dir=folder))
    try:
        for path, text in files.items():
            target = aside / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        for entry in list(aside.iterdir()):
            entry.rename(folder / entry.name)
        aside.rmdir()
    except BaseException:  # raised again, with nothing of ours left behind
        for name in {aside.name, *(path.partition("/")[0] for path in files)}:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).unlink(missing_ok=True)
        if made:
            folder.rmdir()
        raise


def _templates(folder: Traversable, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found |= _templates(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            found[prefix + entry.name] = entry.read_text(encoding="utf-8")
    return found
