"""Surface forms of tokens, rule by rule, and on a tokenizer of bytes."""

import pytest
from data.wikitext import train_tokenizer

from modeling_gma.categories import CATEGORIES, numbered, surface_category, token_categories, token_texts


@pytest.mark.parametrize(
    "text, category",
    [
        (" city", "lower_alpha"),
        (" été", "lower_alpha"),
        (" iPhone", "lower_alpha"),
        (" the", "function_word"),
        ("The", "function_word"),
        (" THE", "function_word"),
        ("'s", "function_word"),
        (" I", "function_word"),
        (" ,", "punctuation"),
        ("@", "punctuation"),
        (" \u2014", "punctuation"),
        (" <", "punctuation"),
        (" London", "capitalized"),
        ("McC", "capitalized"),
        (" M", "capitalized"),
        ("us", "subword_alpha"),
        ("ing", "subword_alpha"),
        ("s", "subword_alpha"),
        (" 1990", "numeric"),
        ("7", "numeric"),
        ("\n", "newline_or_space"),
        (" ", "newline_or_space"),
        ("\n\n", "newline_or_space"),
        (" NASA", "all_caps"),
        ("II", "all_caps"),
        (" 2nd", "other"),
        ("\ufffd", "other"),
        (" x86", "other"),
    ],
)
def test_rules(text, category):
    assert surface_category(text) == category


def test_every_entry_of_a_tokenizer_has_a_category():
    tokenizer = train_tokenizer(["the Cat sat on the mat in 1990 , NASA said .\n"] * 50, 300)
    table, names = token_categories(tokenizer)
    assert names == list(CATEGORIES)
    assert table.shape == (len(tokenizer),)
    assert names[table[tokenizer.eos_token_id]] == "eos"
    assert (table == names.index("eos")).sum() == 1
    for text, category in ((" the", "function_word"), ("\n", "newline_or_space"), (" ,", "punctuation")):
        (number,) = tokenizer(text)["input_ids"]
        assert names[table[number]] == category
    # A byte that is part of a character.
    assert names[table[tokenizer("é")["input_ids"][0]]] == "other"


def test_categories_of_ones_own():
    tokenizer = train_tokenizer(["the cat"], 270)
    table, names = token_categories(tokenizer, lambda text: "vowel" if text in "aeiou" else "no vowel")
    assert set(names) == {"eos", "vowel", "no vowel"}
    (number,) = tokenizer("a")["input_ids"]
    assert names[table[number]] == "vowel"


def test_labels_are_numbered_in_order():
    table, names = numbered(["b", "a", "b", "c"], ["c"])
    assert names == ["c", "b", "a"] and table.tolist() == [1, 2, 1, 0]


def test_texts_of_tokens():
    tokenizer = train_tokenizer(["plain text"], 258)
    text = "a 🙂é<script>\n日\ufffdb"
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) == len(text.encode())
    assert "".join(texts) == text
    assert texts[2:6] == ["", "", "", "🙂"]
    # What is no text at all does not swallow what follows.
    broken = [tokenizer("é")["input_ids"][0]] * 6 + tokenizer("ok")["input_ids"]
    assert token_texts(tokenizer, broken)[-1] == "k"
    assert "".join(token_texts(tokenizer, broken)).endswith("ok")
