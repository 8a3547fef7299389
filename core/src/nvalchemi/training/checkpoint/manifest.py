"""The manifest of a checkpoint: what is in it, in which files, with which sums. Reading it needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

from nvalchemi.errors import (
    CheckpointDamagedError,
    CheckpointFormatError,
    CheckpointMissingError,
    CheckpointReadError,
)
from nvalchemi.training.shape import Each, misfit

__all__ = [
    "DATA_FOLDER",
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "SectionFile",
    "compare_section",
    "is_piece",
    "missing_sections",
    "open_section",
    "read_manifest",
]

FORMAT = 1
FORMAT_OF_SHARDS = 2  # there are files of ranks besides the sections
MANIFEST = "manifest.json"
DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(
    r"[0-9]+(\.[A-Za-z0-9_-]+)*\.(pt|safetensors)"
)  # a plain name: a manifest cannot point out of its folder
_SUM = re.compile(r"[0-9a-f]{64}")
_CONTENT = {
    "kind": str,
    "data": str,
    "metadata": Each(object),
    "sections": Each({"file": str, "size": int, "sha256": str}),
}
_METADATA = {  # each may be missing
    "written_by": str,
    "progress": Each(int),
    "parts": [str],
    "hooks": Each(Each((str, None))),
    "specs": Each({"target": str, "kwargs": Each(object)}),
    "user": Each(object),
}


@dataclass(frozen=True, slots=True)
class SectionFile:
    """Where one section lies: its file, how many bytes that has, and their SHA-256."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``manifest.json`` says.

    Attributes
    ----------
    kind : str
        ``"training"`` or ``"models"``.
    data : str
        The folder of the files.
    sections : dict of str to SectionFile
        By name, ``models/main`` for instance. What rank 3 held of sharded tensors is ``shards/3``.
    metadata : dict
        JSON data: parts of the state, hooks with distribution and version, model specs, counters.
    """

    kind: str
    data: str
    sections: dict[str, SectionFile]
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of the file, which ends with the digest of everything else in it."""
        content = {
            "format": FORMAT_OF_SHARDS if any(map(is_piece, self.sections)) else FORMAT,
            "kind": self.kind,
            "data": self.data,
            "metadata": self.metadata,
            "sections": {
                name: {"file": one.file, "size": one.size, "sha256": one.sha256} for name, one in self.sections.items()
            },
        }
        content = json.loads(json.dumps(content))  # as a reader will find it
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"


def read_manifest(root: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Parameters
    ----------
    root : path
        The folder of the checkpoint.

    Raises
    ------
    CheckpointMissingError
        A ``FileNotFoundError``: there is no checkpoint in `root`, or none that was completed.
    CheckpointReadError
        An ``OSError``: the system does not let us read it.
    CheckpointFormatError
        A ``ValueError``: it has a format number that this version does not know.
    CheckpointDamagedError
        A ``ValueError``: it is not what was written.
    """
    path = Path(root) / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointMissingError(_no_checkpoint(Path(root))) from error
    except OSError as error:
        raise CheckpointReadError(error.errno, _unreadable("the manifest", error), str(path)) from error
    try:
        content = json.loads(text)
        digest = content.pop("digest", None) if isinstance(content, dict) else None
        altered = digest != _digest(content)
    except (ValueError, RecursionError) as error:  # no JSON, or so deep that no save of ours wrote it
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON ({error}); {_RESTORE}.") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointDamagedError(f"{path} is damaged: it has no format number; {_RESTORE}.")
    if content["format"] not in (FORMAT, FORMAT_OF_SHARDS):
        newer = "upgrade it: pip install --upgrade nvalchemi-hooks"
        remedy = newer if content["format"] > FORMAT else "read it with the version that wrote it"
        raise CheckpointFormatError(
            f"{path} has the format {content['format']}, but this nvalchemi-hooks reads the formats {FORMAT} and "
            f"{FORMAT_OF_SHARDS}; {remedy}."
        )
    if altered:
        raise CheckpointDamagedError(f"{path} is damaged: its digest is not that of its content; {_RESTORE}.")
    return _checked(content, path)


def open_section(root: str | Path, manifest: Manifest, name: str, *, summed: bool = True) -> BufferedReader:
    """Return the file of a section, open, after comparing its size and, if `summed`, its sum.

    Raises
    ------
    CheckpointMissingError, CheckpointReadError, CheckpointDamagedError
        The file is missing, cannot be read, is truncated, or holds other bytes than were written.
    """
    path = Path(root) / manifest.data / manifest.sections[name].file
    with ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
            compare_section(file, manifest, name, summed=summed)
        except FileNotFoundError as error:
            raise CheckpointMissingError(
                f"{path} (section {name!r}) is missing, although the manifest names it; {_RESTORE}."
            ) from error
        except OSError as error:
            raise CheckpointReadError(error.errno, _unreadable(f"section {name!r}", error), str(path)) from error
        stack.pop_all()  # whoever asked for it closes it
    return file


def compare_section(file: BufferedReader, manifest: Manifest, name: str, *, summed: bool = True) -> None:
    """Compare an open file with what a manifest says of a section: its size and, if `summed`, its sum.

    Raises
    ------
    CheckpointDamagedError
        A ``ValueError``: it is truncated, or holds other bytes than were written.
    """
    file.seek(0)
    if wrong := _differs(file, manifest.sections[name], summed):
        raise CheckpointDamagedError(f"{file.name} (section {name!r}) is {wrong}; {_RESTORE}.")


def is_piece(section: str) -> bool:
    """Return whether a section is the file of a rank, with what it held of sharded tensors.

    Examples
    --------
    >>> is_piece("shards/0"), is_piece("models/main")
    (True, False)
    """
    return section.startswith("shards/")


def missing_sections(manifest: Manifest) -> list[str]:
    """Return what the manifest says there is without naming a section of it."""
    metadata, sections = manifest.metadata, manifest.sections
    split = {name.partition("/")[0] for name in sections} | ({"hooks"} & set(metadata))  # hooks without state have none
    models = [f"models/{name}" for name in metadata.get("specs", {})]
    return [
        *(part for part in metadata.get("parts", ()) if part not in sections and part not in split),
        *(name for name in models if name not in sections),
    ]


def _differs(file: BufferedReader, section: SectionFile, summed: bool) -> str:
    size = os.fstat(file.fileno()).st_size
    if size != section.size:
        what = "truncated" if size < section.size else "damaged"
        return f"{what}: it has {size} bytes instead of {section.size}"
    if summed and (found := hashlib.file_digest(file, "sha256").hexdigest()) != section.sha256:
        was = f"{section.sha256[:12]}... as when it was written"
        return f"damaged: its SHA-256 is {found[:12]}..., not {was}"
    return ""


def _unreadable(what: str, error: OSError) -> str:
    return f"{what} cannot be read: {error.strerror or error}; see to it that this user may read it, {_RESTORE}"


_RESTORE = "bring it back from a copy, or use an earlier checkpoint"


def _checked(content: Mapping[str, Any], path: Path) -> Manifest:
    wrong = misfit(content, _CONTENT, "manifest") or misfit(
        content["metadata"],
        {key: one for key, one in _METADATA.items() if key in content["metadata"]},
        "manifest['metadata']",
    )
    if wrong:
        raise CheckpointDamagedError(f"{path} is damaged: {wrong}; {_RESTORE}.")
    sections = {name: SectionFile(one["file"], one["size"], one["sha256"]) for name, one in content["sections"].items()}
    manifest = Manifest(content["kind"], content["data"], sections, content["metadata"])
    for one in sections.values():
        if not _FILE.fullmatch(one.file):
            raise CheckpointDamagedError(f"{path} names the file {one.file!r}, which no save writes; do not trust it.")
        if not _SUM.fullmatch(one.sha256):
            raise CheckpointDamagedError(f"{path} names the SHA-256 {one.sha256!r}, which is none; do not trust it.")
    if not DATA_FOLDER.fullmatch(manifest.data):
        raise CheckpointDamagedError(
            f"{path} names the folder {manifest.data!r}, which no save makes; do not trust it."
        )
    return manifest


def _no_checkpoint(root: Path) -> str:
    if not root.is_dir():
        return f"There is no checkpoint in {root}: there is no such folder."
    below = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    if below:
        return (
            f"There is no checkpoint in {root} itself, but in its folders: {', '.join(below[-3:])}; name one of them."
        )
    interrupted = any(DATA_FOLDER.fullmatch(path.name) for path in root.iterdir())
    why = "a save was begun there and never completed" if interrupted else f"it has no {MANIFEST}"
    return f"There is no checkpoint in {root}: {why}."


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
