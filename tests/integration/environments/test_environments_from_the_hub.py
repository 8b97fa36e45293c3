"""Hub datasets through the real `datasets` package: its client, its cache and Parquet files, from a hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.environments.hub import Hub, serving

from telescope.environments.hendrycks_math.environment import SUBJECTS

MATH, COUNTDOWN, EXAMS = "EleutherAI/hendrycks_math", "Jiayi-Pan/Countdown-Tasks-3to4", "someone/exams"
DAPO, DEEPSCALER = "BytedTsinghua-SIA/DAPO-Math-17k", "agentica-org/DeepScaleR-Preview-Dataset"
MATH500, AIME25, GPQA = "HuggingFaceH4/MATH-500", "opencompass/AIME2025", "Idavidrein/gpqa"

LOAD = """
import json, sys
from telescope.environments.registry import get_environment
from telescope.evals.base import EVALS, get_eval
for name, kwargs in json.loads(sys.argv[1]):
    try:
        environment = get_eval(name, **kwargs) if EVALS.has(name) else get_environment(name, **kwargs)
        samples = [environment.get_sample(i) for i in range(len(environment))]
        print("LOADED", json.dumps([[s.prompt, s.answer, s.metadata] for s in samples]))
    except Exception as error:
        print("LOADED", json.dumps(f"{type(error).__name__}: {error}"))
"""


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problem(subject: str, number: int, split: str) -> dict[str, Any]:
    title = subject.replace("_", " ").title()
    return {
        "problem": f"{split} {subject} {number}?", "level": f"Level {number % 5 + 1}", "type": title,
        "solution": rf"It is \boxed{{{number}}}.",
    }  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """The datasets in the layouts that they have on the hub: a subset per subject, and one file of puzzles."""
    root = tmp_path_factory.mktemp("hub")
    configs = ["---", "configs:"]
    for subject in SUBJECTS:
        configs += [f"- config_name: {subject}", "  data_files:"]
        for split in ("train", "test"):
            configs += [f"  - split: {split}", f"    path: {subject}/{split}-*"]
            rows = [problem(subject, number, split) for number in range(10 if split == "train" else 3)]
            write_parquet(root / MATH / subject / f"{split}-00000-of-00001.parquet", rows)
    (root / MATH / "README.md").write_text("\n".join([*configs, "---", "# MATH"]))
    puzzles = [{"target": 2 * n + 3, "nums": [n, n + 1, 2]} for n in range(200)]
    write_parquet(root / COUNTDOWN / "data" / "train-00000-of-00001.parquet", puzzles)
    exams = [{"question": f"{n} + 1?", "answer": str(n + 1), "subject": "sums"} for n in range(5)]
    write_parquet(root / EXAMS / "test.parquet", exams)
    asked = [([{"content": f"{n} + 1?", "role": "user"}], {"ground_truth": str(n + 1)}) for n in range(30)]
    dapo = [{"prompt": prompt, "reward_model": truth} for prompt, truth in asked]
    write_parquet(root / DAPO / "data" / "train-00000-of-00001.parquet", dapo * 100)
    write_jsonl(root / DEEPSCALER / "train.jsonl", [{"problem": "1 + 1?", "answer": "2", "solution": ""}])
    write_jsonl(root / MATH500 / "test.jsonl", [{"problem": "2 + 2?", "answer": "4", "subject": "Algebra", "level": 1}])
    parts = ["---", "configs:"]
    for part, name in (("AIME2025-I", "aime2025-I.jsonl"), ("AIME2025-II", "aime2025-II.jsonl")):
        parts += [f"- config_name: {part}", "  data_files:", "  - split: test", f"    path: {name}"]
        write_jsonl(root / AIME25 / name, [{"question": f"{part}?", "answer": "70"}])
    (root / AIME25 / "README.md").write_text("\n".join([*parts, "---"]))
    subset = ["---", "configs:", "- config_name: gpqa_diamond", "  data_files: gpqa_diamond.csv", "---"]
    header = "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer 3"
    (root / GPQA).mkdir(parents=True)
    (root / GPQA / "README.md").write_text("\n".join(subset))
    (root / GPQA / "gpqa_diamond.csv").write_text(f"{header}\n2 + 2?,4,3,5,6\n")
    with serving(root) as made:
        yield made


def load(hub: Hub, home: Path, *wanted: tuple[str, dict[str, Any]]) -> list[Any]:
    """Loads each environment in a new process; returns (prompt, answer, metadata) of its samples, or its error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", LOAD, json.dumps(wanted)]
    options = {"capture_output": True, "text": True, "timeout": 300, "env": environment | hub.environment(home)}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("LOADED")) for line in done.stdout.splitlines() if line.startswith("LOADED")]


def test_environments_load_their_datasets_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    everything, algebra, test, puzzles, held_out, exams, nowhere = load(
        hub, tmp_path,
        ("hendrycks_math", {"dataset": "hub"}),
        ("hendrycks_math", {"dataset": "hub", "dataset_subset": "algebra", "levels": [5]}),
        ("hendrycks_math", {"dataset_split": "test"}),
        ("countdown", {"dataset": "hub", "num_samples": 150, "prompt_style": "short"}),
        ("countdown", {"portion": "heldout"}),
        ("hendrycks_math", {"dataset": "hub", "dataset_name": EXAMS, "dataset_split": "test"}),
        ("hendrycks_math", {"dataset": "hub", "dataset_name": "someone/nothing"}),
    )  # fmt: skip
    assert [prompt for prompt, _, _ in everything] == [f"train {s} {n}?" for s in SUBJECTS for n in range(10)]
    problem = {"level": 4, "subject": "Counting And Probability", "_env_name": "hendrycks_math"}
    assert everything[13][1:] == ["3", problem]
    assert [answer for _, answer, _ in algebra] == ["4", "9"]
    assert len(test) == 3 * len(SUBJECTS)
    assert test[0][0] == "test algebra 0?"
    assert len(puzzles) == 150
    assert puzzles[7] == ["7 8 2 -> 17", "17", {"numbers": [7, 8, 2], "target": 17, "_env_name": "countdown"}]
    assert 10 < len(held_out) < 90, "a portion of the 200 of the hub"
    assert [answer for _, answer, _ in exams] == ["1", "2", "3", "4", "5"]
    assert exams[0][2] == {"level": 0, "subject": "sums", "_env_name": "hendrycks_math"}
    assert "someone/nothing" in nowhere
    fetched = {path for path in hub.requested if path.endswith(".parquet")}
    assert f"{MATH}/algebra/train-00000-of-00001.parquet" in fetched
    assert f"{COUNTDOWN}/data/train-00000-of-00001.parquet" in fetched
    again = len(hub.requested)
    assert load(hub, tmp_path, ("hendrycks_math", {"dataset": "hub"})) == [everything]
    assert not [path for path in hub.requested[again:] if path.endswith(".parquet")], "what was fetched is kept"


def test_math_environments_and_benchmarks_load_their_datasets_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    dapo, deepscaler, math500, aime, gpqa, wrong = load(
        hub, tmp_path,
        ("dapo_math", {"dataset": "hub"}),
        ("deepscaler", {"dataset": "hub"}),
        ("math500", {}),
        ("aime_2025", {}),
        ("gpqa_diamond", {"instruction_prompt_pre": None}),
        ("math500", {"dataset_name": GPQA, "dataset_split": "train"}),
    )  # fmt: skip
    assert [(prompt, answer) for prompt, answer, _ in dapo] == [(f"{n} + 1?", str(n + 1)) for n in range(30)]
    assert [(prompt, answer) for prompt, answer, _ in deepscaler] == [("1 + 1?", "2")]
    assert math500 == [["2 + 2?", "4", {"level": 1, "subject": "Algebra", "_env_name": "hendrycks_math"}]]
    assert [(prompt, answer) for prompt, answer, _ in aime] == [("AIME2025-I?", "70"), ("AIME2025-II?", "70")]
    ((question, letter, _),) = gpqa
    assert question.startswith("2 + 2?\n\nA) ")
    assert f"\n{letter}) 4" in question
    assert "has no column problem or question, answer or solution. It has: Question, Correct Answer" in wrong
