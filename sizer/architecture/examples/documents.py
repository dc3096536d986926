"""Recipes for texts with structure: tables, pages, entities, regions of a picture found by another model."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples import text, vision
from sizer.architecture.examples.setting import Recipe, Setting, read
from sizer.architecture.examples.tensors import floats, integers, ones, zeros

REGIONS = 36  # regions of a picture, as the detector in front of LXMERT and VisualBERT yields them


def words_and_mask(setting: Setting) -> dict[str, object]:
    """The inputs of a plain encoder."""
    return {"input_ids": text.sentence(setting), "attention_mask": ones(setting.batch, setting.length)}


def page_with_image(setting: Setting) -> dict[str, object]:
    """LayoutLMv2: words, their boxes, and the page's picture under the name `image`."""
    return words_and_mask(setting) | {"bbox": text.boxes_of_words(setting), "image": vision.image(setting)}


def regions(setting: Setting) -> dict[str, object]:
    """LXMERT: words, and 36 regions as features and as corners in parts of the picture."""
    config = setting.config
    inputs = words_and_mask(setting) | {
        "visual_feats": floats(setting.batch, REGIONS, config.visual_feat_dim),
        "visual_pos": floats(setting.batch, REGIONS, config.visual_pos_dim),
    }
    if setting.training and "QuestionAnswering" in setting.class_name:
        inputs["labels"] = integers(config.num_qa_labels, setting.batch)
    return inputs


def region_embeddings(setting: Setting) -> dict[str, object]:
    """VisualBERT: words, and 36 regions as embeddings; its pretraining labels cover both."""
    inputs = words_and_mask(setting) | {
        "visual_embeds": floats(setting.batch, REGIONS, setting.config.visual_embedding_dim),
        "visual_attention_mask": ones(setting.batch, REGIONS),
        "visual_token_type_ids": ones(setting.batch, REGIONS),
    }
    if setting.training and "PreTraining" in setting.class_name:
        inputs["labels"] = integers(text.vocabulary(setting), setting.batch, setting.length + REGIONS)
        inputs["sentence_image_labels"] = integers(2, setting.batch)
    return inputs


def table(setting: Setting) -> dict[str, object]:
    """TAPAS: words with seven token types (row and column among them); the first half is the question."""
    kinds = zeros(setting.batch, setting.length, len(setting.config.type_vocab_sizes))
    half = setting.length // 2
    place = torch.arange(setting.length - half)
    kinds[:, half:, 0] = 1
    kinds[:, half:, 1] = place % 4 + 1
    kinds[:, half:, 2] = (place // 4).clamp(max=60) + 1
    inputs = words_and_mask(setting) | {"token_type_ids": kinds}
    if setting.training and setting.takes("table_mask"):
        inputs["labels"] = (torch.arange(setting.length) == half).long().repeat(setting.batch, 1)
    return inputs


def shaped_words(setting: Setting) -> dict[str, object]:
    """RoCBert: words with ids of their shapes and sounds beside them."""
    shape = integers(setting.config.shape_vocab_size, setting.batch, setting.length)
    sound = integers(setting.config.pronunciation_vocab_size, setting.batch, setting.length)
    return words_and_mask(setting) | {"input_shape_ids": shape, "input_pronunciation_ids": sound}


def word_boxes_in_parts(setting: Setting) -> dict[str, object]:
    """BROS: words and their boxes as eight coordinates in parts of the page."""
    first = ones(setting.batch, setting.length).bool()
    inputs = words_and_mask(setting) | {"bbox": floats(setting.batch, setting.length, 8)}
    return inputs | ({"bbox_first_token_mask": first} if setting.takes("bbox_first_token_mask") else {})


def question_token(setting: Setting) -> dict[str, object]:
    """Splinter: a text with its question token."""
    inputs = words_and_mask(setting)
    inputs["input_ids"][:, 1] = setting.config.question_token_id
    return inputs


def retrieved(setting: Setting) -> dict[str, object]:
    """RAG: a question, and the documents that a retriever found for it, with their scores."""
    count = setting.config.n_docs
    inputs = words_and_mask(setting)
    context = integers(1000, setting.batch * count, setting.length) + 100
    return inputs | {
        "context_input_ids": context,
        "context_attention_mask": torch.ones_like(context),
        "doc_scores": floats(setting.batch, count),
    }


def bytes_or_arrays(setting: Setting) -> dict[str, object]:
    """Perceiver: words, pixels or a plain array under the name `inputs`, after the head's preprocessor."""
    if "MaskedLM" in setting.class_name or "SequenceClassification" in setting.class_name:
        ids = integers(setting.config.vocab_size, setting.batch, setting.config.max_position_embeddings)
        return {"inputs": ids, "attention_mask": torch.ones_like(ids)}
    if "OpticalFlow" in setting.class_name:
        return {"inputs": floats(setting.batch, 2, 27, *read(setting.config, "train_size", default=(368, 496)))}
    if "Image" in setting.class_name:
        return {"inputs": floats(setting.batch, 3, 224, 224)}
    return {"inputs": floats(setting.batch, setting.length, setting.config.d_model)}


def folded_positions(setting: Setting) -> dict[str, object]:
    """Reformer: in training exactly as many tokens as its axial positions have places."""
    shape = setting.config.axial_pos_shape
    length = shape[0] * shape[1] if setting.training and setting.config.axial_pos_embds else setting.length
    ids = integers(setting.config.vocab_size - 3, setting.batch, length) + 3
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def marked_text(setting: Setting) -> dict[str, Tensor]:
    """Jev: one prompt, and where in it four questions with two options each end."""
    marks = torch.linspace(1, setting.length, 4).long().unsqueeze(0)
    ids = text.sentence(setting)[:1]
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
