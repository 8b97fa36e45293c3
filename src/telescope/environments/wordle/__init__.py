"""Wordle: guess a word of five letters in six attempts."""
