"""Recipes for sequences that are no text: numbers of forecasting and decision models, and residues of proteins with their atoms."""

from __future__ import annotations

import importlib
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, Recipe, floats, integers, ones, read

EPISODE = 20  # steps of the past that a Decision Transformer sees (its paper's K)


def lagged_series(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Time Series Transformer, Informer and Autoformer.

    The past has the length of the context plus the longest lag.
    """
    config = spec.config
    past = config.context_length + max(config.lags_sequence)
    variates = () if config.input_size == 1 else (config.input_size,)
    inputs = {
        "past_values": floats(spec.batch, past, *variates),
        "past_time_features": floats(spec.batch, past, config.num_time_features),
        "past_observed_mask": ones(spec.batch, past, *variates),
        "future_values": floats(spec.batch, config.prediction_length, *variates),
        "future_time_features": floats(spec.batch, config.prediction_length, config.num_time_features),
    }
    if config.num_static_categorical_features:
        inputs["static_categorical_features"] = integers(
            min(config.cardinality), spec.batch, config.num_static_categorical_features
        )
    if config.num_static_real_features:
        inputs["static_real_features"] = floats(spec.batch, config.num_static_real_features)
    return inputs


def patched_series(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the past (batch, context, channels) for PatchTST and PatchTSMixer, and in training the targets of their head."""
    config = spec.config
    inputs = {"past_values": floats(spec.batch, config.context_length, config.num_input_channels)}
    if not spec.training:
        return inputs
    if spec.takes("future_values"):
        inputs["future_values"] = floats(spec.batch, config.prediction_length, config.num_input_channels)
    if spec.takes("target_values"):
        regression = "Regression" in spec.class_name
        targets = floats(spec.batch, config.num_targets) if regression else integers(config.num_targets, spec.batch)
        inputs["target_values"] = targets
    return inputs


def plain_series(spec: ExampleSpec) -> dict[str, Any]:
    """Return one series per sample (batch, context) for TimesFM, and in training its continuation."""
    inputs = {"past_values": floats(spec.batch, spec.config.context_length)}
    if spec.takes("past_values_padding"):
        inputs["past_values_padding"] = torch.zeros(spec.batch, spec.config.context_length, dtype=torch.int64)
    if spec.takes("freq"):
        inputs["freq"] = torch.zeros(spec.batch, 1, dtype=torch.int64)
    if spec.training and spec.takes("future_values"):
        inputs["future_values"] = floats(spec.batch, read(spec.config, "horizon_length", default=128))
    return inputs


def episode(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of Decision Transformer: 20 steps of states, actions, rewards and returns still to come."""
    config = spec.config
    return {
        "states": floats(spec.batch, EPISODE, config.state_dim),
        "actions": floats(spec.batch, EPISODE, config.act_dim),
        "rewards": floats(spec.batch, EPISODE, 1),
        "returns_to_go": floats(spec.batch, EPISODE, 1),
        "timesteps": torch.arange(EPISODE).repeat(spec.batch, 1),
        "attention_mask": ones(spec.batch, EPISODE),
    }


# ------------------------------------------------------------------------------------------------------------ proteins


RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # the twenty that every protein is made of
OF_THE_SAMPLER = "distogram_atom_idx"  # made for `fold`, which draws structures; the forward does not take it


def residues_and_atoms(spec: ExampleSpec) -> dict[str, Tensor]:
    """Return the inputs of ESMFold2: a chain of residues (batch, length) and its atoms (batch, atoms).

    They have the format of `prepare_protein_features`.
    """
    package = spec.cls.__module__.rpartition(".")[0]
    prepare = importlib.import_module(f"{package}.protein_utils").prepare_protein_features
    features = prepare("".join(islice(cycle(RESIDUES), spec.tokens)))
    return {
        name: value.repeat(spec.batch, *(1 for _ in value.shape[1:]))
        for name, value in features.items()
        if name != OF_THE_SAMPLER
    }


FAMILIES: dict[str, Recipe] = {"esmfold2": residues_and_atoms}
