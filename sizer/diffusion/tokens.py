"""Tokenizers without a vocabulary, and image processors: memory follows from how many tokens and pixels there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BatchEncoding, BatchFeature


class UnknownWords:
    """A tokenizer of transformers for a prompt of `words` tokens; the rest up to the requested length is padding.

    `vocabulary` is the size of the embedding that reads the tokens. Token ids are int64 of shape (prompts, tokens), on the
    host.
    """

    padding_side = "right"
    pad_token, eos_token, pad_token_id, bos_token_id = "<pad>", "</s>", 0, 1
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

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """Return the id of a token, or of each."""
        return 1 if isinstance(tokens, str) else [1] * len(tokens)

    def decode(self, ids: Sequence, **options: Any) -> str:
        """Return the text of a sequence."""
        return "text"

    def batch_decode(self, ids: Sequence, **options: Any) -> list[str]:
        """Return a text for each sequence."""
        return ["text"] * len(ids)

    def __len__(self) -> int:
        return self.vocabulary


class UnknownImages:
    """An image processor of transformers that makes float32 pixels of shape (images, 3, side, side) of any images, on the host."""

    def __init__(self, *, side: int) -> None:
        self.side = side

    def __call__(self, images: Any, **options: Any) -> BatchFeature:
        """Return pixel_values of each image."""
        count = len(images) if isinstance(images, (list, tuple)) else 1
        with torch.device("cpu"):
            return BatchFeature({"pixel_values": torch.zeros(count, 3, self.side, self.side)})

    def preprocess(self, images: Any, **options: Any) -> BatchFeature:
        """Return the same as a call."""
        return self(images, **options)


class UnknownWordsAndImages:
    """The processor of Qwen2-VL for prompts of `words` tokens, each with an image: its patches, and a token for each 2 x 2 of them.

    Sizes are those of its image processor (transformers 5.24, models/qwen2_vl/image_processing_qwen2_vl.py): sides are rounded to
    28 pixels, a patch is 14 x 14 pixels of two frames. The tokens of the image lie behind the template's.
    """

    template = 64  # tokens before the image (QwenImageEditPipeline.prompt_template_encode_start_idx)

    def __init__(self, *, words: int, image_token: int) -> None:
        self.words, self.image_token = words, image_token

    def __call__(self, text: Sequence[str], images: Any, **options: Any) -> BatchFeature:
        """Return input_ids, attention_mask, pixel_values in float32 and image_grid_thw, on the host."""
        image = images[0] if isinstance(images, (list, tuple)) else images
        rows, columns = (2 * max(round(side / 28), 1) for side in (image.height, image.width))
        prompts = len(text)
        with torch.device("cpu"):
            before, seen, after = (torch.arange(n) % 1000 + 1 for n in (self.template, rows * columns // 4, self.words))
            ids = torch.cat([before, torch.full_like(seen, self.image_token), after]).expand(prompts, -1).contiguous()
            return BatchFeature(
                {
                    "input_ids": ids,
                    "attention_mask": torch.ones_like(ids),
                    "pixel_values": torch.zeros(prompts * rows * columns, 3 * 2 * 14 * 14),
                    "image_grid_thw": torch.tensor([[1, rows, columns]] * prompts),
                }
            )
