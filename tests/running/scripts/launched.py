"""Transformers' trainer, whose parallelism is what `accelerate launch` says."""

import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, max_steps=3, report_to=[], save_strategy="no", disable_tqdm=True
)
words = [{"input_ids": torch.arange(128), "labels": torch.arange(128)} for _ in range(32)]
trainer = Trainer(model=LlamaForCausalLM(LlamaConfig(**SIZES)), args=arguments, train_dataset=words)
kind, rank = trainer.accelerator.distributed_type.name, trainer.accelerator.process_index
print(kind, trainer.accelerator.mixed_precision, trainer.accelerator.num_processes, rank, os.environ["LOCAL_RANK"])
trainer.train()
