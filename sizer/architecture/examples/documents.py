"""Recipes for texts with structure: tables, pages, entities, regions of an image found by another model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples import token_inputs, vision
from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, integers, ones, read, zeros

REGIONS = 36  # regions of an image, as the detector in front of LXMERT and VisualBERT yields them


def page_with_image(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of LayoutLMv2: words, their boxes, and the page's image under the name `image`."""
    return token_inputs.words_and_mask(spec) | {"bbox": token_inputs.boxes_of_words(spec), "image": vision.image(spec)}


def regions(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of LXMERT: words, and 36 regions as features and as corners in parts of the image."""
    config = spec.config
    inputs = token_inputs.words_and_mask(spec) | {
        "visual_feats": floats(spec.batch, REGIONS, config.visual_feat_dim),
        "visual_pos": floats(spec.batch, REGIONS, config.visual_pos_dim),
    }
    if spec.training and "QuestionAnswering" in spec.class_name:
        inputs["labels"] = integers(config.num_qa_labels, spec.batch)
    return inputs


def region_embeddings(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of VisualBERT: words, and 36 regions as embeddings; its pretraining labels cover both."""
    inputs = token_inputs.words_and_mask(spec) | {
        "visual_embeds": floats(spec.batch, REGIONS, spec.config.visual_embedding_dim),
        "visual_attention_mask": ones(spec.batch, REGIONS),
        "visual_token_type_ids": ones(spec.batch, REGIONS),
    }
    if spec.training and "PreTraining" in spec.class_name:
        inputs["labels"] = integers(token_inputs.vocabulary(spec), spec.batch, spec.tokens + REGIONS)
        inputs["sentence_image_labels"] = integers(2, spec.batch)
    return inputs


def table(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of TAPAS: words with seven token types (row and column among them); the first half is the question."""
    kinds = zeros(spec.batch, spec.tokens, len(spec.config.type_vocab_sizes))
    half = spec.tokens // 2
    place = torch.arange(spec.tokens - half)
    kinds[:, half:, 0] = 1
    kinds[:, half:, 1] = place % 4 + 1
    kinds[:, half:, 2] = (place // 4).clamp(max=60) + 1
    inputs = token_inputs.words_and_mask(spec) | {"token_type_ids": kinds}
    if spec.training and spec.takes("table_mask"):
        inputs["labels"] = (torch.arange(spec.tokens) == half).long().repeat(spec.batch, 1)
    return inputs


def shaped_words(spec: ExampleSpec) -> dict[str, Any]:
    """Return words for RoCBert, with ids of their shapes and pronunciations."""
    shape = integers(spec.config.shape_vocab_size, spec.batch, spec.tokens)
    pronunciation = integers(spec.config.pronunciation_vocab_size, spec.batch, spec.tokens)
    return token_inputs.words_and_mask(spec) | {"input_shape_ids": shape, "input_pronunciation_ids": pronunciation}


def word_boxes_in_parts(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of BROS: words and their boxes as eight coordinates in parts of the page."""
    first = ones(spec.batch, spec.tokens).bool()
    inputs = token_inputs.words_and_mask(spec) | {"bbox": floats(spec.batch, spec.tokens, 8)}
    return inputs | ({"bbox_first_token_mask": first} if spec.takes("bbox_first_token_mask") else {})


def question_token(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of Splinter: a text with its question token."""
    inputs = token_inputs.words_and_mask(spec)
    inputs["input_ids"][:, 1] = spec.config.question_token_id
    return inputs


def retrieved(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of RAG: a question, and the documents that a retriever found for it, with their scores."""
    count = spec.config.n_docs
    inputs = token_inputs.words_and_mask(spec)
    context = integers(1000, spec.batch * count, spec.tokens) + 100
    return inputs | {
        "context_input_ids": context,
        "context_attention_mask": torch.ones_like(context),
        "doc_scores": floats(spec.batch, count),
    }


def bytes_or_arrays(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of Perceiver: words, pixels or a plain array under the name `inputs`, after the head's preprocessor."""
    if "MaskedLM" in spec.class_name or "SequenceClassification" in spec.class_name:
        ids = integers(spec.config.vocab_size, spec.batch, spec.config.max_position_embeddings)
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    if "OpticalFlow" in spec.class_name:
        return {"inputs": floats(spec.batch, 2, 27, *read(spec.config, "train_size", default=(368, 496)))}
    if "Image" in spec.class_name:
        return {"inputs": floats(spec.batch, 3, 224, 224)}
    return {"inputs": floats(spec.batch, spec.tokens, spec.config.d_model)}


def folded_positions(spec: ExampleSpec) -> dict[str, Any]:
    """Return the inputs of Reformer: in training exactly as many tokens as its axial positions have places."""
    shape = spec.config.axial_pos_shape
    length = shape[0] * shape[1] if spec.training and spec.config.axial_pos_embds else spec.tokens
    ids = integers(spec.config.vocab_size - 3, spec.batch, length) + 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def marked_text(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Jev: one prompt with four questions of two options each, and the positions of their ends."""
    marks = torch.linspace(1, spec.tokens, 4).long().unsqueeze(0)
    ids = token_inputs.sentence(spec)[:1]
    return {"input_ids": ids, "marks": marks, "num_options": torch.full((1, 4), 2), "question_type_ids": zeros(1, 4)}


FAMILIES: dict[str, Recipe] = {
    "bros": word_boxes_in_parts,
    "jev": marked_text,
    "layoutlmv2": page_with_image,
    "lxmert": regions,
    "perceiver": bytes_or_arrays,
    "rag": retrieved,
    "reformer": folded_positions,
    "roc_bert": shaped_words,
    "splinter": question_token,
    "tapas": table,
    "visual_bert": region_embeddings,
}
