"""Transfers new weights from the trainer to running engines, and verifies them.

`plan` describes a sync, `communicator` and `control_channel` connect one engine, `sender` and `receiver` are the two
ends, and `fingerprint`, `engine_weights`, `engine_experts` and `probe` verify the result. vLLM's side is
`inference/vllm/weights.py`.
"""
