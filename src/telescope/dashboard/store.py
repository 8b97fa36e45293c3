"""Reads long texts and token arrays of one run, which stay in its files.

`of_samples` reads them for some samples from the files with their rows, and `search` scans them.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter

import pyarrow as pa

from telescope.dashboard.tables import OF_SAMPLE, Row, RunTables
from telescope.errors import UserError
from telescope.record.query import Files, block_rows, read_again, sql_text

KEY = ", ".join(OF_SAMPLE)

SEARCHED = {"turns": ("text",), "tool_calls": ("arguments", "result"), "info": ("value",), "prompts": ("text",)}
"""Texts that a search scans."""

IS_ANSWER = "role = 'assistant' AND restarts IS NULL"
"""SQL condition for completions in `turns`. Messages of a prompt can have the role `assistant` too."""

NUM_SEARCHES = 16
"""Number of searches whose hits are kept, so that all pages of a result need only one scan."""

BEFORE_MATCH, BEHIND_MATCH = 24, 160
"""Characters before and after a match that a list shows."""

EXPORTED_AT_ONCE = 2000
"""Samples that an export reads at once, with their texts."""

NO_HITS = pa.table({"attempt": pa.array([], pa.int64()), "id": pa.array([], pa.string())})

Key = tuple[int, str]


class NotFoundError(UserError):
    """Raised if no run, sample or eval has the requested id."""


class RunStore(RunTables):
    """Queries one run and its texts."""

    def _forget(self) -> None:
        super()._forget()
        self._searches: dict[str, tuple[dict[str, int], pa.Table]] = {}

    def search(self, text: str) -> pa.Table:
        """Finds `text` in any case. Returns attempts with ids of samples, or of prompts whose samples all match.

        Waits only for other searches, and scans only rows that are new since the last search for this text.
        """
        with self._locks["search"]:
            self.refresh("samples")
            ends = {name: self.run.num_rows(name) for name in SEARCHED}
            done, hits = self._searches.pop(text, ({}, NO_HITS))
            if any(end < done.get(name, 0) for name, end in ends.items()):  # a table is read from the start again
                done, hits = {}, NO_HITS
            for name, end in ends.items():
                if (cursor := done.get(name, 0)) < end:
                    id_column = "prompt_key" if name == "prompts" else "sample_id"
                    fresh = self._files(name, f"attempt, {id_column} AS id", _matches(name, text), cursor)
                    # A file that has grown since the last search is scanned as a whole, so its hits come again.
                    hits = pa.concat_tables([hits, fresh.cast(NO_HITS.schema)])
                    hits = hits.group_by(["attempt", "id"]).aggregate([])
            self._searches[text] = (ends, hits)
            while len(self._searches) > NUM_SEARCHES:
                self._searches.pop(next(iter(self._searches)))
            return hits

    def whole_samples(self, chosen: pa.Table) -> Iterator[Row]:
        """Yields whole rows of samples with texts. `chosen` has attempt, sample_id and step, in record order."""
        for first in range(0, chosen.num_rows, EXPORTED_AT_ONCE):
            piece = chosen.slice(first, EXPORTED_AT_ONCE).to_pylist()
            steps = [int(row["step"]) for row in piece]
            near, answer = f"step BETWEEN {min(steps)} AND {max(steps)}", IS_ANSWER
            keys = list(map(key_of, piece))
            samples, turns = (self.of_samples(*what) for what in (("samples", keys, near), ("turns", keys, answer)))
            prompts = self.prompts(row for rows in samples.values() for row in rows)
            for key, rows in samples.items():
                answers = sorted(turns[key], key=itemgetter("turn"))
                for row in rows:
                    said = "\n".join(turn["text"] or "" for turn in answers)
                    yield {**row, **prompts[key], "completion_text": said}

    def conversations(self, keys: Collection[Key], where: str = "true") -> dict[Key, Row]:
        """Returns whole samples with their prompts' `messages`, `turns`, `tool_calls` and `info`, in order.

        `where` filters by columns of `samples`.
        """
        samples = self.of_samples("samples", keys, where)
        prompts = self.prompts(row for rows in samples.values() for row in rows)
        orders = {"turns": ("turn",), "tool_calls": ("call",), "info": ("number", "key")}
        whole = {name: self.of_samples(name, keys) for name in orders}
        found = {key: {**rows[0], **prompts[key]} for key, rows in samples.items() if rows}
        for key, sample in found.items():
            sample |= {name: sorted(whole[name][key], key=itemgetter(*order)) for name, order in orders.items()}
        return found

    def of_samples(
        self, table: str, keys: Iterable[Key], where: str = "true", columns: str = "*"
    ) -> dict[Key, list[Row]]:
        """Returns whole rows by sample, in one pass over the files that have them."""
        found: dict[Key, list[Row]] = {key: [] for key in keys}
        own = among(found)
        # A run has too many spans to read them all for a sample. Their times select the parts of files to read.
        places = (0, None) if table == "spans" else self._places(table, own)
        for row in self._files(table, columns, f"{own} AND {where}", *places).to_pylist(maps_as_pydicts="lossy"):
            found[key_of(row)].append(row)
        return found

    def prompts(self, samples: Iterable[Row]) -> dict[Key, Row]:
        """Returns `prompt_key`, `prompt_text` and `messages` by attempt and sample. `samples` have `prompt_key`."""
        found: dict[Key, Row] = {key_of(row): {"prompt_key": row["prompt_key"]} for row in samples}
        own = among({(attempt, key) for (attempt, _), row in found.items() if (key := row["prompt_key"])}, "prompt_key")
        rows = self._files("prompts", "attempt, prompt_key, text, messages", own, *self._places("prompts", own))
        texts = {
            (row["attempt"], row["prompt_key"]): {
                "prompt_text": row["text"],
                "messages": json.loads(row["messages"] or "[]"),
            }
            for row in rows.to_pylist()
        }
        for (attempt, _), row in found.items():
            row |= texts.get((attempt, row["prompt_key"]), {"prompt_text": None, "messages": []})
        return found

    def beginnings(self, samples: Sequence[Row], length: int) -> dict[Key, Row]:
        """Returns the first characters of `prompt` and of the completion as `answer`, by attempt and sample.

        The `prompt` is the last user message, because text before it, such as a system prompt, is often the same.
        `samples` have `prompt_key`.
        """
        own = among(map(key_of, samples))
        first = f"{KEY}, arg_min(left(text, {length}), turn) AS answer"
        grouped = f"{own} AND {IS_ANSWER} GROUP BY {KEY}"
        with ThreadPoolExecutor(1) as pool:  # while this thread reads the prompts
            read = pool.submit(lambda: _by_key(self._files("turns", first, grouped, *self._places("turns", own))))
            found = self.prompts(samples)
            answers = read.result()
        for key, row in found.items():
            row["answer"] = answers[key]["answer"] if key in answers else None
            messages = row["messages"]
            last = next((one for one in reversed(messages) if one["role"] == "user"), messages[-1] if messages else {})
            row["prompt"] = (last.get("content") or "")[:length]
        return found

    def aggregate(self, name: str, columns: str, group: str, where: str = "true") -> list[Row]:
        """Returns aggregates of a table by `group`. Computes them from its files without loading the rows."""
        return self._files(name, columns, f"{where} GROUP BY {group}").to_pylist()

    def snippets(self, text: str, samples: Sequence[Row]) -> dict[Key, str]:
        """Returns the text around the first match of a search, by attempt and sample. Prompts are searched last."""
        found: dict[Key, str] = {}
        match = re.compile(f".{{0,{BEFORE_MATCH}}}{re.escape(text)}.{{0,{BEHIND_MATCH}}}", re.DOTALL | re.IGNORECASE)
        around = f"'(?is).{{0,{BEFORE_MATCH}}}' || regexp_escape({sql_text(text)}) || '.{{0,{BEHIND_MATCH}}}'"
        for name, columns in SEARCHED.items():
            if not (left := [row for row in samples if key_of(row) not in found]):
                break
            if name == "prompts":
                hits = {key: match.search(row["prompt_text"] or "") for key, row in self.prompts(left).items()}
                return found | {key: hit[0] for key, hit in hits.items() if hit}
            own = among(map(key_of, left))
            shown = ", ".join(f"nullif(regexp_extract({column}, {around}), '')" for column in reversed(columns))
            where = f"{own} AND {_matches(name, text)}"
            rows = self._files(name, f"{KEY}, coalesce({shown}) AS x", where, *self._places(name, own))
            found |= {key_of(row): row["x"] for row in reversed(rows.to_pylist())}
        return found

    def token_sums(self, step: int) -> dict[Key, Row]:
        """Returns the engine's summed logprobs and the trainer/engine probability ratio for each sample of a step."""
        gaps = "list_transform(list_zip(trainer_logprobs, engine_logprobs), lambda x: x[1]::DOUBLE - x[2])"
        sums = (
            "list_sum(engine_logprobs::DOUBLE[]) AS logprob_sum, "
            f"exp(list_sum(list_filter({gaps}, lambda gap: isfinite(gap)))) AS ratio"
        )
        where = f"step = {int(step)}"
        return _by_key(self._files("tokens", f"{KEY}, {sums}", where, *self._places("tokens", where)))

    def _places(self, name: str, where: str) -> tuple[int, int | None]:
        """Returns the first and the last row of the record that match `where`, a condition on columns in memory.

        (0, None) means all rows, (0, -1) none. A read of a few rows then opens one file instead of hundreds.
        """
        (end,) = self.refresh(name).values()
        ((first, last, num_rows),) = self.fetch(
            f"SELECT min(rowid), max(rowid), (SELECT count(*) FROM {name}) FROM {name} WHERE {where}"
        )
        if num_rows != end:
            return 0, None  # if files are lost, rows in memory and in the record have different numbers
        return (0, -1) if last is None else (first, last)

    def _files(self, name: str, columns: str, where: str, cursor: int = 0, last: int | None = None) -> pa.Table:
        """Returns rows from the files with rows from `cursor` to `last`, including superseded rows."""

        def read(files: Files) -> pa.Table:
            found = [file for file in self.run.table_files(name, cursor) if last is None or file.first <= last]
            blocks = [file for file in found if file.rows is None]
            tails = [file.rows for file in found if file.rows is not None]
            files += [(self.run, block.path) for block in blocks]
            with self._open_cursor() as connection:
                source = block_rows(name, blocks)
                if tails:
                    # Not copied, so that only the newest rows that match `where` are converted.
                    connection.register("tails", pa.concat_tables(tails, promote_options="default"))
                    source = f"{source} UNION ALL BY NAME FROM tails"
                return connection.sql(f"SELECT {columns} FROM ({source}) WHERE {where}").to_arrow_table()

        return read_again(read)


def key_of(row: Row) -> Key:
    """Returns the key of a row's sample."""
    return row["attempt"], row["sample_id"]


def among(keys: Iterable[Key], column: str = "sample_id") -> str:
    """Returns an SQL condition for the rows of some samples, or of the keys that `column` names."""
    ids: dict[int, list[str]] = defaultdict(list)
    for attempt, name in keys:
        ids[attempt].append(name)
    each = [
        # The range is compared twice as fast as the list is searched, and leaves most rows out.
        f"attempt = {int(attempt)} AND {column} BETWEEN {sql_text(min(some))} AND {sql_text(max(some))} "
        f"AND {column} IN ({', '.join(map(sql_text, some))})"
        for attempt, some in ids.items()
    ]
    return f"({' OR '.join(each) or 'false'})"


def _by_key(rows: pa.Table) -> dict[Key, Row]:
    return {key_of(row): row for row in rows.to_pylist(maps_as_pydicts="lossy")}


def _matches(name: str, text: str) -> str:
    """Returns an SQL condition for rows of a table that contain `text`, ignoring case."""
    # A regular expression takes half the time of ILIKE.
    pattern = f"regexp_escape({sql_text(text)})"
    matches = (f"regexp_matches({column}, {pattern}, 'i')" for column in SEARCHED[name])
    return f"({' OR '.join(matches)})"
