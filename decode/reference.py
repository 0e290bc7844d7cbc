"""Where a model lies: a folder, a GGUF file or a Hub repository, and what its weights are."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from decode.adapters import ADAPTER_CONFIG

FINGERPRINT_BLOCK, FINGERPRINT_BLOCKS = 1 << 16, 512


@dataclass(frozen=True)
class Reference:
    """Where a model comes from. `gguf` is a file name inside `location`; `revision` only goes with a Hub id."""

    location: str
    revision: str | None = None
    gguf: str | None = None

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of transformers' from_pretrained for this reference."""
        extra = {"revision": self.revision, "gguf_file": self.gguf}
        return {key: value for key, value in extra.items() if value is not None}


def parse_reference(text: str) -> Reference:
    """Read FOLDER, FILE.gguf, or HUB/ID[@REVISION].

    Raises UserError for a missing file, a folder without a model, or text that is none of the three.
    """
    path = Path(text)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"{text}: no such GGUF file")
        return Reference(str(path.parent), gguf=path.name)
    if path.is_dir():
        if not (path / "config.json").is_file() and not (path / ADAPTER_CONFIG).is_file():
            raise UserError(f"{text}: not a model folder (no config.json in it)")
        return Reference(text)
    name, _, revision = text.partition("@")
    if path.exists() or not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name):
        raise UserError(f"{text}: no such model folder; expected a local folder, a .gguf file or a Hub id (org/name)")
    return Reference(name, revision=revision or None)


def weights_revision(reference: Reference, config: Any) -> str:
    """What the weights are: the Hub commit, else a fingerprint of the local files.

    The fingerprint reads names, sizes and up to 512 blocks of 64 KiB spread evenly over each file: all of a file
    under 32 MiB, little of a very large one, and some of every tensor that retraining moves.
    """
    commit = getattr(config, "_commit_hash", None)
    if not reference.is_local and commit:
        return str(commit)
    folder = Path(reference.location)
    files = [folder / reference.gguf] if reference.gguf else sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            for place in range(0, size, max(FINGERPRINT_BLOCK, size // FINGERPRINT_BLOCKS)):
                stream.seek(place)
                digest.update(stream.read(FINGERPRINT_BLOCK))
    return "local-" + digest.hexdigest()[:16]
