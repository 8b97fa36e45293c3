"""Wordle: the rules, and attempts to cheat."""

import importlib.machinery
import sys
import types

import pytest
from tests.unit.environments.turns import play as play_turns

from telescope.environments.base import Sample
from telescope.environments.registry import get_environment
from telescope.environments.wordle.environment import color, secret_words


def play(*completions, secret="crane", **kwargs):
    environment = get_environment("wordle", **kwargs)
    state, replies = play_turns(environment, Sample("Guess.", answer=secret), *completions)
    return environment.compute_reward(state), [reply[0] for reply in replies], state


@pytest.mark.parametrize(("guess", "secret", "colors"), [
    ("crane", "crane", "GGGGG"), ("slate", "crane", "XXGXG"), ("nacre", "crane", "YYYYG"),
    ("geese", "eagle", "YYXXG"), ("eerie", "eagle", "GXXXG"), ("llama", "lilac", "GYYXX"),
    ("fuzzy", "crane", "XXXXX"),
])  # fmt: skip
def test_letters_are_colored_by_the_rules(guess, secret, colors):
    assert color(guess, secret) == colors


def test_a_game_that_is_won():
    result, replies, state = play("I try [slate].", "<think>[wrong]</think>[CRANE]")
    assert replies == ["S L A T E\nX X G X G\nYou have 5 attempts left."]
    assert (result.total_reward, result.sample_metrics["num_guesses"], state.stop_reason) == (1.0, 2.0, "solved")
    assert result.info_turns == [{"guess": "slate", "feedback": "XXGXG"}, {"guess": "crane", "feedback": "GGGGG"}]


def test_the_word_in_the_last_attempt_counts():
    result, _, state = play("[slate]", "[crane]", max_turns=2)
    assert (result.total_reward, state.stop_reason) == (1.0, "solved")
    result, replies, state = play("[slate]", "[nacre]", max_turns=2)
    assert (result.total_reward, state.stop_reason) == (pytest.approx(0.2 * 3 / 5), "max_turns_reached")
    assert replies[0].endswith("You have 1 attempt left.")


@pytest.mark.parametrize(("cheat", "words"), [
    ("[crane] [slate]", "exactly one word"), ("crane", "exactly one word"), ("", "exactly one word"),
    ("[apple] is the example", "A P P L E"), ("[cranes]", "must have 5 letters"),
    ("[c r a n e]", "exactly one word"), ("[crän\u0435]", "exactly one word"),
    ("[\uff43\uff52\uff41\uff4e\uff45]", "exactly one word"), ("<think>[crane]</think>", "exactly one word"),
    ("[" * 10_000, "exactly one word"), ("[" + "a" * 100_000 + "]", "exactly one word"),
    ("Tell me the secret word. G G G G G", "exactly one word"),
])  # fmt: skip
def test_invalid_guesses_use_a_turn_without_reward(cheat, words):
    result, replies, _ = play(cheat)
    assert words in replies[0]
    assert result.sample_metrics["solved"] == 0.0 and result.total_reward < 0.2
    assert "crane" not in replies[0].lower()


def test_many_guesses_in_many_answers_cannot_exceed_the_attempts():
    result, _, state = play(*(f"[{word}]" for word in secret_words("own")[:50]), secret="zebra")
    assert state.num_turns == 6 and result.total_reward < 0.2


def test_repeating_a_guess_reveals_nothing():
    result, replies, _ = play("[slate]", "[slate]")
    assert replies[1].startswith("You have guessed slate before.")
    assert (result.sample_metrics["num_guesses"], result.sample_metrics["num_invalid"]) == (1.0, 1.0)


def test_known_words_may_be_required():
    assert "not a known word" in play("[aeiou]", require_known_words=True)[1][0]
    assert "A E I O U" in play("[aeiou]")[1][0]


def test_secrets_are_words_of_five_letters_in_a_seeded_order():
    words = secret_words("own")
    assert len(words) > 500 and list(words) == sorted(set(words))
    assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in words)
    orders = [[s.answer for s in get_environment("wordle", seed=seed)._loaded()] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and set(orders[0]) == set(words)
    assert len(get_environment("wordle", num_samples=2000)) == 2000


def test_textarenas_words_need_its_package(monkeypatch):
    secret_words.cache_clear()
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ModuleNotFoundError, match="textarena"):
        get_environment("wordle", word_source="textarena").get_sample(0)
    module = types.ModuleType("textarena.envs.Wordle.env")
    module.WordleEnv = lambda word_length: types.SimpleNamespace(word_list=["House", "crane", "x", "na\u00efve"])
    for name in ("textarena", "textarena.envs", "textarena.envs.Wordle"):
        package = types.ModuleType(name)
        package.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert {s.answer for s in get_environment("wordle", word_source="textarena")._loaded()} == {"house", "crane"}
    secret_words.cache_clear()
