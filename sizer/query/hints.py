"""Names of query keys and values in other programs, so that a refusal says what to write."""

from __future__ import annotations

from sizer.base.errors import letters
from sizer.catalogue.parallel import OTHER_NAMES

_SAME = {  # by key: other programs' names with the same values
    "arch": "model model_name model_id model_name_or_path base_model architecture network repo repo_id name",
    "batch": "batch_size bs micro_batch_size train_batch_size per_device_train_batch_size per_device_eval_batch_size "
    "num_images_per_prompt",
    "seq": "seq_len seq_length sequence_length sequence_len max_length max_seq_len max_seq_length context context_length ctx "
    "n_ctx block_size cutoff_len tokens prompt_tokens input_tokens",
    "new": "max_new_tokens new_tokens output_tokens max_completion_length",
    "dtype": "torch_dtype precision mixed_precision data_type",
    "optimizer": "optim",
    "attention": "attn attn_implementation attention_implementation",
    "accumulate": "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps accumulation_steps",
    "r": "lora_r lora_rank adapter_rank",
    "alpha": "lora_alpha",
    "targets": "target_modules lora_target lora_target_modules",
    "adapter_dropout": "lora_dropout",
    "weights": "quant quantization quantize",
    "gpu": "device device_name gpu_name gpu_type accelerator hardware card",
    "ranks": "gpus gpu_count num_gpus n_gpus ngpu world world_size num_processes nproc_per_node num_devices devices",
    "tp": "tensor_parallel tensor_parallel_size tp_size",
    "pp": "pipeline_parallel pipeline_parallel_size pp_size",
    "dp": "data_parallel data_parallel_size dp_size",
    "cp": "context_parallel context_parallel_size cp_size",
    "util": "gpu_memory_utilization mem_fraction_static",
    "kv": "kv_cache_dtype",
    "image": "image_size img_size input_size resolution",
    "frames": "num_frames",
    "group": "num_generations",
    "classes": "num_classes num_labels",
    "torch": "torch_version pytorch pytorch_version",
    "mode": "task",
    "evaluate": "eval",
    "cache": "cache_implementation",
}
_SWITCHES = {  # by items of a query: the switches that set them
    "checkpointing=1": "gradient_checkpointing activation_checkpointing grad_checkpointing grad_checkpoint use_checkpoint "
    "use_gradient_checkpointing recompute",
    "weights=nf4": "load_in_4bit four_bit use_4bit",
    "weights=int8": "load_in_8bit eight_bit use_8bit",
    "dtype=amp-bfloat16": "amp autocast_dtype bf16",
    "dtype=amp-float16": "fp16",
    "train=adapter": "lora use_lora peft use_peft",
    "train=adapter&weights=nf4": "qlora use_qlora",
    "compile=default": "torch_compile use_compile",
    "attention=sdpa": "flash_attn flash_attention flash_attention_2 use_flash_attention use_flash_attention_2 sdpa",
    "parallel=ddp": "ddp",
    "parallel=fsdp": "fsdp fully_shard",
    "ep=1": "expert_parallel enable_expert_parallel",
    "offload=1": "cpu_offload",
    "activations=offload": "activation_offloading enable_activation_offloading",
    "expandable=1": "expandable_segments",
    "step=in_backward": "optimizer_in_bwd optimizer_in_backward",
    "gpu=custom:24GiB@8.9": "vram memory gpu_memory device_memory",
}
_STAGES = "zero zero_stage zero_optimization deepspeed"
_NO = ("0", "false", "no", "off", "none")

_COMPUTED = "dtype is the compute dtype of the model: keep it, and ask for weights="
HINTS = {  # by key: words that are refused, and their replacement
    "mode": {
        "train": "did you mean training?",
        "infer": "did you mean inference?",
        "generation": "did you mean generate?",
        "serving": "did you mean serve?",
        "finetune": "write mode=training, and train=adapter or train=all",
        "finetuning": "write mode=training, and train=adapter or train=all",
        "eval": "write mode=inference, or mode=training&evaluate=loss",
    },
    "train": {
        **dict.fromkeys(("lora", "peft"), "write train=adapter"),
        "qlora": "write train=adapter&weights=nf4",
        "full": "write train=all",
        "frozen": "write train=head",
        "none": "write mode=inference",
    },
    "dtype": {
        **dict.fromkeys(("int8", "8bit"), f"{_COMPUTED}int8"),
        **dict.fromkeys(("int4", "4bit", "nf4", "fp4"), f"{_COMPUTED}nf4"),
        **dict.fromkeys(("fp8", "float8"), f"{_COMPUTED}fp8"),
        **dict.fromkeys(("amp", "mixed"), "write dtype=amp-bfloat16 or dtype=amp-float16"),
        "tf32": "write dtype=float32: TF32 needs the same memory",
        **dict.fromkeys(
            ("float64", "fp64", "double"), "a query has no float64: pass a float64 module to sizer.size_module"
        ),
    },
    "weights": {
        **dict.fromkeys(("4bit", "int4", "qlora"), "write weights=nf4, or weights=fp4"),
        "8bit": "write weights=int8",
        **dict.fromkeys(("awq", "gptq"), "a config with quantization_config sets it; for other models it needs mode=serve"),
        "gguf": "write mode=serve&engine=llama.cpp",
    },
    "attention": dict.fromkeys(
        ("flash", "flashattention", "flashattention2", "flashattn", "fa2", "xformers", "memefficient"),
        "write attention=sdpa, which uses PyTorch's flash attention if possible",
    ),
}
SWITCHED = {  # words for 1 and 0
    **dict.fromkeys(("true", "yes", "on"), "write 1"),
    **dict.fromkeys(("false", "no", "off"), "write 0"),
}


def hint_of_stage(word: str, value: str) -> str | None:
    """Return the replacement of a stage of DeepSpeed's ZeRO, None for another word."""
    if letters(word) not in map(letters, _STAGES.split()):
        return None
    return "write parallel=zero1" if value == "1" else OTHER_NAMES.get(f"zero{value}", OTHER_NAMES["deepspeed"])


def items_for(word: str, value: str) -> str | None:
    """Return the items of a query that correspond to another program's key and value, None for an unknown word.

    A switch that is off is the empty text.
    """
    plain = letters(word)
    for key, others in _SAME.items():
        if plain in map(letters, others.split()):
            return f"{key}={value or '...'}"
    for items, others in _SWITCHES.items():
        if plain in map(letters, others.split()):
            return "" if value.lower() in _NO else items
    return None
