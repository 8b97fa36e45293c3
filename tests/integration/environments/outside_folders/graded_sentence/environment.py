"""Write a sentence with a given word; graded by a rubric whose ranges are for the charts."""

from telescope.environments import Rubric, Sample, SingleTurnEnvironment


def has_word(completion, sample):
    return float(sample.answer in completion.split()), sample.answer


async def num_words(completion):
    return len(completion.split())


def num_exclamations(completion):
    return completion.count("!")


class GradedSentence(SingleTurnEnvironment):
    def __init__(self, system_prompt=None, instruction_prompt="Write one sentence with this word.", **kwargs):
        super().__init__(system_prompt=system_prompt, instruction_prompt=instruction_prompt, **kwargs)
        self.rubric = (
            Rubric()
            .add_reward(has_word, weight=1.0, range_min=0.0, range_max=1.0)
            .add_reward(num_words, weight=0.1, range_min=0, range_max=100)
            .add_metric(num_exclamations, range_min=0, range_max=10, invert=True)
        )
        self.metrics_ranges = self.rubric.metrics_ranges

    def load_dataset(self, num_samples=-1, dataset_name="words", **kwargs):
        words = ("comet", "lens", "observatory", "eclipse")
        self._samples = [Sample(prompt=word, answer=word, metadata={"length": len(word)}) for word in words]

    async def compute_reward(self, completion, sample, eos_token=""):
        return await self.rubric.score(
            completion=completion, sample=sample, eos_token=eos_token, extra_sample_tags={"flavor": self.flavor}
        )
