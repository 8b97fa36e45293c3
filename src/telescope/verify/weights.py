"""Weights arrive in every engine as they were sent, and a fault of one bit would be noticed.

`weights.probe` compares; here it is asked twice: after an honest sync, where it must find nothing, and after a sync in
which one bit of one tensor was changed on the way, where it must name that tensor and no other.
"""

from __future__ import annotations

from telescope.orchestrator.parts import Parts
from telescope.verify.report import Check
from telescope.weights.plan import TensorMeta
from telescope.weights.probe import ProbeReport


async def check_weights(parts: Parts, when: str) -> Check:
    """Sync and probe; every server must hold what was sent."""
    probes = await parts.weights.prove()
    failed = {server: str(probe) for server, probe in probes.items() if not probe.ok}
    all_servers = len(probes) == parts.config.num_inference_servers
    return Check(
        f"weights {when} are held as sent",
        "; ".join(f"server {server}: {text}" for server, text in failed.items()) or _summary(probes),
        f"{_allowed(probes)} on {parts.config.num_inference_servers} server(s)",
        ok=all_servers and not failed,
        values={
            "servers": len(probes),
            "tensors": min((probe.num_tensors for probe in probes.values()), default=0),
            "mismatched": {str(server): probe.mismatched for server, probe in probes.items() if probe.mismatched},
        },
    )


async def check_spoiled_tensor(parts: Parts) -> Check:
    """Sync with one bit changed in one tensor, which every probe must name; then an honest sync to put it right."""
    async with parts.trainer.queue:
        name = tensor_to_spoil(await parts.trainer.weight_metadata())
    probes = await parts.weights.prove(spoil=name)
    noticed = [server for server, probe in probes.items() if list(probe.mismatched) == [name]]
    mended = await parts.weights.prove()
    still = [server for server, probe in mended.items() if not probe.ok]
    everywhere = len(noticed) == len(mended) == parts.config.num_inference_servers
    named = sorted({wrong for probe in probes.values() for wrong in probe.mismatched})
    measured = f"bit changed in {name}: noticed by {len(noticed)} of {len(probes)} server(s)"
    if not everywhere:
        measured += f", which named {', '.join(named[:4]) or 'nothing'}"
    if still:
        measured += f"; not mended by the next sync on server(s) {', '.join(map(str, still))}"
    return Check(
        "a tensor with one wrong bit is noticed",
        measured,
        "that tensor and no other, on every server; then mended",
        ok=everywhere and not still,
        values={"spoiled": name, "named": named, "noticed_by": noticed, "not_mended_on": still},
    )


def tensor_to_spoil(metas: list[TensorMeta]) -> str:
    """A matrix from the middle of the model: the kind that hides best."""
    matrices = [meta.name for meta in metas if len(meta.shape) > 1]
    return matrices[len(matrices) // 2]


def _summary(probes: dict[int, ProbeReport]) -> str:
    if not probes:
        return "no server could be asked"
    tensors = min(probe.num_tensors for probe in probes.values())
    logprobs = [probe.logprobs for probe in probes.values() if probe.logprobs is not None]
    text = f"{tensors} of {tensors} tensors bit for bit"
    return text + (f"; logprobs differ by at most {max(p.maximum for p in logprobs):.1e} nats" if logprobs else "")


def _allowed(probes: dict[int, ProbeReport]) -> str:
    bounds = [probe.logprobs.tolerance.maximum for probe in probes.values() if probe.logprobs is not None]
    return "every bit" + (f"; {max(bounds):.0e} nats" if bounds else "")
