"""The code environment: the model writes a Python program or function, which hidden tests run in a sandbox.

Problems come from the hub (`PrimeIntellect/INTELLECT-3-RL`, subset `code`), or are the 60 that ship with Telescope. The
tests of an answer run in one command: `runner.py` gets the program and the inputs, and reports digests of the outputs.
Expected outputs never enter the sandbox, so an answer can only pass by computing them. A sandbox that fails is replaced
once; if the second one fails too, the sample is masked.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment, shares
from telescope.environments.hub import hub_rows
from telescope.environments.i3_code import runner
from telescope.environments.i3_code.own_problems import own_rows
from telescope.environments.parsers import extract_code_block, strip_think_tags
from telescope.environments.sandbox_tools import SandboxEnvironment
from telescope.errors import UserError
from telescope.sandbox import ExecResult, SandboxCommandTimeoutError, SandboxError, SandboxHandle

REQUIRED_PACKAGES: list[str] = []
OPTIONAL_PACKAGES = ["datasets"]

INSTRUCTION_PROMPT = (
    "Solve the problem in Python. Think first; then write the complete program in one block that starts with ```python "
    "and ends with ```. A function must have the name that the problem gives it; a program reads standard input and "
    "prints its result."
)
NUM_ATTEMPTS = 2
"""Sandboxes that are tried for one answer."""
START_SECONDS = 30.0
"""Added to the time of the tests for the start of the runner."""
COMMAND_NOT_FOUND, STOPPED = 127, 124
RUNNER = Path(runner.__file__).read_bytes()


class I3CodeEnvironment(SandboxEnvironment, SingleTurnEnvironment):
    """Programming problems with hidden tests. The reward is 1 for a program that passes all of them, else 0.

    `dataset` is `hub` or `own`. Rows are kept if their column `difficulty_key` is from `min_difficulty` to
    `max_difficulty`, with at most `max_num_tests` tests each, chosen with `random_seed`; `shuffle` orders them
    by `seed`. A test is killed after `timeout_per_test` seconds. The arguments of `SandboxEnvironment` set the sandbox.
    """

    reward_min, reward_max = 0.0, 1.0
    metrics_ranges = shares("passed", "pass_rate", "sandbox_error")
    hub_dataset: ClassVar[str] = "PrimeIntellect/INTELLECT-3-RL"

    def __init__(
        self,
        instruction_prompt: str | None = INSTRUCTION_PROMPT,
        timeout_per_test: Annotated[float, Field(gt=0)] = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(instruction_prompt=instruction_prompt, **kwargs)
        self.timeout_per_test = timeout_per_test

    def load_dataset(
        self,
        num_samples: int = -1,
        dataset: Literal["hub", "own"] = "hub",
        dataset_name: str | None = None,
        dataset_subset: str | None = "code",
        dataset_split: str = "train",
        difficulty_key: str | None = None,
        min_difficulty: float | None = None,
        max_difficulty: float | None = None,
        max_num_tests: Annotated[int, Field(ge=1)] = 15,
        random_seed: int | None = 0,
        shuffle: bool = False,
        seed: int = 0,
        **_: Any,
    ) -> list[Sample]:
        """Returns the problems as samples. Raises `UserError` if there are none."""
        is_bounded = (min_difficulty, max_difficulty) != (None, None)
        if is_bounded and difficulty_key is None:
            raise UserError(f"{self.name}: min_difficulty and max_difficulty need difficulty_key, a column.")
        rows: Iterable[dict[str, Any]] = own_rows()
        if dataset == "hub":
            columns = [("question",), ("info",), *([(difficulty_key,)] if difficulty_key else [])]
            name = dataset_name or self.hub_dataset
            rows = hub_rows(self.name, name, [dataset_subset], dataset_split, columns, only=True)
        low = -math.inf if min_difficulty is None else min_difficulty
        high = math.inf if max_difficulty is None else max_difficulty
        samples = []
        for number, row in enumerate(rows):
            difficulty = row.get(difficulty_key) if difficulty_key else None
            if is_bounded and (difficulty is None or not low <= difficulty <= high):
                continue
            tests = read_tests(row["info"], max_num_tests, random.Random(f"{random_seed} {number}"))
            if tests["inputs"]:
                known = {} if difficulty is None else {"difficulty": difficulty}
                samples.append(Sample(row["question"], metadata={"tests": tests, **known}))
        if not samples:
            where = f" has {difficulty_key} from {low:g} to {high:g}" if is_bounded else ""
            raise UserError(f"{self.name}: no problem with tests{where or ' is in the dataset'}.")
        if shuffle:
            random.Random(f"i3_code {seed}").shuffle(samples)
        return samples if num_samples < 0 else samples[:num_samples]

    def solution(self, sample: Sample) -> list[str]:
        known = [row["solution"] for row in own_rows() if row["question"] == sample.prompt]
        return [f"```python\n{program}\n```" for program in known]

    def answer_that_runs(self, command: str) -> str:
        return f"```python\nimport os\nos.system({command!r})\n```"

    def cheats(self, sample: Sample) -> dict[str, str]:
        return super().cheats(sample) | {"grader timed out": "```python\nimport time\ntime.sleep(1e6)\n```"}

    async def compute_reward(self, completion: str, sample: Sample, eos_token: str = "") -> RewardResult:
        program = extract_code_block(strip_think_tags(completion.removesuffix(eos_token)))
        tests = sample.metadata["tests"]
        metrics = dict.fromkeys(("retry_count", "sandbox_error", "sandbox_acquire_time", "test_time"), 0.0)
        notes = {"generated_code": program, "runner_stderr": "", "error": "" if program else "no ```python block"}
        results: list[dict[str, Any]] = []
        if program:
            results = await self._run_tests(program, tests, metrics, notes)
        passed = [
            result["status"] == "ok" and result["digest"] in expected_digests(expected, is_value="fn_name" in tests)
            for result, expected in zip(results, tests["outputs"], strict=False)
        ]
        statuses, count = [result["status"] for result in results], len(tests["inputs"])
        all_passed = sum(passed) == count
        notes["test_summary"] = f"{sum(passed)} of {count} tests passed"
        lines = [f"{n}: {r['status']}, {r['seconds']} s, {r['output']!r} {r['stderr']}" for n, r in enumerate(results)]
        notes["passed_tests"] = ", ".join(str(n) for n, is_passed in enumerate(passed) if is_passed)
        notes["failed_tests"] = "\n".join(line for line, is_passed in zip(lines, passed, strict=True) if not is_passed)
        return RewardResult(
            total_reward=float(all_passed),
            sample_metrics={
                "passed": float(all_passed),
                "pass_rate": sum(passed) / count,
                "num_test_cases": float(count),
                "num_timeouts": float(statuses.count("timeout")),
                "num_errors": float(statuses.count("error")),
                **metrics,
            },
            info_turns=[
                {"turn_order": 0, "info_key": key, "info_value": value, "info_type": "text"}
                for key, value in notes.items()
                if value
            ],
        )

    async def _run_tests(
        self, program: str, tests: dict[str, Any], metrics: dict[str, float], notes: dict[str, str]
    ) -> list[dict[str, Any]]:
        """Returns the runner's results. Empty if the program ended the runner itself. Raises `SandboxError`."""
        for attempt in range(NUM_ATTEMPTS):
            metrics["retry_count"] = float(attempt)
            started_at = time.monotonic()
            handle = await self.sandboxes.acquire()
            acquired_at = time.monotonic()
            metrics["sandbox_acquire_time"] = acquired_at - started_at
            nonce, is_clean = secrets.token_hex(16), False
            try:
                done = await self._execute(handle, nonce, program, tests)
                metrics["test_time"] = time.monotonic() - acquired_at
                notes["runner_stderr"] = done.stderr[-1000:]
                _, found, report = done.stdout.rpartition(nonce)
                if found:
                    is_clean = True
                    return json.loads(report)
                if done.exit_code == COMMAND_NOT_FOUND:
                    raise SandboxError(f"the sandbox has no python3: {done.stderr.strip()}")
                if done.exit_code == STOPPED:
                    break
            except SandboxError:
                metrics["sandbox_error"] = 1.0
                if attempt == NUM_ATTEMPTS - 1:
                    raise
            finally:
                await (self.sandboxes.release if is_clean else self.sandboxes.remove)(handle)
        notes["error"] = f"the program ended the test runner (exit code {done.exit_code})"
        return []

    async def _execute(self, handle: SandboxHandle, nonce: str, program: str, tests: dict[str, Any]) -> ExecResult:
        folder, provider = f"/tmp/{secrets.token_hex(8)}", self.sandboxes.provider
        job = {
            "nonce": nonce,
            "program": f"{tests.get('before', '')}{program}{tests.get('after', '')}",
            "function": tests.get("fn_name"),
            "tests": tests["inputs"],
            "seconds": self.timeout_per_test,
            "memory_bytes": self.sandbox_config.memory_mb * 2**20 * 3 // 4,  # the runner must survive the program
        }
        await provider.upload_bytes(handle, f"{folder}/runner.py", RUNNER)
        await provider.upload_bytes(handle, f"{folder}/job.json", json.dumps(job).encode("utf-8", "replace"))
        seconds = START_SECONDS + len(tests["inputs"]) * (self.timeout_per_test + 1)
        try:
            return await provider.execute(handle, f"python3 {folder}/runner.py {folder}/job.json", timeout=seconds)
        except SandboxCommandTimeoutError:  # every test has its own limit, so the program must have stopped the runner
            return ExecResult(STOPPED, "", "")


def read_tests(info: Any, max_num_tests: int, rng: random.Random) -> dict[str, Any]:
    """Returns a row's `inputs`, `outputs` and, for functions, `fn_name`, with at most `max_num_tests` tests.

    Lists of lines become texts. A function's arguments, one JSON value per line, become a list. `info` has these keys
    itself or in `tests`, or is a list of objects with `input` and `output`. Any of it may be JSON. Raises `ValueError`.
    """
    try:
        tests = json.loads(info) if isinstance(info, str) else info
        if isinstance(tests, dict) and "tests" in tests:
            tests = json.loads(tests["tests"]) if isinstance(tests["tests"], str) else tests["tests"]
        if isinstance(tests, list):
            tests = {"inputs": [test["input"] for test in tests], "outputs": [test["output"] for test in tests]}
        inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
        if len(inputs) != len(outputs):
            raise ValueError
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{str(info)[:60]!r} is not of the form {{"inputs": [...], "outputs": [...]}}') from error
    chosen = sorted(rng.sample(range(len(inputs)), min(max_num_tests, len(inputs))))
    inputs, outputs = [inputs[i] for i in chosen], [outputs[i] for i in chosen]
    if function:
        inputs = [list(map(json.loads, given.splitlines())) if isinstance(given, str) else given for given in inputs]
        return {"inputs": inputs, "outputs": outputs, "fn_name": function}
    return {"inputs": list(map(_as_lines, inputs)), "outputs": list(map(_as_lines, outputs))}


def _as_lines(text: Any) -> str:
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def expected_digests(expected: Any, *, is_value: bool) -> set[str]:
    """Returns the digests of right outputs. Datasets store a function's value as it is, in a list, or as JSON."""
    if not is_value:
        return {runner.digest(runner.canonical_text(expected))}
    values = [expected]
    if isinstance(expected, str):
        with contextlib.suppress(ValueError):
            values.append(json.loads(expected))
    if isinstance(expected, list) and len(expected) == 1:
        values.append(expected[0])
    return {runner.digest(runner.canonical_value(value)) for value in values}
