"""Countdown: combine given numbers, each exactly once, to reach a target."""
