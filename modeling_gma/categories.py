"""Surface forms of tokens: what a component's tokens are compared with where nobody has labelled them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


CATEGORIES = (
    "lower_alpha",
    "function_word",
    "punctuation",
    "capitalized",
    "subword_alpha",
    "numeric",
    "newline_or_space",
    "eos",
    "all_caps",
    "other",
)

# Closed classes of English: articles, conjunctions, prepositions, pronouns, auxiliaries, and pieces of contractions.
_WORDS = """
a an the
and or but nor so yet if because while although though unless whereas whether than as
about above across after against along among around at before behind below beneath beside between beyond by despite
down during except for from in inside into like near of off on onto out outside over past since through throughout
till to toward towards under until unlike up upon via with within without
i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself
we us our ours ourselves they them their theirs themselves
this that these those who whom whose which what when where why how there here then
am is are was were be been being do does did doing done have has had having
will would shall should can could may might must not no
's 't 're 've 'll 'd 'm
"""
FUNCTION_WORDS = frozenset(_WORDS.split())

AS_IT_IS = {"clean_up_tokenization_spaces": False, "skip_special_tokens": False}


def surface_category(text: str) -> str:
    """The category of a token by its text, leading space included; the first rule that fits decides.

    newline_or_space: nothing but white space.
    numeric: nothing but digits.
    punctuation: no letter and no digit, and all of it characters, not bytes of a part of one.
    function_word: one of `FUNCTION_WORDS`, in any case, where a word can begin: the "us" of "virus" is none.
    other: not letters alone, such as "2nd".
    all_caps: two letters or more, all capitals.
    capitalized: begins with a capital.
    lower_alpha: other letters after a space, so the beginning of a word.
    subword_alpha: other letters without a space before them.

    The end of text is a token, not a text: `token_categories` knows it.
    """
    word = text.strip()
    if not word:
        return "newline_or_space"
    if word.isdecimal():
        return "numeric"
    if "\ufffd" in word:
        return "other"
    if not any(character.isalnum() for character in word):
        return "punctuation"
    if word.lower() in FUNCTION_WORDS and not text[0].islower():
        return "function_word"
    if not word.isalpha():
        return "other"
    if len(word) > 1 and word.isupper():
        return "all_caps"
    if word[0].isupper():
        return "capitalized"
    return "lower_alpha" if text[0].isspace() else "subword_alpha"


def token_categories(tokenizer, category: Callable[[str], str] = surface_category) -> tuple[torch.Tensor, list[str]]:
    """The category of every entry of a tokenizer, (V,), and the names that the numbers stand for.

    `category` takes the text of a token, with its leading space, and returns the name of a category. The tokenizer's
    special tokens are "eos" for the end of text and "other" for the rest.
    """
    special = dict.fromkeys(tokenizer.all_special_ids, "other") | {tokenizer.eos_token_id: "eos"}
    found = [
        special[number] if number in special else category(tokenizer.decode([number], **AS_IT_IS))
        for number in range(len(tokenizer))
    ]
    return numbered(found, CATEGORIES if category is surface_category else ())


def numbered(labels: Sequence[str], names: Sequence[str] = ()) -> tuple[torch.Tensor, list[str]]:
    """Labels as numbers, and the names that they stand for: `names`, then others in the order in which they appear."""
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels]), list(numbers)


def token_texts(tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; of tokens that share a character, the last has it and the others have nothing."""
    texts, waiting = [], []
    for number in ids:
        waiting.append(number)
        text = tokenizer.decode(waiting, **AS_IT_IS)
        # A character has four bytes at most; what is none after as many tokens will not become one.
        if text.endswith("\ufffd") and len(waiting) < 4:
            texts.append("")
        else:
            texts.append(text)
            waiting = []
    return texts
