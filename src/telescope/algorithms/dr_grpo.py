"""Dr. GRPO: GRPO without its two divisions (arXiv 2503.20783).

As implemented: A = r - mean, not divided by the standard deviation, which would give most weight to very easy and very
hard prompts; loss of a token -A logp. `dr_grpo_loss_agg_mode: token_sum_norm` divides the sum by samples x
`max_tokens`, which does not depend on the lengths of completions; `token_mean` divides by trained tokens.
"""

from telescope.algorithms.base import Algorithm
from telescope.algorithms.grpo import policy_gradient_loss
from telescope.algorithms.reinforce_pp import center

ALGORITHM = Algorithm(
    baseline=center,
    token_loss=policy_gradient_loss,
    denominator=lambda config: "sample_budget" if config.dr_grpo_loss_agg_mode == "token_sum_norm" else "tokens",
)
