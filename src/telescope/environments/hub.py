"""Reads datasets of the Hugging Face hub, for environments and evals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from telescope.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def hub_table(owner: str, name: str, subset: str | None, split: str, columns: Sequence[Sequence[str]]) -> pa.Table:
    """Returns one split of a dataset. `owner` is the environment or eval that errors name.

    Each entry of `columns` lists alternatives, of which the dataset must have one. Raises `UserError` if a
    column or the package datasets is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{owner}: a dataset of the hub needs the package datasets. Install it with: pip install datasets"
        ) from error
    table: pa.Table = datasets.load_dataset(name, subset, split=split).with_format("arrow")[:]
    missing = [" or ".join(names) for names in columns if not set(names) & set(table.column_names)]
    if missing:
        raise UserError(
            f"{owner}: the dataset {name!r} (split {split!r}) has no column {', '.join(missing)}. It has: "
            f"{', '.join(table.column_names)}. Set dataset_name to a dataset with these columns."
        )
    return table


def hub_rows(
    owner: str, name: str, subsets: Sequence[str | None], split: str, columns: Sequence[Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """Yields the rows of all `subsets`, one after the other. Raises as `hub_table` does."""
    for subset in subsets:
        yield from hub_table(owner, name, subset, split, columns).to_pylist()


def uses_own_items(name: str, dataset: str) -> bool:
    """Returns whether a benchmark uses its shipped items. Raises `UserError` unless `dataset` is `hub` or `own`."""
    if dataset not in ("hub", "own"):
        raise UserError(f"{name}: dataset is {dataset!r}; use hub or own.")
    return dataset == "own"
