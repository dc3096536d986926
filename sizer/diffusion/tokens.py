"""Tokenizers without a vocabulary: memory follows from how many tokens a prompt has, not from which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding


class UnknownWords:
    """A tokenizer of transformers for a prompt of `words` tokens; the rest up to the asked length is padding.

    `vocabulary` is the size of the embedding that reads the tokens. Token ids are int64 of shape (prompts, tokens), on the host.
    """

    padding_side = "right"
    pad_token, pad_token_id, bos_token_id = "<pad>", 0, 1
    added_tokens_encoder: dict[str, int] = {}  # noqa: RUF012 (an attribute of every tokenizer, which is read only)

    def __init__(self, *, model_max_length: int, words: int, vocabulary: int) -> None:
        self.model_max_length, self.words, self.vocabulary = model_max_length, words, vocabulary
        self.eos_token_id = vocabulary - 1  # CLIP looks for the largest id

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        **options: Any,
    ) -> BatchEncoding:
        """Return input_ids and attention_mask of each prompt."""
        prompts = 1 if isinstance(text, str) else len(text)
        length = self.words
        if padding == "max_length":
            length = max_length or self.model_max_length
        elif truncation and max_length:
            length = min(length, max_length)
        words = min(self.words, length)
        with torch.device("cpu"):
            ids = torch.zeros(prompts, length, dtype=torch.long)
            ids[:, :words] = torch.arange(2, 2 + words) % (self.vocabulary - 2) + 1
            ids[:, words - 1] = self.eos_token_id
            mask = torch.zeros(prompts, length, dtype=torch.long)
            mask[:, :words] = 1
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def apply_chat_template(self, messages: list, *, tokenize: bool = False, **options: Any) -> Any:
        """Return each conversation as a text, or its tokens."""
        several = bool(messages) and isinstance(messages[0], list)
        texts = ["text"] * (len(messages) if several else 1)
        if not tokenize:
            return texts if several else texts[0]
        kept = ("padding", "max_length", "truncation")
        return self(texts, **{name: value for name, value in options.items() if name in kept})

    def tokenize(self, text: str, **options: Any) -> list[str]:
        """Return the words of a prompt."""
        return ["text"] * self.words

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the ids of a prompt."""
        return [*range(1, self.words + 1)]

    def batch_decode(self, ids: Sequence, **options: Any) -> list[str]:
        """Return a text for each sequence."""
        return ["text"] * len(ids)

    def __len__(self) -> int:
        return self.vocabulary
