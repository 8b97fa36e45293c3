"""A record whose texts, names and messages attack whoever shows them."""

from __future__ import annotations

import json
from pathlib import Path

from telescope.record.recorder import Recorder
from telescope.record.run_info import begin_run, end_run

T0 = 1_800_000_000.0
ELSEWHERE = "http://elsewhere.example"
LONG_LINE = 10 * 2**20
"""Characters of a line without an end."""

MARKUP = (
    "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
    f"<img src='{ELSEWHERE}/pixel.png'><svg onload='window.attacked = 3'></svg><iframe src='{ELSEWHERE}'></iframe>"
    "<style>body { display: none }</style><base href='http://elsewhere.example/'>"
    "<meta http-equiv='refresh' content='0;url=http://elsewhere.example'>"
)
BIDI = "safe \u202egnp.exe\u202c \u2066isolate\u2069 zero\u200bwidth"
MARKDOWN = (
    f"![a picture]({ELSEWHERE}/answer.png) [a link](javascript:window.attacked=4) <{ELSEWHERE}/auto.png>\n\n"
    f"[data](data:text/html,<script>window.attacked=5</script>) ![data](data:image/svg+xml,<svg/onload=alert(1)>)\n\n"
    "$\\href{javascript:window.attacked=6}{x}$ $$\\includegraphics{http://elsewhere.example/tex.png}$$ "
    "\\(\\htmlData{a=b}{y}\\) $\\def\\a{\\a\\a}\\a$\n\n```html\n<script>window.attacked = 7</script>\n```\n"
    f"```python\nallowed = True  # {BIDI}\n```\n\n`{BIDI}` ![{BIDI}](x) $x_\\text{{{BIDI}}}$\n"
)
TERMINAL = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x1b[2J\x07 \x00 bell"
HIDDEN = "\u202e\u2066\u200b\x1b\x07"
"""Characters that no page may show as they are."""

NAME = f"{MARKUP} {BIDI}"
"""Of environments, evals, tools, metrics, tags, processes."""
ATTACK = f"{MARKUP}\n{MARKDOWN}\n{TERMINAL}\n{BIDI}"


def write_hostile_run(run_dir: Path) -> None:
    """Writes a finished run of two steps. Answer `0-0` has every attack, `0-1` is one line of 10 MB."""
    config = json.dumps(
        {"values": {"model": ATTACK, NAME: NAME, f"key {BIDI}": BIDI, "environments": [{"name": NAME}]}}
    )
    with Recorder(run_dir) as recorder:
        info = begin_run(
            recorder,
            name=f"hostile {BIDI} {NAME}",
            config_hash="c",
            config_json=config,
            first_step=0,
            num_steps=2,
            project=NAME,
            tags=[NAME, BIDI],
        )
        recorder.write("environments", {"key": NAME, "name": NAME, "purpose": "training", "metrics_ranges": NAME})
        for step in range(2):
            _write_step(recorder, step)
        evaluation = {
            "eval_id": f"../{NAME}", "name": NAME, "status": "finished", "metric": NAME, "accuracy": 0.5,
        }  # fmt: skip
        recorder.write("evals", {**evaluation, "step": 1, "version": 2, "num_items": 1, "num_completions": 1})
        recorder.write(
            "eval_samples", {"eval_id": evaluation["eval_id"], "sample_id": "0-0", "item": 0, "completion": 0}
        )
        for level in ("warning", "error"):
            recorder.write("alerts", {"time": T0, "level": level, "kind": NAME, "message": ATTACK, "step": 1})
        end_run(recorder, info, "failed", config_json=config, error=ATTACK)


def _write_step(recorder: Recorder, step: int) -> None:
    for index, text in enumerate((ATTACK, "a" * LONG_LINE)):
        sample = f"{step}-{index}"
        messages = json.dumps([{"role": NAME, "content": ATTACK}, {"role": "user", "content": ATTACK}])
        recorder.write("prompts", {"prompt_key": "0", "environment": NAME, "text": ATTACK, "messages": messages})
        times = {"started_at": T0 + step, "generated_at": T0 + step + 0.5, "finished_at": T0 + step + 0.7}
        recorder.write(
            "samples",
            {
                **{"sample_id": sample, "group_id": step, "sample_index": index, "step": step, "status": "kept"},
                **{"environment": NAME, "reason": NAME, "stop_reason": NAME, "failure_message": ATTACK},
                **{"failure_kind": NAME, "reward": float(index), "advantage": 0.5, "num_turns": 1, **times},
                "prompt_key": "0",
                **{
                    "golden": {NAME: ATTACK},
                    "metrics": {NAME: 1.0},
                    "tags": {NAME: BIDI},
                    "server": 0,
                    "lane": 0,
                },
            },
        )
        recorder.write("turns", {"sample_id": sample, "turn": 0, "role": "assistant", "text": text, "num_tokens": 3})
        recorder.write(
            "tool_calls",
            {"sample_id": sample, "turn": 0, "call": 0, "name": NAME, "arguments": NAME, "result": text[: 2**20]},
        )
        recorder.write("info", {"sample_id": sample, "number": 0, "turn": 0, "key": NAME, "value": ATTACK})
        span = {"name": NAME, "component": "rollout", "server": 0, "step": step, "sample_id": sample}
        recorder.write("spans", {**span, "start": T0 + step, "end": T0 + step + 0.5, "attributes": {"lane": "0"}})
    group = {"group_id": step, "environment": NAME, "status": "kept", "step": step, "num_samples": 2}
    recorder.write("groups", {**group, "reason": NAME, "reward_mean": 0.5, "reward_std": 0.5})
    ends = {"started_at": T0 + step, "ended_at": T0 + step + 1, "reward_mean": 0.5}
    recorder.write("steps", {"step": step, "version": step + 1, **ends, "metrics": {NAME: 1.0, "entropy": 1.0}})
    recorder.write("gauges", {"time": T0 + step, "name": NAME, "component": NAME, "value": 1.0, "node": NAME})
    recorder.write(
        "gauges",
        {"time": T0 + step, "name": "cpu_utilization_percent", "component": "host", "value": 1.0, "node": NAME},
    )
    for message in (ATTACK, "b" * LONG_LINE):
        line = {"time": T0 + step, "level": "ERROR", "component": NAME, "place": NAME, "source": NAME}
        recorder.write("logs", {**line, "message": message})
