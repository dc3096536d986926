"""DeepSpeed's engine around a small language model: `zero.py [--local_rank N] STAGE OPTIMIZER OFFLOAD`."""

import argparse

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("stage", type=int)
parser.add_argument("optimizer")
parser.add_argument("offload")
options = parser.parse_args()
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 4096}
model = LlamaForCausalLM(LlamaConfig(**SIZES))
optimizer = torch.optim.AdamW(model.parameters()) if options.optimizer == "own" else None
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": options.stage, "reduce_bucket_size": 1_000_000},
}
if optimizer is None:
    settings["optimizer"] = {"type": options.optimizer, "params": {"lr": 1e-5}}
if options.offload == "cpu":
    settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
print("local", options.local_rank, "world", engine.world_size)
tokens = torch.randint(0, 4096, (2, 128), device="cuda")
for _ in range(6):
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
