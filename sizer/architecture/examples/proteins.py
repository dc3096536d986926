"""Recipes for proteins: residues, and the atoms that they are made of."""

from __future__ import annotations

import importlib
from itertools import cycle, islice

from torch import Tensor

from sizer.architecture.examples.example_spec import ExampleSpec, Recipe

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # the twenty that every protein is made of
OF_THE_SAMPLER = "distogram_atom_idx"  # made for `fold`, which draws structures; the forward does not take it


def residues_and_atoms(spec: ExampleSpec) -> dict[str, Tensor]:
    """ESMFold2: a chain of residues (batch, length) and its atoms (batch, atoms), as `prepare_protein_features` makes them."""
    package = spec.cls.__module__.rpartition(".")[0]
    prepare = importlib.import_module(f"{package}.protein_utils").prepare_protein_features
    features = prepare("".join(islice(cycle(RESIDUES), spec.tokens)))
    return {
        name: value.repeat(spec.batch, *(1 for _ in value.shape[1:]))
        for name, value in features.items()
        if name != OF_THE_SAMPLER
    }


FAMILIES: dict[str, Recipe] = {"esmfold2": residues_and_atoms}
