"""Training recipes: losses that keep no logits, optimizers that step in the backward pass, and evaluations after the steps.

Traced steps and measured steps (sizer.tracing.steps) call the same functions of this room. Imports torch.

- `losses`: the loss of a language model by the key `loss`, and the check of the model;
- `preferences`: pairs of completions, a reference, and TRL's loss of them (`objective`, `reference`);
- `grpo`: groups of completions that the model makes, by TRL's trainer (`objective=grpo`, `group`, `rollout`);
- `contrastive`: embeddings of pairs of texts, by sentence-transformers' losses (`objective=contrastive`);
- `liger`: Liger's layers in the model (`liger`);
- `linear_attention`: linear attention by flash-linear-attention (`fla`), not only in training;
- `offloading`: activations offloaded to the host, by TRL's hooks (`activations`);
- `in_backward`: an optimizer for each parameter, which steps as soon as its gradient is computed (`step=in_backward`);
- `evaluation`: batches without gradients after the steps, and the tensors that transformers' Trainer keeps of them
  (`evaluate`).
"""
