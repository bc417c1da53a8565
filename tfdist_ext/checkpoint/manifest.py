"""What is in a checkpoint, and what could not be captured?

The manifest is one JSON file, written last. It ends in a checksum of its own content, so that a flipped bit in it
is found too. Everything here is pure.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

from tfdist_ext.checkpoint import strict_json
from tfdist_ext.errors import CheckpointCorruptError, CheckpointMismatchError

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"
# In the place of a checksum: the index file beside, which has its own SHA-256, carries a CRC of every tensor, and
# TensorFlow checks it whenever it reads one. Reading a large file twice to hash it would say nothing more.
CRC32C_PER_TENSOR = "crc32c-per-tensor"

_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}|" + CRC32C_PER_TENSOR)
_BITS = re.compile(r"(?:b?float|u?int|complex|qu?int)(\d+)(?:_\w+)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        name: Its name in the checkpoint's folder.
        num_bytes: Its size.
        checksum: `"sha256:<hex>"`, or `"crc32c-per-tensor"` for TensorFlow's data files.
    """

    name: str
    num_bytes: int
    checksum: str

    def __post_init__(self):
        # A manifest may come from anywhere; it must not be able to name a file outside of its folder.
        if not self.name or self.name in (".", "..") or set("/\\\0") & set(self.name):
            raise ValueError(
                f"Argument `name` must be a plain file name; received {self.name!r}. Try 'state.index'."
            )
        if not _CHECKSUM.fullmatch(self.checksum):
            raise ValueError(
                f"Argument `checksum` must be `sha256:` and 64 hexadecimal digits, or {CRC32C_PER_TENSOR!r}; received "
                f"{self.checksum!r}. Try `sha256_checksum(data)`."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name among the saved ones.
        dtype: TensorFlow's name of its type, for instance `"float32"`.
        shape: Its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int | None:
        """Its size; None if the type has no fixed one, like `"string"`.

        Example:
            >>> TensorRecord(name="kernel", dtype="bfloat16", shape=(3, 4)).num_bytes
            24
        """
        bits = _BITS.fullmatch(self.dtype)
        if bits is None and self.dtype != "bool":
            return None
        return math.prod(self.shape) * (max(8, int(bits[1])) // 8 if bits else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One row of the completeness report: something that training needs to go on exactly.

    Attributes:
        name: What it is, for instance `"optimizer"`.
        captured: Whether the checkpoint has it.
        reason: Why not; or how, where that needs saying.
    """

    name: str
    captured: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """All about one checkpoint.

    Attributes:
        step: Updates applied.
        attempt: The random token of the save, which all its writers share.
        format_version: Of the manifest and of what it describes.
        epoch: Epochs finished.
        batch: Steps done in the epoch that is not finished.
        created_unix_seconds: When it was committed.
        metrics: Values by name; NaN and infinity are values too.
        files: Its files, but for the manifest.
        tensors: Its tensors.
        pieces: What is captured, and what could not be and why.
        cluster: The tasks that made it; plain JSON values.
        fingerprint: Versions of the software and the strategy's name; plain JSON values.
        input: How the input position is kept; plain JSON values.
    """

    step: int
    attempt: str
    format_version: int = FORMAT_VERSION
    epoch: int = 0
    batch: int = 0
    created_unix_seconds: float = 0.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    tensors: tuple[TensorRecord, ...] = ()
    pieces: tuple[Piece, ...] = ()
    cluster: dict[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: dict[str, Any] = dataclasses.field(default_factory=dict)
    input: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for field in ("files", "tensors", "pieces"):
            names = [row.name for row in getattr(self, field)]
            twice = (
                sorted({name for name in names if names.count(name) > 1})
                if len({*names}) < len(names)
                else []
            )
            if twice:
                raise ValueError(
                    f"Argument `{field}` must name everything once; received {twice[0]!r} twice."
                )

    @property
    def num_bytes(self) -> int:
        """Size of the files together."""
        return sum(file.num_bytes for file in self.files)

    def to_json(self) -> str:
        """Writes it down.

        Returns:
            JSON text that `from_json` reads. Tuples in `cluster`, `fingerprint` and `input` become lists.
        """
        fields = dataclasses.asdict(self)
        fields["metrics"] = {name: strict_json.float_to_json(value) for name, value in self.metrics.items()}
        fields["checksum"] = _checksum_of(fields)
        return json.dumps(fields, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, source: str = FILE_NAME) -> Manifest:
        """Reads one strictly.

        Args:
            text: What `to_json` wrote.
            source: Name of the file, for errors.

        Returns:
            The manifest.

        Raises:
            CheckpointMismatchError: If the format is one that this version cannot read.
            CheckpointCorruptError: If a field is missing, unknown, or malformed, or the checksum differs.
        """
        try:
            fields = strict_json.read(dict[str, Any], strict_json.parse(text))
            version = fields.get("format_version")
            if isinstance(version, int) and version != FORMAT_VERSION:
                raise CheckpointMismatchError(
                    f"{source} has `format_version` {version}; this version of tfdist_ext reads {FORMAT_VERSION}. Try "
                    "the version of tfdist_ext that wrote it.",
                    path=source,
                )
            checksum = fields.pop("checksum", None)
            manifest = strict_json.read(cls, fields)
            if checksum != _checksum_of(fields):
                raise strict_json.MalformedError("does not fit the content", "checksum")
        except strict_json.MalformedError as error:
            where = f"its field `{error.field}`" if error.field else "it"
            raise CheckpointCorruptError(
                f"{source} is damaged: {where} {error.text}. Try an older checkpoint.", path=source
            ) from error
        return manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """One committed checkpoint of a directory.

    Attributes:
        step: Updates applied.
        path: Its folder.
        attempt: The random token of the save.
        manifest: What is in it; None if that cannot be read.
        problem: Why the manifest cannot be read, as one sentence; None if it can.
    """

    step: int
    path: str
    attempt: str
    manifest: Manifest | None = None
    problem: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of its files; 0 if the manifest cannot be read."""
        return 0 if self.manifest is None else self.manifest.num_bytes


def newest_first(records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """Orders checkpoints by when they were committed.

    Args:
        records: In any order.

    Returns:
        Those with a readable manifest, the one that was committed last first; of equal dates the higher step.
    """

    def age(record: CheckpointRecord) -> tuple[float, int, str]:
        created = 0.0 if record.manifest is None else record.manifest.created_unix_seconds
        return created, record.step, record.attempt

    return sorted((record for record in records if record.manifest is not None), key=age, reverse=True)


def sha256_checksum(data: bytes) -> str:
    """Computes the checksum of a file's content.

    Args:
        data: The bytes.

    Returns:
        `"sha256:<hex>"`.
    """
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _checksum_of(fields: dict[str, Any]) -> str:
    """Hashes what a reader will find, whatever the order and the spaces."""
    read_back = json.loads(json.dumps(fields, allow_nan=False))
    return sha256_checksum(json.dumps(read_back, sort_keys=True).encode())
