"""Contrastive training of embeddings by sentence-transformers' own losses: pairs, with other pairs' texts as negatives.

MultipleNegativesRankingLoss, or CachedMultipleNegativesRankingLoss (sentence_transformer/losses, 6.2), runs over a model of
transformers and sentence-transformers' mean pooling. The model around both, and the batch, are re-implemented
(sizer.recipes.preferences).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn

from sizer.architecture.blueprint import Example
from sizer.architecture.frozen_parts import inner
from sizer.architecture.peft_adapters import base_of
from sizer.base.errors import Refusal, RequestError
from sizer.catalogue.recipes import CONTRASTIVE
from sizer.recipes.losses import prepare_forward
from sizer.recipes.preferences import COLUMNS


class Embedder(nn.Module):
    """A model of transformers with mean pooling, called as losses call a SentenceTransformer (base/modules/transformer.py)."""

    def __init__(self, model: nn.Module) -> None:
        from sentence_transformers.sentence_transformer.modules import Pooling

        super().__init__()
        self.model, self.pooling = model, Pooling(base_of(model).config.get_text_config().hidden_size, "mean")
        self._inputs: tuple[str, ...] = ()

    def __getitem__(self, number: int) -> nn.Module:
        """Return the module that reads the inputs (0), or the pooling after it (1)."""
        return (self.model, self.pooling)[number]

    def forward(self, features: dict[str, Any], **others: Any) -> dict[str, Any]:
        """Return the features with the embeddings of tokens and of each text.

        Raises:
            RequestError: The model returns no hidden states of its text, such as CLIPModel.
        """
        self._inputs = self._inputs or tuple(features)
        inputs = {name: features[name] for name in self._inputs}
        outputs = self.model(**inputs, return_dict=True)
        if (states := getattr(outputs, "last_hidden_state", None)) is None:
            refusal = Refusal(
                key="objective",
                given=f"{CONTRASTIVE!r} with {type(base_of(self.model)).__name__}",
                allowed=f"a class that returns hidden states: this one returns {type(outputs).__name__}",
                todo="choose a text model, such as BertModel",
            )
            raise RequestError(refusals=[refusal])
        features["token_embeddings"] = states
        return self.pooling(features)


class PairLoss:
    """The loss of pairs of texts.

    Args:
        size: The texts that a pass with gradients embeds at once, None for all of a column without gradient caching.
        cast: A function that returns the autocast context within which Accelerate calls the model; None if there is none.
    """

    def __init__(self, size: int | None, cast: Callable[[], AbstractContextManager] | None) -> None:
        self._size, self._cast = size, cast

    def __call__(self, module: nn.Module, example: Example) -> Tensor:
        """Compute the loss of a batch of columns. With gradient caching its backward pass embeds the texts again."""
        from sentence_transformers.sentence_transformer import losses

        embedder = inner(module) if isinstance(inner(module), Embedder) else Embedder(module)
        if self._cast is not None:  # as accelerate does; cached gradients call it in the backward pass, too
            embedder.forward = prepare_forward(partial(Embedder.forward, embedder), self._cast)  # type: ignore[method-assign]
        if self._size is None:
            loss = losses.MultipleNegativesRankingLoss(embedder)
        else:
            loss = losses.CachedMultipleNegativesRankingLoss(embedder, mini_batch_size=self._size)
        if inner(module) is embedder:
            loss.model = module  # the module inside DDP, as in the trainer's `override_model_in_loss`
        return loss([dict(example.kwargs[column]) for column in COLUMNS], None)
