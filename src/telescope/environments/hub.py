"""Reads datasets of the Hugging Face hub or of local files, for environments and evals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from telescope.environments.data_files import is_local, read_local, rows_of
from telescope.errors import UnreachableError, UserError

if TYPE_CHECKING:
    import pyarrow as pa

Columns = Sequence[Sequence[str]]
"""Required columns of a dataset. Each entry lists alternatives."""

OWN = "or set dataset: own for the few that ship with Telescope"


def _hub_table(owner: str, name: str, subset: str | None, split: str, otherwise: str) -> pa.Table:
    """Returns one split of a dataset. Raises `UserError` if it is missing, and `UnreachableError` without the hub."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{owner}: a dataset of the hub needs the package datasets. Install it with: pip install datasets"
        ) from error
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


def hub_rows(
    owner: str,
    name: str,
    subsets: Sequence[str | None],
    split: str,
    columns: Columns,
    *,
    only: bool = False,
    otherwise: str = OWN,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all `subsets`, one after the other, or the rows of the local file or folder `name`.

    Errors name `owner`, the environment or eval, and suggest `otherwise` as another fix. With `only`, rows of the hub
    have no columns besides `columns`. Raises `UserError` if the dataset, a column or the package datasets is missing,
    and `UnreachableError` without the hub.
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


def uses_own_items(name: str, dataset: str) -> bool:
    """Returns whether a benchmark uses its shipped items. Raises `UserError` unless `dataset` is `hub` or `own`."""
    if dataset not in ("hub", "own"):
        raise UserError(f"{name}: dataset is {dataset!r}; use hub or own.")
    return dataset == "own"
