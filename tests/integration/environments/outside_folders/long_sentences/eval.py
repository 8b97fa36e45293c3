"""The words of the environment that have more than six letters."""

from telescope.evals import Eval


class LongSentences(Eval):
    environment_name = "graded_sentence"
    environment_kwargs = {"flavor": "plain"}  # noqa: RUF012

    def load_dataset(self, num_samples=-1, **kwargs):
        super().load_dataset(num_samples=-1, **kwargs)
        self._samples = [sample for sample in self._samples if sample.metadata["length"] > 6]
