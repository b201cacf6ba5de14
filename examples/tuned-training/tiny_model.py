"""A small language model, a tokenizer and texts, made without downloads."""

from __future__ import annotations

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
BLOCK = 32  # tokens


def tiny_gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(WORDS) + 2,
            n_positions=BLOCK,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: at for at, word in enumerate(["<end>", "<unknown>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unknown>",
        eos_token="<end>",
        pad_token="<end>",
    )


def token_blocks(count: int) -> list[dict[str, list[int]]]:
    """Blocks of tokens that count up: each is the next of the one before."""
    blocks = []
    for first in range(count):
        tokens = [2 + (first + at) % len(WORDS) for at in range(BLOCK)]
        blocks.append({"input_ids": tokens, "labels": tokens})
    return blocks


def texts(count: int) -> Dataset:
    """Texts of different lengths."""
    return Dataset.from_list([{"text": " ".join(WORDS[: 3 + first % 8])} for first in range(count)])
