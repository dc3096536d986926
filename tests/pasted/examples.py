"""Training configs in seven formats, commands and code, written for these tests in the style of each project's own examples.

Each has the keys of the query that it means, read by hand, and words of the lines that have no counterpart.
"""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    """A config, its format, and what it means."""

    format: str
    name: str
    text: str
    items: dict[str, str]
    unmatched: tuple[str, ...] = ()


LLAMA = {"arch": "hf:llama-3.1-8b", "mode": "training"}
LORA = {"train": "adapter", "adapter": "lora"}
CAST = {"autocast": "1"}
FUSED = {"optimizer": "adamw", "optimizer_impl": "fused"}  # what transformers takes by silence

EXAMPLES = [
    # ------------------------------------------------------------------------------------------------------------- Axolotl
    Example("axolotl", "qlora", """
base_model: meta-llama/Llama-3.1-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: paged_adamw_32bit
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
""", LLAMA | LORA | CAST | {"weights": "nf4-dq", "r": "32", "alpha": "16", "adapter_dropout": "0.05", "targets": "all-linear",
         "seq": "4096",
         "accumulate": "4", "batch": "2", "optimizer": "paged-adamw", "dtype": "bfloat16", "checkpointing": "1",
         "attention": "sdpa"}),
    Example("axolotl", "lora in 8 bits", """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_modules: [q_proj, v_proj]
sequence_len: 2048
micro_batch_size: 4
gradient_accumulation_steps: 1
optimizer: adamw_bnb_8bit
bf16: true
gradient_checkpointing: false
""", LORA | CAST | {"arch": "hub:NousResearch/Meta-Llama-3-8B", "mode": "training", "weights": "int8", "r": "16", "alpha": "32",
         "targets": "q_proj,v_proj", "seq": "2048", "batch": "4", "accumulate": "1", "optimizer": "adamw-8bit",
         "dtype": "bfloat16"}),
    Example("axolotl", "everything, over FSDP", """
base_model: Qwen/Qwen2.5-7B
sequence_len: 8192
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer
""", {"mode": "training", "seq": "8192", "batch": "1", "accumulate": "2", "optimizer": "adamw", "optimizer_impl": "fused",
      "dtype": "amp-bfloat16", "checkpointing": "1", "parallel": "fsdp", "ranks": "8", "offload": "1"}),
    Example("axolotl", "everything, over ZeRO-3", """
base_model: mistralai/Mistral-7B-v0.1
sequence_len: 4096
micro_batch_size: 2
optimizer: adamw_torch
bf16: auto
deepspeed: deepspeed_configs/zero3_bf16.json
""", {"mode": "training", "seq": "4096", "batch": "2", "optimizer": "adamw", "dtype": "amp-bfloat16", "parallel": "fsdp",
         "ranks": "8"}),
    Example("axolotl", "fp16 on an old card", """
base_model: openai-community/gpt2
adapter: lora
lora_r: 8
lora_target_modules:
  - c_attn
lora_modules_to_save:
  - wte
  - lm_head
sequence_len: 1024
micro_batch_size: 8
optimizer: adamw_torch
fp16: true
eager_attention: true
""", LORA | {"arch": "hf:gpt2", "mode": "training", "r": "8", "targets": "c_attn", "seq": "1024", "batch": "8",
         "modules_to_save": "wte,lm_head", "optimizer": "adamw",
         "dtype": "float16", "attention": "eager"}),
    Example("axolotl", "DoRA", """
base_model: meta-llama/Llama-3.1-8B
adapter: lora
peft_use_dora: true
lora_r: 16
sequence_len: 2048
micro_batch_size: 1
optimizer: lion_8bit
bf16: true
""", LLAMA | CAST | {"train": "adapter", "adapter": "dora", "r": "16", "seq": "2048", "batch": "1", "optimizer": "lion-8bit",
         "dtype": "bfloat16"}),
    # ------------------------------------------------------------------------------------------------------- LLaMA-Factory
    Example("llama-factory", "lora", """
### model
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
""", LLAMA | LORA | CAST | FUSED | {"r": "8", "targets": "all-linear", "seq": "2048", "batch": "1", "accumulate": "8",
         "dtype": "bfloat16",
         "checkpointing": "1"}),
    Example("llama-factory", "qlora", """
model_name_or_path: Qwen/Qwen2.5-7B
quantization_bit: 4
quantization_method: bnb
finetuning_type: lora
lora_target: q_proj,v_proj
cutoff_len: 1024
per_device_train_batch_size: 2
optim: paged_adamw_8bit
fp16: true
""", LORA | {"mode": "training", "weights": "nf4-dq", "r": "8", "targets": "q_proj,v_proj", "seq": "1024", "batch": "2",
         "optimizer": "paged-adamw-8bit", "dtype": "float16", "checkpointing": "1"}),
    Example("llama-factory", "full, over ZeRO-3", """
model_name_or_path: meta-llama/Llama-3.1-8B
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
""", LLAMA | FUSED | {"seq": "2048", "batch": "1", "accumulate": "2", "dtype": "amp-bfloat16", "checkpointing": "1",
         "parallel": "fsdp", "ranks": "8"}),
    Example("llama-factory", "full, in pure bfloat16", """
model_name_or_path: openai-community/gpt2
finetuning_type: full
pure_bf16: true
cutoff_len: 512
per_device_train_batch_size: 4
flash_attn: fa2
disable_gradient_checkpointing: true
""", FUSED | {"arch": "hf:gpt2", "mode": "training", "seq": "512", "batch": "4", "dtype": "bfloat16", "attention": "sdpa"}),
    Example("llama-factory", "8 bits, as JSON", """
{"model_name_or_path": "meta-llama/Llama-3.1-8B", "finetuning_type": "lora", "quantization_bit": 8, "lora_rank": 64,
 "lora_alpha": 128, "lora_dropout": 0.1, "cutoff_len": 4096, "per_device_train_batch_size": 1, "bf16": true}
""", LLAMA | LORA | CAST | FUSED | {"weights": "int8", "r": "64", "alpha": "128", "adapter_dropout": "0.1", "seq": "4096",
         "batch": "1",
         "dtype": "bfloat16", "checkpointing": "1"}),
    Example("llama-factory", "freeze", """
model_name_or_path: openai-community/gpt2
finetuning_type: freeze
freeze_trainable_layers: 2
cutoff_len: 512
per_device_train_batch_size: 2
bf16: true
""", FUSED | {"arch": "hf:gpt2", "mode": "training", "seq": "512", "batch": "2", "dtype": "amp-bfloat16", "checkpointing": "1"},
        ("finetuning_type: freeze", "freeze_trainable_layers")),
    # ----------------------------------------------------------------------------------------------------------------- TRL
    Example("trl", "full", """
model_name_or_path: Qwen/Qwen2.5-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
max_length: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
bf16: true
""", FUSED | {"loss": "trl"} | {"mode": "training", "seq": "2048", "batch": "2", "accumulate": "8", "checkpointing": "1",
         "dtype": "amp-bfloat16"}),
    Example("trl", "lora", """
model_name_or_path: meta-llama/Llama-3.1-8B
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: all-linear
dtype: bfloat16
max_length: 1024
per_device_train_batch_size: 4
""", LLAMA | LORA | CAST | FUSED | {"loss": "trl"} | {"r": "32", "alpha": "16", "targets": "all-linear", "dtype": "bfloat16",
         "seq": "1024", "batch": "4",
         "checkpointing": "1"}),
    Example("trl", "qlora", """
model_name_or_path: meta-llama/Llama-3.1-8B
use_peft: true
load_in_4bit: true
use_bnb_nested_quant: true
lora_dropout: 0.05
torch_dtype: bfloat16
max_seq_length: 2048
per_device_train_batch_size: 1
optim: paged_adamw_8bit
attn_implementation: flash_attention_2
""", LLAMA | LORA | CAST | {"loss": "trl"} | {"weights": "nf4-dq", "r": "16", "alpha": "32", "adapter_dropout": "0.05",
         "dtype": "bfloat16", "seq": "2048",
         "batch": "1", "optimizer": "paged-adamw-8bit", "attention": "sdpa", "checkpointing": "1"}),
    Example("trl", "float32 without checkpointing", """
model_name_or_path: openai-community/gpt2
max_length: 512
per_device_train_batch_size: 8
bf16: false
gradient_checkpointing: false
optim: adafactor
packing: true
""", {"loss": "trl"} | {"arch": "hf:gpt2", "mode": "training", "seq": "512", "batch": "8", "dtype": "float32",
         "optimizer": "adafactor-transformers"},
         ("packing: without flash attention",)),
    Example("trl", "the defaults", """
model_name_or_path: openai-community/gpt2
dataset_name: stanfordnlp/imdb
max_length: 256
""", FUSED | {"loss": "trl"} | {"arch": "hf:gpt2", "mode": "training", "seq": "256", "dtype": "amp-bfloat16",
         "checkpointing": "1", "batch": "8"}),
    # ----------------------------------------------------------------------------------------------------------- torchtune
    Example("torchtune", "lora on one device", """
output_dir: /tmp/torchtune/llama3_1_8B/lora_single_device
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/tokenizer.model
  max_seq_len: 4096
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  lr: 3e-4
batch_size: 2
gradient_accumulation_steps: 8
enable_activation_checkpointing: True
dtype: bf16
""", LLAMA | LORA | {"seq": "4096", "targets": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "r": "8", "alpha": "16",
         "adapter_dropout": "0", "optimizer": "adamw", "optimizer_impl": "fused", "batch": "2", "accumulate": "8",
         "checkpointing": "1",
         "dtype": "bfloat16"}),
    Example("torchtune", "qlora", """
model:
  _component_: torchtune.models.llama3_1.qlora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj]
  lora_rank: 16
  lora_alpha: 32
tokenizer:
  max_seq_len: null
optimizer:
  _component_: torch.optim.AdamW
batch_size: 1
enable_activation_checkpointing: true
dtype: bf16
compile: False
""", LLAMA | LORA | {"weights": "nf4-dq", "targets": "q_proj,v_proj", "r": "16", "alpha": "32", "optimizer": "adamw",
         "batch": "1",
         "checkpointing": "1", "dtype": "bfloat16"}),
    Example("torchtune", "full, with a paged optimizer", """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
optimizer:
  _component_: bitsandbytes.optim.PagedAdamW8bit
  lr: 2e-5
optimizer_in_bwd: True
batch_size: 2
enable_activation_checkpointing: True
dtype: bf16
""", LLAMA | {"optimizer": "paged-adamw-8bit", "batch": "2", "checkpointing": "1", "dtype": "bfloat16", "step": "in_backward"}),
    Example("torchtune", "full, on several devices", """
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
optimizer:
  _component_: torch.optim.AdamW
batch_size: 1
fsdp_cpu_offload: True
dtype: bf16
""", LLAMA | {"optimizer": "adamw", "batch": "1", "parallel": "fsdp", "ranks": "8", "offload": "1", "dtype": "bfloat16"}),
    Example("torchtune", "in float32", """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 4, use_dora: true}
optimizer: {_component_: torch.optim.SGD}
batch_size: 1
dtype: fp32
""", LLAMA | {"train": "adapter", "adapter": "dora", "targets": "q_proj", "r": "4", "optimizer": "sgd", "batch": "1",
         "dtype": "float32"}),
    # ----------------------------------------------------------------------------------------------------------- torchtitan
    Example("torchtitan", "its own of a 70B, with tensor parallel", """
[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
[optimizer]
name = "AdamW"  # "Adam", too
lr = 1.5e-4
[training]
local_batch_size = 8
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8  # 8-way TP
enable_async_tensor_parallel = false
[activation_checkpoint]
mode = "full"
[compile]
enable = false
""", {"mode": "training", "arch": "hf:llama-3.1-70b", "batch": "8", "seq": "8192", "optimizer": "adamw", "optimizer_impl": "fused",
      "dtype": "amp-bfloat16", "parallel": "fsdp", "ranks": "8", "tp": "8", "sp": "1", "lp": "1", "checkpointing": "1"}),
    Example("torchtitan", "a debug model, compiled, by hybrid shards", """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
[training]
local_batch_size = 8
seq_len = 2048
[parallelism]
data_parallel_shard_degree = 4
data_parallel_replicate_degree = 2
fsdp_reshard_after_forward = "never"
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
""", {"mode": "training", "batch": "8", "seq": "2048", "optimizer": "adamw", "optimizer_impl": "fused", "dtype": "amp-bfloat16",
      "parallel": "hsdp", "replicate": "2", "ranks": "4", "reshard": "0", "compile": "default"},
         ("flavor: debugmodel", "activation_checkpoint.mode: selective")),
    Example("torchtitan", "copies of a small model in bfloat16", """
[model]
name = "qwen3"
flavor = "0.6B"
converters = ["float8"]
[optimizer]
name = "Adam"
[training]
local_batch_size = 4
seq_len = 4096
dtype = "bfloat16"
[parallelism]
data_parallel_shard_degree = 1
data_parallel_replicate_degree = 4
[activation_checkpoint]
mode = "none"
""", {"mode": "training", "arch": "hf:qwen3-0.6b", "batch": "4", "seq": "4096", "optimizer": "adam", "optimizer_impl": "fused",
      "dtype": "bfloat16", "parallel": "ddp", "ranks": "4"}, ("model.converters",)),
    # ----------------------------------------------------------------------------------------------------------- DeepSpeed
    Example("deepspeed", "ZeRO-3, offloaded", """
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": true},
 "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
 "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true}}
""", {"mode": "training", "batch": "4", "accumulate": "2", "dtype": "amp-bfloat16", "optimizer": "adamw", "parallel": "fsdp",
      "ranks": "8", "offload": "1"}, ("offload_param.pin_memory",)),
    Example("deepspeed", "ZeRO-2", """
{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}
""", {"mode": "training", "batch": "8", "dtype": "amp-float16", "parallel": "zero1", "ranks": "8"}, ("ZeRO-2 shards gradients",)),
    Example("deepspeed", "ZeRO-1", """
{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}
""", {"mode": "training", "batch": "1", "dtype": "amp-bfloat16", "parallel": "zero1", "ranks": "8"},
         ("train_micro_batch_size_per_gpu",)),
    Example("deepspeed", "no ZeRO", """
{"train_micro_batch_size_per_gpu": 16, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 0}}
""", {"mode": "training", "batch": "16", "optimizer": "adam", "dtype": "float32"}),
    # ---------------------------------------------------------------------------------------------------------- accelerate
    Example("accelerate", "FSDP", """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
""", {"mode": "training", "dtype": "amp-bfloat16", "parallel": "fsdp", "ranks": "4", "offload": "1", "batch": "1"}),
    Example("accelerate", "several GPUs", """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
mixed_precision: fp16
num_processes: 2
""", {"mode": "training", "dtype": "amp-float16", "parallel": "ddp", "ranks": "2", "batch": "1"}),
    Example("accelerate", "DeepSpeed", """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  gradient_accumulation_steps: 4
mixed_precision: bf16
num_processes: 8
""", {"mode": "training", "dtype": "amp-bfloat16", "parallel": "fsdp", "ranks": "8", "accumulate": "4", "batch": "1"}),
    Example("accelerate", "one process", """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
""", {"mode": "training", "dtype": "float32", "batch": "1"}),
    # ------------------------------------------------------------------------------------------------- a Trainer's arguments
    Example("trainer", "bf16", """
{"output_dir": "out", "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "bf16": true,
 "gradient_checkpointing": true, "optim": "adamw_torch_fused", "learning_rate": 5e-5, "num_train_epochs": 3,
         "torch_compile": false}
""", {"mode": "training", "batch": "16", "accumulate": "2", "dtype": "amp-bfloat16", "checkpointing": "1", "optimizer": "adamw",
      "optimizer_impl": "fused"}),
    Example("trainer", "float32", """
{"output_dir": "out", "per_device_train_batch_size": 8, "optim": "adafactor", "fp16": false, "bf16": false}
""", {"mode": "training", "batch": "8", "optimizer": "adafactor-transformers", "dtype": "float32"}),
    Example("trainer", "FSDP and compilation", """
{"per_device_train_batch_size": 4, "fsdp": "full_shard auto_wrap offload", "bf16": true, "torch_compile": true}
""", FUSED | {"compile": "default"} | {"mode": "training", "batch": "4", "dtype": "amp-bfloat16", "parallel": "fsdp",
         "ranks": "8", "offload": "1"}),
    # ------------------------------------------------------------------------------------- recipes: losses, objectives, offloading
    Example("axolotl", "DPO in 8 bits", """
base_model: meta-llama/Llama-3.1-8B
load_in_8bit: true
adapter: lora
rl: dpo
sequence_len: 4096
lora_r: 32
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
""", LLAMA | LORA | CAST | {"weights": "int8", "objective": "dpo", "seq": "4096", "r": "32", "targets": "all-linear",
         "accumulate": "4", "batch": "2", "optimizer": "adamw-8bit", "dtype": "bfloat16", "checkpointing": "1"}),
    Example("axolotl", "Liger and offloading", """
base_model: meta-llama/Llama-3.1-8B
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rope: true
liger_rms_norm: true
liger_glu_activation: true
liger_fused_linear_cross_entropy: true
sequence_len: 8192
micro_batch_size: 1
bf16: true
gradient_checkpointing: true
""", LLAMA | CAST | FUSED | {"liger": "1", "loss": "liger", "seq": "8192", "batch": "1", "dtype": "bfloat16",
         "checkpointing": "1"}),
    Example("axolotl", "cut cross-entropy, activations on the host", """
base_model: Qwen/Qwen2.5-7B
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
sequence_len: 2048
micro_batch_size: 1
bf16: true
gradient_checkpointing: offload
torch_compile: true
""", CAST | FUSED | {"mode": "training", "loss": "cce", "seq": "2048", "batch": "1", "dtype": "bfloat16", "checkpointing": "1",
         "activations": "offload"}, ("compile=default",)),
    Example("axolotl", "GRPO beside a server", """
base_model: Qwen/Qwen2.5-0.5B
rl: grpo
trl:
  beta: 0.001
  use_vllm: true
  num_generations: 4
  max_completion_length: 256
sequence_len: 512
micro_batch_size: 4
bfloat16: true
""", FUSED | {"mode": "training", "objective": "grpo", "group": "4", "new": "256", "rollout": "colocated:0.3", "seq": "512",
         "batch": "4", "dtype": "bfloat16"}),
    Example("llama-factory", "ORPO", """
model_name_or_path: meta-llama/Llama-3.1-8B
stage: dpo
pref_loss: orpo
finetuning_type: lora
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
bf16: true
""", LLAMA | LORA | CAST | FUSED | {"objective": "orpo", "r": "8", "targets": "all-linear", "seq": "2048", "batch": "1",
         "dtype": "bfloat16", "checkpointing": "1"}),
    Example("llama-factory", "KTO over ZeRO-3", """
model_name_or_path: Qwen/Qwen2.5-7B
stage: kto
finetuning_type: lora
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 2
bf16: true
""", LORA | FUSED | CAST | {"mode": "training", "r": "8", "seq": "2048", "batch": "2", "dtype": "bfloat16", "checkpointing": "1",
         "parallel": "fsdp", "ranks": "8", "objective": "kto"}),
    Example("llama-factory", "Liger, and a command", """
llamafactory-cli train --stage sft --model_name_or_path openai-community/gpt2 --finetuning_type full --pure_bf16 true \\
    --enable_liger_kernel true --cutoff_len 1024 --per_device_train_batch_size 2
""", FUSED | {"mode": "training", "liger": "1", "loss": "liger", "seq": "1024", "batch": "2", "dtype": "bfloat16",
         "checkpointing": "1"}),
    Example("trl", "GRPO", """
model_name_or_path: Qwen/Qwen2.5-3B
torch_dtype: bfloat16
num_generations: 8
max_prompt_length: 512
max_completion_length: 1024
per_device_train_batch_size: 16
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.4
beta: 0.04
""", CAST | FUSED | {"mode": "training", "objective": "grpo", "group": "8", "seq": "512", "new": "1024", "batch": "16",
         "rollout": "colocated:0.4", "dtype": "bfloat16", "checkpointing": "1"}),
    Example("trl", "DPO, precomputed, by a script", """
trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B --dtype bfloat16 --precompute_ref_log_probs --max_length=512 \\
  --per_device_train_batch_size 4 --gradient_checkpointing false --use_liger_kernel
""", CAST | FUSED | {"mode": "training", "objective": "dpo", "reference": "precomputed", "seq": "512", "batch": "4",
         "dtype": "bfloat16", "liger": "1"}),
    Example("trl", "offloading, in Python", """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
model_id = "meta-llama/Llama-3.1-8B"
tokenizer = AutoTokenizer.from_pretrained("another/tokenizer")
model = AutoModelForCausalLM.from_pretrained(model_id, dtype=torch.bfloat16, attn_implementation="sdpa")
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"])  # the adapter (small)
args = SFTConfig(output_dir="out", max_length=1024, per_device_train_batch_size=2, activation_offloading=True, learning_rate=LR)
SFTTrainer(model, args=args, train_dataset=load_dataset("x", split="train"), peft_config=peft_config).train()
""", LLAMA | LORA | CAST | FUSED | {"loss": "trl", "activations": "offload", "r": "16", "alpha": "32", "targets": "q_proj,v_proj",
         "seq": "1024", "batch": "2", "dtype": "bfloat16", "attention": "sdpa", "checkpointing": "1"}),
    Example("torchtune", "chunked loss, all offloaded", """
model:
  _component_: torchtune.models.qwen2_5.qwen2_5_7b
tokenizer: {max_seq_len: 2048}
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
optimizer: {_component_: bitsandbytes.optim.PagedAdamW}
batch_size: 2
enable_activation_checkpointing: True
enable_activation_offloading: True
""", {"mode": "training", "loss": "chunked:8", "seq": "2048", "optimizer": "paged-adamw", "batch": "2", "checkpointing": "1",
      "activations": "offload", "dtype": "bfloat16"}),
    Example("torchtune", "DPO", """
model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj], lora_rank: 8, lora_alpha: 16}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.1}
optimizer: {_component_: torch.optim.AdamW}
batch_size: 4
""", LLAMA | LORA | {"objective": "dpo", "targets": "q_proj", "r": "8", "alpha": "16", "optimizer": "adamw", "batch": "4",
         "dtype": "bfloat16"}),
    Example("torchtune", "over several GPUs", """
model: {_component_: torchtune.models.llama3_3.llama3_3_70b}
optimizer: {_component_: torch.optim.AdamW, fused: True}
custom_sharded_layers: [tok_embeddings, output]
fsdp_cpu_offload: False
tensor_parallel_dim: 2
compile: True
batch_size: 1
""", {"arch": "hf:llama-3.3-70b", "mode": "training", "parallel": "fsdp", "ranks": "8", "tp": "2", "compile": "default",
      "batch": "1", "dtype": "bfloat16"} | FUSED),
    Example("accelerate", "FSDP2 with tensor parallelism", """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true, fsdp_reshard_after_forward: false}
parallelism_config: {parallelism_config_dp_shard_size: 2, parallelism_config_tp_size: 4}
dynamo_config: {dynamo_backend: INDUCTOR}
""", {"mode": "training", "dtype": "amp-bfloat16", "parallel": "fsdp", "ranks": "2", "tp": "4", "reshard": "0",
      "checkpointing": "1", "compile": "default", "batch": "1"}),
    Example("trainer", "a command of four processes", """
torchrun --nproc_per_node=4 run_clm.py --model_name_or_path openai-community/gpt2 --dataset_name wikitext --bf16 \\
  --block_size 512 --do_train --output_dir /tmp/out
""", FUSED | {"arch": "hf:gpt2", "mode": "training", "seq": "512", "batch": "8", "dtype": "amp-bfloat16", "parallel": "ddp",
         "ranks": "4"}),
    Example("trainer", "QLoRA, in Python", """
model_id = 'meta-llama/Llama-3.1-8B'
half = torch.bfloat16
bnb_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16,
                                bnb_4bit_use_double_quant=True)
model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=bnb_config, device_map={"": 0}, torch_dtype=half)
model = get_peft_model(model, LoraConfig(r=64, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear"))
training_arguments = TrainingArguments(
    output_dir="./results",
    per_device_train_batch_size=4,
    optim="paged_adamw_32bit",
    gradient_checkpointing=True,  # (slower)
    bf16=True,
)
""", LLAMA | LORA | CAST | {"prepare": "0"} | {"weights": "nf4-dq", "compute": "float16",
         "r": "64", "alpha": "16", "adapter_dropout": "0.1", "targets": "all-linear", "batch": "4",
         "optimizer": "paged-adamw", "checkpointing": "1", "dtype": "bfloat16"}),
    Example("trainer", "Liger", """
{"per_device_train_batch_size": 2, "bf16": true, "use_liger_kernel": true, "gradient_checkpointing": true}
""", FUSED | {"mode": "training", "batch": "2", "dtype": "amp-bfloat16", "liger": "1", "loss": "liger", "checkpointing": "1"}),
    # --------------------------------------------------------------------------------------------- diffusers' example scripts
    Example("diffusers", "DreamBooth LoRA of FLUX", """
accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path=black-forest-labs/FLUX.1-dev \\
  --instance_data_dir=dog --output_dir=out --mixed_precision="bf16" --instance_prompt="a sks dog" --resolution=1024 \\
  --train_batch_size=1 --guidance_scale=1 --gradient_accumulation_steps=4 --use_8bit_adam --rank=16 \\
  --gradient_checkpointing --cache_latents --learning_rate=1e-4 --lr_scheduler=constant --max_train_steps=500 --seed=0
""", {"arch": "diffusers:flux.1-dev", "mode": "training", "train": "adapter", "r": "16", "dtype": "bfloat16", "image": "1024",
      "batch": "1", "accumulate": "4", "optimizer": "adamw-8bit", "checkpointing": "1", "cached": "latents"}),
    Example("diffusers", "LoRA of SDXL, text to image", """
accelerate launch train_text_to_image_lora_sdxl.py --pretrained_model_name_or_path stabilityai/stable-diffusion-xl-base-1.0 \\
  --dataset_name lambdalabs/naruto --resolution 768 --train_batch_size 2 --mixed_precision fp16 --train_text_encoder
""", {"arch": "diffusers:sdxl", "mode": "training", "train": "adapter", "r": "4", "dtype": "float16", "image": "768",
      "batch": "2", "optimizer": "adamw", "cached": "none"}, ("train_text_encoder",)),
    Example("diffusers", "the whole UNet, on four GPUs", """
accelerate launch --num_processes 4 --mixed_precision bf16 train_text_to_image.py --train_batch_size 8 \\
  --pretrained_model_name_or_path runwayml/stable-diffusion-v1-5 --use_ema
""", {"arch": "diffusers:sd1.5", "mode": "training", "train": "all", "dtype": "amp-bfloat16", "image": "512", "batch": "8",
      "optimizer": "adamw"}, ("use_ema", "4 processes")),
    # --------------------------------------------------------------------------------------------------------------- ms-swift
    Example("ms-swift", "LoRA", """
CUDA_VISIBLE_DEVICES=0 \\
swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset 'AI-ModelScope/alpaca-gpt4-data-en#500' \\
  --torch_dtype bfloat16 --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 16 --target_modules all-linear \\
  --max_length 2048 --gradient_accumulation_steps 16 --save_steps 50 --output_dir output
""", FUSED | {"arch": "hf:qwen2.5-7b", "mode": "training", "train": "adapter", "adapter": "lora", "r": "16", "alpha": "32",
      "adapter_dropout": "0.05", "targets": "all-linear", "dtype": "bfloat16", "autocast": "1", "checkpointing": "1", "batch": "1",
      "accumulate": "16", "seq": "2048"}),
    Example("ms-swift", "all weights on four GPUs", """
#!/bin/bash
export WANDB_DISABLED=true
MODEL=Qwen/Qwen3-8B

NPROC_PER_NODE=4 swift sft --model $MODEL --train_type full --deepspeed zero3 --attn_impl flash_attn --packing true
""", FUSED | {"arch": "hf:qwen3-8b", "mode": "training", "dtype": "amp-bfloat16", "checkpointing": "1", "batch": "1",
      "parallel": "fsdp", "ranks": "4", "attention": "sdpa"}),
    Example("ms-swift", "DPO in 4 bits", """
swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --quant_bits 4 --quant_method bnb --target_modules q_proj v_proj \\
  --gradient_checkpointing false
""", FUSED | {"arch": "hf:qwen2.5-7b", "mode": "training", "objective": "dpo", "train": "adapter", "adapter": "lora", "r": "8",
      "alpha": "32", "adapter_dropout": "0.05", "targets": "q_proj,v_proj", "weights": "nf4-dq", "dtype": "bfloat16",
      "autocast": "1", "batch": "1"}),
    Example("sd-scripts", "the tables of a file", """
[model_arguments]
pretrained_model_name_or_path = "/workspace/sd_xl_base_1.0.safetensors"
v2 = false
[additional_network_arguments]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
network_train_unet_only = true
[training_arguments]
optimizer_type = "AdamW8bit"
train_batch_size = 4
mixed_precision = "bf16"
gradient_checkpointing = true
cache_latents = true
cache_text_encoder_outputs = true
xformers = true
resolution = "1024,1024"
""", {"mode": "training", "train": "adapter", "arch": "diffusers:sdxl", "r": "32", "alpha": "16", "dtype": "bfloat16",
      "image": "1024", "cached": "all", "optimizer": "adamw-8bit", "batch": "4", "checkpointing": "1",
      "targets": "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2"}),
    Example("sd-scripts", "LoRA of SDXL", """
accelerate launch sdxl_train_network.py --pretrained_model_name_or_path="./sd_xl_base_1.0.safetensors" --train_data_dir="./img" \\
  --resolution="1024,1024" --output_dir="./out" --network_module=networks.lora --network_dim=32 \\
  --network_alpha=16 --train_batch_size=2 --mixed_precision="bf16" --optimizer_type="AdamW8bit" --gradient_checkpointing \\
  --cache_latents --xformers --max_train_steps=2000
""", {"arch": "diffusers:sdxl", "mode": "training", "train": "adapter", "r": "32", "alpha": "16", "dtype": "bfloat16",
      "image": "1024", "targets": "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2", "batch": "2",
      "optimizer": "adamw-8bit", "checkpointing": "1", "cached": "latents"}, ("text encoders",)),
    Example("sd-scripts", "LoRA of Stable Diffusion 1.5, from a repository", """
accelerate launch train_network.py --pretrained_model_name_or_path=runwayml/stable-diffusion-v1-5 --resolution=512,768 \\
  --network_train_unet_only --cache_text_encoder_outputs --cache_latents_to_disk --mixed_precision=fp16 --max_train_steps=1000
""", {"arch": "diffusers:sd1.5", "mode": "training", "train": "adapter", "r": "4", "alpha": "1", "dtype": "float16",
      "image": "768x512", "targets": "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2", "batch": "1",
      "optimizer": "adamw", "cached": "all"}, ("sdpa",)),
    Example("sd-scripts", "sizes in another file", """
accelerate launch .\\sdxl_train_network.py --pretrained_model_name_or_path D:\\models\\juggernaut.safetensors --sdpa \\
  --dataset_config set.toml --network_module lycoris.kohya --network_dim 8 --network_alpha 4 \\
  --mixed_precision bf16 --optimizer_type Prodigy
""", {"arch": "diffusers:sdxl", "mode": "training", "train": "adapter", "r": "8", "alpha": "4", "dtype": "bfloat16",
      "image": "1024", "targets": "to_q,to_k,to_v,to_out.0,proj_in,proj_out,ff.net.0.proj,ff.net.2", "batch": "1",
      "optimizer": "adamw", "cached": "none"}, ("lycoris", "Prodigy", "text encoders")),
]  # fmt: skip
