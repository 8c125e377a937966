"""What a checkpoint holds, as data and as a table. No communication."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.manifest import VERSION, Manifest
from zero_optim.checkpoint.reader import CheckpointReader
from zero_optim.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a checkpoint: the model, the optimizer's state, and so on."""

    name: str
    num_tensors: int
    nbytes: int
    num_values: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint's folder holds.

    Attributes:
        path: its folder.
        complete: whether nothing is missing or damaged; every byte was compared with its checksum.
        reason: why it is not complete, or empty.
        version: of the format.
        saved: time of the save, UTC.
        world_size: number of ranks that wrote it.
        software: versions that wrote it.
        sections: what is in it.
        files: name, rank that wrote it, bytes.
    """

    path: str
    complete: bool
    reason: str
    version: int = VERSION
    saved: str = ""
    world_size: int = 0
    software: tuple[tuple[str, str], ...] = ()
    sections: tuple[Section, ...] = ()
    files: tuple[tuple[str, int, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**asdict(self), "software": dict(self.software)}

    def __str__(self) -> str:
        """Write it as a table."""
        head = [("checkpoint", self.path), ("complete", "yes" if self.complete else f"no: {self.reason}")]
        if self.saved:
            by = ", ".join(f"{name} {version}" for name, version in self.software)
            ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
            head += [("saved", f"{self.saved} by {ranks}, {by}"), ("format", f"version {self.version}")]
        lines = [f"{name:<12}{value}" for name, value in head]
        if self.sections:
            rows = [(s.name, s.num_tensors, s.nbytes, s.num_values) for s in self.sections]
            lines += ["", *_table(("section", "tensors", "bytes", "values"), rows)]
        if self.files:
            # A rank is no quantity, so it has no commas.
            files = [(name, str(rank), nbytes) for name, rank, nbytes in self.files]
            lines += ["", *_table(("file", "rank", "bytes"), files)]
        return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    """Align rows in columns: the first to the left, the others to the right."""
    text = [head, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in text
    ]


def inspect(folder: Path) -> Inspection:
    """Read all of a checkpoint and check it; CheckpointError if there is no such folder."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    reason, manifest = "", None
    try:
        manifest = manifests.parse(folder)
        CheckpointReader(folder).check_all()
    except CheckpointError as error:
        reason = str(error)
    if manifest is None:
        return Inspection(str(folder), complete=False, reason=reason)
    saved = datetime.fromtimestamp(manifest.time_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Inspection(
        str(folder),
        not reason,
        reason,
        version=manifest.version,
        saved=saved,
        world_size=manifest.world_size,
        software=tuple(manifest.software.items()),
        sections=_sections(manifest),
        files=tuple((name, file.rank, file.nbytes) for name, file in manifest.files.items()),
    )


def _sections(manifest: Manifest) -> tuple[Section, ...]:
    names = sorted({_section(key) for key in (*manifest.values, *manifest.entries)})
    sections = []
    for name in names:
        nbytes = [entry.nbytes for key, entry in manifest.entries.items() if _section(key) == name]
        values = sum(_section(key) == name for key in manifest.values)
        sections.append(Section(name, len(nbytes), sum(nbytes), values))
    return tuple(sections)


def _section(key: str) -> str:
    return re.split(r"[/.]", key, maxsplit=1)[0]
