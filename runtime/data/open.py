"""From a name or a path to a source of batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from persia_sim.words.schema import nearest
from runtime.data.catalogue import CATALOGUE, downloads, find_folder
from runtime.data.errors import DataError
from runtime.data.files import FileSource
from runtime.data.kept import keeping
from runtime.data.rows import number_of
from runtime.data.schema import read_schema
from runtime.data.source import Source
from runtime.data.synthetic import SyntheticSource, presets, recipe

DEFAULT_TRAIN_ROWS = 12_000 * 256
"""Of the synthetic stream: long enough for a trained model to come near the best reachable AUC."""
DEFAULT_TEST_ROWS = 100_000
"""Of the synthetic stream: the standard error of an AUC near 0.78 is about 0.0017."""


def open_source(
    name_or_path: str,
    data_dir: str | Path | None = None,
    rows: int | None = None,
    skip_bad_rows: bool = False,
    *,
    keep: bool = False,
    validation_fraction: float | None = None,
) -> Source:
    """Open a data set: a name of the catalogue, the path of a schema file (.toml) or `synthetic`.

    ``synthetic:PRESET`` has the field counts of a workload, ``synthetic:PRESET:SCALE`` with SCALE
    times its distinct ids (``synthetic:criteo-ad:0.01``), ``synthetic:PRESET:SCALE:DRAW`` another
    truth, other samples and other test rows (DRAW is 1 else).

    Real data is looked for in ``data_dir``, else in the directory that PERSIA_DATA_DIR names, then
    where ``data get`` puts downloads. ``rows`` keeps the first rows of the training part only, and
    of those ``validation_fraction`` (the schema's, unless given) validate. With ``keep``, what is
    parsed is kept among the downloads for the next run (`runtime.data.kept`). DataError for what
    cannot be opened, ValueError for ``rows`` below 1 or a share that is none.
    """
    is_synthetic = name_or_path.partition(":")[0] == "synthetic"
    if data_dir is not None and (is_synthetic or name_or_path.endswith(".toml")):
        raise DataError(
            f"--data.dir {str(data_dir)!r} is not used with {name_or_path}: it is where the ready"
            " data sets lie; remove it (the files of a schema lie beside the schema)"
        )
    if is_synthetic:
        if skip_bad_rows:
            raise DataError(
                "--data.skip-bad-rows is not used: the synthetic stream has no bad rows; remove it"
            )
        if validation_fraction is not None:
            raise DataError(
                "--data.validation-fraction is not used: the synthetic stream has validation rows"
                " of its own; remove it"
            )
        return _open_synthetic(name_or_path, rows)
    if name_or_path.endswith(".toml"):
        schema, folder = read_schema(Path(name_or_path))
    elif name_or_path in CATALOGUE:
        schema = CATALOGUE[name_or_path]()
        folder = find_folder(schema, data_dir)
    else:
        raise DataError(
            f"no data set is called {name_or_path!r}; "
            f"{nearest(name_or_path, ['synthetic', *CATALOGUE])}\n"
            "  a schema of your own is given by its path, which ends in .toml"
        )
    if validation_fraction is not None:
        split = replace(schema.split, validation_fraction=float(validation_fraction))
        schema = replace(schema, split=split)
    source = FileSource(schema=schema, folder=folder, rows=rows, skip_bad_rows=skip_bad_rows)
    return keeping(source, downloads() / "parsed") if keep else source


def _open_synthetic(name: str, rows: int | None) -> SyntheticSource:
    _, *choice = name.split(":")
    preset, scale_text, draw_text = (*choice, *("default", "1", "1")[len(choice) :])[:3]
    if preset not in presets():
        raise DataError(f"no synthetic preset is called {preset!r}; {nearest(preset, presets())}")
    try:
        scale = number_of(scale_text)
        if scale is None or not draw_text.isdecimal() or len(choice) > 3:
            given = ":".join(choice[1:])
            raise ValueError(f"SCALE must be a number and DRAW a whole one, got {given!r}")
        made = recipe(preset, scale, int(draw_text))
    except ValueError as error:
        raise DataError(
            f"{name}: {error}\n  write synthetic:PRESET:SCALE or synthetic:PRESET:SCALE:DRAW,"
            " as in synthetic:criteo-ad:0.01"
        ) from error
    train_rows = DEFAULT_TRAIN_ROWS if rows is None else rows
    return SyntheticSource(recipe=made, train_rows=train_rows, test_rows=DEFAULT_TEST_ROWS)
