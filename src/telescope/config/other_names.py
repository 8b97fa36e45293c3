"""Names of settings in TRL, verl and other frameworks, and what stands for them here."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from telescope.utils.data import table_of
from telescope.utils.text import did_you_mean

NAMES = table_of(__file__)

FIELD_OF: dict[str, str] = {name: field for field, names in NAMES["fields"].items() for name in names.split()}
"""Fields by their names elsewhere."""
SENTENCE_OF: dict[str, str] = {name: one["text"] for one in NAMES["sentences"] for name in one["names"].split()}
"""What to know instead of a field, by names elsewhere."""


def hint(name: str, known: Iterable[str], value: Any = None) -> str:
    """Returns what an unknown name means here, after a space, or nothing. A section's value is a mapping."""
    known = list(known)
    if isinstance(value, Mapping):
        meant = {leaf: _meaning(f"{name}.{leaf}", known) for leaf in _leaves(value)}
        fields = [f"{leaf} is {field}" if leaf != field else leaf for leaf, (field, _) in meant.items() if field]
        sentences = dict.fromkeys(sentence for _, sentence in meant.values() if sentence)
        flat = f" The file is flat: write {', '.join(fields)} without '{name}'." if fields else ""
        if flat or sentences:
            return flat + "".join(f" {sentence}" for sentence in sentences)
    field, sentence = _meaning(name, known)
    # `config explain` also knows the fields of entries, such as evals.num_samples, and suggests them.
    if sentence and not any(each.endswith(f".{name.rpartition('.')[2]}") for each in known):
        return f" {sentence}"
    return f" Did you mean '{field}'?" if field else did_you_mean(name, known)


def _leaves(value: Mapping[Any, Any], prefix: str = "") -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _meaning(name: str, known: Collection[str]) -> tuple[str | None, str | None]:
    """Returns the field that a name means, or a sentence, or neither."""
    parts = name.strip().lower().replace("-", "_").split(".")
    for section in (f"{part}." for part in parts[:-1]):
        if section in SENTENCE_OF:  # a critic's learning rate is not the policy's
            return None, SENTENCE_OF[section]
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        field = end if end in known else FIELD_OF.get(end)
        if field in known or end in SENTENCE_OF:
            return (field, None) if field in known else (None, SENTENCE_OF[end])
    return None, None
