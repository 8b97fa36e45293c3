"""Returns groups, whole samples, and samples in flight as plain data for the API.

The run's tokenizer decodes tokens. It is searched for on this machine only.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from telescope.dashboard.api import Integer
from telescope.dashboard.conversations import conversations, paths
from telescope.dashboard.registry import config_of
from telescope.dashboard.samples import beginnings
from telescope.dashboard.store import KEY, NotFoundError, RunStore, key_of
from telescope.dashboard.tables import Row

IN_FLIGHT = (
    *("attempt", "sample_id", "group_id", "sample_index", "environment", "start_version", "prompt_tokens"),
    *("server", "lane", "started_at"),
)

TOKEN_ARRAYS = ("token_ids", "logprobs", "trainer_logprobs", "entropies", "versions", "mask")
TOKEN_COLUMNS = {"logprobs": "engine_logprobs", "mask": "trained"}
"""Arrays of a completion's tokens, with the columns in `tokens` if their names differ."""

AROUND_SECONDS = 1.0
"""The clocks of engine and driver differ by less than this."""

TOKENIZER = "tokenizer.json"
NUM_TOKENIZERS = 4
"""Tokenizers that stay in memory. A large vocabulary takes about 50 MB."""


def groups(store: RunStore, step: Integer) -> list[dict[str, Any]]:
    """Returns the groups of a step with their samples of that step.

    A prompt that was requeued at the step has no row in `groups` until its outcome is final, so its samples form the
    group.
    """
    visible = store.visible()
    store.refresh("groups", "samples")
    columns = "attempt, group_id, environment, status, reason, step, reward_mean, reward_std"
    members = store.rows(
        f"FROM samples WHERE {visible} AND step = ? AND eval_name IS NULL ORDER BY sample_index", [step]
    )
    found = store.rows(
        f"""WITH ended AS (SELECT {columns} FROM groups WHERE {visible} AND step = $1)
        FROM ended UNION ALL BY NAME SELECT attempt, group_id, any_value(environment) AS environment,
            mode(status) AS status, mode(reason) AS reason, any_value(step) AS step, avg(reward) AS reward_mean,
            stddev_samp(reward) AS reward_std
        FROM samples ANTI JOIN ended USING (attempt, group_id)
        WHERE {visible} AND step = $1 AND eval_name IS NULL AND group_id IS NOT NULL GROUP BY attempt, group_id
        ORDER BY attempt, group_id""",
        [step],
    )
    texts, sums = beginnings(store, members), store.token_sums(step)
    samples: dict[tuple[int, int], list[Row]] = defaultdict(list)
    prompts: dict[tuple[int, int], str] = {}
    for row in members:
        key = (row["attempt"], row["group_id"])
        text = texts.get(key_of(row), {})
        prompts.setdefault(key, text.get("prompt") or "")
        kept = {name: row[name] for name in ("reward", "advantage", "status")}
        numbers = {"length": row["completion_tokens"], "metrics": row["metrics"] or {}}
        numbers |= {name: sums.get(key_of(row), {}).get(name) for name in ("logprob_sum", "ratio")}
        samples[key].append({"id": row["sample_id"], **kept, **numbers, "completion": text.get("answer") or ""})
    return [
        {
            **{name: row[name] for name in columns.split(", ") if name != "group_id"},
            "id": row["group_id"],
            "prompt": prompts.get((row["attempt"], row["group_id"]), ""),
            "samples": samples[row["attempt"], row["group_id"]],
        }
        for row in found
    ]


def detail(store: RunStore, attempt: Integer, sample_id: str) -> dict[str, Any]:
    """Returns all data of a sample. Raises `NotFoundError` if it does not exist or a later attempt superseded it."""
    key = (attempt, sample_id)
    if (sample := store.conversations([key], store.visible()).get(key)) is None:
        raise NotFoundError(f"Attempt {attempt} has no sample {sample_id!r}, or a later attempt replaced it.")
    sequences = store.of_samples("tokens", [key], f"step = {sample['step']}")[key]
    # A sample's spans start between its start and its end.
    begin, end = sample["started_at"], sample["finished_at"]
    near = [f"start >= {begin - AROUND_SECONDS}"] if begin is not None else []
    near += [f"start <= {end + AROUND_SECONDS}"] if end is not None else []
    first_token = "try_cast(attributes['first_token_seconds'] AS DOUBLE) AS first_token_seconds"
    of_sandbox = "attributes['sandbox'] AS sandbox, attributes['error'] AS error"
    columns = f'{KEY}, component, name, start, "end", {first_token}, {of_sandbox}'
    spans = store.of_samples("spans", [key], " AND ".join(near) or "true", columns)[key]
    add_tokens(sample["turns"], sorted(sequences, key=itemgetter("part")))
    add_texts(store, sample["turns"])
    return assemble(sample, spans)


def assemble(sample: Row, spans: Sequence[Row]) -> dict[str, Any]:
    """Returns a whole sample in the form that the pages read."""
    ordered = sorted(spans, key=itemgetter("start"))
    listed = conversations(sample["turns"])
    return {
        **{name: value for name, value in sample.items() if name not in ("info_turns", "completion_text")},
        **{name: sample[name] or {} for name in ("metrics", "tags", "golden", "divergences")},
        "messages": [] if listed else sample["messages"],  # `turns` has the prompts of an agent
        "conversations": listed,
        "spans": [
            {name: row[name] for name in ("name", "start", "end", "first_token_seconds")}
            for row in ordered
            if row["component"] != "sandbox"
        ],
        "sandbox_spans": [
            {name: row[name] for name in ("name", "start", "end", "sandbox", "error")}
            for row in ordered
            if row["component"] == "sandbox"
        ],
    }


def in_flight(store: RunStore) -> list[Row]:
    """Returns the samples that are being generated, longest first. Empty unless the run is live."""
    rows = store.run.in_flight().select(list(IN_FLIGHT)).to_pylist()
    return sorted(rows, key=lambda row: (row["started_at"] or 0.0, row["group_id"] or 0, row["sample_index"] or 0))


def add_tokens(turns: Sequence[Row], sequences: Sequence[Row]) -> None:
    """Assigns each completion its part of the first recorded sequence that contains it.

    Sampled tokens have a version of 0 or more, in the order of the completions. Arrays that an old record lacks are
    left out.
    """
    columns = {name: TOKEN_COLUMNS.get(name, name) for name in TOKEN_ARRAYS}
    columns = {name: column for name, column in columns.items() if all(row[column] is not None for row in sequences)}
    sampled = [
        {name: sequence[column][place] for name, column in columns.items()}
        for sequence in sequences
        for place, version in enumerate(sequence["versions"] or ())
        if version >= 0
    ]
    ways = paths(turns)
    answers = [turn for sequence in sequences if sequence["part"] < len(ways) for turn in ways[sequence["part"]]]
    lengths = [turn["num_tokens"] or 0 for turn in answers]
    if not sampled or sum(lengths) != len(sampled):
        return
    begin = 0
    for turn, length in zip(answers, lengths, strict=True):
        own = sampled[begin : begin + length]
        begin += length
        if "token_ids" not in turn:
            turn.update({name: [token[name] for token in own] for name in columns})


def add_texts(store: RunStore, turns: Sequence[Row]) -> None:
    """Adds the texts of tokens to turns with token ids, if the run's tokenizer is on this machine."""
    if not any(turn.get("token_ids") for turn in turns):
        return
    model = config_of(store.run)[0].get("model")
    tokenizer = find_tokenizer(store.run.files.run_dir, model if isinstance(model, str) else None)
    if tokenizer is None:
        return
    for turn in turns:
        if turn.get("token_ids"):
            turn["tokens"] = token_texts(tokenizer, turn["token_ids"])


def find_tokenizer(run_dir: Path, model: str | None) -> Path | None:
    """Returns the file of the run's tokenizer, or None if it is not on this machine."""
    folders = [run_dir / "model", *sorted(run_dir.glob("checkpoints/*/hf_meta"))]
    if model:
        folders.append(Path(model).expanduser())
    for folder in folders:
        if (folder / TOKENIZER).is_file():
            return folder / TOKENIZER
    if not model or Path(model).is_absolute():
        return None
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, TOKENIZER)
    except (ImportError, ValueError):  # no package where runs are only read; or no name of the Hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def token_texts(path: Path, ids: Sequence[int]) -> list[str] | None:
    """Returns the text of each token, including blanks before words. None if the tokenizer cannot be read."""
    try:
        tokenizer = _load(path, path.stat().st_mtime_ns)
    except Exception:  # tokenizers raises plain Exception for a file that it cannot read
        return None
    texts: list[str] = []
    before = ""
    for place, token in enumerate(ids):
        alone = tokenizer.decode([token], skip_special_tokens=False)
        # Some decoders drop the blank before the first word, so a token is decoded after the token before it.
        both = tokenizer.decode(list(ids[max(0, place - 1) : place + 1]), skip_special_tokens=False)
        texts.append(both[len(before) :] if both.startswith(before) and len(both) >= len(alone) else alone)
        before = alone
    return texts


@lru_cache(NUM_TOKENIZERS)
def _load(path: Path, _modified: int) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))
