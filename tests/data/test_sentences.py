import re

import pytest

from xla_b2t.data.phonemes import PHONEMES, SILENCE
from xla_b2t.data.sentences import Lexicon, draw_sentences, parse_grammar, read_grammar, read_list
from xla_b2t.errors import UserError


@pytest.fixture(scope="module")
def lexicon():
    return Lexicon()


def test_lexicon_spells_words_with_a_silence_after_each(lexicon):
    names = [PHONEMES[label] for label in lexicon.labels("Bring it closer.", "here")]
    assert names == ["B", "R", "IH", "NG", "SIL", "IH", "T", "SIL", "K", "L", "OW", "S", "ER", "SIL"]


def test_lexicon_reads_hyphens_as_two_words_and_apostrophes_as_one(lexicon):
    assert lexicon.labels("Well-known", "here") == lexicon.labels("well known", "here")
    assert [PHONEMES[label] for label in lexicon.labels("I don't", "here")] == ["AY", "SIL", "D", "OW", "N", "T", "SIL"]


def test_lexicon_unknown_word_is_a_user_error(lexicon):
    with pytest.raises(UserError) as raised:
        lexicon.labels("He likes xqzzt a lot.", "mine.txt")
    assert raised.value.what == "'xqzzt' is not in the pronunciation dictionary"
    assert raised.value.where == "mine.txt"
    assert "another word" in raised.value.fix


def test_grammar_rules_are_all_there_and_all_used():
    grammar = read_grammar()
    used = {name for parts in grammar.values() for part in parts for name in re.findall(r"<(\w+)>", part)}
    assert used == set(grammar) - {"sentence"}
    assert all(part for parts in grammar.values() for part in parts)


def test_grammar_and_list_have_only_words_of_the_dictionary(lexicon):
    texts = [re.sub(r"<\w+>|[()?]", " ", part) for parts in read_grammar().values() for part in parts]
    texts = [text for text in texts if text.strip()]
    for text in [*texts, *read_list()]:
        assert lexicon.labels(text, "grammar.txt")


def test_parse_grammar_indented_line_goes_on_with_the_rule_above():
    assert parse_grammar("# note\nanimal: dog | cat\n  | red fox\n\nplace: park\n") == {
        "animal": ("dog", "cat", "red fox"),
        "place": ("park",),
    }


@pytest.fixture(scope="module")
def thousands():
    return draw_sentences(4000, seed=0)


def test_draw_sentences_thousands_are_distinct_and_of_everyday_length(thousands):
    assert len({sentence.text for sentence in thousands}) == 4000
    words = [len(sentence.text.split()) for sentence in thousands]
    assert min(words) >= 2
    assert max(words) <= 14
    assert 5.5 < sum(words) / len(words) < 8
    phonemes = [len(sentence.labels) for sentence in thousands]
    assert 25 < sum(phonemes) / len(phonemes) < 33
    assert len({word for sentence in thousands for word in sentence.text.lower().split()}) > 1000


def test_draw_sentences_use_every_phoneme_and_end_in_silence(thousands):
    assert {label for sentence in thousands for label in sentence.labels} == set(range(1, 41))
    assert all(sentence.labels[-1] == SILENCE for sentence in thousands)
    assert all(sentence.labels.count(SILENCE) == len(sentence.text.split()) for sentence in thousands)


def test_draw_sentences_are_written_as_english(thousands):
    for sentence in thousands:
        assert re.fullmatch(r"[A-Z][A-Za-z' ]*[.?]", sentence.text), sentence.text
        assert "  " not in sentence.text
        assert not re.search(r"\bi\b|\ba [aeio]|\bA [aeio]", sentence.text.replace("a one", "")), sentence.text
        assert not re.search(r"\b(january|texas|monday|spanish|new york)\b", sentence.text), sentence.text


def test_draw_sentences_seed_decides():
    assert draw_sentences(20, 1) == draw_sentences(20, 1)
    assert draw_sentences(20, 1) != draw_sentences(20, 2)


def test_draw_sentences_own_file_gives_its_lines_once(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("# mine\nBring it closer.\n\nHow are you?\nBring it closer.\nNo.\n")
    assert {sentence.text for sentence in draw_sentences(3, 0, str(path))} == {
        "Bring it closer.",
        "How are you?",
        "No.",
    }
    with pytest.raises(UserError) as raised:
        draw_sentences(4, 0, str(path))
    assert raised.value.what == "3 distinct sentences, the simulation needs 4"
    assert raised.value.where == str(path)
    assert "add sentences" in raised.value.fix


def test_draw_sentences_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="the sentences cannot be read") as raised:
        draw_sentences(1, 0, str(tmp_path / "no.txt"))
    assert raised.value.where == str(tmp_path / "no.txt")


def test_draw_sentences_line_without_words_is_a_user_error(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("...\n")
    with pytest.raises(UserError, match="a sentence without a word"):
        draw_sentences(1, 0, str(path))
