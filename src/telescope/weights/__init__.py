"""New weights from the trainer's ranks into running engines, and the proof that they arrived.

`plan` describes a sync, `communicator` connects one engine, `sender` and `receiver` are its ends, `fingerprint`,
`held` and `probe` prove the result. vLLM's side of it is `telescope.inference.vllm.weights`.
"""
