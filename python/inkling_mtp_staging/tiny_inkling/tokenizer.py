"""A byte-level tokenizer whose words are made of syllables.

Any text encodes, at worst byte by byte. The model answers only in words, so that its
text prints.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"


def vocabulary(vocab_size: int) -> tuple[list[str], list[tuple[str, str]], range]:
    """The tokens in id order, the BPE merges, and the ids of the words.

    A word is a space and one to three syllables. Raises ValueError if ``vocab_size``
    leaves fewer than two words or asks for more than there are.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    space = "\u0120"  # the byte-level alphabet's space
    syllables = ["".join(s) for s in product(CONSONANTS, VOWELS)]
    tokens = [END_OF_TEXT, *sorted(ByteLevel.alphabet()), *syllables]
    merges = [(s[0], s[1]) for s in syllables]
    first_word = len(tokens)
    stems = [space]
    while len(tokens) < vocab_size and len(stems[0]) < 7:
        longer = []
        for stem, syllable in product(stems, syllables):
            if len(tokens) == vocab_size:
                break
            tokens.append(stem + syllable)
            merges.append((stem, syllable))
            longer.append(stem + syllable)
        stems = longer
    if not first_word + 2 <= len(tokens) == vocab_size:
        raise ValueError(
            f"vocabulary of {vocab_size}: use {first_word + 2} to {len(tokens)}"
        )
    return tokens, merges, range(first_word, vocab_size)


def write_tokenizer(model_dir: Path, vocab_size: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` to ``model_dir``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, merges, _ = vocabulary(vocab_size)
    tokenizer = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 65536,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (model_dir / "tokenizer_config.json").write_text(text)
