from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from sizer.architecture.schema import annotation_words, check_value
from sizer.base.errors import ConfigError

INT = frozenset({"int"})


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, {"int"}),
        ("int | None", {"int", "None"}),
        (int | list[int] | None, {"int", "list", "None"}),
        (list[int], {"list", "int"}),
        (Sequence[int], {"collections", "abc", "Sequence", "int"}),
        (Any, {"Any"}),
        (Literal["cls"], {"typing", "Literal", "cls"}),
    ],
)
def test_the_words_of_an_annotation(annotation: object, words: set[str]):
    assert annotation_words(annotation) == words


@pytest.mark.parametrize(
    ("where", "value", "allowed"),
    [
        ("num_hidden_layers", -1, "whole numbers from 1 to 1,024"),
        ("num_hidden_layers", 0, "whole numbers from 1 to 1,024"),
        ("num_hidden_layers", 10**9, "whole numbers from 1 to 1,024"),
        ("text_config.num_hidden_layers", 1025, "whole numbers from 1 to 1,024"),
        ("n_layer", 0, "whole numbers from 1 to 1,024"),
        ("encoder_layers", -1, "whole numbers from 1 to 1,024"),
        ("num_nextn_predict_layers", -1, "whole numbers from 0 to 1,024"),
        ("depths", [2, 10**6], "whole numbers from 1 to 1,024"),
        ("depths", [2, 0], "whole numbers from 1 to 1,024"),
        ("depths", [500, 500, 500], "at most 1,024"),
        ("stage_num_blocks", [4096], "whole numbers from 0 to 1,024"),
        ("hidden_size", 0, "whole numbers from 1 to 134,217,728"),
        ("hidden_size", 2**40, "whole numbers from 1 to 134,217,728"),
        ("hidden_size", True, "whole numbers from 1"),
        ("vocab_size", -5, "whole numbers from 1"),
        ("num_attention_heads", 0, "whole numbers from 1"),
        ("num_key_value_heads", -1, "whole numbers from 0"),
        ("intermediate_size", -1, "whole numbers from 0"),
        ("num_local_experts", -1, "whole numbers from 0"),
        ("hidden_sizes", [64, [0]], "whole numbers from 1"),
        ("vision_config.image_size", 8000, "whole numbers from 1 to 4,096"),
        ("image_size", [224, 8000], "whole numbers from 1 to 4,096"),
        ("num_labels", 10**7, "whole numbers from 1 to 100,000"),
        ("num_labels", True, "whole numbers from 1 to 100,000"),
        ("num_classes", -1, "whole numbers from 1 to 100,000"),
        ("architectures", 5, "a list of class names"),
        ("architectures", "GPT2LMHeadModel", "a list of class names"),
        ("architectures", [{}], "a list of class names"),
        ("text_config.architectures", [["GPT2LMHeadModel"]], "a list of class names"),
        ("id2label", {"x": "a"}, "an object of number: label"),
        ("id2label", ["a"], "an object of number: label"),
        ("id2label", dict.fromkeys(range(100_001), "a"), "at most 100,000"),
    ],
)
def test_values_out_of_their_domain(where: str, value: object, allowed: str):
    with pytest.raises(
        ConfigError, match=f"out of range: given {where} = .*, allowed {allowed}.*; correct it"
    ) as caught:
        check_value(where, value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, {"int"}),
        ([True], {"int", "list"}),
        ("768", {"int", "None"}),
        (["768"], {"int", "list"}),
        ("0.1", {"float"}),
    ],
)
def test_types_that_do_not_fit_the_annotation(value: object, words: set[str]):
    with pytest.raises(ConfigError, match=r"out of range: given any_key = .*, allowed numbers"):
        check_value("any_key", value, frozenset(words))


@pytest.mark.parametrize(
    ("where", "value", "words", "default"),
    [
        ("num_hidden_layers", 1024, INT, 12),
        ("depths", [1, 2, 3, 4], INT | {"list"}, None),
        ("num_nextn_predict_layers", 0, INT, 1),
        ("num_local_experts", 0, INT, 8),
        ("vision_feature_layer", -2, INT, -2),  # an index, not a count
        ("vision_feature_layers", [-2], frozenset(), None),
        ("max_depth", 80, INT, None),  # metres
        ("chunk_size", -1, INT, -1),  # its own default
        ("type_vocab_size", 0, INT, 0),
        ("head_dim", None, INT | {"None"}, None),
        ("use_layers", True, frozenset({"bool"}), None),
        ("qk_size", False, frozenset({"bool", "int"}), None),
        ("hidden_act", "gelu", frozenset({"str"}), "relu"),
        ("layer_types", ["full_attention"], frozenset({"list", "str", "None"}), None),
        ("attention_types", [["global", 1]], frozenset({"list", "tuple", "None"}), None),
        ("anything", "text", frozenset(), None),
        ("pad_token_id", -1, INT, 0),
        ("max_position_embeddings", 10_485_760, INT, None),
        ("id2label", {"0": "a", 1: "b", "-1": "c"}, frozenset(), None),
        ("id2label", None, frozenset(), None),
        ("image_size", [4096, 16], INT | {"list"}, None),
        ("initializer_range", 0.02, frozenset({"float"}), 0.02),
    ],
)
def test_values_that_real_configs_have(where: str, value: object, words: frozenset[str], default: object):
    assert check_value(where, value, words, default) is None
