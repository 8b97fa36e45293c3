"""A generated run for `telescope ui --demo` and benchmarks: real rows and metrics of samples that no model wrote.

    tasks (prompts and answers) --> steps (one training step) --> writer (record) --> live (catches up, then goes on)

Groups, samples, metrics, distributions and alerts are made by the code that records real runs, from generated answers.
A step is a function of the seed and its number. Needs none of the packages that train.
"""
