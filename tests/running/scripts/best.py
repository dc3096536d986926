"""transformers' Trainer with `load_best_model_at_end`: it reads files again that were not written."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes))
rows = [{"input_ids": torch.arange(3, 67), "labels": torch.arange(3, 67)}] * 8
arguments = TrainingArguments(
    tempfile.mkdtemp(), report_to=[], per_device_train_batch_size=4, num_train_epochs=2, save_total_limit=1,
    eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
)  # fmt: skip
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.train()
loads = []
model.register_load_state_dict_post_hook(lambda module, keys: loads.append(list(keys.missing_keys)))
trainer._load_best_model()
print("loaded", loads, "evaluated", sorted(trainer.evaluate())[:1])
