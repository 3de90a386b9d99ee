"""Ready schemas of public data sets, and where on this machine their files lie; no rows come here.

Each is a TOML file of `catalogue/`, as users write them. Its first line says what the set is, and
its facts are from the publisher's documentation. What is left out: columns known only after the
event, times that the split is made of, and survey weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from persia_sim.base.files import parsed
from persia_sim.base.schema import Checked, parse
from runtime.data.errors import DataError
from runtime.data.schema import Schema, schema_keys
from runtime.object_store import user_cache

DATA_DIR_VARIABLE = "PERSIA_DATA_DIR"
FOLDER = Path(__file__).parent / "catalogue"
FIRST_DOWNLOAD = "kuairand-pure-14d"
"""What is named in place of a data set that cannot be fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication(Checked):
    """A data set as its publisher offers it; the table `download` of a ready schema."""

    name: str
    url: str
    """The publisher's archive."""
    members: tuple[str, ...]
    """File names inside the archive that are needed, without their folders."""
    terms: str
    """Licence and whom to cite."""
    sha256: str | None = None
    """Checksum of the archive, where it is known."""
    first_day: int | None = None
    """Rows of an earlier day (yyyymmdd in the column `date`) are left out."""
    values_sha256: str | None = None
    """Checksum of the values (`runtime.preparing.download.values_sha256`) with which the stored
    results of this project were made, where there are such."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A ready schema, read from its file when it is asked for."""

    path: Path

    def __call__(self) -> Schema:
        """The schema."""
        keys = schema_keys(self.path)
        keys.pop("download", None)
        return parse(Schema, keys, str(self.path))

    @property
    def about(self) -> str:
        """One line: what it is."""
        return self.path.read_text().partition("\n")[0].removeprefix("# ")

    @property
    def publication(self) -> Publication | None:
        """What ``data get`` fetches; None where the publisher wants his terms accepted first."""
        download = parsed(self.path.read_bytes(), self.path, toml=True).get("download")
        if download is None:
            return None
        return parse(Publication, {"name": self.path.stem, **download}, str(self.path))


CATALOGUE = {path.stem: Ready(path) for path in sorted(FOLDER.glob("*.toml"))}
"""Every ready schema by name."""


def downloads() -> Path:
    """Where ``data get`` puts what it fetches (the XDG rules for a user's cache)."""
    return user_cache()


def find_folder(schema: Schema, data_dir: str | Path | None = None) -> Path:
    """The folder with the schema's main file; an error that names every place.

    Places, in order: ``data_dir``, else PERSIA_DATA_DIR; then the downloads. A place holds the data
    set as PLACE/NAME/FILE or as PLACE/FILE; the downloads only as the first.
    """
    # The places in their order.
    subfolder = schema.folder or schema.name
    variable = os.environ.get(DATA_DIR_VARIABLE)
    named = data_dir or variable
    candidates = [Path(named) / subfolder, Path(named)] if named else []
    for folder in [*candidates, downloads() / subfolder]:
        if any(file.is_file() for file in folder.glob(schema.file)):
            return folder

    # It is nowhere: say all places, and what would help.
    if schema.name in CATALOGUE and CATALOGUE[schema.name].publication is not None:
        instead = f"fetch it: persia-runtime data get {schema.name}"
    else:
        instead = (
            f"(data get cannot make {schema.name}) fetch another set and\n"
            f"  name it: persia-runtime data get {FIRST_DOWNLOAD},"
            f" then --data.name {FIRST_DOWNLOAD}"
        )
    raise DataError(
        f"no data of {schema.name}: there is no {subfolder}/{schema.file}\n"
        f"  in the data directory ({data_dir or 'not given'}), which goes before\n"
        f"  {DATA_DIR_VARIABLE} ({variable or 'not set'}), nor in\n"
        f"  the downloads ({downloads()})\n"
        f"  name its folder (--data.dir, or {DATA_DIR_VARIABLE}), or {instead}\n"
        "  or train on what needs no file: --data.name synthetic"
    )
