"""Whether a run is healthy: rules with limits (`rules`), their alerts (`watch`), and the verdict in words (`verdict`).

The run evaluates the rules after every step and records what they find in the table `alerts`; the dashboard and the
terminal view evaluate the same rules for the state of now.
"""
