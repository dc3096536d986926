"""Recipes for series of numbers: forecasting and decision models."""

from __future__ import annotations

import torch
from torch import Tensor

from sizer.architecture.examples.setting import Setting, read
from sizer.architecture.examples.tensors import floats, integers, ones

EPISODE = 20  # steps of the past that a Decision Transformer sees (its paper's K)


def lagged_series(setting: Setting) -> dict[str, Tensor]:
    """Time Series Transformer, Informer, Autoformer: the past is as much longer than the context as the longest lag."""
    config = setting.config
    past = config.context_length + max(config.lags_sequence)
    variates = () if config.input_size == 1 else (config.input_size,)
    inputs = {
        "past_values": floats(setting.batch, past, *variates),
        "past_time_features": floats(setting.batch, past, config.num_time_features),
        "past_observed_mask": ones(setting.batch, past, *variates),
        "future_values": floats(setting.batch, config.prediction_length, *variates),
        "future_time_features": floats(setting.batch, config.prediction_length, config.num_time_features),
    }
    if config.num_static_categorical_features:
        inputs["static_categorical_features"] = integers(
            min(config.cardinality), setting.batch, config.num_static_categorical_features
        )
    if config.num_static_real_features:
        inputs["static_real_features"] = floats(setting.batch, config.num_static_real_features)
    return inputs


def patched_series(setting: Setting) -> dict[str, Tensor]:
    """PatchTST, PatchTSMixer: the past (batch, context, channels), and in training what their head predicts from it."""
    config = setting.config
    inputs = {"past_values": floats(setting.batch, config.context_length, config.num_input_channels)}
    if not setting.training:
        return inputs
    if setting.takes("future_values"):
        inputs["future_values"] = floats(setting.batch, config.prediction_length, config.num_input_channels)
    if setting.takes("target_values"):
        regression = "Regression" in setting.class_name
        targets = (
            floats(setting.batch, config.num_targets) if regression else integers(config.num_targets, setting.batch)
        )
        inputs["target_values"] = targets
    return inputs


def plain_series(setting: Setting) -> dict[str, object]:
    """TimesFM: one series per sample (batch, context), and in training what follows it."""
    inputs = {"past_values": floats(setting.batch, setting.config.context_length)}
    if setting.takes("past_values_padding"):
        inputs["past_values_padding"] = torch.zeros(setting.batch, setting.config.context_length, dtype=torch.int64)
    if setting.takes("freq"):
        inputs["freq"] = torch.zeros(setting.batch, 1, dtype=torch.int64)
    if setting.training and setting.takes("future_values"):
        inputs["future_values"] = floats(setting.batch, read(setting.config, "horizon_length", default=128))
    return inputs


def episode(setting: Setting) -> dict[str, Tensor]:
    """Decision Transformer: 20 steps of states, actions, rewards and returns still to come."""
    config = setting.config
    return {
        "states": floats(setting.batch, EPISODE, config.state_dim),
        "actions": floats(setting.batch, EPISODE, config.act_dim),
        "rewards": floats(setting.batch, EPISODE, 1),
        "returns_to_go": floats(setting.batch, EPISODE, 1),
        "timesteps": torch.arange(EPISODE).repeat(setting.batch, 1),
        "attention_mask": ones(setting.batch, EPISODE),
    }
