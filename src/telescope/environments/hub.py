"""Reads rows of datasets, for environments and evals: of the Hugging Face hub, or of local files.

Files are JSON, JSON lines, Parquet and CSV, alone or in folders.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from telescope.errors import UnreachableError, UserError
from telescope.utils.text import listed, nearest_name, user_path

if TYPE_CHECKING:
    import pyarrow as pa

Columns = Sequence[Sequence[str]]
"""Required columns of a dataset. Each entry lists alternatives."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
NOT_DATA = re.compile(r"(.*/)?(\..*|node_modules/.*|(package(-lock)?|tsconfig[^/]*)\.json)")  # relative paths


def hub_rows(
    owner: str,
    name: str,
    subsets: Sequence[str | None],
    split: str,
    columns: Columns,
    *,
    only: bool = False,
    otherwise: str = "or set dataset: own for the few that ship with Telescope",
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all `subsets`, one after the other, or the rows of the local file or folder `name`.

    Errors name `owner`, the environment or eval, and suggest `otherwise` as another fix. With `only`, rows of the hub
    have no columns besides `columns`. Raises `UserError` if the dataset or a column is missing, and
    `UnreachableError` without the hub.
    """
    if is_local(name):
        for subset in subsets:
            for number, row in enumerate(read_local(owner, name, split, subset)):
                if number == 0:
                    _require(owner, name, split, columns, list(row))
                yield row
        return
    for subset in subsets:
        table = _hub_table(owner, name, subset, split, otherwise)
        _require(owner, name, split, columns, table.column_names)
        if only:
            table = table.select([column for names in columns for column in names])
        for batch in table.to_batches():
            yield from rows_of(batch)


def _hub_table(owner: str, name: str, subset: str | None, split: str, otherwise: str) -> pa.Table:
    """Returns one split of a dataset. Raises `UserError` if it is missing, and `UnreachableError` without the hub."""
    import datasets

    try:
        return datasets.load_dataset(name, subset, split=split).with_format("arrow")[:]
    except Exception as error:
        is_general = type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None
        cause = error.__cause__ if is_general else error
        reason = " ".join(str(cause).split())[:300]
        asked = f"{owner}: the dataset {name!r} (subset {subset!r}, split {split!r})"
        if isinstance(cause, FileNotFoundError | ValueError | TypeError) or "scripts are no longer" in reason:
            raise UserError(f"{asked} cannot be loaded: {reason}") from error
        raise UnreachableError(
            f"{asked} cannot be loaded from the hub ({type(cause).__name__}: {reason}). Connect this machine, or "
            f"download it beforehand (`hf download --repo-type dataset {name}`){f', {otherwise}' if otherwise else ''}."
        ) from error


def _require(owner: str, name: str, split: str | None, columns: Columns, found: Sequence[str]) -> None:
    missing = [" or ".join(names) for names in columns if not set(names) & set(found)]
    if missing:
        raise UserError(
            f"{owner}: the dataset {name!r} (split {split!r}) has no column {', '.join(missing)}. It has: "
            f"{', '.join(found)}. Set dataset_name to a dataset with these columns."
        )


def is_local(name: str) -> bool:
    """Returns whether `name` means a local file or folder, not a dataset of the hub."""
    path = user_path(name)
    return path.exists() or path.suffix in SUFFIXES or name.startswith((".", "/", "~")) or name.count("/") > 1


def read_local(owner: str, name: str, split: str | None, subset: str | None) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file, or of a split's files in a folder. A subset is a subfolder.

    A single file is the split `train`, unless it is a JSON object with a list of rows per split. Raises `UserError` for
    a missing file or split, with the existing ones, and for a broken file, with the line.
    """
    path = user_path(name)
    if not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        raise UserError(
            f"{owner}: there is no file {name!r}. {_listed(folder, path.name)} Give the path of one of them."
        )
    if subset and not path.is_dir():
        raise UserError(f"{owner}: {name!r} is a file, which has no subset {subset!r}. Leave it out.")
    if path.is_dir():
        if subset and not (path / subset).is_dir():
            raise UserError(f"{owner}: the folder {name!r} has no subfolder of the subset {subset!r}. {_listed(path)}")
        path, wanted = path / (subset or ""), split or "train"
        if any(path.glob("*.arrow")) or any(path.glob("*/*.arrow")):
            raise UserError(
                f"{owner}: {str(path)!r} is of save_to_disk, and .arrow files are not read. Write the rows with "
                'load_from_disk(...).to_parquet("train.parquet"), and give the path of that file.'
            )
        is_of_split = re.compile(rf"{re.escape(wanted)}(-[0-9]+-of-[0-9]+(-[0-9a-f]+)?)?").fullmatch
        files = [file for file in _data_files(path) if is_of_split(file.stem) or file.parent.name == wanted]
        if not files:
            raise UserError(
                f"{owner}: the folder {str(path)!r} has no data file of the split {wanted!r}. {_listed(path)} Put the "
                f"files of the split into a subfolder {wanted!r}, or give the path of one file."
            )
        if len(folders := sorted({str(file.parent.relative_to(path)) for file in files})) > 1:
            raise UserError(
                f"{owner}: the folder {str(path)!r} has files of the split {wanted!r} in {', '.join(folders)}. Set "
                "subset to one of these folders, or path to a file."
            )
        for file in files:
            yield from _rows(owner, file, None)
        return
    yield from _rows(owner, path, split)


def _data_files(folder: Path) -> list[Path]:
    found = sorted(file for file in (*folder.glob("*.*"), *folder.glob("*/*.*")) if file.suffix in SUFFIXES)
    return [file for file in found if not NOT_DATA.fullmatch(str(file.relative_to(folder)))]


def _listed(folder: Path, wanted: str = "") -> str:
    """Returns a sentence that lists a folder's data files, the one most similar to `wanted` first."""
    names = [str(file.relative_to(folder)) for file in _data_files(folder)]
    close = nearest_name(wanted, [Path(name).name for name in names])
    names.sort(key=lambda name: Path(name).name != close)
    return f"Data files in {folder}: {listed(names, 20) or 'none'}."


def _rows(owner: str, file: Path, split: str | None) -> Iterator[dict[str, Any]]:
    rows: Iterable[Any]
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows = (row for batch in pq.ParquetFile(file).iter_batches() for row in rows_of(batch))
        elif file.suffix in (".csv", ".tsv"):
            text = _decode(file, file.read_bytes())
            header = text.partition("\n")[0]
            delimiter = max(",;\t" if file.suffix == ".csv" else "\t;,", key=header.count)  # the first if none occurs
            csv.field_size_limit(2**31 - 1)  # by default 131,072 characters, less than a long prompt
            rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
        elif file.suffix == ".json":
            try:
                rows = json.loads(_decode(file, file.read_bytes()))
            except json.JSONDecodeError as error:
                if error.msg != "Extra data":
                    raise
                rows = list(_json_lines(file))  # many datasets have JSON lines in such a file
            if isinstance(rows, dict) and split in rows:
                rows, split = rows[split], None
            if isinstance(rows, dict):
                keys = ", ".join(map(repr, rows))
                raise UserError(f"{owner}: {file} is not a list of rows. It has the keys {keys}; set split to one.")
            if not isinstance(rows, list):
                raise UserError(f"{owner}: {file} is not a list of rows.")
        elif file.suffix in SUFFIXES:
            rows = _json_lines(file)
        else:
            raise UserError(f"{owner}: {file} is of no known format. Use a file that ends in {', '.join(SUFFIXES)}.")
        if split not in (None, "train"):
            raise UserError(
                f"{owner}: {file} is one file, without the split {split!r}. Leave split out, or name a folder."
            )
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise UserError(f"{owner}: row {number} of {file} is {str(row)[:60]!r}, not an object with columns.")
            if None in row:
                raise UserError(
                    f"{owner}: row {number} of {file} has more fields than the header, the last {row[None][-1]!r}. "
                    "Quote fields that contain the delimiter."
                )
            yield row
    except (OSError, ValueError, csv.Error, RecursionError) as error:  # pyarrow's and json's errors are ValueErrors
        raise UserError(f"{owner}: {file} cannot be read: {error}") from error


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yields the rows of a batch. `datasets` stores a column whose values have several types as JSON, decoded here."""
    coded = {field.name: field.type for field in batch.schema if "arrow.json" in str(field.type)}
    for row in batch.to_pylist():
        yield row | {name: _decoded(row[name], kind) for name, kind in coded.items()}


def _decoded(value: Any, kind: Any) -> Any:
    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(value, dict):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    return [_decoded(each, kind.value_type) for each in value] if isinstance(value, list) else json.loads(value)


def _json_lines(file: Path) -> Iterator[Any]:
    with file.open("rb") as lines:
        for number, encoded in enumerate(lines, 1):
            if line := _decode(file, encoded, f"line {number}, ").strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number} is not JSON ({error}): {line[:60]!r}") from None


def _decode(file: Path, encoded: bytes, place: str = "") -> str:
    try:
        return encoded.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if encoded[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
        raise ValueError(
            f"{place}byte {error.start} is {encoded[error.start]:#04x}, which is not UTF-8. Convert the file, for "
            f"example with: iconv -f {encoding} -t UTF-8 {file} > utf8_{file.name}"
        ) from None
